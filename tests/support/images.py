"""Pictures of which no two are alike, drawn from a seed."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from support.tiny_model import PIXELS_PER_TOKEN


def make_image(seed: int, *, tokens_high: int = 8, tokens_wide: int = 8) -> Image.Image:
    """A picture that becomes `tokens_high * tokens_wide` embedding rows; another seed, another
    picture.
    """
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (tokens_high, tokens_wide, 3), dtype=np.uint8)
    size = (tokens_wide * PIXELS_PER_TOKEN, tokens_high * PIXELS_PER_TOKEN)
    return Image.fromarray(coarse, "RGB").resize(size, Image.Resampling.NEAREST)


def data_url(image: Image.Image) -> str:
    """The picture as a `data:` URL, the way a client sends one without a web server."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()

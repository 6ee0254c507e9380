"""A Qwen2.5-VL with random weights, made on the spot: nothing is downloaded.

The architecture, the tokenizer, the image processor and the chat template are real ones, only
small, so that vLLM takes the same paths as with a model from the hub. Same spec, same versions:
same weights.

Run as a program it makes the model and prints where it is:  python -m support.tiny_model
[tiny|demo]
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = REPOSITORY / ".cache" / "models"

# One embedding row stands for this many pixels on each side: 14-pixel patches, merged 2 by 2.
PIXELS_PER_TOKEN = 28

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CORPUS = (
    "a picture of a red square beside a blue circle on a green field",
    "describe the image in a few words, then say which of the two is brighter",
    "how many shapes are there, and where does the light come from?",
    "the first picture shows what the second one hides: 0 1 2 3 4 5 6 7 8 9",
)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The size of a model: everything that decides its weights, besides the versions of the
    libraries.
    """

    name: str
    hidden_size: int  # columns of one embedding row
    text_layers: int
    vision_hidden_size: int
    vision_layers: int
    max_image_tokens: int  # rows of the largest image; larger images are scaled down
    seed: int = 20_260_101

    @property
    def row_bytes(self) -> int:
        """Bytes of one embedding row in float32, the type that the tests run in."""
        return self.hidden_size * 4


TINY = ModelSpec(
    "tiny",
    hidden_size=128,
    text_layers=2,
    vision_hidden_size=128,
    vision_layers=2,
    max_image_tokens=256,
)
# An encoder that costs about what it does beside a real language model: most of a request.
DEMO = ModelSpec(
    "demo",
    hidden_size=512,
    text_layers=2,
    vision_hidden_size=512,
    vision_layers=4,
    max_image_tokens=256,
)
SPECS = {spec.name: spec for spec in (TINY, DEMO)}


def build(spec: ModelSpec = TINY, cache: Path = CACHE) -> Path:
    """The directory of this model, made if it is not there yet. Safe to call from several processes
    at once.
    """
    target = cache / f"{spec.name}-{_fingerprint(spec)}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{spec.name}-", dir=cache))
    try:
        _write_model(spec, unfinished)
        unfinished.chmod(0o755)
        # The rename is what publishes it: whoever loses the race keeps the winner's.
        try:
            unfinished.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _fingerprint(spec: ModelSpec) -> str:
    parts = {
        "spec": asdict(spec),
        "recipe": sha256(Path(__file__).read_bytes()).hexdigest(),
        "transformers": version("transformers"),
        "tokenizers": version("tokenizers"),
        "torch": version("torch").partition("+")[0],
    }
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _write_model(spec: ModelSpec, directory: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    tokenizer = _make_tokenizer()
    config = _make_config(spec, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = Qwen2_5_VLForConditionalGeneration(config)
        _spread_weights(model)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.save_pretrained(directory)
    _write_processor(spec, tokenizer, directory)


def _spread_weights(model: Any) -> None:
    """Give every matrix unit gain, so that what comes out depends visibly on the image and on the
    prompt.

    With the usual small initial weights all images give nearly the same logits, and a test that
    compares tokens would pass even with the wrong embeddings.
    """
    import torch

    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            continue
        fan_in = weight[0].numel()
        is_embedding = "embed_tokens" in name
        torch.nn.init.normal_(weight, std=1.0 if is_embedding else fan_in**-0.5)


def _make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(SPECIAL_TOKENS[3:]),
        model_max_length=4096,
    )


def _make_config(spec: ModelSpec, tokenizer: Any) -> Any:
    from transformers import Qwen2_5_VLConfig

    head_size = 64
    quarter = head_size // 8
    token = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": _padded(len(tokenizer), 64),
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.hidden_size * 2,
        "num_hidden_layers": spec.text_layers,
        "num_attention_heads": spec.hidden_size // head_size,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [
                head_size // 2 - 2 * quarter - quarter // 2 * 2,
                quarter + quarter // 2,
                quarter + quarter // 2,
            ],
        },
        "bos_token_id": token("<|endoftext|>"),
        "eos_token_id": token("<|im_end|>"),
        "pad_token_id": token("<|endoftext|>"),
    }
    vision = {
        "depth": spec.vision_layers,
        "hidden_size": spec.vision_hidden_size,
        "intermediate_size": spec.vision_hidden_size * 2,
        "num_heads": spec.vision_hidden_size // head_size,
        "out_hidden_size": spec.hidden_size,
        "fullatt_block_indexes": [spec.vision_layers - 1],
        "patch_size": PIXELS_PER_TOKEN // 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": PIXELS_PER_TOKEN * 4,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        dtype="float32",
    )


def _write_processor(spec: ModelSpec, tokenizer: Any, directory: Path) -> None:
    from transformers import (
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    size = {
        "shortest_edge": PIXELS_PER_TOKEN**2 * 4,
        "longest_edge": PIXELS_PER_TOKEN**2 * spec.max_image_tokens,
    }
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=size),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


if __name__ == "__main__":
    print(build(SPECS[sys.argv[1] if len(sys.argv) > 1 else "tiny"]))

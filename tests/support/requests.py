"""Requests and answers as the tests speak of them; free of vLLM, so that both sides of the pipe can
import it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True, slots=True)
class Picture:
    """An image by its seed: `high * wide` embedding rows. `uuid` overrides the key that vLLM would
    compute.
    """

    seed: int
    high: int = 8
    wide: int = 8
    uuid: str | None = None

    @property
    def rows(self) -> int:
        return self.high * self.wide


@dataclass(frozen=True, slots=True)
class Request:
    """Text, pictures, text. Answered greedily with exactly `max_tokens` tokens.

    Another `before` makes a prompt whose pictures prefix caching cannot answer for, so the
    embeddings are needed again.
    """

    images: tuple[Picture, ...] = ()
    before: str = ""
    text: str = "describe the image"
    max_tokens: int = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came back. `seconds` is the time of the whole batch divided by its requests."""

    tokens: tuple[int, ...]
    logprob: float
    seconds: float


def prompt_for(request: Request) -> str:
    """The prompt as the chat template would write it."""
    images = IMAGE * len(request.images)
    question = f"{request.before}{images}{request.text}"
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def one_each(pictures: Iterable[Picture], **kwargs: Any) -> list[Request]:
    """One request per picture; the keywords are those of `Request`."""
    return [Request((picture,), **kwargs) for picture in pictures]


def without_uuids(request: Request) -> Request:
    """The same request with the pictures' keys left to vLLM."""
    return replace(request, images=tuple(replace(each, uuid=None) for each in request.images))


def tokens_of(outcomes: Iterable[Outcome]) -> list[tuple[int, ...]]:
    """The tokens alone: what two runs must have in common."""
    return [outcome.tokens for outcome in outcomes]

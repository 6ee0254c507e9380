"""Requests as vLLM's scheduler sees them, of its own kind of features."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from sim.content import Variant

WAITING, RUNNING, PREEMPTED, PAUSED, FINISHED = (
    "waiting",
    "running",
    "preempted",
    "paused",
    "finished",
)


@dataclass(frozen=True)
class Turn:
    """A piece of prompt: items, each behind some text, and the length of the answer to it."""

    items: tuple[Variant, ...]
    gaps: tuple[int, ...]
    tail: int = 1
    answer: int = 1


@dataclass(eq=False)
class Request:
    """What the connector and vLLM's encoder cache read of a request, and what a scheduler keeps of
    it.
    """

    request_id: str
    priority: int = 0
    arrival: int = 0
    resumable: bool = False
    with_data: bool = True
    mm_features: list[Any] = field(default_factory=list)
    items: list[Variant] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    num_tokens: int = 0
    max_tokens: int = 0
    outputs: int = 0
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    status: str = WAITING
    times_preempted: int = 0
    mismatched: bool = False
    rows_before: list[list[int]] = field(default_factory=list)

    def get_num_encoder_embeds(self, index: int) -> int:
        return self.items[index].rows

    @property
    def has_encoder_inputs(self) -> bool:
        return bool(self.mm_features)

    @property
    def finished(self) -> bool:
        return self.status == FINISHED

    def extend(self, turn: Turn) -> None:
        """Add a piece of prompt behind all tokens so far."""
        position = self.num_tokens
        for item, gap in zip(turn.items, turn.gaps, strict=True):
            position += gap
            self._add(item, position)
            position += item.placeholder
        self.num_tokens = position + turn.tail
        self.max_tokens = turn.answer
        self.outputs = 0

    def _add(self, item: Variant, offset: int) -> None:
        length = item.placeholder
        is_embed = None
        if length != item.rows:
            # Embeddings spread over the placeholder, a separator first.
            is_embed = torch.zeros(length, dtype=torch.bool)
            is_embed[length - item.rows :] = True
        flags = [True] * length if is_embed is None else is_embed.tolist()
        before = [0]
        for flag in flags:
            before.append(before[-1] + flag)
        self.items.append(item)
        self.rows_before.append(before)
        self.mm_features.append(
            MultiModalFeatureSpec(
                data={} if self.with_data else None,
                modality=item.modality,
                identifier=item.key,
                mm_position=PlaceholderRange(offset=offset, length=length, is_embed=is_embed),
            )
        )

    def offset(self, index: int) -> int:
        offset: int = self.mm_features[index].mm_position.offset
        return offset

    def overlapping(self, start: int, end: int) -> Iterable[int]:
        """Indices of the items whose placeholders overlap these positions."""
        for index, item in enumerate(self.items):
            offset = self.offset(index)
            if offset < end and offset + item.placeholder > start:
                yield index

    def has_rows_in(self, index: int, start: int, end: int) -> bool:
        """Whether embeddings of the item lie between these positions of the prompt."""
        offset, before = self.offset(index), self.rows_before[index]
        first = min(max(0, start - offset), len(before) - 1)
        last = min(max(0, end - offset), len(before) - 1)
        return before[last] > before[first]

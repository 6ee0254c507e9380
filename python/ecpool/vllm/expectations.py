"""What the live requests expect of each encoder output: an answer must be right for all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

# A modality whose items are embeddings already: nothing encodes them, so nothing is to be saved.
PROMPT_EMBEDS = "prompt_embeds"

# What an item must be: its modality, and its rows (embeddings, not placeholder tokens).
Expected = tuple[str, int]


def expected_of(feature: Any) -> Expected:
    """What a vLLM multimodal feature expects."""
    position = feature.mm_position
    if getattr(position, "is_embed", None) is None:
        return feature.modality, position.length
    count = position.get_num_embeds
    return feature.modality, int(count() if callable(count) else count)


def is_per_request(identifier: str, modality: str) -> bool:
    """Whether an identifier has the form of those that vLLM makes from a request's number."""
    return re.search(rf"-{re.escape(modality)}-\d+\Z", identifier) is not None


class Expectations:
    """The items of all live requests by identifier. Every call but a request's first is O(1)."""

    def __init__(self) -> None:
        # One place per feature; None for those that are no items.
        self._live: dict[str, list[tuple[str, Expected] | None]] = {}
        self._by_identifier: dict[str, dict[Expected, int]] = {}
        self._growing: dict[str, Any] = {}

    def note(self, request: Any) -> None:
        """Count a request's items, once each; one that has grown since is counted on."""
        request_id = request.request_id
        items = self._live.get(request_id)
        if items is None:
            items = self._live[request_id] = []
            if getattr(request, "resumable", False):
                self._growing[request_id] = request
        features = request.mm_features
        if features and len(items) != len(features):
            self._count(items, features)

    @property
    def may_grow(self) -> bool:
        """Whether any live request may get further items."""
        return bool(self._growing)

    def note_growth(self) -> None:
        """Look at the requests that may have grown: not every vLLM asks about them again."""
        for request in self._growing.values():
            self.note(request)

    def forget(self, request_id: str) -> None:
        """The request is finished; unknown ones are ignored."""
        self._growing.pop(request_id, None)
        for item in self._live.pop(request_id, ()):
            if item is None:
                continue
            identifier, expected = item
            counts = self._by_identifier[identifier]
            if counts[expected] > 1:
                counts[expected] -= 1
            elif len(counts) > 1:
                del counts[expected]
            else:
                del self._by_identifier[identifier]

    def of(self, identifier: str) -> Expected | None:
        """What all live requests agree on; None if none has it, or if they disagree."""
        counts = self._by_identifier.get(identifier)
        if counts is None or len(counts) > 1:
            return None
        (expected,) = counts
        return expected

    def disagree(self, identifier: str) -> bool:
        """Whether live requests expect different things of one identifier."""
        return len(self._by_identifier.get(identifier, ())) > 1

    def __len__(self) -> int:
        return len(self._live)

    def _count(self, items: list[tuple[str, Expected] | None], features: Sequence[Any]) -> None:
        for feature in features[len(items) :]:
            expected = expected_of(feature)
            if expected[0] == PROMPT_EMBEDS:
                items.append(None)
                continue
            identifier = feature.identifier
            items.append((identifier, expected))
            counts = self._by_identifier.get(identifier)
            if counts is None:
                self._by_identifier[identifier] = {expected: 1}
            else:
                counts[expected] = counts.get(expected, 0) + 1

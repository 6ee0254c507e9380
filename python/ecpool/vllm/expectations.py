"""What the live requests expect of each encoder output: an answer must be right for all."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# A modality whose items are embeddings already: nothing encodes them, so nothing is to be saved.
PROMPT_EMBEDS = "prompt_embeds"


class Expected(NamedTuple):
    """What an item must be: its modality, and its rows (embeddings, not placeholder tokens)."""

    modality: str
    rows: int


def expected_of(feature: Any) -> Expected:
    """What a vLLM multimodal feature expects."""
    position = feature.mm_position
    count = getattr(position, "get_num_embeds", None)
    rows = position.length if count is None else count() if callable(count) else count
    return Expected(feature.modality, int(rows))


def is_per_request(identifier: str, modality: str) -> bool:
    """Whether an identifier has the form of those that vLLM makes from a request's number."""
    return re.search(rf"-{re.escape(modality)}-\d+\Z", identifier) is not None


@dataclass(slots=True)
class _Live:
    features: int = 0
    items: list[tuple[str, Expected]] = field(default_factory=list)


class Expectations:
    """The items of all live requests by identifier. Every call but a request's first is O(1)."""

    def __init__(self) -> None:
        self._live: dict[str, _Live] = {}
        self._by_identifier: dict[str, dict[Expected, int]] = {}
        self._growing: dict[str, Any] = {}

    def note(self, request: Any) -> None:
        """Count a request's items, once each; one that has grown since is counted on."""
        live = self._live.get(request.request_id)
        if live is None:
            live = self._live[request.request_id] = _Live()
            if getattr(request, "resumable", False):
                self._growing[request.request_id] = request
        features = request.mm_features or ()
        if live.features != len(features):
            self._count(live, features)

    def note_growth(self) -> None:
        """Look at the requests that may have grown: not every vLLM asks about them again."""
        for request in self._growing.values():
            self.note(request)

    def forget(self, request_id: str) -> None:
        """The request is finished; unknown ones are ignored."""
        self._growing.pop(request_id, None)
        live = self._live.pop(request_id, None)
        for identifier, expected in live.items if live is not None else ():
            counts = self._by_identifier[identifier]
            counts[expected] -= 1
            if not counts[expected]:
                del counts[expected]
            if not counts:
                del self._by_identifier[identifier]

    def of(self, identifier: str) -> Expected | None:
        """What all live requests agree on; None if none has it, or if they disagree."""
        counts = self._by_identifier.get(identifier, ())
        return next(iter(counts)) if len(counts) == 1 else None

    def disagree(self, identifier: str) -> bool:
        """Whether live requests expect different things of one identifier."""
        return len(self._by_identifier.get(identifier, ())) > 1

    def __len__(self) -> int:
        return len(self._live)

    def _count(self, live: _Live, features: Any) -> None:
        for feature in features[live.features :]:
            if feature.modality != PROMPT_EMBEDS:
                identifier, expected = feature.identifier, expected_of(feature)
                live.items.append((identifier, expected))
                counts = self._by_identifier.setdefault(identifier, {})
                counts[expected] = counts.get(expected, 0) + 1
        live.features = len(features)

"""When a worker can no longer be about to begin a transfer."""

from __future__ import annotations

from collections import deque


class LastCalls:
    """Transfers by the step whose metadata named them last.

    They come back once every worker has run that step: ``steps`` is more than vLLM has in flight.
    """

    def __init__(self, steps: int) -> None:
        self._steps: deque[list[int]] = deque([] for _ in range(steps))
        self._this_step: list[int] = []

    def add(self, transfer_id: int) -> None:
        """This step's metadata is the last one to name the transfer."""
        self._this_step.append(transfer_id)

    def step(self) -> list[int]:
        """End a step; returns what no worker can still be about to begin."""
        self._steps.append(self._this_step)
        self._this_step = []
        return self._steps.popleft()

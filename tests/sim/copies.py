"""The device of one rank, and a transfer engine whose copies are done when the schedule says.

The device is behind the program: what a step queues on it (an encoder's output, a read of it, a
copy) is done later. Streams and events allow no less and no more: what compute queued is done in
order; a copy starts after what compute held when it was submitted; compute goes on after a load
only when the load is done; a copy is reported some time after it is done.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ecpool.transfer import LoadItem, SaveItem
from sim.content import Content, Violation

Extents = tuple[tuple[int, int], ...]


def blocks_of(extents: Extents) -> list[int]:
    return [block for first, count in extents for block in range(first, first + count)]


class Custody:
    """Who reads and who writes each block, from the submission of a copy to its report."""

    def __init__(self) -> None:
        self._writer: dict[int, str] = {}
        self._readers: dict[int, int] = {}

    def begin(self, extents: Extents, who: str, *, writes: bool) -> None:
        for block in blocks_of(extents):
            if block in self._writer:
                raise Violation(
                    f"block {block} is given to {who} while {self._writer[block]} writes it"
                )
            if writes and self._readers.get(block):
                raise Violation(f"block {block} is given to {who} to write while it is being read")
            if writes:
                self._writer[block] = who
            else:
                self._readers[block] = self._readers.get(block, 0) + 1

    def end(self, extents: Extents, *, writes: bool) -> None:
        for block in blocks_of(extents):
            if writes:
                del self._writer[block]
            else:
                self._readers[block] -= 1

    def busy(self) -> int:
        return len(self._writer) + sum(self._readers.values())


@dataclass
class Compute:
    """Something on the compute stream, after these loads."""

    run: Callable[[], None]
    after: list[Copy]


@dataclass(eq=False)
class Copy:
    """A batch on a side stream: not before compute has done ``after`` things."""

    run: Callable[[], None]
    report: Callable[[], None]
    after: int
    is_load: bool
    done: bool = False


class Device:
    """One rank's compute stream and the copies beside it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._compute: deque[Compute] = deque()
        self._done = 0
        self._copies: list[Copy] = []
        self._fired: list[Copy] = []
        self._loads: list[Copy] = []

    @property
    def mark(self) -> int:
        """All that compute holds by now."""
        return self._done + len(self._compute)

    def compute(self, run: Callable[[], None]) -> None:
        self._compute.append(Compute(run, self._loads))
        self._loads = []

    def submit(self, run: Callable[[], None], report: Callable[[], None], *, is_load: bool) -> None:
        copy = Copy(run, report, self.mark, is_load)
        self._copies.append(copy)
        if is_load:
            self._loads = [*self._loads, copy]

    def idle(self) -> bool:
        return not (self._compute or self._copies or self._fired)

    def advance(self) -> None:
        """Do one thing, or report one copy, of those that may be next."""
        choices: list[Callable[[], None]] = []
        if self._compute and all(each.done for each in self._compute[0].after):
            choices.append(self._do_compute)
        if any(each.after <= self._done for each in self._copies):
            choices.append(self._do_copy)
        if self._fired:
            choices.append(self._report)
        if choices:
            self._rng.choice(choices)()

    def finish_compute(self, mark: int) -> None:
        """Until compute has done this much: with the copies that it waits for, and no others."""
        while self._done < mark:
            for copy in [each for each in self._compute[0].after if not each.done]:
                self._run_copy(copy)
            self._do_compute()

    def stop(self) -> None:
        """No further copy is done; what was under way is reported, to end its custody."""
        for copy in self._copies + self._fired:
            copy.report()
        self._compute.clear()
        self._copies, self._fired, self._loads = [], [], []

    def finish(self) -> None:
        while not self.idle():
            self.advance()

    def _do_compute(self) -> None:
        self._compute.popleft().run()
        self._done += 1

    def _do_copy(self) -> None:
        self._run_copy(
            self._rng.choice([each for each in self._copies if each.after <= self._done])
        )

    def _run_copy(self, copy: Copy) -> None:
        self._copies.remove(copy)
        copy.run()
        copy.done = True
        self._fired.append(copy)

    def _report(self) -> None:
        self._fired.pop(self._rng.randrange(len(self._fired))).report()


class LateEngine:
    """Stands in for `TransferEngine`:

    same calls, but each item's copy and report come when the device gets to them.
    """

    def __init__(
        self,
        region: Any,
        device: Device,
        content: Content,
        custody: Custody,
        rng: random.Random,
        *,
        on_done: Callable[[list[int], bool], None],
        name: str,
        failing: bool,
    ) -> None:
        self._region = region
        self._device = device
        self._content = content
        self._custody = custody
        self._rng = rng
        self._on_done = on_done
        self._name = name
        self._failing = failing
        self.saving: set[int] = set()

    def outlive(self, region: Any) -> None:
        """Its process is gone and its device goes on for a moment, writing to the same memory."""
        self._region = region
        self._on_done = lambda ids, ok: None

    def register(self) -> int:
        return 0

    def load(self, items: Sequence[LoadItem]) -> dict[str, torch.Tensor]:
        loaded: dict[str, torch.Tensor] = {}
        for item in items:
            tensor = torch.full(item.shape, -1.0, dtype=item.dtype)
            self._custody.begin(item.extents, f"{self._name}'s load of {item.key}", writes=False)
            self._submit_load(item, tensor)
            loaded[item.key] = tensor
        return loaded

    def _submit_load(self, item: LoadItem, tensor: torch.Tensor) -> None:
        def run() -> None:
            self._region.read(item.extents, tensor.view(torch.uint8).numpy())
            self._content.check(tensor, item.key, f"{self._name} loads")

        def report() -> None:
            self._custody.end(item.extents, writes=False)
            self._on_done([item.id], True)

        self._device.submit(run, report, is_load=True)

    def save(self, items: Sequence[SaveItem]) -> None:
        if self._failing and self._rng.random() < 0.01:
            raise RuntimeError("the device takes no copies (simulated)")
        for item in items:
            self._custody.begin(item.extents, f"{self._name}'s save of {item.key}", writes=True)
            self._submit_save(item, ok=not (self._failing and self._rng.random() < 0.03))

    def _submit_save(self, item: SaveItem, *, ok: bool) -> None:
        self.saving.add(item.id)

        def run() -> None:
            data = item.tensor.view(torch.uint8).numpy()
            if not ok:
                data = data[: len(data) // 2]
            self._region.write(item.extents, data)

        def report() -> None:
            self.saving.discard(item.id)
            self._custody.end(item.extents, writes=True)
            self._on_done([item.id], ok)

        self._device.submit(run, report, is_load=False)

    def drain(self, timeout: float | None = None) -> bool:
        self._device.finish()
        return True

    def close(self) -> None:
        self._device.finish()

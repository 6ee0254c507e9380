"""Random use of a `TransferEngine` on the simulated device, with a model of every byte.

`World.run` drives saves, loads, computations and evictions and raises AssertionError as soon as
bytes are wrong: in the region when a save is reported, in a tensor when compute reads it.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import cast

import torch

from ecpool._completion import Batch, Completer
from ecpool.transfer import LoadItem, SaveItem, TransferEngine
from support.sim_accelerator import Fault, Order, SimAccelerator, SimEvent
from support.stand_in_region import StandInRegion

DTYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
SHAPES = ((40,), (7, 8), (2, 3, 64), (33, 16), (1, 512))


class ManualCompleter(Completer):
    """Reports when it is told to, in the caller's thread, so that a run repeats exactly."""

    @classmethod
    def put_into(cls, engine: TransferEngine) -> ManualCompleter:
        copies = engine._device_copies
        assert copies is not None
        manual = cls(copies._accelerator, copies._lanes, copies._reporter, copies._log)
        manual.batches = deque()
        copies._completer = manual
        return manual

    batches: deque[Batch]

    def _start_thread(self) -> None:
        pass

    def submit(self, batch: Batch) -> None:
        self.batches.append(batch)

    def pump(self) -> None:
        while self.batches and cast(SimEvent, self.batches[0].lane.end).query():
            self.finish(self.batches.popleft())

    def drain(self, timeout: float | None) -> bool:
        while self.batches:
            self.finish(self.batches.popleft())
        return super().drain(timeout)


@dataclass
class Entry:
    extents: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: torch.Tensor
    ready: bool = False
    loads: int = 0


@dataclass
class World:
    seed: int
    order: Order
    faults: tuple[Fault, ...] = ()
    steps: int = 60
    entries: dict[str, Entry] = field(default_factory=dict)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.sim = SimAccelerator(self.seed, order=self.order, faults=self.faults)
        self.region = StandInRegion(num_blocks=64, block_size=256, segment_blocks=16)
        self.free = list(range(64))
        self.pending: dict[int, tuple[str, Entry]] = {}
        self.engine = TransferEngine(
            self.region, torch.device("cpu"), on_done=self.on_done, accelerator=self.sim
        )
        self.completer = ManualCompleter.put_into(self.engine)
        self.errors: list[str] = []
        self.next_id = 1
        self.loads_checked = 0

    def run(self) -> None:
        moves = (self.save, self.load, self.compute, self.evict, self.forget, self.wait)
        for _ in range(self.steps):
            self.random.choices(moves, weights=(4, 4, 2, 2, 2, 1))[0]()
            self.sim.tick()
            if self.random.random() < 0.5:
                self.sim.progress()
            self.completer.pump()
            self.raise_errors()
        self.engine.drain()
        self.sim.run_all()
        self.raise_errors()
        assert not self.pending, f"never reported: {sorted(self.pending)}"
        self.engine.close()

    def raise_errors(self) -> None:
        if self.errors:
            raise AssertionError("; ".join(self.errors))

    def on_done(self, ids: list[int], ok: bool) -> None:
        for id in ids:
            if id not in self.pending or not ok:
                self.errors.append(f"id {id} reported again, or as failed")
                continue
            key, entry = self.pending.pop(id)
            if entry.ready:
                entry.loads -= 1
                continue
            stored = self.region.item(entry.extents, entry.data.numel())
            if stored != entry.data.numpy().tobytes():
                self.errors.append(f"{key} was reported before, or without, being saved")
            entry.ready = True

    # Moves

    def save(self) -> None:
        items = []
        for _ in range(self.random.randint(1, 3)):
            tensor, data = self.new_tensor()
            entry = self.new_entry(tensor, data)
            if entry is None:
                continue
            key = f"k{self.next_id}"
            self.entries[key] = entry
            self.pending[self.next_id] = (key, entry)
            items.append(SaveItem(key, self.next_id, entry.extents, tensor))
            self.next_id += 1
            del tensor
        self.engine.save(items)

    def load(self) -> None:
        ready = [key for key, entry in self.entries.items() if entry.ready]
        items = []
        for key in self.random.sample(ready, min(len(ready), self.random.randint(1, 3))):
            entry = self.entries[key]
            entry.loads += 1
            self.pending[self.next_id] = (key, entry)
            items.append(LoadItem(key, self.next_id, entry.extents, entry.shape, entry.dtype))
            self.next_id += 1
        for key, tensor in self.engine.load(items).items():
            assert tensor.shape == self.entries[key].shape
            assert tensor.dtype == self.entries[key].dtype
            self.use(tensor, self.entries[key].data)
            if self.random.random() < 0.3:
                self.kept.append((tensor, self.entries[key].data))

    def wait(self) -> None:
        self.engine.drain()

    def compute(self) -> None:
        """Somebody else's work in memory that was just freed."""
        tensor, data = self.new_tensor()
        self.use(tensor, data)

    def forget(self) -> None:
        if self.kept:
            tensor, data = self.kept.pop(self.random.randrange(len(self.kept)))
            self.use(tensor, data)

    def evict(self) -> None:
        idle = [key for key, e in self.entries.items() if e.ready and e.loads == 0]
        if idle:
            entry = self.entries.pop(self.random.choice(idle))
            for first, count in entry.extents:
                self.free.extend(range(first, first + count))
                start = first * self.region.block_size
                stop = start + count * self.region.block_size
                self.region[start:stop] = self.random.randbytes(stop - start)

    # Parts

    def new_tensor(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A device tensor that a queued kernel will fill, and the bytes it will then have."""
        dtype = self.random.choice(DTYPES)
        tensor = self.sim.empty(self.random.choice(SHAPES), dtype)
        if tensor.ndim > 1 and self.random.random() < 0.3:
            tensor = tensor.transpose(0, 1)
        data = bytearray(self.random.randbytes(tensor.nbytes))
        wanted = torch.frombuffer(data, dtype=torch.uint8)
        self.sim.launch(lambda raw: raw.copy_(wanted.view(raw.dtype).reshape(raw.shape)), tensor)
        return tensor, wanted

    def use(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        def kernel(raw: torch.Tensor) -> None:
            self.loads_checked += 1
            if not torch.equal(raw.contiguous().reshape(-1).view(torch.uint8), data):
                self.errors.append("compute read other bytes than were saved")

        self.sim.launch(kernel, tensor)

    def new_entry(self, tensor: torch.Tensor, data: torch.Tensor) -> Entry | None:
        blocks = -(-tensor.nbytes // self.region.block_size)
        if blocks > len(self.free):
            return None
        self.random.shuffle(self.free)
        taken = [self.free.pop() for _ in range(blocks)]
        if self.random.random() < 0.5:
            taken.sort()
        extents = tuple((block, 1) for block in taken)
        return Entry(extents, tuple(tensor.shape), tensor.dtype, data)

"""Streams and events on the simulated device: right as built, wrong with each planted mistake."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecpool.errors import ClosedError
from ecpool.transfer import LoadItem, SaveItem, TransferEngine, TransferError
from support.sim_accelerator import Fault, Order, SimAccelerator, SimulationError
from support.stand_in_region import StandInRegion
from support.transfer_world import ManualCompleter, World

BLOCK = 64


class Bench:
    """One engine on a simulated device, whose copies are reported when the test says so."""

    def __init__(self, order: Order = Order.NEEDED, faults: tuple[Fault, ...] = ()) -> None:
        self.sim = SimAccelerator(order=order, faults=faults, arena=8 << 20)
        self.region = StandInRegion(num_blocks=64, block_size=BLOCK, segment_blocks=16)
        self.reports: list[tuple[list[int], bool]] = []
        reports = self.reports
        self.engine = TransferEngine(
            self.region,
            torch.device("cpu"),
            on_done=lambda ids, ok: reports.append((ids, ok)),
            accelerator=self.sim,
        )
        self.completer = ManualCompleter.put_into(self.engine)

    def tensor(self, value: int, nbytes: int = BLOCK) -> torch.Tensor:
        tensor = self.sim.empty((nbytes,), torch.uint8)
        self.sim.launch(lambda raw: raw.fill_(value), tensor)
        return tensor

    def read(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What compute sees in the tensor, once it has come so far."""
        seen: list[torch.Tensor] = []
        self.sim.launch(lambda raw: seen.append(raw.clone()), tensor)
        return seen

    def block(self, index: int) -> bytes:
        return self.region.item(((index, 1),), BLOCK)

    def fill_block(self, index: int, value: int) -> None:
        self.region[index * BLOCK : (index + 1) * BLOCK] = bytes([value]) * BLOCK


def save(id: int, first: int, tensor: torch.Tensor, count: int = 1) -> SaveItem:
    return SaveItem(f"k{id}", id, ((first, count),), tensor)


def load(id: int, first: int, nbytes: int = BLOCK) -> LoadItem:
    return LoadItem(f"k{id}", id, ((first, 1),), (nbytes,), torch.uint8)


@pytest.mark.parametrize("order", list(Order))
def test_random_use_gives_exactly_the_bytes_that_were_saved(order: Order) -> None:
    for seed in range(40):
        world = World(seed, order)
        world.run()
        assert world.loads_checked > 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), order=st.sampled_from(Order), steps=st.integers(1, 120))
def test_random_use_whatever_the_seed(seed: int, order: Order, steps: int) -> None:
    World(seed, order, steps=steps).run()


@pytest.mark.parametrize("fault", list(Fault))
def test_a_planted_fault_is_seen_by_random_use(fault: Fault) -> None:
    seen = 0
    for seed in range(5):
        for order in Order:
            try:
                World(seed, order, (fault,)).run()
            except AssertionError:
                seen += 1
    assert seen >= 3


FAULTLESS_OR = [(), (Fault.SIDE_DOES_NOT_WAIT,)]


@pytest.mark.parametrize("faults", FAULTLESS_OR)
def test_a_save_waits_for_the_kernel_that_fills_its_source(faults: tuple[Fault, ...]) -> None:
    bench = Bench(Order.SIDE_FIRST, faults)
    bench.engine.save([save(1, 3, bench.tensor(7))])
    bench.engine.drain()
    assert (bench.block(3) == bytes([7]) * BLOCK) is (not faults)


@pytest.mark.parametrize("faults", FAULTLESS_OR)
def test_a_load_waits_for_reads_of_the_memory_it_is_given(faults: tuple[Fault, ...]) -> None:
    bench = Bench(Order.SIDE_FIRST, faults)
    bench.fill_block(5, 99)
    old = bench.tensor(7)
    bench.sim.run_all()
    address = old.data_ptr()
    seen = bench.read(old)
    del old
    new = bench.engine.load([load(1, 5)])["k1"]
    assert new.data_ptr() == address, "the simulation should hand out freed memory at once"
    bench.sim.run_all()
    assert bool((seen[0] == 7).all()) is (not faults)


@pytest.mark.parametrize("faults", [(), (Fault.COMPUTE_DOES_NOT_WAIT,)])
def test_compute_waits_for_a_load(faults: tuple[Fault, ...]) -> None:
    bench = Bench(Order.COMPUTE_FIRST, faults)
    bench.fill_block(5, 99)
    seen = bench.read(bench.engine.load([load(1, 5)])["k1"])
    bench.sim.run_all()
    assert bool((seen[0] == 99).all()) is (not faults)


@pytest.mark.parametrize("faults", [(), (Fault.NOT_RECORDED,)])
def test_a_source_may_be_dropped_and_its_memory_used_again(faults: tuple[Fault, ...]) -> None:
    bench = Bench(Order.COMPUTE_FIRST, faults)
    source = bench.tensor(7)
    address = source.data_ptr()
    bench.engine.save([save(1, 3, source)])
    del source
    other = bench.tensor(8)
    assert (other.data_ptr() == address) is bool(faults)
    bench.engine.drain()
    assert (bench.block(3) == bytes([7]) * BLOCK) is (not faults)
    bench.sim.run_all()
    again = bench.tensor(9)
    assert again.data_ptr() == address or faults, "the memory is free once the copy is done"


@pytest.mark.parametrize("recorded", [True, False])
def test_a_dropped_destination_is_not_written_to_later(recorded: bool) -> None:
    """The second line of defence, for when compute could not be made to wait."""
    faults = (Fault.COMPUTE_DOES_NOT_WAIT,) + (() if recorded else (Fault.NOT_RECORDED,))
    bench = Bench(Order.COMPUTE_FIRST, faults)
    bench.fill_block(5, 99)
    bench.engine.load([load(1, 5)])
    other = bench.tensor(8)
    bench.engine.drain()
    bench.sim.run_all()
    assert bool((other == 8).all()) is recorded


def test_nothing_is_reported_before_its_event() -> None:
    bench = Bench()
    bench.engine.save([save(1, 3, bench.tensor(7)), save(2, 4, bench.tensor(8))])
    bench.completer.pump()
    assert bench.reports == []
    bench.sim.run_all()
    bench.completer.pump()
    assert bench.reports == [([1, 2], True)]
    bench.completer.pump()
    assert len(bench.reports) == 1


def test_lanes_are_used_again_only_after_their_event() -> None:
    bench = Bench()
    for id in range(3):
        bench.engine.save([save(id + 1, id, bench.tensor(id))])
    assert len(bench.sim.streams) == 2 + 3
    bench.engine.drain()
    for id in range(9):
        bench.engine.save([save(id + 4, id, bench.tensor(id))])
        bench.engine.drain()
    assert len(bench.sim.streams) == 2 + 3


def test_no_copy_runs_on_the_legacy_default_stream() -> None:
    bench = Bench()
    with bench.sim.use(bench.sim.legacy):
        source = bench.tensor(7)
        bench.engine.save([save(1, 3, source)])
        with pytest.raises(SimulationError):
            bench.sim.copy(source, source)
    bench.engine.drain()
    assert bench.block(3) == bytes([7]) * BLOCK


def test_50_000_scattered_blocks_in_one_item() -> None:
    sim = SimAccelerator(order=Order.NEEDED, arena=16 << 20, torn=False)
    region = StandInRegion(num_blocks=100_000, block_size=BLOCK, segment_blocks=1000)
    reports: list[tuple[list[int], bool]] = []
    engine = TransferEngine(
        region,
        torch.device("cpu"),
        on_done=lambda ids, ok: reports.append((ids, ok)),
        accelerator=sim,
    )
    ManualCompleter.put_into(engine)
    extents = tuple((block, 1) for block in range(0, 100_000, 2))
    data = torch.randint(0, 256, (50_000 * BLOCK - 7,), dtype=torch.uint8)
    source = sim.empty(data.shape, torch.uint8)
    source.copy_(data)
    engine.save([SaveItem("big", 1, extents, source)])
    assert engine.drain()
    assert region.item(extents, data.numel()) == data.numpy().tobytes()
    loaded = engine.load([LoadItem("big", 2, extents, tuple(data.shape), torch.uint8)])["big"]
    sim.run_all()
    assert torch.equal(loaded, data)
    assert engine.drain()
    assert reports == [([1], True), ([2], True)]


def test_neighbouring_blocks_are_one_copy_but_never_across_segments() -> None:
    bench = Bench()
    copies: list[int] = []
    plain_copy = bench.sim.copy

    def counting_copy(destination: torch.Tensor, source: torch.Tensor) -> None:
        copies.append(destination.numel())
        plain_copy(destination, source)

    bench.sim.copy = counting_copy  # type: ignore[method-assign]
    extents = ((12, 1), (13, 2), (15, 1), (16, 2), (40, 1), (18, 1))
    data = bytes(range(256)) + bytes(range(200))
    source = bench.sim.empty((len(data),), torch.uint8)
    source.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    bench.engine.save([SaveItem("k", 1, extents, source)])
    bench.engine.drain()
    assert copies == [4 * BLOCK, 2 * BLOCK, BLOCK, len(data) - 7 * BLOCK]
    assert bench.region.item(extents, len(data)) == data


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.view(torch.float32).reshape(4, 8),
        lambda t: t.view(torch.bfloat16).reshape(8, 8).transpose(0, 1),
        lambda t: t.view(torch.float16).reshape(8, 8)[:, ::2],
        lambda t: t.view(torch.float8_e5m2).reshape(2, 64)[1:],
        lambda t: t.view(torch.float32).reshape(4, 8)[2, 3],
        lambda t: t.view(torch.float32).reshape(4, 8)[:0],
        lambda t: t.view(torch.int64)[3:9],
        lambda t: t.view(torch.complex64).reshape(4, 4).conj(),
        lambda t: t.view(torch.float32).reshape(4, 8).requires_grad_(),
        lambda t: t.view(torch.float32)[:1].expand(5, 3, 1),
        lambda t: torch.nn.Parameter(t.view(torch.float32).reshape(4, 8)),
    ],
)
def test_any_strided_tensor_comes_back_the_same(make: object) -> None:
    bench = Bench(Order.SIDE_FIRST)
    base = bench.sim.empty((128,), torch.uint8)
    base.copy_(torch.arange(128, dtype=torch.uint8) % 60)
    source = make(base)  # type: ignore[operator]
    wanted = source.detach().clone()
    bench.engine.save([SaveItem("k", 1, ((0, 16),), source)])
    bench.engine.drain()
    item = LoadItem("k", 2, ((0, 16),), tuple(source.shape), source.dtype)
    loaded = bench.engine.load([item])["k"]
    bench.sim.run_all()
    bench.engine.drain()
    assert loaded.shape == wanted.shape
    assert loaded.dtype == wanted.dtype
    assert not loaded.requires_grad
    flat = [t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (loaded, wanted)]
    assert torch.equal(*flat)
    assert bench.reports == [([1], True), ([2], True)]


def test_tensors_of_another_device_are_saved_before_the_call_returns() -> None:
    bench = Bench()
    host = torch.full((BLOCK,), 5, dtype=torch.uint8)
    bench.engine.save([save(1, 2, host), save(2, 3, bench.tensor(6))])
    assert bench.block(2) == bytes([5]) * BLOCK
    assert bench.reports == [([1], True)]
    bench.engine.drain()
    assert bench.reports == [([1], True), ([2], True)]


# Failures


def test_a_save_that_cannot_be_queued_fails_alone_and_with_its_batch() -> None:
    bench = Bench()
    too_long = SaveItem("long", 2, ((9, 1),), bench.tensor(8, BLOCK + 1))
    outside = SaveItem("outside", 3, ((64, 1),), bench.tensor(8))
    sparse = SaveItem("sparse", 4, ((9, 1),), torch.eye(3).to_sparse())
    good = save(1, 3, bench.tensor(7))
    bench.engine.save([too_long, good, outside])
    assert bench.reports == [], "blocks of a half-copied save are still being written"
    bench.engine.drain()
    assert bench.reports == [([1], True), ([2, 3], False)]
    assert bench.block(3) == bytes([7]) * BLOCK
    bench.engine.save([sparse])
    assert bench.reports[2:] == [([4], False)]


def test_a_load_that_fails_is_named_and_the_others_are_not_lost() -> None:
    bench = Bench()
    bench.fill_block(5, 99)
    huge = LoadItem("huge", 2, ((0, 64),), (1 << 30,), torch.uint8)
    outside = LoadItem("outside", 3, ((64, 1),), (BLOCK,), torch.uint8)
    with pytest.raises(TransferError) as caught:
        bench.engine.load([huge, load(1, 5), outside])
    assert bench.reports == [([2, 3], False)]
    assert sorted(caught.value.failed) == ["huge", "outside"]
    assert isinstance(caught.value.failed["huge"], torch.OutOfMemoryError)
    assert "2 of 3 loads" in str(caught.value)
    assert "huge" in str(caught.value)
    seen = bench.read(caught.value.loaded["k1"])
    bench.sim.run_all()
    assert bool((seen[0] == 99).all())
    bench.engine.drain()
    assert bench.reports == [([2, 3], False), ([1], True)]


@pytest.mark.parametrize("call", ["new_stream", "record", "copy"])
@pytest.mark.parametrize("good_calls", [0, 1])
def test_a_device_error_anywhere_reports_every_id_once(call: str, good_calls: int) -> None:
    for direction in ("save", "load"):
        bench = Bench()
        sources = [bench.tensor(7), bench.tensor(8)]
        bench.sim.break_after(call, good_calls)
        if direction == "save":
            bench.engine.save([save(id + 1, id, t) for id, t in enumerate(sources)])
        elif call == "new_stream" and good_calls == 1:
            bench.engine.load([load(1, 0), load(2, 1)])
        else:
            with pytest.raises(TransferError, match="device error in"):
                bench.engine.load([load(1, 0), load(2, 1)])
        bench.engine.drain()
        assert sorted(id for ids, _ in bench.reports for id in ids) == [1, 2]
        bench.sim.broken.clear()
        bench.engine.save([save(3, 5, bench.tensor(9))])
        bench.engine.drain()
        assert bench.reports[-1] == ([3], True)
        assert bench.block(5) == bytes([9]) * BLOCK


def test_what_was_queued_of_a_broken_batch_is_done_before_its_blocks_are_given_back() -> None:
    bench = Bench()
    bench.sim.break_after("record", 1)  # the end event cannot be recorded
    bench.engine.save([save(1, 3, bench.tensor(7))])
    assert bench.reports == [([1], False)]
    assert not any(stream.work for stream in bench.sim.streams)


def test_a_batch_that_fails_on_the_device_is_reported_as_failed() -> None:
    bench = Bench()
    bench.engine.save([save(1, 3, bench.tensor(7))])
    lane = bench.completer.batches[0].lane
    bench.sim.break_after("synchronize", 0)
    bench.engine.drain()
    assert bench.reports == [([1], False)]
    bench.sim.broken.clear()
    bench.engine.save([save(2, 4, bench.tensor(8))])
    assert bench.completer.batches[0].lane is not lane


def test_a_report_that_raises_is_survived(caplog: pytest.LogCaptureFixture) -> None:
    sim = SimAccelerator()
    region = StandInRegion(num_blocks=4, block_size=BLOCK)
    calls = []

    class Panic(BaseException):
        pass

    def on_done(ids: list[int], ok: bool) -> None:
        calls.append((ids, ok))
        raise Panic("worse than an exception")

    engine = TransferEngine(region, torch.device("cpu"), on_done=on_done, accelerator=sim)
    for id in range(5):
        engine.save([SaveItem("k", id, ((0, 1),), sim.empty((BLOCK,), torch.uint8))])
        assert engine.drain(30)
    assert calls == [([id], True) for id in range(5)]
    assert len([r for r in caplog.records if "worse than an exception" in r.getMessage()]) == 1
    engine.close()


# The thread


def test_the_thread_reports_while_others_submit() -> None:
    sim = SimAccelerator(seed=3, arena=8 << 20)
    region = StandInRegion(num_blocks=64, block_size=BLOCK)
    reported: list[int] = []
    engine = TransferEngine(
        region,
        torch.device("cpu"),
        on_done=lambda ids, ok: reported.extend(ids if ok else []),
        accelerator=sim,
    )

    def work(thread: int) -> None:
        for turn in range(40):
            id = thread * 1000 + turn + 1
            tensor = sim.empty((BLOCK,), torch.uint8)
            sim.launch(lambda raw, value=id % 251: raw.fill_(value), tensor)
            engine.save([save(id, thread, tensor)])
            del tensor
            engine.drain()
            assert region.item(((thread, 1),), BLOCK) == bytes([id % 251]) * BLOCK
            engine.load([load(id + 500_000, thread)])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert engine.drain(30)
    assert len(reported) == len(set(reported)) == 4 * 40 * 2
    engine.close()
    assert not [t for t in threading.enumerate() if t.name == "ecpool-copies" and t.is_alive()]


def test_closing_waits_for_copies_then_unregisters() -> None:
    bench = Bench()
    assert bench.engine.register() == bench.region.nbytes
    assert bench.sim.registered == {
        bench.region.data_ptr + start: length for start, length in bench.region.segments()
    }
    bench.engine.save([save(1, 3, bench.tensor(7))])
    bench.engine.close()
    assert bench.reports == [([1], True)]
    assert bench.sim.registered == {}
    bench.engine.close()
    for call in (
        lambda: bench.engine.save([]),
        lambda: bench.engine.load([]),
        bench.engine.register,
    ):
        with pytest.raises(ClosedError):
            call()


def test_memory_stays_registered_while_a_device_may_write_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ecpool.transfer._CLOSE_TIMEOUT", 0.01)
    bench = Bench()
    bench.engine.register()
    bench.engine.save([save(1, 3, bench.tensor(7))])
    monkeypatch.setattr(bench.completer, "drain", lambda _timeout: False)
    bench.engine.close()
    assert bench.sim.registered


def test_an_engine_that_is_dropped_unclosed_lets_go() -> None:
    bench = Bench()
    bench.engine.register()
    sim = bench.sim
    del bench
    assert sim.registered == {}


def test_an_engine_whose_end_comes_in_its_own_thread_does_not_wait_for_itself() -> None:
    sim = SimAccelerator()
    region = StandInRegion(num_blocks=64, block_size=BLOCK)
    dropped = threading.Event()
    reports: list[int] = []

    def on_done(ids: list[int], ok: bool) -> None:
        if ids == [1]:
            assert dropped.wait(30)
            gc.collect()
        reports.extend(ids if ok else [])

    engine = TransferEngine(region, torch.device("cpu"), on_done=on_done, accelerator=sim)
    engine.register()
    assert sim.registered
    # Only the garbage collector finds it.
    ring: list[object] = [engine]
    ring.append(ring)
    ended = weakref.ref(engine)
    gc.disable()
    try:
        # The collector comes while the second is still to be copied.
        for id in (1, 2):
            tensor = sim.empty((BLOCK,), torch.uint8)
            sim.launch(lambda raw, value=id: raw.fill_(value), tensor)
            engine.save([save(id, id, tensor)])
        (thread,) = [each for each in threading.enumerate() if each.name == "ecpool-copies"]
        del engine, ring
        began = time.monotonic()
        dropped.set()
        thread.join(30)
    finally:
        gc.enable()
    assert ended() is None
    assert not thread.is_alive()
    assert time.monotonic() - began < 10
    assert reports == [1, 2]
    assert region.item(((2, 1),), BLOCK) == bytes([2]) * BLOCK
    assert sim.registered == {}


@pytest.mark.parametrize("call", ["drain", "close"])
def test_a_report_that_calls_its_engine_is_no_deadlock(call: str) -> None:
    sim = SimAccelerator()
    region = StandInRegion(num_blocks=4, block_size=BLOCK)
    answers: list[object] = []
    engine = TransferEngine(
        region,
        torch.device("cpu"),
        on_done=lambda _ids, _ok: answers.append(getattr(engine, call)()),
        accelerator=sim,
    )
    engine.register()
    engine.save([save(1, 1, sim.empty((BLOCK,), torch.uint8))])
    for thread in threading.enumerate():
        if thread.name == "ecpool-copies" and call == "close":
            thread.join(30)
            assert not thread.is_alive()
    if call == "drain":
        assert engine.drain(30)
    engine.close()
    assert answers == [False if call == "drain" else None]
    assert sim.registered == {}

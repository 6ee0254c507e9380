"""Transfers on a real accelerator: the bytes, under load and overlap, and pinned memory.

They need torch and a machine with an accelerator, and no vLLM. What holds a stream up is a kernel
that sleeps, where the backend has one.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ecpool
from ecpool.accelerator import HostRegistrationError, TorchAccelerator
from ecpool.pool import Pool
from ecpool.transfer import LoadItem, SaveItem, TransferEngine, TransferError

pytestmark = pytest.mark.gpu

MIB = 1 << 20
BLOCK = 16384
NUM_BLOCKS = 16384
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA or ROCm")


def the_device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.get_device_module(found).current_device())


class Bench:
    """A region of 256 MiB with an engine for the accelerator."""

    def __init__(self, *, register: bool = True) -> None:
        self.device = the_device()
        self.region = ecpool.Region.open(
            f"gpu-test-{random.getrandbits(64):x}",
            capacity=NUM_BLOCKS * BLOCK,
            block_size=BLOCK,
            lifetime="private",
            expected_clients=1,
        )
        self.view = torch.frombuffer(self.region, dtype=torch.uint8)
        self.lock = threading.Lock()
        self.reports: list[tuple[list[int], bool]] = []
        self.engine = TransferEngine(self.region, self.device, on_done=self.on_done)
        self.registered = self.engine.register() if register else 0
        self.next_id = 1

    def on_done(self, ids: list[int], ok: bool) -> None:
        with self.lock:
            self.reports.append((ids, ok))

    def done(self, ok: bool = True) -> set[int]:
        with self.lock:
            return {id for ids, fine in self.reports if fine is ok for id in ids}

    def save(self, first: int, tensor: torch.Tensor) -> int:
        id, self.next_id = self.next_id, self.next_id + 1
        self.engine.save([SaveItem(f"k{first}", id, extents(first, tensor.nbytes), tensor)])
        return id

    def load(self, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        id, self.next_id = self.next_id, self.next_id + 1
        nbytes = torch.empty(shape, dtype=dtype, device="meta").nbytes
        item = LoadItem(f"k{first}", id, extents(first, nbytes), shape, dtype)
        return self.engine.load([item])[item.key]

    def stored(self, first: int, nbytes: int) -> torch.Tensor:
        return self.view[first * BLOCK : first * BLOCK + nbytes].clone()

    def close(self) -> None:
        self.engine.close()
        del self.view
        self.region.close()


@pytest.fixture(params=[True, False], ids=["pinned", "unpinned"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(register=request.param)
    yield bench
    bench.close()


@pytest.fixture
def pinned() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def extents(first: int, nbytes: int) -> tuple[tuple[int, int], ...]:
    return ((first, max(1, -(-nbytes // BLOCK))),)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    nbytes = torch.empty(shape, device="meta").numel() * size
    # Small bytes are plain numbers in every dtype, so comparing values is comparing bits.
    return torch.randint(0, 60, (nbytes,), dtype=torch.uint8).view(dtype).reshape(shape)


def hold_up(milliseconds: int) -> None:
    """Keep the current stream busy for about so long."""
    if torch.cuda.is_available():
        torch.cuda._sleep(milliseconds * 1_500_000)
        return
    device = the_device()
    work = torch.ones(4096, 4096, device=device)
    for _ in range(milliseconds):
        work @ work


# Bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (138, 3584), (7, 3, 11), (0, 8), ()])
def test_bytes_come_back(bench: Bench, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = random_tensor(shape, dtype)
    bench.save(5, source.to(bench.device))
    assert bench.engine.drain(60)
    loaded = bench.load(5, shape, dtype)
    assert loaded.device == bench.device
    assert torch.equal(bits(loaded), bits(source))
    assert bench.engine.drain(60)
    assert bench.done() == {1, 2}


def test_strided_sources(bench: Bench) -> None:
    base = random_tensor((64, 96), torch.bfloat16).to(bench.device)
    for index, source in enumerate((base.t(), base[::2, 3:17], base[:1].expand(5, 96))):
        bench.save(100 * index, source)
        assert bench.engine.drain(60)
        assert torch.equal(bench.stored(100 * index, source.nbytes), bits(source))


def test_scattered_blocks(bench: Bench) -> None:
    blocks = list(range(0, NUM_BLOCKS, 4))
    random.Random(3).shuffle(blocks)
    runs = tuple((block, 1) for block in blocks)
    source = random_tensor((len(blocks) * BLOCK - 5,), torch.uint8)
    bench.engine.save([SaveItem("k", 1, runs, source.to(bench.device))])
    assert bench.engine.drain(60)
    loaded = bench.engine.load([LoadItem("k", 2, runs, tuple(source.shape), torch.uint8)])["k"]
    assert torch.equal(bits(loaded), source)


# Order


def test_a_save_waits_for_the_kernel_that_fills_its_source(bench: Bench) -> None:
    source = torch.zeros(4 * MIB, dtype=torch.uint8, device=bench.device)
    hold_up(100)
    source.fill_(7)
    bench.save(0, source)
    assert bench.engine.drain(60)
    assert bool((bench.stored(0, source.nbytes) == 7).all())


def test_a_source_may_be_dropped_and_its_memory_used_again(bench: Bench) -> None:
    for turn in range(20):
        source = torch.empty(4 * MIB, dtype=torch.uint8, device=bench.device)
        hold_up(5)
        source.fill_(turn + 1)
        bench.save(turn * 256, source)
        del source
        torch.empty(4 * MIB, dtype=torch.uint8, device=bench.device).fill_(99)
    assert bench.engine.drain(60)
    for turn in range(20):
        assert bool((bench.stored(turn * 256, 4 * MIB) == turn + 1).all())


def test_a_load_waits_for_reads_of_the_memory_it_is_given(bench: Bench) -> None:
    bench.view[: 4 * MIB] = 99
    for _ in range(20):
        old = torch.full((4 * MIB,), 7, dtype=torch.uint8, device=bench.device)
        hold_up(5)
        seen = old.clone()
        del old
        loaded = bench.load(0, (4 * MIB,), torch.uint8)
        assert bool((seen == 7).all())
        assert bool((loaded == 99).all())


def test_compute_waits_for_a_load(bench: Bench) -> None:
    for turn in range(20):
        bench.view[: 64 * MIB] = turn
        loaded = bench.load(0, (64 * MIB,), torch.uint8)
        assert bool((loaded == turn).all())
        assert bench.engine.drain(60)


@needs_cuda
def test_the_default_stream_and_others_are_served_alike(bench: Bench) -> None:
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            source = torch.zeros(4 * MIB, dtype=torch.uint8, device=bench.device)
            hold_up(20)
            source.fill_(7)
            bench.save(0, source)
            assert bench.engine.drain(60)
            assert torch.equal(bench.load(0, (4 * MIB,), torch.uint8), source)
            stream.synchronize()
        bench.view[: 4 * MIB] = 0


def test_nothing_is_reported_before_it_is_copied(pinned: Bench) -> None:
    source = torch.zeros(4 * MIB, dtype=torch.uint8, device=pinned.device)
    torch.accelerator.synchronize()
    hold_up(500)
    start = time.perf_counter()
    pinned.save(0, source.fill_(7))
    assert time.perf_counter() - start < 0.25, "save waited for the device"
    assert pinned.done() == set()
    assert not pinned.engine.drain(0.05)
    assert pinned.engine.drain(60)
    assert pinned.done() == {1}
    assert bool((pinned.stored(0, source.nbytes) == 7).all())


def test_bytes_are_right_under_load(bench: Bench) -> None:
    """Saves, loads and matrix products of several threads, each on a stream of its own."""
    errors: list[BaseException] = []
    streams = torch.get_device_module(bench.device)

    def work(number: int) -> None:
        chance = random.Random(number)
        try:
            with streams.stream(streams.Stream(bench.device)):
                busy = torch.ones(1024, 1024, device=bench.device)
                for turn in range(60):
                    value = chance.randrange(256)
                    size = chance.randrange(1, 8 * MIB)
                    first = number * 2048 + (turn % 2) * 1024
                    source = torch.empty(size, dtype=torch.uint8, device=bench.device)
                    busy = (busy @ busy).clamp(0, 1)
                    source.fill_(value)
                    item = SaveItem("k", number * 1000 + turn + 1, extents(first, size), source)
                    bench.engine.save([item])
                    del source
                    torch.empty(size, dtype=torch.uint8, device=bench.device).fill_(value + 1 & 255)
                    assert bench.engine.drain(60)
                    load = LoadItem(
                        "k", 10**6 + number * 1000 + turn, item.extents, (size,), torch.uint8
                    )
                    loaded = bench.engine.load([load])["k"]
                    assert bool((loaded == value).all())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(110)
    assert errors == []
    assert bench.engine.drain(60)
    assert len(bench.done()) == 4 * 60 * 2


@needs_cuda
def test_a_graph_can_be_captured_while_a_copy_is_awaited(pinned: Bench) -> None:
    source = torch.ones(4 * MIB, dtype=torch.uint8, device=pinned.device)
    static = torch.ones(1024, device=pinned.device)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        (static + 1).sum()
    torch.cuda.synchronize()
    hold_up(300)
    pinned.save(0, source)
    pinned.save(1024, source)
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph, which first waits for everything.
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="global")
        result = (static + 1).sum()
        time.sleep(0.6)  # the waiting thread goes from the first copy to the second meanwhile
        graph.capture_end()
    graph.replay()
    assert result.item() == 2048
    assert pinned.engine.drain(60)
    assert pinned.done() == {1, 2}


# Failures


def test_a_full_device_is_a_named_failure(bench: Bench) -> None:
    bench.view[:BLOCK] = 7
    huge = LoadItem("huge", 1, ((0, NUM_BLOCKS),), (1 << 44,), torch.uint8)
    small = LoadItem("small", 2, ((0, 1),), (BLOCK,), torch.uint8)
    with pytest.raises(TransferError) as caught:
        bench.engine.load([huge, small])
    assert isinstance(caught.value.failed["huge"], torch.OutOfMemoryError)
    assert bool((caught.value.loaded["small"] == 7).all())
    assert bench.engine.drain(60)
    assert bench.done() == {2}
    assert bench.done(ok=False) == {1}


# Registration


@needs_cuda
def test_registered_memory_is_pinned_until_the_engine_closes(pinned: Bench) -> None:
    assert pinned.registered == pinned.region.nbytes
    assert pinned.view.is_pinned()
    pinned.engine.close()
    assert not pinned.view.is_pinned()


@needs_cuda
def test_a_refused_registration_blames_no_later_kernel() -> None:
    accelerator = TorchAccelerator(the_device())
    with pytest.raises(HostRegistrationError):
        accelerator.register_host(1 << 20, 1 << 50)
    assert torch.ones(10, device=the_device()).sum().item() == 10
    accelerator.unregister_host(1 << 20)
    assert torch.ones(10, device=the_device()).sum().item() == 10


@needs_cuda
def test_memory_that_is_registered_already_is_left_alone(pinned: Bench) -> None:
    accelerator = TorchAccelerator(the_device())
    offset, nbytes = pinned.region.segments()[0]
    assert accelerator.register_host(pinned.region.data_ptr + offset, nbytes) is False
    assert torch.ones(10, device=the_device()).sum().item() == 10


# Speed, for people to look at


def timed(action: Callable[[], Any]) -> float:
    action()
    torch.accelerator.synchronize()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        action()
        torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


@pytest.mark.parametrize("mib", [1, 16, 128])
def test_throughput_beside_a_pinned_copy(
    bench: Bench, mib: int, capsys: pytest.CaptureFixture[str]
) -> None:
    nbytes = mib * MIB
    device_side = torch.ones(nbytes, dtype=torch.uint8, device=bench.device)
    host_side = torch.empty(nbytes, dtype=torch.uint8).pin_memory()

    def save() -> None:
        bench.save(0, device_side)
        assert bench.engine.drain(60)

    def load() -> None:
        bench.load(0, (nbytes,), torch.uint8)

    rows = {
        "save": (timed(save), timed(lambda: host_side.copy_(device_side, non_blocking=True))),
        "load": (timed(load), timed(lambda: device_side.copy_(host_side, non_blocking=True))),
    }
    kind = "pinned" if bench.registered else "unpinned"
    with capsys.disabled():
        for name, (ours, plain) in rows.items():
            speeds = (
                f"{nbytes / ours / 1e9:6.1f} GB/s, plain pinned {nbytes / plain / 1e9:6.1f} GB/s"
            )
            print(f"\n{name} {mib:4} MiB {kind:8}: {speeds}", end="")


# Pool


def test_a_pool_on_the_device() -> None:
    device = the_device()
    with Pool("64MiB", device=device.type) as pool:
        assert pool.device == device
        tensors = {f"k{i}": random_tensor((50 + i, 1024), torch.bfloat16) for i in range(20)}
        for key, tensor in tensors.items():
            assert pool.put(key, tensor.to(device))
        for key, tensor in tensors.items():
            on_device, on_host = pool.get(key), pool.get(key, device="cpu")
            assert on_device is not None
            assert on_host is not None
            assert on_device.device == device
            assert on_host.device.type == "cpu"
            assert torch.equal(bits(on_device), bits(tensor))
            assert torch.equal(bits(on_host), bits(tensor))
        assert pool.put("later", torch.ones(4 * MIB, device=device), wait=False)
        assert pool.drain(60)
        assert "later" in pool
        pool.drain()
        assert pool.stats()["holds"] == 0

"""`ecpool.Pool` for any torch program, on the native module."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ecpool
from ecpool.errors import ClosedError, InvalidArgumentError, RegionError
from ecpool.pool import Pool
from ecpool.transfer import TransferEngine, TransferError, dtype_of
from support.sim_accelerator import Order, SimAccelerator


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ecpool-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def pool(directory: Path) -> Iterator[Pool]:
    with Pool("1MiB", block_size=4096, directory=directory) as pool:
        yield pool


def same(left: torch.Tensor | None, right: torch.Tensor) -> bool:
    if left is None or left.shape != right.shape or left.dtype != right.dtype:
        return False
    plain = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*plain)


def healthy(pool: Pool) -> bool:
    pool.drain()
    stats = pool.stats()
    held = stats["writing"] + stats["doomed"] + stats["orphaned"] + stats["holds"]
    return held == 0 and pool._region.check() == []


# Storing and finding


def test_what_is_put_comes_back(pool: Pool) -> None:
    tensor = torch.randn(138, 96)
    assert pool.put("image", tensor) is True
    assert "image" in pool
    assert pool.contains("image")
    assert same(pool.get("image"), tensor)
    assert healthy(pool)


@pytest.mark.parametrize("name", sorted(ecpool._native.DTYPES))
def test_every_dtype_that_the_index_knows(pool: Pool, name: str) -> None:
    dtype = getattr(torch, name)
    assert torch.empty(0, dtype=dtype).element_size() == ecpool._native.DTYPES[name]
    data = torch.randint(0, 2, (3 * 5 * 16,), dtype=torch.uint8)
    tensor = data.view(dtype)[:10].reshape(2, 5)
    assert pool.put("k", tensor)
    assert same(pool.get("k"), tensor)


@pytest.mark.parametrize("shape", [(), (1,), (4097,), (3, 5), (2, 3, 4), (1, 2, 1, 2, 1, 2, 1, 2)])
def test_every_shape(pool: Pool, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    assert pool.put("k", tensor)
    assert same(pool.get("k"), tensor)


def test_a_copy_is_kept_and_a_copy_is_given(pool: Pool) -> None:
    tensor = torch.ones(10)
    pool.put("k", tensor)
    tensor.fill_(2)
    first = pool.get("k")
    assert first is not None
    first.fill_(3)
    assert same(pool.get("k"), torch.ones(10))


def test_views_and_gradients_are_stored_as_plain_tensors(pool: Pool) -> None:
    base = torch.randn(8, 6, requires_grad=True)
    assert pool.put("slice", base.t()[1:4, ::2])
    loaded = pool.get("slice")
    assert loaded is not None
    assert same(loaded, base.t()[1:4, ::2])
    assert not loaded.requires_grad
    assert loaded.is_contiguous()


def test_widths_may_differ_from_item_to_item(pool: Pool) -> None:
    tensors = {f"k{i}": torch.randn(3 + i % 4, 1 + 100 * (i % 3)) for i in range(12)}
    for key, tensor in tensors.items():
        assert pool.put(key, tensor)
    for key, tensor in tensors.items():
        assert same(pool.get(key), tensor)


def test_what_is_not_there_is_none(pool: Pool) -> None:
    assert pool.get("nothing") is None
    assert "nothing" not in pool
    assert 7 not in pool
    assert pool.stats()["misses"] == 1


def test_a_key_is_never_replaced(pool: Pool) -> None:
    assert pool.put("k", torch.ones(3))
    assert pool.put("k", torch.zeros(3)) is False
    assert same(pool.get("k"), torch.ones(3))
    assert pool.stats()["skipped_exists"] == 1


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)])
def test_a_tensor_without_elements_is_skipped(pool: Pool, shape: tuple[int, ...]) -> None:
    assert pool.put("k", torch.empty(shape)) is False
    assert "k" not in pool
    assert pool.stats()["skipped_empty"] == 1


def test_a_tensor_larger_than_the_pool_is_skipped(pool: Pool) -> None:
    assert pool.put("k", torch.empty(1025, 1024, dtype=torch.uint8)) is False
    assert pool.stats()["skipped_too_large"] == 1
    assert pool.put("fits", torch.empty(1024, 1024, dtype=torch.uint8))
    assert healthy(pool)


def test_the_oldest_goes_when_room_is_needed(pool: Pool) -> None:
    quarter = torch.zeros(256, 1024, dtype=torch.uint8)
    for index in range(4):
        assert pool.put(f"k{index}", quarter)
    assert pool.get("k0") is not None  # goes to the end of the queue
    assert pool.put("k4", quarter)
    assert [f"k{index}" in pool for index in range(5)] == [True, False, True, True, True]
    assert pool.stats()["evictions"] == 1


def test_flush_forgets_everything_of_its_namespace(directory: Path) -> None:
    with (
        Pool("1MiB", name="p", namespace="a", directory=directory) as a,
        Pool("1MiB", name="p", namespace="b", directory=directory) as b,
    ):
        a.put("k", torch.ones(3))
        b.put("k", torch.zeros(3))
        assert same(a.get("k"), torch.ones(3))
        assert same(b.get("k"), torch.zeros(3))
        assert a.flush() == 1
        assert "k" not in a
        assert same(b.get("k"), torch.zeros(3))
        assert a.put("k", torch.full((3,), 2.0))
        assert same(a.get("k"), torch.full((3,), 2.0))


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        ([1, 2], "list cannot be stored"),
        (torch.eye(3).to_sparse(), "torch.sparse_coo"),
        (torch.empty(3, device="meta"), "meta tensor"),
        (torch.empty([1] * 9), "9 dimensions cannot be stored, 8 at most"),
        (torch.empty(3, dtype=torch.float8_e8m0fnu), "torch.float8_e8m0fnu"),
    ],
)
def test_what_can_never_be_stored_is_an_error(pool: Pool, thing: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        pool.put("k", thing)
    assert healthy(pool)


@pytest.mark.parametrize("device", ["nonsense", "meta"])
def test_a_device_that_cannot_be_used_is_an_error(pool: Pool, device: str) -> None:
    pool.put("k", torch.ones(3))
    with pytest.raises(InvalidArgumentError, match=device):
        pool.get("k", device=device)
    with pytest.raises(InvalidArgumentError, match=device):
        Pool("1MiB", device=device)
    assert healthy(pool)


@settings(max_examples=40)
@given(
    moves=st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 60), st.integers(1, 3000)), max_size=40
    )
)
def test_random_use_against_a_dictionary(moves: list[tuple[int, int, int]]) -> None:
    """Whatever is found has the bytes that were put first under its key since it was last gone."""
    with Pool("256KiB", block_size=4096) as pool:
        model: dict[str, torch.Tensor] = {}
        for number, rows, width in moves:
            key = f"k{number}"
            tensor = torch.randint(0, 256, (rows, width), dtype=torch.uint8)
            was_there = key in pool
            if pool.put(key, tensor):
                assert not was_there
                model[key] = tensor
            for known, wanted in model.items():
                found = pool.get(known)
                assert found is None or same(found, wanted)
        assert healthy(pool)


# Names, sizes, processes


def test_a_private_pool_leaves_no_file(directory: Path) -> None:
    with Pool("1MiB", directory=directory) as pool:
        assert not [path for path in directory.glob("*") if path.stat().st_size > 1 << 16]
        assert pool.name is None
    assert list(directory.glob("*")) == []


def test_two_pools_of_one_name_are_one_pool(directory: Path) -> None:
    with Pool("1MiB", name="p", directory=directory) as one:
        one.put("k", torch.ones(3))
        with Pool.attach("p", directory=directory) as two:
            assert two.capacity == one.capacity == 1 << 20
            assert same(two.get("k"), torch.ones(3))
            assert not two.put("k", torch.zeros(3))
        with pytest.raises(InvalidArgumentError, match=r"in use and differs"):
            Pool("2MiB", name="p", directory=directory)
    with pytest.raises(RegionError):
        Pool.attach("p", directory=directory)


def test_a_persistent_pool_is_found_again(directory: Path) -> None:
    with Pool("1MiB", name="p", persistent=True, directory=directory) as pool:
        pool.put("kept", torch.arange(5000))
        pool.put("damaged", torch.arange(5000) + 1)
        lease = pool._cache.lease("damaged")
        assert lease is not None
        damaged_block = lease.extents[0][0]
    with Pool("1MiB", name="p", persistent=True, directory=directory) as pool:
        view = torch.frombuffer(pool._region, dtype=torch.uint8)
        view[damaged_block * pool._region.block_size] ^= 1
        assert same(pool.get("kept"), torch.arange(5000))
        assert pool.get("damaged") is None, "its bytes are not what was stored"
        assert pool.put("damaged", torch.arange(5000) + 1)
        assert healthy(pool)
    with pytest.raises(InvalidArgumentError, match="name"):
        Pool("1MiB", persistent=True, directory=directory)


@pytest.mark.parametrize("capacity", [0, -1, True, "4GiBB", "many", None, float("nan")])
def test_a_capacity_that_is_none_leaves_no_file(directory: Path, capacity: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="capacity"):
        Pool(capacity, name="p", directory=directory)
    assert list(directory.glob("*")) == []


def test_populate_changes_nothing_that_is_seen(directory: Path) -> None:
    with Pool("1MiB", directory=directory, populate=True) as pool:
        assert pool.put("k", torch.ones(3))
        assert same(pool.get("k"), torch.ones(3))


OTHER_PROCESS = """
    import sys
    import torch
    from ecpool import Pool

    directory, command = sys.argv[1:]
    with Pool("4MiB", name="p", directory=directory) as pool:
        if command == "put":
            for index in range(20):
                assert pool.put(f"k{index}", torch.full((100, 64), float(index)))
        else:
            for index in range(20):
                assert torch.equal(pool.get(f"k{index}"), torch.full((100, 64), float(index)))
            assert pool.flush() == 20
"""


def run_other(directory: Path, command: str) -> None:
    program = textwrap.dedent(OTHER_PROCESS)
    subprocess.run(
        [sys.executable, "-c", program, str(directory), command], check=True, timeout=100
    )


def test_processes_share_a_pool_by_name(directory: Path) -> None:
    with Pool("4MiB", name="p", directory=directory) as pool:
        run_other(directory, "put")
        assert same(pool.get("k7"), torch.full((100, 64), 7.0))
        run_other(directory, "find and flush")
        assert "k7" not in pool
        assert healthy(pool)


def test_a_forked_child_is_told_and_its_parent_goes_on(pool: Pool) -> None:
    pool.put("k", torch.ones(3))
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: pool.get("k"), lambda: pool.put("j", torch.ones(3)), pool.flush):
            try:
                call()
            except ClosedError:
                refused += 1
        pool.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert same(pool.get("k"), torch.ones(3))
    assert healthy(pool)


# Closing


def test_after_close_every_call_says_so(directory: Path) -> None:
    pool = Pool("1MiB", directory=directory)
    pool.close()
    pool.close()
    calls = (
        lambda: pool.put("k", torch.ones(1)),
        lambda: pool.get("k"),
        lambda: pool.contains("k"),
        pool.flush,
        pool.stats,
        pool.drain,
    )
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    assert pool.closed
    assert "closed" in repr(pool)


def test_a_view_outlives_its_region(directory: Path) -> None:
    region = ecpool.Region.open("p", capacity=1 << 20, directory=str(directory))
    region.write([(3, 1)], b"\x07" * 100)
    view = torch.frombuffer(region, dtype=torch.uint8)[3 * 16384 :]
    region.close()
    region.close()
    del region
    gc.collect()
    assert view[:100].tolist() == [7] * 100
    view[5] = 9
    assert view[5] == 9


def test_a_pool_that_is_dropped_unclosed_lets_go(directory: Path) -> None:
    pool = Pool("1MiB", name="p", directory=directory)
    pool.put("k", torch.ones(3))
    del pool
    gc.collect()
    with pytest.raises(RegionError):
        Pool.attach("p", directory=directory)


def test_it_says_what_it_is(pool: Pool) -> None:
    assert repr(pool) == "<ecpool.Pool private, 1 MiB in blocks of 4 KiB, cpu>"
    assert pool.device == torch.device("cpu")
    stats = pool.stats()
    assert stats["capacity"] == pool.capacity == 1 << 20
    assert stats["block_size"] == 4096
    with pytest.raises(TypeError, match="pickled"):
        __import__("pickle").dumps(pool)


# Threads


def test_threads_on_one_pool(pool: Pool) -> None:
    """Small enough that entries come and go under the readers' hands."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(300):
                index = (number * 7 + turn) % 40
                pool.put(f"k{index}", torch.full((64, 1024), index, dtype=torch.uint8))
                found = pool.get(f"k{(index + number) % 40}")
                if found is not None:
                    assert found.eq((index + number) % 40).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert errors == []
    assert healthy(pool)


def test_closing_while_others_work_is_a_clear_error_for_them(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Pool("1MiB", directory=directory)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                pool.put("k", torch.ones(1000))
                pool.get("k")
                pool.flush()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    pool.close()
    for thread in threads:
        thread.join(30)
    assert [repr(error) for error in errors] == ["ClosedError('the pool is closed')"] * 4
    assert caplog.records == []


# On a device


class SimulatedPool(Pool):
    """A pool whose engine works on the simulated device."""

    sim: SimAccelerator

    def _make_engine(self, device: torch.device) -> TransferEngine:
        self.sim = SimAccelerator(order=Order.RANDOM, seed=5)
        engine = TransferEngine(
            self._region, device, on_done=self._reports.on_done, accelerator=self.sim
        )
        engine.register()
        return engine

    def tensor(self, value: int) -> torch.Tensor:
        tensor = self.sim.empty((10, 100), torch.uint8)
        self.sim.launch(lambda raw: raw.fill_(value), tensor)
        return tensor


@pytest.fixture
def device_pool(directory: Path) -> Iterator[SimulatedPool]:
    with SimulatedPool("1MiB", directory=directory) as pool:
        yield pool


def test_device_tensors_go_in_and_out(device_pool: SimulatedPool) -> None:
    pool = device_pool
    assert sum(pool.sim.registered.values()) == pool.capacity
    for value in range(20):
        assert pool.put(f"k{value}", pool.tensor(value))
    assert pool.put("from the host", torch.ones(7))
    for value in range(20):
        loaded = pool.get(f"k{value}")
        assert loaded is not None
        assert pool.sim.owns(loaded)
        pool.sim.launch(lambda raw, value=value: raw.sub_(value), loaded)
        pool.sim.run_all()
        assert not loaded.any()
    assert healthy(pool)


def test_put_without_waiting_is_found_after_drain(device_pool: SimulatedPool) -> None:
    pool = device_pool
    for value in range(10):
        assert pool.put(f"k{value}", pool.tensor(value), wait=False)
    assert pool.drain(30)
    assert all(f"k{value}" in pool for value in range(10))


def test_a_failed_copy_is_not_found(device_pool: SimulatedPool) -> None:
    pool = device_pool
    pool.put("good", pool.tensor(1))
    tensor = pool.tensor(2)
    pool.sim.break_after("copy", 0)
    assert pool.put("bad", tensor) is False
    with pytest.raises(TransferError, match="device error in copy"):
        pool.get("good")
    pool.sim.broken.clear()
    assert "bad" not in pool
    assert pool.get("good") is not None
    assert pool.put("bad", tensor)
    assert pool.stats()["copies_failed"] == 2
    assert healthy(pool)


def test_closing_a_device_pool_unregisters_its_memory(device_pool: SimulatedPool) -> None:
    device_pool.put("k", device_pool.tensor(1), wait=False)
    device_pool.close()
    assert device_pool.sim.registered == {}


def test_what_has_no_element_type_is_a_miss(pool: Pool) -> None:
    pool._cache.alloc("raw", 1)
    pool._cache.mark_ready("raw")
    assert "raw" in pool
    assert pool.get("raw") is None
    assert healthy(pool)


def test_an_element_type_that_this_torch_lacks_is_a_miss(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.put("k", torch.ones(3, dtype=torch.int16))
    with monkeypatch.context() as older:
        older.delattr(torch, "int16")
        assert pool.get("k") is None
        assert healthy(pool)
    assert same(pool.get("k"), torch.ones(3, dtype=torch.int16))


@pytest.mark.parametrize("name", ["", "nn", "empty", "float33", "torch.float32"])
def test_other_names_are_no_element_types(name: str) -> None:
    assert dtype_of(name) is None
    assert dtype_of("bfloat16") is torch.bfloat16

"""Tensors given to a native region itself, as the transfer engine does on CPU."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ecpool import ClosedError, InvalidArgumentError, Region
from ecpool._native import DTYPES
from ecpool.transfer import LoadItem, SaveItem, TransferEngine, TransferError, dtype_of

BLOCK = 4096


@pytest.fixture
def region() -> Iterator[Region]:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        Region.open("t", capacity=64 * BLOCK, block_size=BLOCK, directory=directory) as opened,
    ):
        yield opened


def content(region: Region, nbytes: int) -> bytes:
    return bytes(memoryview(region)[:nbytes])


@pytest.mark.parametrize("name", DTYPES)
def test_every_element_type(region: Region, name: str) -> None:
    dtype = dtype_of(name)
    if dtype is None:
        pytest.skip("this torch has no such type")
    tensor = torch.empty(3, 5, dtype=dtype)
    wanted = bytes(range(1, 1 + tensor.nbytes))
    ctypes.memmove(tensor.data_ptr(), wanted, len(wanted))
    reports: list[tuple[list[int], bool]] = []
    engine = TransferEngine(
        region, torch.device("cpu"), on_done=lambda ids, ok: reports.append((ids, ok))
    )
    engine.save([SaveItem("k", 1, ((0, 1),), tensor)])
    loaded = engine.load([LoadItem("k", 2, ((0, 1),), (3, 5), dtype)])["k"]
    assert reports == [([1], True), ([2], True)]
    assert content(region, len(wanted)) == wanted
    assert (loaded.shape, loaded.dtype) == ((3, 5), dtype)
    assert ctypes.string_at(loaded.data_ptr(), loaded.nbytes) == wanted


@pytest.mark.parametrize("old", [False, True], ids=["table", "capsule"])
@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(6, 4).t(), "C-contiguous"),
        (torch.zeros(6, 4)[:, :2], "C-contiguous"),
        (torch.zeros(4).expand(3, 4), "C-contiguous"),
        (torch.zeros(4, device="meta"), "device|memory|storage|meta"),
        (torch.zeros(BLOCK + 1, dtype=torch.uint8), "4097 bytes"),
    ],
    ids=["transposed", "gaps", "expanded", "meta", "too large"],
)
def test_what_cannot_be_copied_is_refused(
    region: Region, tensor: torch.Tensor, reason: str, old: bool
) -> None:
    given = _Older(tensor) if old else tensor
    for call in (region.write, region.read):
        with pytest.raises((InvalidArgumentError, RuntimeError, BufferError), match=reason):
            call([(0, 1)], given)
    assert content(region, 64 * BLOCK) == bytes(64 * BLOCK)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(4, dtype=torch.complex64).conj(), "conj"),
        (torch.ones(4, dtype=torch.complex64).conj().imag, "neg"),
        (torch.ones(4, requires_grad=True), "grad"),
    ],
    ids=["conjugated", "negated", "requires a gradient"],
)
@pytest.mark.parametrize("derived", [False, True], ids=["", "derived type"])
def test_values_that_the_memory_alone_does_not_say_are_refused(
    region: Region, tensor: torch.Tensor, reason: str, derived: bool
) -> None:
    given = tensor.as_subclass(_Derived) if derived else tensor
    for call in (region.write, region.read):
        with pytest.raises((InvalidArgumentError, BufferError), match=reason):
            call([(0, 1)], given)
    assert content(region, BLOCK) == bytes(BLOCK)
    engine = TransferEngine(region, torch.device("cpu"), on_done=lambda ids, ok: None)
    engine.save([SaveItem("k", 1, ((0, 1),), given)])
    wanted = tensor.detach().resolve_conj().resolve_neg().numpy().tobytes()
    assert content(region, len(wanted)) == wanted


class _Elsewhere(torch.Tensor):
    """With memory of its own that says nothing, and values in another tensor."""

    values: torch.Tensor

    @staticmethod
    def around(values: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(values).as_subclass(_Elsewhere)
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [each.values if isinstance(each, cls) else each for each in args]
        return function(*plain, **(kwargs or {}))


def test_the_values_of_a_derived_type_are_saved_not_its_memory(region: Region) -> None:
    values = torch.randn(8)
    reports: list[tuple[list[int], bool]] = []
    engine = TransferEngine(
        region, torch.device("cpu"), on_done=lambda ids, ok: reports.append((ids, ok))
    )
    engine.save([SaveItem("k", 1, ((0, 1),), _Elsewhere.around(values))])
    assert reports == [([1], True)]
    assert content(region, values.nbytes) == values.numpy().tobytes()


class _Derived(torch.Tensor):
    """As parameters are: of a type of its own, with memory of its own."""


class _Wrapper(torch.Tensor):
    """As quantised tensors are: without memory of its own."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{function}")


@pytest.mark.parametrize("offset", [0, 1000])
def test_a_tensor_without_memory_is_skipped_and_never_read(region: Region, offset: int) -> None:
    wrapper = torch.Tensor._make_wrapper_subclass(
        _Wrapper, (8,), strides=(1,), storage_offset=offset, dtype=torch.float32
    )
    with pytest.raises((InvalidArgumentError, RuntimeError, TypeError, BufferError)):
        region.write([(0, 1)], wrapper)
    reports: list[tuple[list[int], bool]] = []
    engine = TransferEngine(
        region, torch.device("cpu"), on_done=lambda ids, ok: reports.append((ids, ok))
    )
    engine.save([SaveItem("k", 1, ((0, 1),), wrapper)])
    assert reports == [([1], False)]


@pytest.mark.parametrize("old", [False, True], ids=["table", "capsule"])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4),
        torch.arange(12).reshape(3, 4)[1:],
        torch.arange(12).reshape(3, 1, 4)[1:2],
        torch.arange(40)[::2].reshape(20, 1)[3:4],
        torch.tensor(5.5),
        torch.zeros(0, 3),
    ],
    ids=lambda t: f"{tuple(t.shape)}",
)
def test_tensors_without_gaps_go_both_ways(region: Region, tensor: torch.Tensor, old: bool) -> None:
    found = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    region.write([(3, 1)], _Older(tensor) if old else tensor)
    region.read([(3, 1)], _Older(found) if old else found)
    assert torch.equal(found, tensor)


def test_a_tensor_that_came_in_a_capsule_is_given_back(region: Region) -> None:
    tensor = torch.ones(8)
    references = tensor._use_count()
    region.write([(0, 1)], _Older(tensor))
    with pytest.raises(InvalidArgumentError):
        region.write([], _Older(tensor))
    with pytest.raises(InvalidArgumentError):
        region.write([(0, 1)], _Older(tensor[::2]))
    assert tensor._use_count() == references


def test_a_capsule_is_taken_once(region: Region) -> None:
    capsule = torch.utils.dlpack.to_dlpack(torch.ones(8))
    region.write([(0, 1)], _Exports(capsule))
    with pytest.raises(ValueError, match="PyCapsule"):
        region.write([(0, 1)], _Exports(capsule))
    assert content(region, 4) == b"\x00\x00\x80\x3f"


@pytest.mark.parametrize("lie", [None, 5, "text", b"bytes"])
def test_lies_about_memory_are_type_errors(region: Region, lie: object) -> None:
    with pytest.raises(TypeError):
        region.write([(0, 1)], _Exports(lie))
    liar = type("Liar", (), {"__dlpack_c_exchange_api__": lie})()
    with pytest.raises(TypeError):
        region.write([(0, 1)], liar)


def test_the_table_of_another_type_refuses_what_is_no_tensor(region: Region) -> None:
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if table is None:
        pytest.skip("this torch has no such table")
    with pytest.raises(RuntimeError):
        region.write([(0, 1)], type("Liar", (), {"__dlpack_c_exchange_api__": table})())


LARGE = 1_000_000  # bytes: other threads run during such a copy


@pytest.fixture
def roomy() -> Iterator[Region]:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        Region.open("l", capacity=40 << 20, block_size=BLOCK, directory=directory) as opened,
    ):
        yield opened


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(LARGE // 4),
        torch.randn(3, 5, LARGE // 4).bfloat16(),
        torch.randn(LARGE // 8, 2).to(torch.float8_e4m3fn).repeat(8, 1),
        torch.randn(2000, 2000).t(),
        torch.randn(2001, 1, 1000)[1:],
        torch.randn(LARGE, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.randn(LARGE // 4)),
        torch.rand(LARGE + 1) < 0.5,
        torch.randint(0, 255, (LARGE,), dtype=torch.uint8).view(torch.bool),
    ],
    ids=lambda t: f"{str(t.dtype)[6:]}{tuple(t.shape)}",
)
@pytest.mark.parametrize("inferring", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("cut", [1, 2], ids=["one run", "two runs"])
def test_large_items_come_back_and_touch_no_block_of_another(
    roomy: Region, tensor: torch.Tensor, inferring: bool, cut: int
) -> None:
    reports: list[tuple[list[int], bool]] = []
    engine = TransferEngine(
        roomy, torch.device("cpu"), on_done=lambda ids, ok: reports.append((ids, ok))
    )
    count = -(-tensor.nbytes // BLOCK)
    halves = ((7, count // 2), (8 + count // 2, count - count // 2))
    extents = ((7, count),) if cut == 1 else halves
    around = memoryview(roomy)
    around[:] = b"\xa5" * around.nbytes
    with torch.inference_mode(inferring):
        engine.save([SaveItem("k", 1, extents, tensor)])
        item = LoadItem("k", 2, extents, tuple(tensor.shape), tensor.dtype)
        loaded = engine.load([item])["k"]
    assert reports == [([1], True), ([2], True)]
    assert not loaded.requires_grad
    wanted = tensor.detach().resolve_conj().contiguous()
    assert torch.equal(loaded.view(torch.uint8), wanted.view(torch.uint8))
    bytes_kept = torch.frombuffer(roomy, dtype=torch.uint8) == 0xA5
    assert bytes_kept[: 7 * BLOCK].all()
    end = (extents[-1][0] + extents[-1][1]) * BLOCK
    assert bytes_kept[end:].all()
    engine.close()


@pytest.mark.parametrize("inferring", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("huge_pages", [True, False], ids=["huge pages", "no huge pages"])
def test_an_item_of_many_megabytes_comes_back(
    roomy: Region, huge_pages: bool, inferring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not huge_pages:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)
    tensor = torch.randint(-(2**31), 2**31 - 1, (3, (33 << 20) // 12, 1), dtype=torch.int32)
    extents = ((5, roomy.num_blocks - 5),)
    engine = TransferEngine(roomy, torch.device("cpu"), on_done=lambda ids, ok: None)
    engine.save([SaveItem("k", 1, extents, tensor)])
    item = LoadItem("k", 2, extents, tuple(tensor.shape), tensor.dtype)
    with torch.inference_mode(inferring), torch.no_grad():
        loaded = engine.load([item])["k"]
    engine.close()
    assert (loaded.shape, loaded.dtype) == (tensor.shape, tensor.dtype)
    assert not loaded._is_view()
    assert loaded.is_contiguous()
    assert torch.equal(loaded, tensor)
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert _asks_for_huge_pages(loaded) is huge_pages


def _asks_for_huge_pages(tensor: torch.Tensor) -> bool:
    """Whether the mapping around the tensor's middle has that flag."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            inside = begin <= middle < end
        elif inside and first == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError("the tensor is not mapped")


def test_a_large_item_that_does_not_fit_is_refused(roomy: Region) -> None:
    reports: list[tuple[list[int], bool]] = []
    engine = TransferEngine(
        roomy, torch.device("cpu"), on_done=lambda ids, ok: reports.append((ids, ok))
    )
    tensor = torch.ones(LARGE, dtype=torch.uint8)
    blocks = roomy.num_blocks
    for number, extents in enumerate([((0, 244),), ((blocks - 1, 300),), ((blocks, 300),)]):
        engine.save([SaveItem("k", 2 * number, extents, tensor)])
        with pytest.raises(TransferError):
            engine.load([LoadItem("k", 2 * number + 1, extents, (LARGE,), torch.uint8)])
    assert reports == [([number], False) for number in range(6)]
    assert not torch.frombuffer(roomy, dtype=torch.uint8).any()


def test_a_closed_region_is_neither_read_nor_written(roomy: Region) -> None:
    reports: list[tuple[list[int], bool]] = []
    engine = TransferEngine(
        roomy, torch.device("cpu"), on_done=lambda ids, ok: reports.append((ids, ok))
    )
    tensor = torch.ones(LARGE, dtype=torch.uint8)
    engine.save([SaveItem("k", 1, ((0, 300),), tensor)])
    left = torch.frombuffer(roomy, dtype=torch.uint8)
    roomy.close()
    engine.save([SaveItem("k", 2, ((0, 300),), tensor * 2)])
    with pytest.raises(TransferError) as caught:
        engine.load([LoadItem("k", 3, ((0, 300),), (LARGE,), torch.uint8)])
    assert isinstance(caught.value.failed["k"], ClosedError)
    assert reports == [([1], True), ([2], False), ([3], False)]
    assert (left[:LARGE] == 1).all()


def _copy_in_a_child(directory: str) -> None:
    with Region.open("c", capacity=40 << 20, block_size=BLOCK, directory=directory) as opened:
        engine = TransferEngine(opened, torch.device("cpu"), on_done=lambda ids, ok: None)
        tensor = torch.frombuffer(bytearray(b"\7" * 4 * LARGE), dtype=torch.uint8)
        engine.save([SaveItem("k", 1, ((0, 1000),), tensor)])
        loaded = engine.load([LoadItem("k", 2, ((0, 1000),), (4 * LARGE,), torch.uint8)])["k"]
        assert bytes(memoryview(loaded.numpy())) == b"\7" * 4 * LARGE


def test_a_child_copies_after_its_parent_used_all_of_torchs_threads() -> None:
    # Those threads are lost in a child, and torch waits for them for ever.
    child = """
import os, signal, sys, torch
sys.path[:0] = sys.argv[2:]
from torch_tests import _copy_in_a_child
torch.set_num_threads(2)
torch.ones(4_000_000).add_(1)
if (pid := os.fork()) == 0:
    signal.alarm(30)
    _copy_in_a_child(sys.argv[1])
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""".replace("torch_tests", Path(__file__).stem)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        paths = [str(Path(__file__).parent), *sys.path]
        arguments = [sys.executable, "-c", child, directory, *paths]
        subprocess.run(arguments, check=True, timeout=60)


def test_copies_of_a_closed_region_fail_one_by_one(region: Region) -> None:
    reports: list[tuple[list[int], bool]] = []
    engine = TransferEngine(
        region, torch.device("cpu"), on_done=lambda ids, ok: reports.append((ids, ok))
    )
    region.close()
    engine.save([SaveItem("k", 1, ((0, 1),), torch.ones(3))])
    with pytest.raises(TransferError) as caught:
        engine.load([LoadItem("k", 2, ((0, 1),), (3,), torch.float32)])
    assert isinstance(caught.value.failed["k"], ClosedError)
    assert reports == [([1], False), ([2], False)]


class _Exports:
    """Answers with whatever it was given."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def __dlpack__(self) -> Any:
        return self._answer

    def __dlpack_device__(self) -> Any:
        return (1, 0)


class _Older:
    """A tensor of a library that has no table of functions."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self) -> Any:
        return torch.utils.dlpack.to_dlpack(self._tensor)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()

"""Transfers on CPU: no stream, no thread, one native call for each item."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

import pytest
import torch

from ecpool.errors import ClosedError
from ecpool.transfer import LoadItem, SaveItem, TransferEngine, TransferError
from support.stand_in_region import StandInRegion

BLOCK = 64
CPU = torch.device("cpu")


class Bench:
    def __init__(self) -> None:
        self.region = StandInRegion(num_blocks=64, block_size=BLOCK)
        self.reports: list[tuple[list[int], bool]] = []
        self.engine = TransferEngine(
            self.region, CPU, on_done=lambda ids, ok: self.reports.append((ids, ok))
        )

    def roundtrip(self, tensor: torch.Tensor, extents: Any = ((3, 4), (20, 9))) -> torch.Tensor:
        self.engine.save([SaveItem("k", 1, extents, tensor)])
        item = LoadItem("k", 2, extents, tuple(tensor.shape), tensor.dtype)
        return self.engine.load([item])["k"]


def bits(tensor: torch.Tensor) -> list[int]:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 8),
        torch.randn(5, 8).t(),
        torch.randn(10, 12)[1::3, ::2],
        torch.randn(3, 4, 5, dtype=torch.float64).permute(2, 0, 1),
        torch.randn(7, 9).bfloat16(),
        torch.randn(7, 9).half(),
        torch.randn(7, 9).to(torch.float8_e4m3fn),
        torch.tensor([float("nan"), -0.0, float("inf")]),
        torch.randn(4, 4, requires_grad=True),
        torch.nn.Parameter(torch.randn(4, 4)),
        torch.randn(4, 4, dtype=torch.complex64).conj(),
        torch.randn(4, 4, dtype=torch.complex64).conj().imag,
        torch.randn(1, 6).expand(5, 6),
        torch.arange(9),
        torch.tensor([True, False, True]),
        torch.tensor(3.5),
        torch.empty(0, 7),
        torch.empty(7, 0),
    ],
    ids=lambda t: f"{str(t.dtype)[6:]}{tuple(t.shape)}",
)
def test_every_tensor_comes_back_bit_for_bit(tensor: torch.Tensor) -> None:
    bench = Bench()
    loaded = bench.roundtrip(tensor)
    assert loaded.shape == tensor.shape
    assert loaded.dtype == tensor.dtype
    assert loaded.is_contiguous()
    assert not loaded.requires_grad
    assert bits(loaded) == bits(tensor)
    assert bench.reports == [([1], True), ([2], True)]


def test_one_native_call_for_each_item_and_no_thread() -> None:
    bench = Bench()
    before = threading.active_count()
    bench.roundtrip(torch.zeros(5 * BLOCK, dtype=torch.uint8), tuple((i, 1) for i in range(9)))
    assert bench.region.calls == 2
    assert threading.active_count() == before
    assert bench.engine.drain(0)
    assert bench.engine.register() == 0


def test_the_region_gets_the_memory_of_the_tensor_itself() -> None:
    bench = Bench()
    given: list[Any] = []
    bench.region.write = lambda extents, source: given.append(source)  # type: ignore[method-assign]
    tensor = torch.randn(5, 8)
    bench.engine.save([SaveItem("k", 1, ((0, 3),), tensor)])
    assert [each.data_ptr() for each in given] == [tensor.data_ptr()]


def test_an_older_torch_is_asked_for_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecpool._host_copies._HAS_TABLE", False)
    bench = Bench()
    given: list[Any] = []
    read, write = bench.region.read, bench.region.write
    monkeypatch.setattr(bench.region, "read", lambda e, to: (given.append(to), read(e, to)))

    def write_bytes(extents: Any, source: torch.Tensor) -> None:
        if source.dtype != torch.uint8:
            raise BufferError("float8 types are not supported by dlpack")
        given.append(source)
        write(extents, source)

    monkeypatch.setattr(bench.region, "write", write_bytes)
    tensor = torch.nn.Parameter(torch.randn(5, 8).to(torch.float8_e4m3fn), requires_grad=False)
    assert bits(bench.roundtrip(tensor)) == bits(tensor)
    assert [(each.dtype, each.requires_grad) for each in given] == [(torch.uint8, False)] * 2


def test_an_engine_made_in_inference_mode_works_outside_it_and_the_other_way() -> None:
    with torch.inference_mode():
        bench = Bench()
        inside = torch.randn(4, 4)
    assert torch.equal(bench.roundtrip(inside), inside)
    with torch.inference_mode():
        assert torch.equal(bench.roundtrip(inside), inside)


def test_two_items_of_other_widths_keep_their_own_shape() -> None:
    bench = Bench()
    wide, narrow = torch.randn(2, 64), torch.randn(8, 16)
    bench.engine.save(
        [SaveItem("wide", 1, ((0, 8),), wide), SaveItem("narrow", 2, ((8, 8),), narrow)]
    )
    loaded = bench.engine.load(
        [
            LoadItem("narrow", 3, ((8, 8),), (8, 16), torch.float32),
            LoadItem("wide", 4, ((0, 8),), (2, 64), torch.float32),
        ]
    )
    assert torch.equal(loaded["wide"], wide)
    assert torch.equal(loaded["narrow"], narrow)


def test_failed_items_are_named_and_reported_and_the_others_are_kept() -> None:
    bench = Bench()
    long = torch.zeros(BLOCK + 1, dtype=torch.uint8)
    good = torch.full((BLOCK,), 7, dtype=torch.uint8)
    bench.engine.save([SaveItem("long", 1, ((0, 1),), long), SaveItem("good", 2, ((1, 1),), good)])
    assert bench.reports == [([2], True), ([1], False)]
    with pytest.raises(
        TransferError, match=r"1 of 2 loads to cpu failed, first 'long': ValueError"
    ):
        bench.engine.load(
            [
                LoadItem("long", 3, ((0, 1),), (BLOCK + 1,), torch.uint8),
                LoadItem("good", 4, ((1, 1),), (BLOCK,), torch.uint8),
            ]
        )
    assert bench.reports[2:] == [([4], True), ([3], False)]
    bench.engine.save([SaveItem("sparse", 5, ((0, 1),), torch.eye(3).to_sparse())])
    assert bench.reports[4:] == [([5], False)]


def test_a_panic_of_the_native_module_fails_its_item_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Panic(BaseException):
        pass

    bench = Bench()
    write = bench.region.write

    def panicking(extents: Any, source: Any) -> None:
        if extents == ((1, 1),):
            raise Panic
        write(extents, source)

    monkeypatch.setattr(bench.region, "write", panicking)
    bench.engine.save([SaveItem("k", id, ((id, 1),), torch.ones(4)) for id in range(3)])
    assert bench.reports == [([0, 2], True), ([1], False)]


def test_an_interrupt_goes_up_after_every_id_was_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    write = bench.region.write

    def interrupted(extents: Any, source: Any) -> None:
        if extents == ((1, 1),):
            raise KeyboardInterrupt
        write(extents, source)

    monkeypatch.setattr(bench.region, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.engine.save([SaveItem("k", id, ((id, 1),), torch.ones(4)) for id in range(3)])
    assert bench.reports == [([0], True), ([1, 2], False)]


def test_a_closed_engine_says_so() -> None:
    bench = Bench()
    bench.engine.close()
    bench.engine.close()
    for call in (
        lambda: bench.engine.save([]),
        lambda: bench.engine.load([]),
        bench.engine.register,
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()


def test_a_forked_child_is_told_and_its_parent_goes_on() -> None:
    bench = Bench()
    child = os.fork()
    if child == 0:
        try:
            bench.engine.save([])
        except ClosedError:
            bench.engine.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    bench.roundtrip(torch.ones(3))


def test_the_stand_in_is_what_torch_sees() -> None:
    region = StandInRegion(num_blocks=2, block_size=BLOCK)
    view = torch.frombuffer(region, dtype=torch.uint8)
    assert view.data_ptr() == region.data_ptr
    view[3] = 9
    assert region[3] == 9
    assert ctypes.string_at(region.data_ptr + 3, 1) == b"\x09"

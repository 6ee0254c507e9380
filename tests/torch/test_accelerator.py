"""The real accelerator, as far as it can be shown without one: registration and its failures."""

from __future__ import annotations

import contextlib
import inspect
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ecpool.accelerator import (
    HostRegistration,
    HostRegistrationError,
    TorchAccelerator,
    _exchange_capture_mode,
)
from ecpool.errors import InvalidArgumentError

GIB = 1 << 30
NOT_PERMITTED = 801
OUT_OF_MEMORY = 2


class FakeRuntime:
    """cudart as torch offers it: codes, not exceptions, and an error that stays until asked for."""

    def __init__(self, *, limit: int = 1 << 62, refusal: int = OUT_OF_MEMORY) -> None:
        self.limit = limit
        self.refusal = refusal
        self.pending = 0
        self.regions: dict[int, int] = {}
        self.flags: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.flags.append(flags)
        if address in self.regions:
            self.pending = 712
        elif sum(self.regions.values()) + nbytes > self.limit:
            self.pending = self.refusal
        else:
            self.regions[address] = nbytes
            return 0
        return self.pending

    def cudaHostUnregister(self, address: int) -> int:
        if self.regions.pop(address, None) is None:
            self.pending = 713
            return 713
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"the words for {code}"

    def launch_kernel(self, *_: object, **__: object) -> None:
        """As torch does after each kernel: ask for the pending error, which also clears it."""
        code, self.pending = self.pending, 0
        if code:
            raise RuntimeError(f"CUDA error: {code}")


def make(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> TorchAccelerator:
    accelerator = TorchAccelerator(torch.device("cuda", 1))
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def device(which: torch.device) -> Any:
        entered.append(which)
        yield

    module = SimpleNamespace(cudart=lambda: runtime, device=device)
    monkeypatch.setattr(accelerator, "_module", module)
    monkeypatch.setattr(torch, "full", runtime.launch_kernel)
    return accelerator


def segments(count: int, nbytes: int = 32 * GIB) -> list[tuple[int, int]]:
    return [(index * nbytes, nbytes) for index in range(count)]


def test_each_segment_is_registered_and_unregistered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    registration = HostRegistration(make(monkeypatch, runtime), 1 << 40, segments(3))
    assert registration.register() == 96 * GIB
    assert sorted(runtime.regions) == [(1 << 40) + index * 32 * GIB for index in range(3)]
    assert set(runtime.flags) == {1}, "portable: pinned for all devices"
    registration.release()
    registration.release()
    assert runtime.regions == {}


@pytest.mark.parametrize("refusal", [OUT_OF_MEMORY, NOT_PERMITTED])
@pytest.mark.parametrize("fitting", [0, 2])
def test_a_refusal_is_one_warning_and_no_later_kernel_is_blamed(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refusal: int,
    fitting: int,
) -> None:
    runtime = FakeRuntime(limit=fitting * 32 * GIB, refusal=refusal)
    registration = HostRegistration(make(monkeypatch, runtime), 1 << 40, segments(16))
    with caplog.at_level(logging.WARNING):
        assert registration.register() == fitting * 32 * GIB
    assert len(runtime.flags) == fitting + 1, "the next segments would meet the same limit"
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert f"{refusal}: the words for {refusal}" in message
    assert "512 GiB" in message
    runtime.launch_kernel()
    registration.release()
    assert runtime.regions == {}


def test_memory_that_somebody_else_registered_stays_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    accelerator = make(monkeypatch, runtime)
    first = HostRegistration(accelerator, 1 << 40, segments(2))
    second = HostRegistration(accelerator, 1 << 40, segments(2))
    assert first.register() == second.register() == 64 * GIB
    runtime.launch_kernel()
    second.release()
    assert len(runtime.regions) == 2
    first.release()
    assert runtime.regions == {}


def test_a_failed_unregistration_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    registration = HostRegistration(make(monkeypatch, runtime), 1 << 40, segments(2))
    registration.register()
    runtime.regions.clear()
    registration.release()
    runtime.launch_kernel()


def test_the_error_names_code_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = make(monkeypatch, FakeRuntime(limit=0, refusal=NOT_PERMITTED))
    with pytest.raises(HostRegistrationError, match="801: the words for 801"):
        accelerator.register_host(1 << 40, GIB)


@pytest.mark.parametrize("backend", [torch.cuda, torch.xpu])
def test_torch_backends_have_what_is_used(backend: Any) -> None:
    for method in ("wait_event", "synchronize"):
        assert callable(getattr(backend.Stream, method))
    for method in ("record", "synchronize", "query"):
        assert callable(getattr(backend.Event, method))
    for function in ("current_stream", "current_device", "stream", "device"):
        assert callable(getattr(backend, function))
    options = inspect.signature(backend.Event.__new__).parameters
    assert ("blocking" in options) is (backend is torch.cuda)


def test_only_cuda_registers_host_memory() -> None:
    assert TorchAccelerator(torch.device("cuda", 0)).registers_host_memory
    assert not TorchAccelerator(torch.device("xpu", 0)).registers_host_memory


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_a_device_without_streams_is_refused(device: str) -> None:
    with pytest.raises(InvalidArgumentError, match=device):
        TorchAccelerator(torch.device(device))


@pytest.mark.skipif(torch.version.cuda is None, reason="torch was built without CUDA")
def test_the_runtime_has_the_capture_mode_call() -> None:
    try:
        function = _exchange_capture_mode()
    except OSError:
        pytest.skip("the CUDA runtime is not loaded in this process")
    assert function.__name__ == "cudaThreadExchangeStreamCaptureMode"


def test_the_waiting_thread_starts_without_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    TorchAccelerator(torch.device("cuda", 0)).enter_waiting_thread()
    TorchAccelerator(torch.device("xpu", 0)).enter_waiting_thread()

"""The seam between the transfer code and a device.

`Accelerator` is everything that `ecpool.transfer` asks of a device, and nothing else: streams,
events, memory, queued copies and the registration of host memory. `TorchAccelerator` serves CUDA,
ROCm, XPU and other backends that have streams through their torch module (``torch.cuda``,
``torch.xpu``, ...). The tests put a simulated device behind the same seam.
"""

import contextlib
import ctypes
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ecpool.errors import EcpoolError, InvalidArgumentError
from ecpool.sizes import format_size

logger = logging.getLogger(__name__)

_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device, not for the current one
_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered
_CAPTURE_MODE_RELAXED = 2  # cudaStreamCaptureModeRelaxed


class HostRegistrationError(EcpoolError, RuntimeError):
    """The device's driver does not register this host memory; the message has its reason."""


class Event(Protocol):
    """A mark in a stream. Recording it again moves the mark."""

    def record(self, stream: Any, /) -> None: ...

    def synchronize(self) -> None:
        """Block this thread, with the GIL released, until the marked work is done."""


class Stream(Protocol):
    """A queue of device work, done in order."""

    def wait_event(self, event: Any, /) -> None:
        """Hold what is queued from now on until the event's last recorded mark is reached."""

    def synchronize(self) -> None: ...


class Accelerator(Protocol):
    """What the transfer code needs of one device. Every method may be called from any thread."""

    @property
    def device(self) -> torch.device: ...

    @property
    def registers_host_memory(self) -> bool:
        """Whether `register_host` can make copies faster here."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies in this device's memory."""

    def current_stream(self) -> Stream:
        """The stream that the calling thread computes on."""

    def new_stream(self) -> Stream:
        """A stream of its own: never the legacy default stream, which waits for all others."""

    def new_event(self) -> Event: ...

    def use(self, stream: Any) -> AbstractContextManager[object]:
        """Make ``stream`` this thread's current stream for a ``with`` block."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised contiguous device memory that belongs to the current stream."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on the current stream. Strides may differ; shapes and dtypes are equal."""

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep freed memory from reuse until what ``stream`` holds at that moment is done."""

    def register_host(self, address: int, nbytes: int) -> bool:
        """Pin host memory. False if it was pinned before, by somebody else.

        Raises HostRegistrationError; the device is then as usable as before the call.
        """

    def unregister_host(self, address: int) -> None: ...

    def enter_waiting_thread(self) -> None:
        """Called once by a thread that from now on only waits for events."""


class TorchAccelerator:
    """A device that torch drives.

    It uses the backend's own stream and event classes rather than ``torch.Stream`` and
    ``torch.Event``, since only those give events whose waiting thread sleeps instead of keeping a
    core busy; the two families must not be mixed.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            module = torch.get_device_module(device)
        except RuntimeError as error:
            raise InvalidArgumentError(f"device {device} cannot be used: {error}") from error
        if not hasattr(module, "Stream"):
            raise InvalidArgumentError(f"device {device} has no streams that torch knows of")
        if ":" not in str(device):
            device = torch.device(device.type, module.current_device())
        self._device = device
        self._module = module

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def registers_host_memory(self) -> bool:
        return hasattr(self._module, "cudart")

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._device

    def current_stream(self) -> Stream:
        stream: Stream = self._module.current_stream(self._device)
        return stream

    def new_stream(self) -> Stream:
        stream: Stream = self._module.Stream(self._device)
        return stream

    def new_event(self) -> Event:
        options = {"blocking": True} if self._device.type == "cuda" else {}
        event: Event = self._module.Event(**options)
        return event

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self._module.stream(stream)
        return context

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source, non_blocking=True)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def register_host(self, address: int, nbytes: int) -> bool:
        with self._module.device(self._device):
            runtime = self._module.cudart()
            code = runtime.cudaHostRegister(address, nbytes, _REGISTER_PORTABLE)
            if int(code) == 0:
                return True
            self._clear_pending_error()
        if int(code) == _ALREADY_REGISTERED:
            return False
        reason = runtime.cudaGetErrorString(code)
        raise HostRegistrationError(f"error {int(code)}: {reason}")

    def unregister_host(self, address: int) -> None:
        with self._module.device(self._device):
            code = self._module.cudart().cudaHostUnregister(address)
            if int(code) != 0:
                self._clear_pending_error()

    def _clear_pending_error(self) -> None:
        # The runtime keeps a failed call's code until somebody asks for it, and torch asks after
        # every kernel: without this an innocent kernel later raises. This small one takes the
        # blame.
        with contextlib.suppress(RuntimeError):
            torch.full((1,), 1.0, device=self._device)

    def enter_waiting_thread(self) -> None:
        # Waiting for an event spoils a CUDA graph that another thread captures in the "global"
        # mode, torch's default, unless the waiting thread has said that it takes no part.
        if self._device.type != "cuda":
            return
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        with contextlib.suppress(OSError, AttributeError):
            _exchange_capture_mode()(ctypes.byref(mode))


class HostRegistration:
    """The registered segments of one mapping. Not for use by several threads at once."""

    def __init__(
        self, accelerator: Accelerator, base: int, segments: Sequence[tuple[int, int]]
    ) -> None:
        self._accelerator = accelerator
        self._base = base
        self._segments = segments
        self._registered: list[int] = []

    def register(self) -> int:
        """Register segment by segment and return the bytes that are pinned now.

        The first refusal ends it, with one warning: what is not pinned is copied all the same, only
        slower, and the next segment would meet the same limit.
        """
        pinned = 0
        total = sum(nbytes for _, nbytes in self._segments)
        for offset, nbytes in self._segments:
            try:
                mine = self._accelerator.register_host(self._base + offset, nbytes)
            except (HostRegistrationError, RuntimeError) as error:
                logger.warning(
                    "ecpool: %s of %s host memory registered with %s, the rest is copied unpinned, "
                    "which is slower (%s)",
                    format_size(pinned),
                    format_size(total),
                    self._accelerator.device,
                    error,
                )
                break
            if mine:
                self._registered.append(self._base + offset)
            pinned += nbytes
        return pinned

    def release(self) -> None:
        """Unregister what this object registered. No copy may be under way."""
        while self._registered:
            address = self._registered.pop()
            try:
                self._accelerator.unregister_host(address)
            except RuntimeError as error:
                logger.warning("ecpool: host memory could not be unregistered (%s)", error)


def _exchange_capture_mode() -> Any:
    """The loaded runtime's function that sets a thread's part in other threads' graph captures."""
    if torch.version.hip:
        return ctypes.CDLL("libamdhip64.so").hipThreadExchangeStreamCaptureMode
    major = str(torch.version.cuda).partition(".")[0]
    return ctypes.CDLL(f"libcudart.so.{major}").cudaThreadExchangeStreamCaptureMode

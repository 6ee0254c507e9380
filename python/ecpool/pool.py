"""Torch tensors by key, in memory that other processes of this host can share."""

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Literal, Self

import torch

from ecpool._native import DTYPES, EmbeddingCache, Region, Transfer
from ecpool.errors import ClosedError, InvalidArgumentError
from ecpool.sizes import format_size, parse_size
from ecpool.transfer import LoadItem, SaveItem, TransferEngine, dtype_of

__all__ = ["Pool"]

_MOST_DIMENSIONS = 8
_RANK = 0
_RANKS = 1 << _RANK
_CLOSE_TIMEOUT = 60.0  # seconds that closing waits for calls of other threads

Device = torch.device | str | int


class Pool:
    """Keeps copies of torch tensors by key, in host memory, the oldest leaving when room is needed.

    A tensor comes back with its shape, its dtype and exactly its bytes, on any device. Keys are any
    text. Nothing is ever replaced: what is stored under a key stays until it is evicted or flushed,
    so a key should say all that decides the bytes.

    Without a ``name`` the pool is this process's own and leaves no file. With one, every process of
    the same user that gives the same name uses the same memory; its tensors are found by all that
    also give the same ``namespace``.

    All methods may be called from any thread. A process that forks must make its own pool: in the
    child every call raises ClosedError.
    """

    def __init__(
        self,
        capacity: int | str = "1GiB",
        *,
        name: str | None = None,
        namespace: str = "",
        block_size: int | str = 16384,
        device: Device | None = None,
        directory: str | PathLike[str] | None = None,
        persistent: bool = False,
        populate: bool = False,
    ) -> None:
        """Create the pool, or join the one of this name.

        capacity: bytes, or text such as "4GiB"; whoever joins must give what the pool was made
        with. block_size: bytes, a power of two of at least 4096; each tensor takes whole blocks.
        device: where `get` puts tensors unless told otherwise; "cpu" by default. Memory is pinned
        for an accelerator when it is first used. directory: where the memory's file is, by default
        the user's own below /dev/shm; it must be on a tmpfs. persistent: a pool with a name
        outlives the last process that uses it, until the host restarts or its file is removed.
        populate: touch all memory now, so that the first tensors are stored as quickly as later
        ones.

        Raises InvalidArgumentError, NoSpaceError if the host cannot hold so much, RegionError and
        RegionFormatError for a file that cannot be used.
        """
        if persistent and name is None:
            raise InvalidArgumentError("a persistent pool needs a name to be found by")
        lifetime: Literal["private", "shared", "persistent"]
        lifetime = "persistent" if persistent else "shared" if name is not None else "private"
        region = Region.open(
            f"pool-{secrets.token_hex(8)}" if name is None else name,
            capacity=parse_size(capacity, what="capacity"),
            block_size=parse_size(block_size, what="block_size"),
            lifetime=lifetime,
            role="pool",
            expected_clients=1 if name is None else 0,
            directory=None if directory is None else fspath(directory),
        )
        self._start(region, name, namespace, device, checksums=persistent)
        if populate:
            region.populate()

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        namespace: str = "",
        device: Device | None = None,
        directory: str | PathLike[str] | None = None,
    ) -> Self:
        """Join the pool of this name, whatever its size. Raises RegionError if there is none."""
        place = None if directory is None else fspath(directory)
        pool = cls.__new__(cls)
        region = Region.attach(name, role="pool", directory=place)
        # It may be a persistent one.
        pool._start(region, name, namespace, device, checksums=True)
        return pool

    def _start(
        self,
        region: Region,
        name: str | None,
        namespace: str,
        device: Device | None,
        *,
        checksums: bool,
    ) -> None:
        self._region = region
        self._name = name
        self._namespace = namespace
        # Nobody steps a model here: rather wait for the lock for a second than miss.
        self._cache = EmbeddingCache(region=region, namespace=namespace, deadline=1.0)
        self._reports = _Reports(region, self._cache, checksums=checksums)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._calls = 0
        self._engines: dict[torch.device, TransferEngine] = {}
        self._closed = False
        try:
            self._device = _device_of("cpu" if device is None else device)
            self._engine(self._device)
        except BaseException:
            region.close()
            raise

    # Storing and finding

    def put(self, key: str, tensor: torch.Tensor, *, wait: bool = True) -> bool:
        """Store a copy of the tensor; False if it was skipped.

        tensor: any strides, up to eight dimensions, any dtype of `ecpool._native.DTYPES`, on any
        device; from an accelerator it is copied after what its current stream holds.
        wait: return when the copy is done and other processes can find it. Without, a tensor of an
        accelerator is found a moment later, may be dropped at once, but must not be written to
        before `drain` returns; True then means that its copy has begun.

        Skipped, and counted in `stats`, are a key that is stored or being stored already, a tensor
        without elements, one larger than the pool or than what can be evicted now, and one whose
        copy failed. Raises InvalidArgumentError for what can never be stored, ClosedError.
        """
        shape, dtype = _describe(tensor)
        rows = shape[0] if shape else 1
        # 0 rows are not stored, but counted.
        rows, row_bytes = (rows, tensor.nbytes // rows) if tensor.nbytes else (0, 0)
        with self._call():
            save = self._cache.begin_save(key, rows=rows, row_bytes=row_bytes, ranks=_RANKS)
            if isinstance(save, str):
                return False
            outcome = self._copy_in(key, save, tensor, dtype)
            if outcome is None:
                return False
            return outcome.result() if wait else True

    def get(self, key: str, device: Device | None = None) -> torch.Tensor | None:
        """A new tensor with what is stored under the key, or None.

        device: where to; the pool's own by default. On an accelerator the copy is asynchronous and
        the tensor can be used at once on the current stream.

        Raises TransferError if the device cannot take it (its memory is full, for one),
        ClosedError.
        """
        target = self._device if device is None else _device_of(device)
        with self._call():
            engine = self._engine(target)
            lease = self._cache.lease(key)
            if lease is None:
                return None
            item = self._claim(key, lease)
            return None if item is None else engine.load([item])[key]

    def contains(self, key: str) -> bool:
        """Whether `get` would find the key now. Another process may evict it a moment later."""
        with self._call():
            return self._cache.contains(key)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.contains(key)

    def flush(self) -> int:
        """Forget all that this namespace holds, in every process; returns how many tensors that is.

        What others are reading at this moment stays intact until they are done.
        """
        with self._call():
            return self._cache.flush()

    # The pool itself

    @property
    def name(self) -> str | None:
        """The name that other processes find the pool by, None if it is this process's own."""
        return self._name

    @property
    def namespace(self) -> str:
        """Tensors stored under another namespace are not found here."""
        return self._namespace

    @property
    def device(self) -> torch.device:
        """Where `get` puts tensors unless told otherwise."""
        return self._device

    @property
    def capacity(self) -> int:
        """Bytes for tensors, in whole blocks."""
        return self._region.nbytes

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def stats(self) -> dict[str, int]:
        """What is in the pool now, of all namespaces and processes, and what this object did.

        Blocks (of ``block_size`` bytes) and entries by state; hits, misses, saves, evictions and
        each reason for a skipped `put` as counters since this object was made.
        """
        sizes = {"capacity": self._region.nbytes, "block_size": self._region.block_size}
        with self._call():
            return sizes | self._cache.stats() | self._cache.counters()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until all copies are done that were begun. False if ``timeout`` seconds pass first.

        The time is for each device that the pool has used.
        """
        with self._call():
            return all(engine.drain(timeout) for engine in self._all_engines())

    def close(self) -> None:
        """Wait for calls and copies under way and leave the pool. Harmless if it was closed before.

        The memory is given back with the last process that uses it, unless it is persistent.
        """
        if os.getpid() == self._pid:
            with self._idle:
                self._closed = True
                self._idle.wait_for(lambda: self._calls == 0, _CLOSE_TIMEOUT)
            for engine in self._all_engines():
                engine.close()
        self._region.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        name = "private" if self._name is None else repr(self._name)
        if self._closed:
            return f"<ecpool.Pool {name}, closed>"
        sizes = f"{format_size(self.capacity)} in blocks of {format_size(self._region.block_size)}"
        return f"<ecpool.Pool {name}, {sizes}, {self._device}>"

    def __reduce__(self) -> Any:
        raise TypeError("a Pool cannot be pickled; give the other process its name")

    # Parts

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """A call of this pool's, which `close` waits for. Raises ClosedError."""
        # A fork may have happened while another thread had the lock, so this comes first.
        if os.getpid() != self._pid:
            raise ClosedError("this process is a fork of the one that made the pool")
        with self._idle:
            if self._closed:
                raise ClosedError("the pool is closed")
            self._calls += 1
        try:
            yield
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def _all_engines(self) -> list[TransferEngine]:
        with self._lock:
            return list(self._engines.values())

    def _engine(self, device: torch.device) -> TransferEngine:
        with self._lock:
            engine = self._engines.get(device)
            if engine is None:
                engine = self._make_engine(device)
                self._engines[device] = engine
            return engine

    def _make_engine(self, device: torch.device) -> TransferEngine:
        engine = TransferEngine(self._region, device, on_done=self._reports.on_done)
        engine.register()
        return engine

    def _copy_in(
        self, key: str, save: Transfer, tensor: torch.Tensor, dtype: str
    ) -> "Future[bool] | None":
        """Begin the copy; None if it may not be made after all."""
        try:
            engine = self._engine(tensor.device)
            claims = self._cache.claim_saves(_RANK, [(save.id, tuple(tensor.shape), dtype)])
            outcome = self._reports.expect(save, tensor.nbytes) if claims == ["claimed"] else None
        except BaseException:
            self._drop(save.id)
            raise
        if outcome is None:
            self._cache.withdraw([save.id])
            return None
        try:
            engine.save([SaveItem(key, save.id, save.extents, tensor)])
        except ClosedError:  # of which the engine reports nothing
            self._drop(save.id)
            raise
        return outcome

    def _claim(self, key: str, lease: Transfer) -> LoadItem | None:
        """Turn a lease into a load that may be copied; None if the bytes may not be used."""
        try:
            dtype = dtype_of(lease.dtype)
            if dtype is None:
                # Stored without one, as `EmbeddingCache.alloc` does, or by a newer torch.
                self._cache.end_leases([lease.id])
                return None
            if not self._may_read(lease):
                return None
            self._cache.dispatch_loads([lease.id], ranks=_RANKS)
            if self._cache.claim_loads(_RANK, [lease.id]) != ["claimed"]:
                return None
            return LoadItem(key, lease.id, lease.extents, lease.shape, dtype)
        except BaseException:
            self._cache.complete(_RANK, [lease.id], ok=False)
            self._cache.end_leases([lease.id])
            raise

    def _drop(self, id: int) -> None:
        self._reports.forget(id)
        self._cache.complete(_RANK, [id], ok=False)

    def _may_read(self, lease: Transfer) -> bool:
        """Whether the bytes are what was stored: they may have lain without a process for long."""
        if lease.unverified is None:
            return True
        fits = self._region.checksum(lease.extents, lease.nbytes) == lease.unverified
        self._cache.confirm(lease.id, fits=fits)
        return fits


class _Reports:
    """Tells the cache what became of copies, and whoever waits for one. Thread-safe.

    It knows nothing of its pool, so that a pool that was dropped unclosed can go.
    """

    def __init__(self, region: Region, cache: EmbeddingCache, *, checksums: bool) -> None:
        self._region = region
        self._checksums = checksums
        self._cache = cache
        self._lock = threading.Lock()
        self._saves: dict[int, tuple[Transfer, int, Future[bool]]] = {}

    def expect(self, save: Transfer, nbytes: int) -> "Future[bool]":
        """What will be known of a save: whether it is stored."""
        outcome: Future[bool] = Future()
        with self._lock:
            self._saves[save.id] = (save, nbytes, outcome)
        return outcome

    def forget(self, id: int) -> None:
        with self._lock:
            self._saves.pop(id, None)

    def on_done(self, ids: Sequence[int], ok: bool) -> None:
        with self._lock:
            found = [self._saves.pop(id) for id in ids if id in self._saves]
        stored = False
        try:
            if ok and found and self._checksums:
                self._record_checksums(found)
            self._cache.complete(_RANK, ids, ok=ok)
            stored = ok
        finally:
            for _, _, outcome in found:
                outcome.set_result(stored)

    def _record_checksums(self, saves: Sequence[tuple[Transfer, int, "Future[bool]"]]) -> None:
        sums = [(save.id, self._region.checksum(save.extents, n)) for save, n, _ in saves]
        self._cache.set_checksums(sums)


def _device_of(device: Device) -> torch.device:
    """The device with its index, as tensors name it."""
    try:
        found = torch.device(device)
        if found.type == "cpu":
            return torch.device("cpu")
        if ":" in str(found):
            return found
        return torch.device(found.type, torch.get_device_module(found).current_device())
    except (RuntimeError, AssertionError, AttributeError, TypeError) as error:
        raise InvalidArgumentError(f"device {device!r} cannot be used here: {error}") from error


def _describe(tensor: Any) -> tuple[tuple[int, ...], str]:
    """Shape and dtype's name of a tensor that can be stored. Raises InvalidArgumentError."""
    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        raise InvalidArgumentError(f"a {kind} cannot be stored, only torch tensors")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        kind = "meta" if tensor.device.type == "meta" else str(tensor.layout)
        raise InvalidArgumentError(f"a {kind} tensor cannot be stored, only one with plain memory")
    if tensor.ndim > _MOST_DIMENSIONS:
        raise InvalidArgumentError(
            f"a tensor of {tensor.ndim} dimensions cannot be stored, {_MOST_DIMENSIONS} at most"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise InvalidArgumentError(
            f"a tensor of {tensor.dtype} cannot be stored, only one of {', '.join(sorted(DTYPES))}"
        )
    return tuple(tensor.shape), dtype

"""One host-wide pool of multimodal encoder outputs for vLLM, usable by any PyTorch program.

`Region`, `EmbeddingCache` and `StepTracker` are the native classes, `Pool` keeps torch tensors by
key, and `ecpool.vllm` is the connector. Torch is imported only when `Pool` is, vLLM only by
`ecpool.vllm`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ecpool.errors import (
    ClosedError,
    EcpoolError,
    EntryStateError,
    InvalidArgumentError,
    KeyNotFoundError,
    NoSpaceError,
    PoolBusyError,
    RegionError,
    RegionFormatError,
    TooLargeError,
)

if TYPE_CHECKING:
    from ecpool._native import (
        CacheEntry,
        EmbeddingCache,
        Region,
        StepTracker,
        Transfer,
        __version__,
    )
    from ecpool.pool import Pool

__all__ = [
    "CacheEntry",
    "ClosedError",
    "EcpoolError",
    "EmbeddingCache",
    "EntryStateError",
    "InvalidArgumentError",
    "KeyNotFoundError",
    "NoSpaceError",
    "Pool",
    "PoolBusyError",
    "Region",
    "RegionError",
    "RegionFormatError",
    "StepTracker",
    "TooLargeError",
    "Transfer",
    "__version__",
]

_HOMES = {
    "CacheEntry": "ecpool._native",
    "EmbeddingCache": "ecpool._native",
    "Region": "ecpool._native",
    "StepTracker": "ecpool._native",
    "Transfer": "ecpool._native",
    "__version__": "ecpool._native",
    "Pool": "ecpool.pool",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

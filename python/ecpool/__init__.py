"""One host-wide pool of multimodal encoder outputs for vLLM, usable by any PyTorch program.

`Region`, `EmbeddingCache` and `StepTracker` are the native classes, `Pool` keeps torch tensors by
key, and `ecpool.vllm` is the connector. Torch is imported only when `Pool` is, vLLM only by
`ecpool.vllm`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ecpool._lazy import lazy
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

__getattr__, __dir__ = lazy(
    __name__,
    {
        "CacheEntry": "ecpool._native",
        "EmbeddingCache": "ecpool._native",
        "Region": "ecpool._native",
        "StepTracker": "ecpool._native",
        "Transfer": "ecpool._native",
        "__version__": "ecpool._native",
        "Pool": "ecpool.pool",
    },
)

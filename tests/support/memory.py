"""The memory of what a region's calls take, for regions that are no native ones."""

from __future__ import annotations

import ctypes
from typing import Any


def bytes_of(memory: Any) -> memoryview:
    """A buffer's bytes, or a contiguous CPU tensor's; valid while the argument lives."""
    if hasattr(memory, "data_ptr"):
        assert memory.is_cpu
        assert memory.is_contiguous()
        assert not any((memory.is_conj(), memory.is_neg(), memory.requires_grad))
        memory = (ctypes.c_ubyte * memory.nbytes).from_address(memory.data_ptr())
    return memoryview(memory).cast("B")

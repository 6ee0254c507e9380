"""Where a worker stands among its engine's ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ecpool.vllm.config import first_stage_ranks, world_size


@dataclass(frozen=True, slots=True)
class Place:
    """rank: number within the engine, as vLLM lays ranks out (stage, then context, then tensor).
    loads: whether this rank is one of the first pipeline stage, which alone has an encoder cache to
    load into."""

    rank: int
    loads: bool


def place_of_worker(vllm_config: Any) -> Place:
    """This process's place, from vLLM's process groups if they exist, else its configuration."""
    parallel = vllm_config.parallel_config
    stage = first_stage_ranks(parallel)
    rank = _rank_in_groups(parallel, stage)
    if rank is None:
        rank = int(getattr(parallel, "rank", 0)) % world_size(parallel)
    return Place(rank, rank < stage)


def _rank_in_groups(parallel: Any, stage: int) -> int | None:
    from vllm.distributed import parallel_state

    tensor = _index(parallel_state, "get_tp_group")
    if tensor is None:
        return None
    context = _index(parallel_state, "get_pcp_group") or 0
    pipeline = _index(parallel_state, "get_pp_group") or 0
    return pipeline * stage + context * int(parallel.tensor_parallel_size) + tensor


def _index(parallel_state: Any, getter: str) -> int | None:
    """This process's index in a group; None where the group does not exist (yet)."""
    try:
        return int(getattr(parallel_state, getter)().rank_in_group)
    except (AttributeError, AssertionError):
        return None

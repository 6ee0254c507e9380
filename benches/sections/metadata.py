"""What a step's metadata costs on its way to the workers."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benches.measure import Effort, compare, repeat, single
from benches.peers import ROW_BYTES, WIDTH, new_keys
from benches.report import Goal, Row

ROWS = 1_296
BLOCK_SIZE = 16_384
FIRST_BLOCK = 1_000_000  # numbers of a large pool
GOAL = Goal(at_most=64)


def rows(effort: Effort) -> Iterator[Row]:
    yield _beside_key("a load", 1, 0)
    yield _beside_key("a save", 0, 1)
    for loads, saves in ((0, 1), (1, 0), (4, 4)):
        yield from _compare(loads, saves, effort)


def _beside_key(case: str, loads: int, saves: int) -> Row:
    """Bytes of one item of one extent, its key and an empty metadata taken off."""
    extra = len(_dump(ours(loads, saves))) - len(_dump(ours(0, 0)))
    key = new_keys(1)[0]
    return Row(
        "metadata", f"bytes of {case} besides its key", "B", single(extra - len(key)), goal=GOAL
    )


def _compare(loads: int, saves: int, effort: Effort) -> Iterator[Row]:
    mine, theirs = ours(loads, saves), vllms(loads, saves)
    packed = {"ours": _dump(mine), "vllm": _dump(theirs)}
    case = _case(loads, saves)
    peer = "vLLM's metadata"
    sizes = {name: single(len(each)) for name, each in packed.items()}
    yield Row("metadata", f"{case}: bytes", "B", sizes["ours"], peer, sizes["vllm"])
    ways: tuple[tuple[str, Callable[[Any], object], dict[str, Any]], ...] = (
        ("pickle", _dump, {"ours": mine, "vllm": theirs}),
        ("unpickle", pickle.loads, packed),
    )
    for way, function, given in ways:
        turns = {name: repeat(partial(function, each), effort) for name, each in given.items()}
        samples = compare(turns, effort)
        yield Row("metadata", f"{case}: {way}", "s", samples["ours"], peer, samples["vllm"])


def _case(loads: int, saves: int) -> str:
    if not loads or not saves:
        return f"1 {'load' if loads else 'save'} of {ROWS:,} rows"
    return f"{loads + saves} items of {ROWS:,} rows"


def _dump(metadata: Any) -> bytes:
    return pickle.dumps(metadata, pickle.HIGHEST_PROTOCOL)


def ours(loads: int, saves: int) -> Any:
    """Our metadata of one-extent items."""
    from ecpool.vllm.metadata import ECPoolMetadata, Load, Save

    blocks = -(-ROWS * ROW_BYTES // BLOCK_SIZE)
    firsts = iter(range(FIRST_BLOCK, FIRST_BLOCK + (loads + saves) * blocks, blocks))
    return ECPoolMetadata(
        [
            Load(key, FIRST_BLOCK + n, ((next(firsts), blocks),), (ROWS, WIDTH), "bfloat16")
            for n, key in enumerate(new_keys(loads))
        ],
        [
            Save(key, FIRST_BLOCK - n, ((next(firsts), blocks),))
            for n, key in enumerate(new_keys(saves))
        ],
    )


def vllms(loads: int, saves: int) -> Any:
    """vLLM's metadata of the same items: a block per row, listed one by one."""
    from vllm.distributed.ec_transfer.ec_connector.cpu.common import ECCPUConnectorMetadata

    starts = iter(range(FIRST_BLOCK, FIRST_BLOCK + (loads + saves) * ROWS, ROWS))

    def blocks() -> list[int]:
        first = next(starts)
        return list(range(first, first + ROWS))

    return ECCPUConnectorMetadata(
        saves={key: blocks() for key in new_keys(saves)},
        loads={key: (n, blocks(), (ROWS, WIDTH)) for n, key in enumerate(new_keys(loads))},
    )

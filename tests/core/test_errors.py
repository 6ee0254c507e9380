"""Each error of the core has a class of its own, is the built-in one that a caller expects, and
says what was wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ecpool
from ecpool import EmbeddingCache, Region, _native, errors

BASES = {
    "InvalidArgumentError": ValueError,
    "KeyNotFoundError": KeyError,
    "EntryStateError": RuntimeError,
    "TooLargeError": ValueError,
    "NoSpaceError": OSError,
    "RegionError": OSError,
    "RegionFormatError": OSError,
    "PoolBusyError": TimeoutError,
    "ClosedError": RuntimeError,
}


def test_every_error_is_ours_and_a_builtin_one() -> None:
    classes = {
        name: cls
        for name, cls in vars(errors).items()
        if inspect.isclass(cls) and cls.__module__ == errors.__name__
    }
    assert classes.keys() == BASES.keys() | {"EcpoolError"}
    for name, base in BASES.items():
        assert issubclass(classes[name], errors.EcpoolError)
        assert issubclass(classes[name], base)
        assert getattr(ecpool, name) is classes[name]


def _writing(cache: EmbeddingCache) -> None:
    cache.alloc("key-7", 1)


def _ready(cache: EmbeddingCache) -> None:
    cache.alloc("key-7", 1)
    cache.mark_ready("key-7")


def _nothing(cache: EmbeddingCache) -> None:
    pass


Step = Callable[[EmbeddingCache], Any]
# What was done before, the call, its error, and what the message must contain.
CACHE_ERRORS: list[tuple[str, Step, Step, type[Exception], list[str]]] = [
    (
        "mark_ready of nothing",
        _nothing,
        lambda c: c.mark_ready("key-7"),
        errors.KeyNotFoundError,
        ["key-7"],
    ),
    ("pin of nothing", _nothing, lambda c: c.pin("key-7"), errors.KeyNotFoundError, ["key-7"]),
    ("unpin of nothing", _nothing, lambda c: c.unpin("key-7"), errors.KeyNotFoundError, ["key-7"]),
    (
        "discard of nothing",
        _nothing,
        lambda c: c.discard("key-7"),
        errors.KeyNotFoundError,
        ["key-7"],
    ),
    (
        "mark_ready twice",
        _ready,
        lambda c: c.mark_ready("key-7"),
        errors.EntryStateError,
        ["key-7", "mark_ready", "ready"],
    ),
    (
        "pin while written",
        _writing,
        lambda c: c.pin("key-7"),
        errors.EntryStateError,
        ["key-7", "pin", "being written"],
    ),
    (
        "unpin while written",
        _writing,
        lambda c: c.unpin("key-7"),
        errors.EntryStateError,
        ["key-7", "unpin"],
    ),
    (
        "unpin without a pin",
        _ready,
        lambda c: c.unpin("key-7"),
        errors.EntryStateError,
        ["key-7", "not pinned"],
    ),
    (
        "discard of a ready one",
        _ready,
        lambda c: c.discard("key-7"),
        errors.EntryStateError,
        ["key-7", "discard"],
    ),
    (
        "alloc twice",
        _writing,
        lambda c: c.alloc("key-7", 1),
        errors.EntryStateError,
        ["key-7", "alloc"],
    ),
    (
        "alloc of too much",
        _nothing,
        lambda c: c.alloc("key-7", 9),
        errors.TooLargeError,
        ["key-7", "9", "4"],
    ),
    (
        "a negative alloc",
        _nothing,
        lambda c: c.alloc("key-7", -3),
        errors.InvalidArgumentError,
        ["n_blocks", "-3"],
    ),
]


@pytest.mark.parametrize(
    ("before", "call", "error", "words"),
    [row[1:] for row in CACHE_ERRORS],
    ids=[row[0] for row in CACHE_ERRORS],
)
def test_cache_errors(
    make_cache: Callable[[int], EmbeddingCache],
    before: Step,
    call: Step,
    error: type[Exception],
    words: list[str],
) -> None:
    cache = make_cache(4)
    before(cache)
    with pytest.raises(error) as caught:
        call(cache)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)
    assert cache.check() == []


def test_a_full_host_is_an_error_with_both_sizes_and_no_file(pools: Path) -> None:
    with pytest.raises(errors.NoSpaceError) as caught:
        Region.open("pool", capacity=1 << 46, block_size=1 << 20, directory=str(pools))
    assert "TiB" in str(caught.value)
    assert list(pools.glob("*")) == []


def test_attaching_to_nothing_is_an_os_error_that_names_the_file(pools: Path) -> None:
    with pytest.raises(errors.RegionError, match="pool") as caught:
        Region.attach("pool", directory=str(pools))
    assert isinstance(caught.value, OSError)
    assert not pools.exists()


def test_a_region_used_with_other_sizes_is_refused_with_both(
    open_region: Callable[..., Region],
) -> None:
    open_region(capacity=1 << 20)
    with pytest.raises(errors.InvalidArgumentError, match=r"blocks 256.*512"):
        open_region(capacity=2 << 20)


def _public(owner: object) -> list[tuple[str, Any]]:
    return [(name, member) for name, member in vars(owner).items() if not name.startswith("_")]


def test_everything_public_explains_itself() -> None:
    silent = []
    for name, member in _public(_native):
        if inspect.isclass(member):
            silent += [f"{name}.{n}" for n, m in _public(member) if not (m.__doc__ or "").strip()]
        if (inspect.isclass(member) or callable(member)) and not (member.__doc__ or "").strip():
            silent.append(name)
    assert silent == []


def test_keyword_only_arguments_are_keyword_only() -> None:
    cache = EmbeddingCache(4)
    with pytest.raises(TypeError):
        cache.begin_save("k", 1, 1)  # type: ignore[call-arg, misc]
    with pytest.raises(TypeError):
        cache.dispatch_loads([], 1)  # type: ignore[call-arg, misc]
    assert str(inspect.signature(EmbeddingCache.alloc)) == "(self, /, key, n_blocks)"

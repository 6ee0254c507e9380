"""The native `EmbeddingCache` and `StepTracker` do what their naive models do."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model import native_model

import ecpool

BLOCK = 4096
NUM_BLOCKS = 8
ROW = BLOCK // 2  # two rows of float32[512] fill a block
COLUMNS = ROW // 4

KEYS = st.sampled_from(["a", "b", "c", "d", "e"])
MODALITIES = st.sampled_from(["image", "audio"])
RANKS = st.integers(0, 3)
RANK_SETS = st.sampled_from([0b1, 0b11, 0b101, 0b1111])
ROWS = st.integers(0, 2 * NUM_BLOCKS + 4)
NAMESPACES = st.sampled_from([0, 1])

Outcome = tuple[str, Any]


def outcome_of(call: Callable[[], Any]) -> Outcome:
    """What a call returned, or the kind of error that it raised."""
    try:
        return "returned", call()
    except ecpool.EcpoolError as error:
        return "raised", type(error)


class CacheMachine(RuleBasedStateMachine):
    """Two namespaces of one pool, on the native side over a region, driven next to their model."""

    transfers = Bundle("transfers")  # (native id, model id)

    def __init__(self) -> None:
        super().__init__()
        self.region = ecpool.Region.open(
            f"model-{uuid.uuid4().hex}",
            capacity=NUM_BLOCKS * BLOCK,
            block_size=BLOCK,
            lifetime="private",
            expected_clients=1,
        )
        self.native = [
            ecpool.EmbeddingCache(region=self.region, namespace=name, deadline=5.0)
            for name in ("one", "two")
        ]
        model = native_model.Region(NUM_BLOCKS, BLOCK)
        self.model = [
            native_model.EmbeddingCache(region=model, namespace=name) for name in ("one", "two")
        ]
        self.entries: list[tuple[Any, Any]] = []

    def teardown(self) -> None:
        self.region.close()

    def both(
        self, namespace: int, method: str, *args: Any, **kwargs: Any
    ) -> tuple[Outcome, Outcome]:
        native = outcome_of(lambda: getattr(self.native[namespace], method)(*args, **kwargs))
        model = outcome_of(lambda: getattr(self.model[namespace], method)(*args, **kwargs))
        return native, model

    def agree(self, namespace: int, method: str, *args: Any, **kwargs: Any) -> Any:
        native, model = self.both(namespace, method, *args, **kwargs)
        assert native == model
        return native[1]

    def agree_on_entry(self, namespace: int, method: str, *args: Any) -> None:
        native, model = self.both(namespace, method, *args)
        assert native[0] == model[0]
        if native[0] == "raised" or native[1] is None or model[1] is None:
            assert native == model
            return
        assert len(native[1].block_ids) == len(model[1].block_ids)
        self.entries.append((native[1], model[1]))

    def agree_on_ids(self, method: str, pair: tuple[int, int], *args: Any, **kwargs: Any) -> None:
        """For methods that take ids, which are each side's own."""
        native = getattr(self.native[0], method)(*args, [pair[0]], **kwargs)
        model = getattr(self.model[0], method)(*args, [pair[1]], **kwargs)
        assert (native == [pair[0]]) == (model == [pair[1]])
        if native not in ([pair[0]], [], None):
            assert native == model

    # vLLM's verbs.

    @rule(namespace=NAMESPACES, key=KEYS)
    def get(self, namespace: int, key: str) -> None:
        self.agree_on_entry(namespace, "get", key)

    @rule(namespace=NAMESPACES, key=KEYS, blocks=st.integers(1, NUM_BLOCKS + 2))
    def alloc(self, namespace: int, key: str, blocks: int) -> None:
        self.agree_on_entry(namespace, "alloc", key, blocks)

    @rule(
        namespace=NAMESPACES,
        key=KEYS,
        verb=st.sampled_from(["mark_ready", "pin", "pin", "unpin", "discard", "contains"]),
    )
    def verb(self, namespace: int, key: str, verb: str) -> None:
        flushed = self.model[namespace].is_flushed(key)
        native, model = self.both(namespace, verb, key)
        # A flushed entry is no longer found by its key, but its writer and its pins still end.
        assert native == model or (flushed and native == ("raised", ecpool.KeyNotFoundError))

    # Promises and transfers.

    @rule(
        target=transfers,
        namespace=NAMESPACES,
        key=KEYS,
        rows=st.integers(-1, 6),
        dtype=st.sampled_from([None, "float32", "float32", "float16"]),
        modality=MODALITIES,
    )
    def lease(self, namespace: int, key: str, rows: int, dtype: str | None, modality: str) -> Any:
        expected = {"rows": rows, "dtype": dtype, "modality": modality}
        native, model = self.both(namespace, "lease", key, **expected)
        return self._begun(native[1], model[1])

    @rule(
        target=transfers,
        namespace=NAMESPACES,
        key=KEYS,
        rows=ROWS,
        row_bytes=st.sampled_from([ROW, ROW // 2, 2 * ROW]),
        modality=MODALITIES,
        ranks=RANK_SETS,
    )
    def begin_save(
        self, namespace: int, key: str, rows: int, row_bytes: int, modality: str, ranks: int
    ) -> Any:
        native, model = self.both(
            namespace,
            "begin_save",
            key,
            rows=rows,
            row_bytes=row_bytes,
            modality=modality,
            ranks=ranks,
        )
        return self._begun(native[1], model[1])

    def _begun(self, native: Any, model: Any) -> Any:
        if native is None or isinstance(native, str):
            assert native == model
            return multiple()
        assert model is not None
        assert not isinstance(model, str)
        assert native.num_blocks == model.num_blocks
        assert sum(num for _, num in native.extents) == native.num_blocks
        return native.id, model.id

    @rule(pair=transfers, rank=RANKS)
    def claim_load(self, pair: tuple[int, int], rank: int) -> None:
        native = self.native[0].claim_loads(rank, [pair[0]])
        assert native == self.model[0].claim_loads(rank, [pair[1]])

    @rule(pair=transfers, rank=RANKS, rows=st.integers(1, 6), wide=st.booleans())
    def claim_save(self, pair: tuple[int, int], rank: int, rows: int, wide: bool) -> None:
        shape = self._shape_claimed_before(pair[1]) or (rows, 2 * COLUMNS if wide else COLUMNS)
        native = self.native[0].claim_saves(rank, [(pair[0], shape, "float32")])
        assert native == self.model[0].claim_saves(rank, [(pair[1], shape, "float32")])

    def _shape_claimed_before(self, wanted: int) -> tuple[int, ...] | None:
        """All ranks of a save write the same item."""
        hold = self.model[0]._find_hold(wanted, "save")
        return hold.entry.shape if hold is not None and hold.claimed and hold.entry.shape else None

    @rule(pair=transfers, rank=RANKS, ok=st.sampled_from([True, True, False]))
    def complete(self, pair: tuple[int, int], rank: int, ok: bool) -> None:
        self.native[0].complete(rank, [pair[0]], ok=ok)
        self.model[0].complete(rank, [pair[1]], ok=ok)

    @rule(pair=transfers, ranks=RANK_SETS)
    def dispatch(self, pair: tuple[int, int], ranks: int) -> None:
        self.agree_on_ids("dispatch_loads", pair, ranks=ranks)

    @rule(
        pair=transfers,
        method=st.sampled_from(
            ["end_leases", "withdraw", "close_unclaimed", "unclaimed", "finish_loads"]
        ),
    )
    def by_id(self, pair: tuple[int, int], method: str) -> None:
        self.agree_on_ids(method, pair)

    @rule(pair=transfers)
    def finish_save(self, pair: tuple[int, int]) -> None:
        # Of a save that nobody claimed not even the shape is known: the scheduler closes such
        # saves.
        if not self.model[0].unclaimed([pair[1]]):
            self.agree_on_ids("finish_saves", pair)

    @rule(namespace=NAMESPACES)
    def flush(self, namespace: int) -> None:
        self.agree(namespace, "flush")

    @precondition(lambda self: self.entries)
    @rule(data=st.data())
    def look_at_an_old_entry(self, data: st.DataObject) -> None:
        native, model = data.draw(st.sampled_from(self.entries))
        assert (native.ready, native.evictable) == (model.ready, model.evictable)

    @invariant()
    def same_state(self) -> None:
        native, model = self.native[0].stats(), self.model[0].stats()
        for name in ("num_blocks", "free_blocks", "evictable_blocks", "writing", "ready", "doomed"):
            assert native[name] == model[name], name
        assert self.native[0].has_held_entries() == any(
            cache.has_held_entries() for cache in self.model
        )
        for (cache, shadow), key in itertools.product(
            zip(self.native, self.model, strict=True), ["a", "b", "c", "d", "e"]
        ):
            assert cache.contains(key) == shadow.contains(key)

    @invariant()
    def healthy(self) -> None:
        assert self.native[0].check() == []
        assert self.model[0].check() == []


def test_the_cache_does_what_its_model_does() -> None:
    examples = int(os.environ.get("ECPOOL_MODEL_EXAMPLES", "100"))
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=examples, stateful_step_count=60)
    )


class TrackerMachine(RuleBasedStateMachine):
    """A `StepTracker` next to its model."""

    def __init__(self) -> None:
        super().__init__()
        self.native: Any = None
        self.model: Any = None

    @precondition(lambda self: self.native is None)
    @rule(batches=st.integers(1, 4))
    def begin(self, batches: int) -> None:
        self.native = ecpool.StepTracker(batches)
        self.model = native_model.StepTracker(batches)

    @precondition(lambda self: self.native is not None)
    @rule(key=KEYS, request=st.sampled_from(["r1", "r2", "r3"]))
    def add(self, key: str, request: str) -> None:
        self.native.add(key, request)
        self.model.add(key, request)

    @precondition(lambda self: self.native is not None)
    @rule(finished=st.lists(st.sampled_from(["r1", "r2", "r3"]), max_size=2, unique=True))
    def step(self, finished: list[str]) -> None:
        assert self.native.step(finished) == self.model.step(finished)

    @precondition(lambda self: self.native is not None)
    @rule()
    def drain(self) -> None:
        assert sorted(self.native.drain_all()) == sorted(self.model.drain_all())

    @invariant()
    def same_length(self) -> None:
        if self.native is not None:
            assert len(self.native) == len(self.model)


def test_the_tracker_does_what_its_model_does() -> None:
    run_state_machine_as_test(TrackerMachine, settings=settings(max_examples=200))


@pytest.mark.parametrize("blocks", [1, 2, 7])
def test_bytes_of_an_item_are_those_of_the_model(blocks: int) -> None:
    """Reading and writing through extents, scattered ones too."""
    with ecpool.Region.open(
        f"bytes-{uuid.uuid4().hex}",
        capacity=8 * BLOCK,
        block_size=BLOCK,
        lifetime="private",
        expected_clients=1,
    ) as region:
        model = native_model.Region(8, BLOCK)
        extents = tuple((7 - number, 1) for number in range(blocks))
        data = os.urandom(blocks * BLOCK - 17)
        for side in (region, model):
            side.write(extents, data)
            found = bytearray(len(data))
            side.read(extents, found)
            assert found == data
        for block in range(8):
            native, shadow = bytearray(BLOCK), bytearray(BLOCK)
            region.read(((block, 1),), native)
            model.read(((block, 1),), shadow)
            assert native == shadow

"""What travels from scheduler to workers."""

from __future__ import annotations

import pickle

import pytest
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

from ecpool.vllm.metadata import ECPoolMetadata, Load, Save

BIG = 1 << 40


def _load(number: int) -> Load:
    extents = ((1_000_000_000 + number, 100_000),)
    return Load(f"{number:064x}", BIG + number, extents, (30_000 + number, 8192), "bfloat16")


def _save(number: int) -> Save:
    return Save(f"{number:064x}", BIG + number, ((1_000_000_000 + number, 100_000),))


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("kind", ["loads", "saves"])
def test_an_item_takes_at_most_64_bytes_beside_its_key(kind: str, protocol: int) -> None:
    make = _load if kind == "loads" else _save

    def size(count: int) -> int:
        metadata = ECPoolMetadata(**{kind: [make(number) for number in range(count)]})
        return len(pickle.dumps(metadata, protocol=protocol))

    assert (size(200) - size(100)) / 100 - 64 <= 64


def test_comes_out_as_it_went_in() -> None:
    loads, saves = [_load(1), _load(2)], [_save(3)]
    metadata = pickle.loads(pickle.dumps(ECPoolMetadata(loads, saves)))
    assert isinstance(metadata, ECConnectorMetadata)
    assert metadata.loads == loads
    assert metadata.saves == saves
    assert metadata.loads[0].shape == (30_001, 8192)


def test_an_empty_step_is_small() -> None:
    assert len(pickle.dumps(ECPoolMetadata(), protocol=5)) < 100


def test_is_told_in_logs() -> None:
    assert _save(3).key in repr(ECPoolMetadata(saves=[_save(3)]))

"""Sizes as users write them."""

import math
from fractions import Fraction

import pytest

from ecpool.errors import InvalidArgumentError
from ecpool.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (1, 1),
        (1 << 40, 1 << 40),
        (4e9, 4 * 10**9),
        ("1073741824", 1 << 30),
        ("17B", 17),
        ("4GiB", 4 << 30),
        ("4 gib", 4 << 30),
        ("  4\tGIB ", 4 << 30),
        ("1.5 GiB", 3 << 29),
        ("512MB", 512 * 10**6),
        ("512MiB", 512 << 20),
        ("2KiB", 2048),
        ("2kb", 2000),
        ("0.1GB", 10**8),
        ("0.0000000005 TiB", 549),
        ("3TB", 3 * 10**12),
    ],
)
def test_what_people_write(value: object, nbytes: int) -> None:
    size = parse_size(value, what="capacity")
    assert size == nbytes
    assert type(size) is int


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -1, 0.0, -4e9, 1.5, math.nan, math.inf, Fraction(1, 2), [], b"4GiB",
        "", " ", "0", "0GiB", "-1GiB", "-1", "+1", "nan", "inf", "1e9", "4GiBB", "4 Gi B", "GiB",
        "4G", "4Gi", "1.5", "1.5B", "0.1B", ".5GiB", "5.GiB", "1_000", "0x10", "4GiB 2MiB", "٤GiB",
        2**63, "8388608TiB", "99999999999999999999999999",
    ],
)  # fmt: skip
def test_everything_else_is_refused_with_the_setting_and_the_value(value: object) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_size(value, what="ec_cpu_bytes")
    assert "ec_cpu_bytes" in str(caught.value)
    assert repr(value) in str(caught.value)


def test_the_message_says_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=r"KiB, MiB, GiB, TiB.*'4GiB'"):
        parse_size("many", what="capacity")
    with pytest.raises(ValueError, match=r"write GiB \(powers of 1024\) or GB"):
        parse_size("4G", what="capacity")


def test_numpy_integers_are_integers() -> None:
    numpy = pytest.importorskip("numpy")
    assert parse_size(numpy.int64(4096), what="capacity") == 4096


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (17, "17 B"), (1024, "1 KiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5 TiB")],
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text

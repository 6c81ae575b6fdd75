"""Text with units to numbers and back."""

import math
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isthmus.errors import FieldError
from isthmus.units import (
    BANDWIDTH,
    BYTES,
    DURATION,
    FLOPS,
    closest,
    format_bandwidth,
    format_bytes,
    format_duration,
)

numbers = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
plausible = st.floats(min_value=1e-9, max_value=1e21)
FLOATS = [
    (format_bandwidth, BANDWIDTH.parse),
    (format_duration, DURATION.parse),
    (FLOPS.format, FLOPS.parse),
]


@pytest.mark.parametrize(
    ("text", "bps"),
    [
        ("1 Gbps", 1e9),
        ("1Gbps", 1e9),
        ("  200   Mbps ", 200e6),
        ("1.5 Mbit/s", 1.5e6),
        ("2e3 kbit/s", 2e6),
        (".5 Gbit/s", 5e8),
        ("7 bps", 7.0),
        ("0", 0.0),
        ("0 Gbps", 0.0),
    ],
)
def test_bandwidths(text: str, bps: float) -> None:
    assert BANDWIDTH.parse(text) == bps


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("35 ms", 0.035), ("7 us", 7e-6), ("1.5 s", 1.5), ("5 min", 300.0), ("2 h", 7200.0), ("1 d", 86400.0)],
)
def test_durations_are_the_nearest_float(text: str, seconds: float) -> None:
    assert DURATION.parse(text) == seconds


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80 GiB", 80 * 2**30),
        ("80 GB", 80 * 10**9),
        ("1.5 KiB", 1536),
        ("3 B", 3),
        ("2 TiB", 2**41),
        ("1.1 B", 1),
    ],
)
def test_bytes_are_whole(text: str, num_bytes: int) -> None:
    assert int(BYTES.parse(text)) == num_bytes


def test_flops() -> None:
    assert FLOPS.parse("312 TFLOPS") == 312e12


@pytest.mark.parametrize(
    "text",
    [
        *("10", "-1 Gbps", "1 parsec", "nan Gbps", "inf Gbps", "1e999 Gbps", "fast", "", "1 Gbps 2"),
        "1e308 Gbps",
    ],
)
def test_what_is_no_bandwidth_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(FieldError) as caught:
        BANDWIDTH.parse(text)
    assert caught.value.what.startswith(repr(text))


def test_words_for_units_are_understood_in_the_cure() -> None:
    with pytest.raises(FieldError) as caught:
        DURATION.parse("5 minutes")
    assert caught.value.cure == "did you mean '5 min'?"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("1 Gps", "1 Gbps"),
        ("1.50 gbps", "1.5 Gbps"),
        ("50 MB/s", "400 Mbps"),
        ("2.5 GB/s", "20 Gbps"),
        ("1 MiB/s", "8.389 Mbps"),
    ],
)
def test_a_mistyped_unit_and_one_in_bytes_are_told_in_the_right_one(text: str, meant: str) -> None:
    with pytest.raises(FieldError) as caught:
        BANDWIDTH.parse(text)
    assert caught.value.cure is not None
    assert caught.value.cure.endswith(f"did you mean {meant!r}?")


@pytest.mark.parametrize(("write", "read"), FLOATS)
@settings(deadline=None)
@given(value=numbers)
@example(value=0.1 + 0.2)
@example(value=5e-324)
def test_exact_text_reads_back_as_the_same_number(
    write: Callable[..., str], read: Callable[[str], float], value: float
) -> None:
    assert read(write(value, exact=True)) == value


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=2**63))
def test_exact_bytes_read_back_as_the_same_number(num_bytes: int) -> None:
    assert BYTES.parse(format_bytes(num_bytes, exact=True)) == num_bytes


@pytest.mark.parametrize(("write", "read"), FLOATS)
@settings(deadline=None)
@given(value=plausible)
def test_rounded_text_reads_back_within_four_digits(
    write: Callable[..., str], read: Callable[[str], float], value: float
) -> None:
    assert math.isclose(read(write(value)), value, rel_tol=6e-4)


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=2**63))
def test_rounded_bytes_read_back_within_four_digits(num_bytes: int) -> None:
    assert math.isclose(BYTES.parse(format_bytes(num_bytes)), num_bytes, rel_tol=6e-4, abs_tol=1)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (format_bandwidth(199.8374e6), "199.8 Mbps"),
        (format_bandwidth(0), "0 bps"),
        (format_duration(0.040123), "40.12 ms"),
        (format_duration(0), "0 s"),
        (format_duration(90), "90 s"),
        (format_duration(300), "5 min"),
        (format_duration(2e-7), "0.2 us"),
        (format_bytes(80 * 2**30), "80 GiB"),
        (format_bytes(999), "999 B"),
        (FLOPS.format(312e12), "312 TFLOPS"),
        (format_duration(61.0, exact=True), "61 s"),
        (format_duration(300.0, exact=True), "5 min"),
        (format_bandwidth(2e8, exact=True), "200 Mbps"),
        (format_bytes(80 * 10**9, exact=True), "80 GB"),
        (format_bytes(0, exact=True), "0 B"),
    ],
)
def test_people_read(shown: str, text: str) -> None:
    assert shown == text


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_what_is_no_quantity_is_not_written(value: float) -> None:
    with pytest.raises(ValueError, match="is not a finite number of at least 0"):
        format_duration(value)


def test_closest_looks_past_capitals_and_gives_up_on_strangers() -> None:
    assert closest("RANK", ["ranks", "rtt"]) == "ranks"
    assert closest("gpu", ["cuda", "npu", "xpu", "cpu"]) is None

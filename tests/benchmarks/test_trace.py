import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from stages.trace import Piece, Row, Step, draw_step, read_step, step_of

from isthmus.events import Span

BASE_S = 1_700_000_000.0


def event(category: str, name: str, stream: int, start_ms: float, end_ms: float) -> dict[str, Any]:
    duration_us = 1e3 * (end_ms - start_ms)
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": 1e3 * start_ms,
        "dur": duration_us,
        "args": {"stream": stream},
    }


def span(kind: str, start_ms: float, end_ms: float, track: str = "here") -> Span:
    return Span(
        track=track, name=kind, kind=kind, start_s=BASE_S + start_ms / 1e3, end_s=BASE_S + end_ms / 1e3
    )


SPANS = [
    span("forward", 0, 10),
    span("backward", 10, 30),
    span("encode", 10, 12),
    span("transfer", 12, 13, track="send"),
    span("transfer", 0, 30, track="beyond→here"),
    span("optimize", 30, 32),
]
EVENTS: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5},
    event("kernel", "gemm", 7, 0, 10),
    event("kernel", "gemm", 7, 10, 30),
    event("kernel", "adam", 7, 30, 32),
    event("kernel", "encode_kernel", 20, 10, 11),
    event("gpu_memcpy", "Memcpy DtoH", 20, 11, 12),
    event("kernel", "all_gather_copy", 24, -5, 0),
]


def trace_of(events: list[dict[str, Any]], folder: Path) -> Path:
    file = folder / "trace.json"
    file.write_text(json.dumps({"baseTimeNanoseconds": int(BASE_S * 1e9), "traceEvents": events}))
    return file


def kinds(row: Row) -> list[str]:
    return [piece.kind for piece in row.pieces]


def test_streams_are_told_apart_by_what_runs_on_them(tmp_path: Path) -> None:
    step = read_step(trace_of(EVENTS, tmp_path), SPANS)
    rows = {row.name: row for row in step.rows}
    assert kinds(rows["compute stream"]) == ["forward", "backward", "optimize"]
    assert kinds(rows["stream of a cut 2"]) == ["codec", "copy"]
    assert kinds(rows["stream beside it 1"]) == ["other"]
    assert kinds(rows["host: send"]) == ["send"]


def test_gathering_before_the_first_pass_is_no_coding(tmp_path: Path) -> None:
    step = read_step(trace_of(EVENTS, tmp_path), SPANS)
    assert step.overlapped_share({"codec", "copy", "send"}) == pytest.approx(1.0)
    assert step.busy_share == pytest.approx(1.0, abs=1e-3)


def test_what_is_not_overlapped_counts(tmp_path: Path) -> None:
    gap = [*EVENTS[:2], event("kernel", "gemm", 7, 0, 10), event("kernel", "gemm", 7, 14, 30), *EVENTS[5:]]
    spans = [one for one in SPANS if one.kind in ("forward", "backward")]
    step = read_step(trace_of(gap, tmp_path), spans)
    assert step.overlapped_share({"codec", "copy"}) == 0.0
    assert step.busy_share == pytest.approx(26 / 30, abs=1e-3)


def test_without_kernels_of_ours_every_stream_beside_the_first_may_be_a_cut(tmp_path: Path) -> None:
    events = [event("kernel", "gemm", 7, 0, 30), event("kernel", "elementwise", 20, 1, 2)]
    rows = read_step(trace_of(events, tmp_path), SPANS).rows
    assert [row.name for row in rows[:2]] == ["compute stream", "stream of a cut 1"]
    assert kinds(rows[1]) == ["codec"]


def test_a_trace_without_a_device_shows_the_host(tmp_path: Path) -> None:
    step = read_step(trace_of(EVENTS[:2], tmp_path), SPANS)
    assert [row.name for row in step.rows] == ["host: passes", "host: encode, copy", "host: send"]
    assert step.busy_share == pytest.approx(1.0)


def test_events_of_the_device_make_the_same_rows() -> None:
    lanes = [
        Piece(kind="codec", start_s=BASE_S + 0.010, end_s=BASE_S + 0.012),
        Piece(kind="decode", start_s=BASE_S + 0.040, end_s=BASE_S + 0.041),
    ]
    step = step_of(SPANS, lanes)
    names = ["device: passes", "device: encode, copy", "device: copy, decode", "host: send"]
    assert [row.name for row in step.rows] == names
    assert step.overlapped_share({"codec", "send"}) == pytest.approx(1.0)
    assert step.overlapped_share({"decode"}) == 0.0


@pytest.mark.parametrize("step", [Step(rows=()), Step(rows=(Row(name="compute stream", pieces=()),))])
def test_nothing_is_drawn_as_nothing(step: Step) -> None:
    assert step.busy_share == 0.0
    assert step.overlapped_share({"codec"}) == 1.0
    ElementTree.fromstring(draw_step(step, title="nothing"))


def test_the_picture_has_a_box_for_each_piece_that_can_be_seen(tmp_path: Path) -> None:
    step = read_step(trace_of(EVENTS, tmp_path), SPANS)
    drawn = ElementTree.fromstring(draw_step(step, title="a step"))
    titles = [one.text or "" for one in drawn.iter() if one.tag.endswith("title")]
    assert sum(text.startswith("backward, 20.00 ms") for text in titles) >= 1
    assert any(text.startswith("copy, 1.00 ms") for text in titles)

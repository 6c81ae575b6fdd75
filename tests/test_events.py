"""Events are read back as they were written, on the first cloud's clock."""

import threading
import time
from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.events import EventLog, Fact, Span, read_events

SPAN = Span(track="east", name="forward 0.1", kind="forward", start_s=10.0, end_s=10.5, num_bytes=7)


def test_spans_are_moved_to_the_first_clouds_clock(tmp_path: Path) -> None:
    path = tmp_path / "events" / "east.jsonl"
    with EventLog(path, clock_offset_s=-2.25) as log:
        log.span(SPAN)
        before_s = time.time()
        log.fact("step", {"loss": 1.5, "windows": [2, 1]})
    span, fact = read_events(path)
    assert span == Span(
        track="east", name="forward 0.1", kind="forward", start_s=7.75, end_s=8.25, num_bytes=7
    )
    assert isinstance(span, Span)
    assert span.duration_s == 0.5
    assert isinstance(fact, Fact)
    assert (fact.kind, fact.values) == ("step", {"loss": 1.5, "windows": [2, 1]})
    assert fact.at_s < before_s


def write_fifty(log: EventLog) -> None:
    for _ in range(50):
        log.span(SPAN)


def test_a_resumed_run_appends_and_many_threads_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "east.jsonl"
    for _ in range(2):
        with EventLog(path) as log:
            threads = [threading.Thread(target=write_fifty, args=(log,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert list(read_events(path)) == [SPAN] * 400


def test_what_comes_after_the_end_is_dropped(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "east.jsonl")
    log.close()
    log.span(SPAN)
    log.fact("link", {"state": "down"})
    assert list(read_events(tmp_path / "east.jsonl")) == []


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "east.jsonl"
    with EventLog(path) as log:
        log.span(SPAN)
        log.span(SPAN)
    path.write_text(path.read_text()[:-20])
    assert list(read_events(path)) == [SPAN]


def test_a_run_goes_on_behind_a_line_that_a_crash_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "east.jsonl"
    with EventLog(path) as log:
        log.span(SPAN)
        log.span(SPAN)
    for length in (len(path.read_text()) - 20, 5):
        path.write_text(path.read_text()[:length])
        with EventLog(path) as log:
            log.span(SPAN)
        assert list(read_events(path)) == [SPAN] * (2 if length > 5 else 1)


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"event": "span"}', '{"kind": "step"}'])
def test_a_line_that_is_no_event_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "east.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match="line 1"):
        list(read_events(path))

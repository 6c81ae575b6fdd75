"""Figures of a run whose spans are known."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.events import MEASURED_KIND, STARTED_KIND, Event, EventLog, Fact, Span
from isthmus.observe.report import CodingError, read_run, summarize, summarize_rank
from isthmus.observe.timeline import shared_s, total_s, union
from isthmus.observe.trackers import check_trackers, open_trackers

times = st.integers(0, 40)
intervals = st.lists(
    st.tuples(times, times).map(lambda pair: (float(min(pair)), float(max(pair)))), max_size=8
)


def covers(found: list[tuple[float, float]], moment: float) -> bool:
    return any(start <= moment < end for start, end in found)


@given(intervals, intervals)
def test_overlap_counts_each_moment_once(
    first: list[tuple[float, float]], second: list[tuple[float, float]]
) -> None:
    moments = [moment + 0.5 for moment in range(40)]
    assert total_s(union(first)) == sum(covers(first, moment) for moment in moments)
    both = sum(covers(first, moment) and covers(second, moment) for moment in moments)
    assert shared_s(first, second) == both == shared_s(second, first)


def span(kind: str, start_s: float, end_s: float, num_bytes: int = 0) -> Span:
    return Span(track="east", name=kind, kind=kind, start_s=start_s, end_s=end_s, num_bytes=num_bytes)


def test_bubble_and_overlapped_share_of_a_cloud() -> None:
    spans = [
        span("transfer", 0.0, 0.5, 100),
        span("optimize", 0.5, 1.0),
        span("data", 1.0, 1.4),
        span("transfer", 1.0, 3.0, 100),
        span("forward", 2.0, 4.0),
        span("transfer", 4.0, 4.5, 100),
        span("optimize", 4.5, 5.0),
    ]
    found = summarize_rank("east", spans)
    assert found.bubble == pytest.approx(1 - 2.5 / 4)
    assert found.overlapped_share == pytest.approx(1.0 / 2.5)
    assert found.received_bytes == 300
    assert found.data_share == pytest.approx(0.4 / 4)


def test_coding_is_a_share_of_the_time_and_the_compression_counts_all(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events" / "east.jsonl") as log:
        for step in range(2):
            log.span(span("optimize", 4.0 * step, 4.0 * step + 0.5))
            log.fact("sent", {"step": step, "num_elements": 800, "num_bytes": 400})
            log.fact("evaluation", {"loss": 2.5 + step, "is_plain": bool(step)})
        log.span(span("encode", 1.0, 1.5, 400))
        log.span(span("decode", 2.0, 2.5, 400))
    found = summarize(read_run(tmp_path))
    assert found.clouds[0].coding_share == pytest.approx(1.0 / 4)
    assert (found.bits_per_element, found.ratio_to_float32, found.ratio_to_bfloat16) == (4.0, 8.0, 4.0)
    assert (found.validation_loss, found.plain_validation_loss) == (2.5, 3.5)


def test_the_worst_measured_message_counts_each_way(tmp_path: Path) -> None:
    found = [("east→west", 0.1, 0.99), ("east→west", 0.2, 0.98), ("west→east", None, 0.0)]
    with EventLog(tmp_path / "events" / "east.jsonl") as log:
        for track, error, cosine in found:
            log.fact(MEASURED_KIND, {"track": track, "relative_error": error, "cosine": cosine})
    assert summarize(read_run(tmp_path)).coding_errors == (
        CodingError(track="east→west", relative_error=0.2, cosine=0.98),
        CodingError(track="west→east", relative_error=None, cosine=0.0),
    )


def test_a_cloud_of_one_step_has_no_times() -> None:
    found = summarize_rank("east", [span("optimize", 0.5, 1.0)])
    assert (found.bubble, found.overlapped_share) == (0.0, None)


def test_a_run_is_summed_up_from_its_files(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events" / "east.jsonl") as log:
        for step, loss in enumerate((4.0, 3.0, 2.0)):
            log.fact("step", {"step": step, "loss": loss, "duration_s": 1.0 + step})
            log.span(span("optimize", step, step + 0.5))
        log.fact("evaluation", {"loss": 2.5})
    with EventLog(tmp_path / "events" / "west.jsonl") as log:
        log.span(span("transfer", 1.0, 2.0, 50))
    found = summarize(read_run(tmp_path))
    assert (found.num_steps, found.step_s, found.num_bytes) == (3, 2.5, 50)
    assert (found.first_loss, found.last_loss, found.validation_loss) == (4.0, 2.0, 2.5)
    assert [one.cloud for one in found.clouds] == ["east", "west"]
    assert found.overlapped_share is None


def test_a_folder_without_events_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no events"):
        summarize(read_run(tmp_path))


def test_trackers_that_are_unknown_or_missing_have_a_cure(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tracker") as caught:
        open_trackers(tmp_path, names=["tensorbord"], project="x")
    assert "tensorboard" in str(caught.value.hint)


def test_trackers_are_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else object())
    check_trackers(["mlflow", "tensorboard"])
    with pytest.raises(UserError, match="no tracker 'tensorbord'"):
        check_trackers(["tensorbord"])
    with pytest.raises(UserError, match="wandb is not installed") as caught:
        check_trackers(["mlflow", "wandb"])
    assert caught.value.hint == "pip install wandb"


def test_a_tracker_gets_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mlflow.py"
    package.write_text(
        "calls = []\n"
        "set_experiment = lambda name: calls.append(name)\n"
        "start_run = lambda run_name: calls.append(run_name)\n"
        "log_metrics = lambda metrics, step: calls.append((metrics, step))\n"
        "end_run = lambda: calls.append('end')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tracker,) = open_trackers(tmp_path / "7", names=["mlflow"], project="demo")
    tracker.log(3, {"loss": 1.0})
    tracker.close()
    import mlflow  # type: ignore[import-not-found]

    assert mlflow.calls == ["demo", "7", ({"loss": 1.0}, 3), "end"]


def test_ranks_of_a_cloud_come_in_their_order(tmp_path: Path) -> None:
    for name in ("west", "east.10", "east.2", "east"):
        with EventLog(tmp_path / "events" / f"{name}.jsonl") as log:
            log.span(span("optimize", 0.0, 0.5))
    assert [one.cloud for one in summarize(read_run(tmp_path)).clouds] == [
        "east",
        "east.2",
        "east.10",
        "west",
    ]


def test_the_time_between_a_stop_and_the_next_pass_does_not_count() -> None:
    events: list[Event] = [
        Fact(kind=STARTED_KIND, at_s=0.0, values={}),
        span("optimize", 0.0, 1.0),
        span("optimize", 2.0, 3.0),
        Fact(kind=STARTED_KIND, at_s=1003.0, values={}),
        span("optimize", 1004.0, 1005.0),
    ]
    assert summarize_rank("east", events).bubble == pytest.approx(1 / 3)


def test_a_stop_before_the_first_step_had_ended_does_not_count_either() -> None:
    events: list[Event] = [
        Fact(kind=STARTED_KIND, at_s=0.0, values={}),
        span("forward", 0.0, 1.0),
        Fact(kind=STARTED_KIND, at_s=1000.0, values={}),
        span("optimize", 1001.0, 1002.0),
        span("optimize", 1003.0, 1004.0),
    ]
    assert summarize_rank("east", events).bubble == pytest.approx(0.5)


def test_a_step_that_was_done_again_after_a_stop_counts_once(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events" / "east.jsonl") as log:
        for step, loss in ((0, 4.0), (1, 3.5), (2, 9.0), (1, 3.0), (2, 2.5)):
            log.fact("step", {"step": step, "loss": loss, "duration_s": 1.0})
    found = summarize(read_run(tmp_path))
    assert (found.num_steps, found.first_loss, found.last_loss) == (3, 4.0, 2.5)
    assert [one["loss"] for one in read_run(tmp_path).steps] == [4.0, 3.0, 2.5]

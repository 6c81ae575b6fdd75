"""The end of a step over all stages, and what goes wrong in it."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.errors import Aborted, IsthmusError, LinkError
from isthmus.events import Span
from isthmus.plan.types import Arrived, Pass, ScheduleError
from isthmus.plan.window import Hop
from isthmus.train.crossing.bench import Effort
from isthmus.train.crossing.courier import Courier, Mailbox
from isthmus.train.crossing.settlement import Seen, Settlement, Terms
from isthmus.train.crossing.ways import Travels
from isthmus.train.crossing.words import Tally
from isthmus.wan.memory import MemoryLink
from isthmus.wan.packet import Packet
from tests.model.cases import blueprint
from tests.train.chain import Given, chain, course
from tests.train.test_exactness import batches


def tally(**changes: Any) -> Tally:
    values: dict[str, Any] = {
        "step": 0,
        "loss_sum": 2.0,
        "squared_norms": (9.0, 16.0),
        "busy_s": (1.0,),
        "hops": (),
        "travel_s": 0.0,
    }
    return Tally(**{**values, **changes})


def settle(own: Tally, **terms: Any) -> Any:
    settlement = Settlement(terms=Terms(**{"num_microbatches": 10, "max_in_flight": 10, **terms}))
    return settlement.settle(own, seen=Seen(), up=None, down=None)[1]


def test_the_first_stage_judges_alone() -> None:
    verdict = settle(tally(), should_save=lambda step: step == 0)
    assert (verdict.norm, verdict.windows, verdict.save) == (5.0, (1,), True)


def test_windows_cover_the_round_trip_and_keep_the_cap() -> None:
    hop = Hop(forward_s=0.01, backward_s=0.01, latency_s=0.1)
    far = tally(busy_s=(1.0, 1.0), hops=(hop,))
    assert settle(far).windows[0] >= 2 + round(0.22 / 0.1)
    assert settle(far, max_in_flight=3).windows[0] == 3
    slow = tally(busy_s=(1.0, 1.0), hops=(replace(hop, coding_s=0.1),))
    assert settle(slow).windows[0] == settle(far).windows[0] + 1
    assert settle(far, max_in_flight=(4, 1)).windows == (4, 1)
    assert settle(tally(busy_s=(1.0, 1.0), hops=(Hop(forward_s=0, backward_s=0, latency_s=0),))).windows == (
        3,
        1,
    )


def test_effort_is_told_by_what_was_done_since() -> None:
    before = Effort().more(9.0)
    assert before.mean_s(since=Effort()) == 9.0
    assert before.more(1.0).more(2.0).mean_s(since=before) == 1.5
    assert before.mean_s(since=before) == 0.0


@pytest.mark.parametrize("changes", [{"loss_sum": float("nan")}, {"squared_norms": (float("inf"),)}])
def test_a_loss_that_is_not_finite_ends_the_run(changes: dict[str, Any]) -> None:
    with pytest.raises(IsthmusError, match="not finite") as caught:
        settle(tally(**changes))
    assert caught.value.hint


def test_a_mailbox_that_failed_keeps_failing() -> None:
    box: Mailbox[int] = Mailbox()
    box.put(1)
    box.fail(Aborted("west", "gone"))
    assert box.take() == 1
    for _ in range(2):
        with pytest.raises(Aborted):
            box.take()


def test_an_error_on_a_couriers_thread_is_reported() -> None:
    errors: list[BaseException] = []
    seen = threading.Event()

    def fail(error: BaseException) -> None:
        errors.append(error)
        seen.set()

    with MemoryLink("east", "west") as wan:
        courier = Courier(wan.end("east"), receivers={"x": lambda _: None}, on_failure=fail)
        courier.send("x", lambda: Packet({"bad": object()}))
        assert seen.wait(30)
        courier.close()
    assert isinstance(errors[0], TypeError)


def test_a_stage_that_fails_ends_its_neighbours() -> None:
    plan = blueprint("llama")
    with chain(plan, course(3, 2)) as found:

        def fail(_: object) -> None:
            raise RuntimeError("out of luck")

        found.records[2].on_step = fail
        with pytest.raises((RuntimeError, LinkError)):
            found.run(Given(batches(plan, 2)))


def test_stages_that_disagree_on_the_micro_batches_are_found_out() -> None:
    plan = blueprint("llama")
    steps = [[*step, step[0]] for step in batches(plan, 1)]
    with chain(plan, course(2, 1)) as found, pytest.raises((ValueError, ScheduleError, LinkError)):
        found.run(Given(steps))


def test_what_comes_for_a_step_before_it_has_begun_counts_for_that_step() -> None:
    spans: list[Span] = []
    travels = Travels(cloud="west", on_span=spans.append)
    link: Any = SimpleNamespace(
        peer=SimpleNamespace(cloud="east"), counters=lambda: SimpleNamespace(clock_offset_s=None)
    )

    def note(step: int, kind: Pass, travel_s: float) -> None:
        packet = Packet({"sent_s": time.time() - travel_s})
        travels.note(packet, Arrived(kind=kind, step=step, microbatch=0), link)

    note(0, Pass.FORWARD, 3.0)
    note(1, Pass.FORWARD, 1.0)  # while the optimizer is at work, or a checkpoint is written
    assert travels.take(0) == {Pass.FORWARD: pytest.approx(3.0, abs=0.5)}
    note(1, Pass.FORWARD, 5.0)
    note(1, Pass.BACKWARD, 7.0)
    assert travels.take(1) == {
        Pass.FORWARD: pytest.approx(1.0, abs=0.5),
        Pass.BACKWARD: pytest.approx(7.0, abs=0.5),
    }
    assert travels.take(1) == {}
    assert [span.kind for span in spans] == ["transfer"] * 4

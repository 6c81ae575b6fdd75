"""Whatever a peer says, it is a valid fact or an error that names it; and a scheduler keeps little of it."""

import math
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from isthmus.errors import FrameError
from isthmus.plan.codecs import Bounds, Crossing, Cut
from isthmus.plan.end_of_step import Cosines, Evaluated, Tally, Verdict
from isthmus.plan.pipeline_parts import FACTS
from isthmus.plan.types import (
    MAX_FACTS_BYTES,
    Action,
    Arrived,
    Carried,
    Facts,
    Member,
    Message,
    MessageKind,
    ScheduleError,
    Stop,
    Tell,
    WorkKind,
    pack_facts,
    unpack_facts,
)
from tests.plan.hostile import EVALUATED, HOP, TALLY, VALID, VALUES, VERDICT, extreme_text, hostile_text
from tests.plan.one_member import OneMember, pipeline_of, tally_of

KINDS = {Tally: MessageKind.TALLY, Verdict: MessageKind.VERDICT, Evaluated: MessageKind.EVALUATED}
CUT = Cut(
    crossing=Crossing(num_rows=64, width=256),
    guard_every=1,
    is_free=True,
    bandwidths_bps=(1e8, 1e7),
    bounds=Bounds(),
)
PIPELINE = pipeline_of(
    (1, 2, 1), num_steps=4, cuts=(CUT, CUT), evaluate_every=2, num_validation_microbatches=2, save_every_s=0.0
)

many = pytest.mark.parametrize(
    "num_cases", [1000, pytest.param(50_000, marks=pytest.mark.slow)], ids=["some", "many"]
)


def first_awaits_a_tally() -> OneMember:
    one = OneMember(PIPELINE)
    one.begin()
    for item in range(2):
        one.done()
        one.arrived(MessageKind.GRADIENT, item)
    while one.running is not None:
        one.done()
    return one


def leader_awaits_a_verdict() -> OneMember:
    one = OneMember(PIPELINE, Member("cloud1"))
    one.begin()
    one.arrived(MessageKind.ACTIVATION, 0)
    one.done()
    one.arrived(MessageKind.GRADIENT, 0)
    one.done()
    one.sent(MessageKind.GRADIENT, 0)
    one.done()
    one.arrived(MessageKind.TALLY)
    return one


def first_awaits_a_result() -> OneMember:
    one = OneMember(PIPELINE)
    one.start(4)
    while one.running is not None:
        one.done()
    return one


MAKERS: dict[type[Facts], Callable[[], OneMember]] = {
    Tally: first_awaits_a_tally,
    Verdict: leader_awaits_a_verdict,
    Evaluated: first_awaits_a_result,
}


@many
def test_facts_of_a_peer_are_valid_or_refused(num_cases: int) -> None:
    random, found = Random(num_cases), Counter[str]()
    for _ in range(num_cases):
        valid = random.choice(VALID)
        try:
            facts = unpack_facts(hostile_text(random, valid), type(valid))
        except FrameError:
            found["refused"] += 1
        else:
            found["valid"] += 1
            assert pack_facts(unpack_facts(pack_facts(facts), type(valid))) == pack_facts(facts)
    assert min(found["refused"], found["valid"]) > num_cases // 20, "both happen"


@many
def test_a_scheduler_acts_on_facts_of_a_peer_or_refuses_them(num_cases: int) -> None:
    random, found = Random(-num_cases), Counter[str]()
    for _ in range(num_cases):
        valid = random.choice(VALID)
        one = MAKERS[type(valid)]()
        message = one.message(KINDS[type(valid)], step=valid.step)
        try:
            facts = unpack_facts(hostile_text(random, valid), type(valid))
            one.feed(Arrived(_spoilt(random, message._replace(facts=facts)), 0.0, Carried()))
            for _ in range(4):
                if one.running is not None:
                    one.done()
        except (FrameError, ScheduleError):
            found["refused"] += 1
        else:
            found["acted"] += 1
    assert min(found["refused"], found["acted"]) > num_cases // 20, "both happen"


@pytest.mark.parametrize("num_runs", [100, pytest.param(2000, marks=pytest.mark.slow)], ids=["some", "many"])
def test_a_first_stage_judges_any_tallies_for_many_steps(num_runs: int) -> None:
    """So that codecs are chosen by them too."""
    pipeline = pipeline_of((1, 1), num_steps=9, num_microbatches=1, cuts=(CUT,))
    found: Counter[str] = Counter()
    for seed in range(num_runs):
        random, one = Random(seed), OneMember(pipeline)
        one.start()
        for step in range(pipeline.num_steps):
            actions = _end_step(one, step, _readable(random, step))
            if any(isinstance(action, Stop) for action in actions):
                found["failed"] += 1
                break
            found["judged"] += 1
            found["coded anew"] += any(isinstance(action, Tell) for action in actions)
    assert found["judged"] > 4 * num_runs
    assert found["coded anew"] > num_runs // 2


def _readable(random: Random, step: int) -> Tally:
    """A tally that can be read, whatever its numbers."""
    while True:
        try:
            found = unpack_facts(extreme_text(random, tally_of(1, step)), Tally)
        except FrameError:
            continue
        return replace(found, step=step, loss_sum=1.0, squared_norms=(1.0,), wants_stop=False)


def _end_step(one: OneMember, step: int, tally: Tally) -> tuple[Action, ...]:
    """One step of the first stage with this tally from behind; gives the actions that answer it."""
    one.done()
    one.done()
    one.arrived(MessageKind.GRADIENT, step=step)
    one.done()
    one.done()
    actions = one.feed(Arrived(one.message(MessageKind.TALLY, step=step, facts=tally)))
    if one.is_running(WorkKind.UPDATE):
        one.done()
    return actions


def _spoilt(random: Random, message: Message) -> Message:
    """Most messages are right but for their facts."""
    match random.randrange(12):
        case 0:
            return message._replace(kind=random.choice(list(MessageKind)))
        case 1:
            return message._replace(step=random.choice(COUNTS))
        case 2:
            return message._replace(item=random.choice(COUNTS))
        case 3:
            return message._replace(sender=random.choice([*PIPELINE.members, Member("nowhere", -1)]))
        case 4:
            return message._replace(facts=random.choice([None, Carried(), *VALID]))
    return message


COUNTS = [value for value in VALUES if type(value) is int]


@pytest.mark.parametrize(
    "member", [Member("cloud0"), Member("cloud1"), Member("cloud1", 1), Member("cloud2")]
)
def test_a_scheduler_keeps_no_more_tensors_than_two_turns_have(member: Member) -> None:
    random, one, num_kept = Random(str(member)), OneMember(PIPELINE, member), 0
    one.begin()
    for _ in range(5000):
        kind = random.choice([MessageKind.ACTIVATION, MessageKind.EVALUATION, MessageKind.GRADIENT])
        message = one.message(kind, random.choice(COUNTS), step=random.choice(COUNTS))
        try:
            one.scheduler.on(Arrived(message), 0.0)
        except ScheduleError:
            continue
        num_kept += 1
    assert num_kept <= 2 * PIPELINE.num_microbatches + PIPELINE.num_validation_microbatches


@pytest.mark.parametrize(
    "text",
    [
        "[" * MAX_FACTS_BYTES,
        '{"step":' * (MAX_FACTS_BYTES // 8),
        '{"windows":[' + "9," * 16_000 + "9]}",
        '{"windows":[' + "0," * 16_000 + "0]}",
        '{"codecs":[' + '["a","b"],' * 3000 + '["a","b"]]}',
        "9" * MAX_FACTS_BYTES,
        "9" * 10**7,
        '{"' + "a" * 30_000 + '":1}',
        "{" + ",".join(f'"{number}":1' for number in range(3000)) + "}",
    ],
    ids=lambda text: text[:12],
)
def test_what_a_long_text_takes_is_bounded(text: str) -> None:
    for kind in FACTS.values():
        tracemalloc.start()
        with pytest.raises(FrameError) as raised:
            unpack_facts(text, kind)
        _, most_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(raised.value.message) < 500
        assert most_bytes < 128 * MAX_FACTS_BYTES


@pytest.mark.parametrize(
    ("valid", "changes"),
    [
        (TALLY, {"busy_s": ()}),
        (TALLY, {"busy_s": (0.1,) * 1025}),
        (TALLY, {"busy_s": (-0.1,)}),
        (TALLY, {"busy_s": (math.nan,)}),
        (TALLY, {"hops": (replace(HOP, forward_s=-1.0),)}),
        (TALLY, {"hops": (replace(HOP, latency_s=math.inf),)}),
        (TALLY, {"hops": (HOP,) * 1024}),
        (TALLY, {"squared_norms": (1.0,) * 65}),
        (TALLY, {"cosines": (Cosines(forward=1.5),)}),
        (TALLY, {"gradient_cosine": math.inf}),
        (TALLY, {"element_bytes": (65,)}),
        (TALLY, {"travel_s": 1e13}),
        (TALLY, {"step": -1}),
        (TALLY, {"step": 2**60}),
        (VERDICT, {"norm": math.nan}),
        (VERDICT, {"norm": -1.0}),
        (VERDICT, {"windows": ()}),
        (VERDICT, {"windows": (2**25,)}),
        (VERDICT, {"codecs": (("a" * 257, "raw"),)}),
        (EVALUATED, {"num_targets": -1}),
        (EVALUATED, {"num_correct": 2**60}),
    ],
)
def test_each_bound_holds(valid: Tally | Verdict | Evaluated, changes: dict[str, Any]) -> None:
    text = pack_facts(replace(valid, **changes), max_bytes=10**6)
    with pytest.raises(FrameError, match=next(iter(changes))):
        unpack_facts(text, type(valid), max_bytes=10**6)


def test_losses_and_norms_that_are_not_finite_are_told() -> None:
    """They end the run with a reason, where they are judged."""
    bad = replace(TALLY, loss_sum=math.nan, squared_norms=(math.inf,), gradient_cosine=math.nan)
    assert math.isnan(unpack_facts(pack_facts(bad), Tally).loss_sum)

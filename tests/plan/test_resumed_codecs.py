"""Which codecs a scheduler continues with when the job gives some links others than before."""

from isthmus.job.codec import parse_codec
from isthmus.plan.codecs import Crossing, Cut, CutState, Pair, texts_of
from isthmus.plan.end_of_step import Note
from isthmus.plan.pipeline import PipelineScheduler
from isthmus.plan.pipeline_parts import Pipeline, PipelineState
from isthmus.plan.types import Action, Member, Started, Tell


def pair(forward: str, backward: str | None = None) -> Pair:
    return Pair(forward=parse_codec(forward), backward=parse_codec(backward or forward))


# The guard has widened both since the run started.
STOOD = (
    CutState(codecs=("int8", "int8"), since_step=3, least_forward_bytes=5),
    CutState(codecs=("bf16", "raw"), since_step=4),
)
ASKED = (pair("int4"), pair("int8"))
STATE = PipelineState(
    asked=tuple(map(texts_of, ASKED)),
    codecs=tuple(one.codecs for one in STOOD),
    states=STOOD,
)


def resumed(cloud: str, *codecs: Pair) -> tuple[PipelineScheduler, list[str]]:
    crossing = Crossing(num_rows=4, width=16)
    pipeline = Pipeline(
        stages=((Member("a"),), (Member("b"),), (Member("c"),)),
        num_steps=20,
        num_microbatches=2,
        cuts=tuple(
            Cut(name=f"cut-{number}", crossing=crossing, codecs=one) for number, one in enumerate(codecs)
        ),
    )
    scheduler = PipelineScheduler(pipeline, Member(cloud))
    return scheduler, notes(scheduler.on(Started(9, STATE), 0.0))


def notes(actions: tuple[Action, ...]) -> list[str]:
    facts = [action.fact for action in actions if isinstance(action, Tell)]
    return [fact.text for fact in facts if isinstance(fact, Note)]


def test_codecs_that_the_job_has_not_changed_continue() -> None:
    scheduler, told = resumed("a", *ASKED)
    assert scheduler._codecs == STATE.codecs
    assert scheduler._end.steering is not None
    assert scheduler._end.steering.states == STOOD
    assert told == []


def test_a_codec_that_the_job_has_changed_starts_again_and_is_told() -> None:
    now = (pair("int4"), pair("rotate | int4", "int8"))
    scheduler, told = resumed("a", *now)
    assert scheduler._end.steering is not None
    assert scheduler._end.steering.states == (STOOD[0], CutState(codecs=texts_of(now[1]), since_step=9))
    assert told == ["link cut-1: codec bf16 and raw, now rotate | int4 and int8"]
    for cloud in "bc":
        other, told = resumed(cloud, *now)
        assert other._codecs == scheduler._codecs == (STOOD[0].codecs, texts_of(now[1]))
        assert told == []


def test_codecs_of_another_number_of_cuts_are_left_aside() -> None:
    scheduler = PipelineScheduler(
        Pipeline(stages=((Member("a"),),), num_steps=20, num_microbatches=2), Member("a")
    )
    scheduler.on(Started(9, STATE), 0.0)
    assert scheduler._codecs == ()

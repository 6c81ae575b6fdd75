"""The best weights: which evaluation counts, what is saved for it, and what a resumption knows."""

import math
from dataclasses import replace

import pytest

from isthmus.plan.end_of_step import Best, Evaluated, Note, Read, Reduced, Round, Scored, Seen, Updated
from isthmus.plan.pipeline import PipelineScheduler
from isthmus.plan.pipeline_parts import Pipeline, PipelineState
from isthmus.plan.types import (
    Done,
    Facts,
    Member,
    Outcome,
    Run,
    Save,
    Saved,
    Started,
    Stop,
    Tell,
    Work,
    WorkKind,
)


def evaluated(step: int, **metrics: float) -> Evaluated:
    return Evaluated(step=step, loss_sum=step, num_correct=0, num_targets=1, metrics=tuple(metrics.items()))


def test_a_loss_is_to_be_low_and_all_else_high() -> None:
    losses = [Best.of(evaluated(step), "loss") for step in (3, 2)]
    assert losses[1] is not None
    assert losses[1].beats(losses[0])
    bleu, worse = Best.of(evaluated(1, bleu=20.0), "bleu"), Best.of(evaluated(2, bleu=19.0), "bleu")
    assert bleu is not None
    assert worse is not None
    assert bleu.beats(None)
    assert not worse.beats(bleu)
    assert not bleu.beats(bleu)
    assert worse.beats(losses[0])  # which was chosen by another metric
    assert Best.of(evaluated(1), "bleu") is None
    assert Best.of(evaluated(1, bleu=math.nan), "bleu") is None


PIPELINE = Pipeline(
    stages=((Member("east"),),),
    num_steps=5,
    num_microbatches=1,
    evaluate_every=2,
    num_validation_microbatches=1,
    save_every_s=1e6,
    keep_best="f1",
)
F1 = {2: 0.5, 4: 0.8, 5: 0.7}


class One:
    """The only member of a pipeline, whose works end at once."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.scheduler = PipelineScheduler(pipeline, Member("east"))
        self.pipeline = pipeline
        self.saves: list[Save] = []
        self.scored: list[int] = []
        self.notes: list[str] = []

    def run(self, step: int, facts: Facts | None, *, until: int = 99) -> Stop | None:
        todo = list(self.scheduler.on(Started(step, facts), 0.0))
        while todo:
            match todo.pop(0):
                case Run(work=work):
                    todo += self.scheduler.on(Done(work, self.facts(work)), 0.0)
                case Save() as save:
                    self.saves.append(save)
                    if save.step == until:
                        return None
                    todo += self.scheduler.on(Saved(save.step), 0.0)
                case Tell(fact=Note(text=text)):
                    self.notes.append(text)
                case Stop() as stop:
                    return stop
        raise AssertionError("the scheduler waits for nothing")

    def facts(self, work: Work) -> Facts | None:
        match work.kind:
            case WorkKind.READ:
                return Read(num_targets=1, num_tokens=1)
            case WorkKind.REDUCE:
                return Reduced(seen=Seen(), loss_sum=1.0, squared_norms=(1.0,), num_targets=1)
            case WorkKind.UPDATE:
                return Updated(verdict=None)
            case WorkKind.SCORE:
                self.scored.append(work.step)
                one = Round(losses=(1.0,), num_correct=0, num_targets=1)
                found = ((("f1", F1[work.step]),), (("f1", 1 - F1[work.step]),))
                rounds = self.pipeline.num_rounds
                return Scored(rounds=(one,) * rounds, metrics=found[:rounds])
        return None


def best_of(save: Save) -> Best | None:
    assert isinstance(save.facts, PipelineState)
    return save.facts.best


def test_every_evaluated_step_is_saved_and_the_best_one_is_named() -> None:
    one = One(PIPELINE)
    stop = one.run(0, None)
    assert [save.step for save in one.saves] == [2, 4, 5]
    assert [save.best_step for save in one.saves] == [None, 2, 4]
    assert stop is not None
    assert (stop.outcome, stop.step) == (Outcome.FINISHED, 4)
    assert one.notes[-1] == "the best f1 was 0.8000, at step 4, which is exported"


@pytest.mark.parametrize("step", [2, 4, 5])
def test_a_resumption_judges_again_what_was_saved_before_it_was_judged(step: int) -> None:
    before, after = One(PIPELINE), One(PIPELINE)
    before.run(0, None, until=step)
    stop = after.run(step, before.saves[-1].facts)
    assert after.scored[0] == step
    assert stop is not None
    assert stop.step == 4


def test_the_round_without_codecs_counts_where_there_is_one() -> None:
    one = One(replace(PIPELINE, evaluates_without_codecs=True))
    stop = one.run(0, None)
    assert stop is not None
    assert stop.step == 2


def test_without_a_metric_nothing_is_saved_for_it() -> None:
    one = One(replace(PIPELINE, keep_best=None))
    stop = one.run(0, None)
    assert [save.step for save in one.saves] == [5]
    assert stop is not None
    assert (stop.step, one.saves[0].best_step, best_of(one.saves[0])) == (0, None, None)

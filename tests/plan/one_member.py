"""One member of a pipeline, driven by hand: what its peers and its group would do is said event by event."""

from typing import Any

from isthmus.plan.end_of_step import Cosines, Evaluated, Tally, Verdict
from isthmus.plan.pipeline import PipelineScheduler
from isthmus.plan.pipeline_parts import Pipeline
from isthmus.plan.scenario import Hop
from isthmus.plan.types import (
    Action,
    Arrived,
    Carried,
    Done,
    Event,
    Facts,
    Gathered,
    Member,
    Message,
    MessageKind,
    Run,
    Send,
    Sent,
    Started,
    Work,
    WorkKind,
)
from tests.plan.driver import facts_of

FROM_BEHIND = (MessageKind.GRADIENT, MessageKind.TALLY, MessageKind.EVALUATED)


def pipeline_of(num_ranks: tuple[int, ...], **changes: Any) -> Pipeline:
    """Stages of so many ranks, one step of two micro-batches."""
    stages = tuple(
        tuple(Member(f"cloud{index}", rank) for rank in range(number))
        for index, number in enumerate(num_ranks)
    )
    return Pipeline(**{"stages": stages, "num_steps": 1, "num_microbatches": 2, **changes})


def tally_of(num_stages: int, step: int = 0, **changes: Any) -> Tally:
    """The tally of so many stages, in which nothing took long."""
    hop = Hop(forward_s=0.01, backward_s=0.01, latency_s=0.01)
    values: dict[str, Any] = {
        "step": step,
        "loss_sum": 1.0,
        "squared_norms": (1.0,),
        "busy_s": (0.1,) * num_stages,
        "hops": (hop,) * (num_stages - 1),
        "cosines": (Cosines(),) * (num_stages - 1),
        "element_bytes": (4,) * (num_stages - 1),
    }
    return Tally(**{**values, **changes})


def verdict_of(pipeline: Pipeline, step: int = 0, **changes: Any) -> Verdict:
    """A verdict that changes nothing."""
    return Verdict(**{"step": step, "norm": 1.0, "windows": pipeline.first_windows(), **changes})


class OneMember:
    """Feeds the scheduler of one member; `running` and `sending` are what it has asked for."""

    def __init__(self, pipeline: Pipeline, member: Member = Member("cloud0")) -> None:  # noqa: B008
        self.pipeline = pipeline
        self.member = member
        self.stage = pipeline.stage_of(member)
        self.scheduler = PipelineScheduler(pipeline, member)
        self.running: Work | None = None
        self.sending: list[Message] = []

    @property
    def work(self) -> Work:
        assert self.running is not None
        return self.running

    def is_running(self, kind: WorkKind) -> bool:
        return self.running is not None and self.running.kind is kind

    def feed(self, event: Event) -> tuple[Action, ...]:
        actions = self.scheduler.on(event, 0.0)
        for action in actions:
            if isinstance(action, Run):
                self.running = action.work
            elif isinstance(action, Send):
                self.sending.append(action.message)
        return actions

    def start(self, step: int = 0, facts: Facts | None = None) -> list[object]:
        return _kinds(self.feed(Started(step, facts)))

    def begin(self, step: int = 0) -> None:
        """Start, and read."""
        self.start(step)
        self.done()

    def done(self) -> list[object]:
        work, self.running = self.work, None
        return _kinds(self.feed(self.end_of(work)))

    def end_of(self, work: Work) -> Done:
        facts = facts_of(self.pipeline, work)
        if work.kind is WorkKind.UPDATE and self.member != work.group[0]:
            verdict = verdict_of(self.pipeline, work.step)
            facts = facts_of(self.pipeline, work._replace(facts=verdict))
        return Done(work, Gathered(of=(facts,)) if work.group else facts)

    def arrived(self, kind: MessageKind, item: int = 0, *, step: int = 0) -> list[object]:
        return _kinds(self.feed(Arrived(self.message(kind, item, step=step), 0.0, Carried())))

    def message(
        self, kind: MessageKind, item: int = 0, *, step: int = 0, facts: Facts | None = None
    ) -> Message:
        """A message to this member from a member that could send it."""
        stage = self.stage + (1 if kind in FROM_BEHIND else -1)
        is_known = 0 <= stage < len(self.pipeline.stages)
        sender = self.pipeline.stages[stage][0] if is_known else Member("nowhere")
        return Message(kind, step, item, sender, (self.member,), facts or self._facts(kind, step))

    def sent(self, kind: MessageKind, item: int = 0, *, step: int = 0) -> list[object]:
        wanted = (kind, step, item)
        message = next(one for one in self.sending if (one.kind, one.step, one.item) == wanted)
        self.sending.remove(message)
        return _kinds(self.feed(Sent(message, Carried())))

    def finish_step(self, step: int = 0, **verdict: Any) -> None:
        """Run the backwards of a step at a stage between others, and all that ends it."""
        self.pass_back(step)
        self.settle(step, **verdict)

    def pass_back(self, step: int = 0) -> None:
        """Let gradients come as soon as they can, until all passes of a step are over."""
        number = self.pipeline.num_microbatches
        for item in range(number):
            self.arrived(MessageKind.GRADIENT, item, step=step)
            while self.running is not None and not self.is_running(WorkKind.REDUCE):
                self.done()
            if self.stage > self.pipeline.first_trained:
                self.sent(MessageKind.GRADIENT, item, step=step)

    def settle(self, step: int = 0, **verdict: Any) -> None:
        """Reduce, take the tally from behind and the verdict, and update."""
        assert self.is_running(WorkKind.REDUCE)
        self.done()
        self.arrived(MessageKind.TALLY, step=step)
        facts = verdict_of(self.pipeline, step, **verdict)
        self.feed(Arrived(self.message(MessageKind.VERDICT, step=step, facts=facts)))
        assert self.is_running(WorkKind.UPDATE)
        self.done()

    def _facts(self, kind: MessageKind, step: int) -> Facts | None:
        if kind is MessageKind.TALLY:
            return tally_of(len(self.pipeline.stages) - self.stage - 1, step)
        if kind is MessageKind.VERDICT:
            return verdict_of(self.pipeline, step)
        if kind is MessageKind.EVALUATED:
            return Evaluated(step=step, loss_sum=1.0, num_correct=1, num_targets=1)
        return None


def _kinds(actions: tuple[Action, ...]) -> list[object]:
    """Works and messages by their kind, other actions by their class."""
    return [
        action.work.kind
        if isinstance(action, Run)
        else action.message.kind
        if isinstance(action, Send)
        else type(action)
        for action in actions
    ]

"""What must hold at one member, checked event by event against a record that knows no schedule."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from isthmus.plan.end_of_step import Updated
from isthmus.plan.pipeline_parts import Pipeline
from isthmus.plan.types import (
    Action,
    Arrived,
    Done,
    Event,
    Gathered,
    Member,
    Message,
    MessageKind,
    Run,
    Send,
    Sent,
    Work,
    WorkKind,
)
from tests.plan.driver import Entry

Key = tuple[str, int, int]

PASSES = (WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.EVALUATE)
TENSORS = (MessageKind.ACTIVATION, MessageKind.GRADIENT, MessageKind.EVALUATION)


@dataclass(slots=True)
class Replay:
    """One member of a log; `computed` and `sends` are the works and tensors it asked for, in order."""

    stage: int
    is_first: bool
    is_last: bool
    is_trained: bool
    window: int
    computed: list[Work] = field(default_factory=list)
    sends: list[Message] = field(default_factory=list)
    inputs: set[Key] = field(default_factory=set)
    outputs: set[Key] = field(default_factory=set)
    kept: set[tuple[int, int]] = field(default_factory=set)
    unsent: set[Key] = field(default_factory=set)
    running: Work | None = None

    def passes(self, kind: WorkKind, step: int) -> list[int]:
        return [work.item for work in self.computed if (work.kind, work.step) == (kind, step)]

    def happened(self, event: Event) -> None:
        match event:
            case Arrived(message=message):
                self.inputs.add(key(message))
            case Sent(message=message):
                self.unsent.discard(key(message))
            case Done(work=work, facts=facts):
                assert work == self.running
                self.running = None
                self._ended(work)
                self._resize(facts)

    def asked(self, action: Action) -> None:
        match action:
            case Send(message=message) if message.kind in TENSORS:
                assert key(message) in self.outputs
                self.sends.append(message)
            case Run(work=work):
                assert self.running is None, "compute is one resource"
                self.running = work
                self.computed.append(work)
                if work.kind in PASSES:
                    self._began(work)

    def _began(self, work: Work) -> None:
        is_backward = work.kind is WorkKind.BACKWARD
        needs_input = not (self.is_last if is_backward else self.is_first)
        assert not needs_input or key(work) in self.inputs, "runs before its input is there"
        if is_backward:
            assert (WorkKind.FORWARD.value, work.step, work.item) in self.outputs
        elif work.kind is WorkKind.FORWARD and self.is_trained:
            self.kept.add((work.step, work.item))
            assert len(self.kept) <= self.window, "more in flight than the window allows"
        else:
            self.unsent.add(key(work))
            assert len(self.unsent) <= self.window, "more in flight than the window allows"

    def _ended(self, work: Work) -> None:
        self.outputs.add(key(work))
        if work.kind is WorkKind.BACKWARD:
            self.kept.remove((work.step, work.item))
        elif self.is_last:
            self.unsent.discard(key(work))

    def _resize(self, facts: object) -> None:
        for one in facts.of if isinstance(facts, Gathered) else ():
            if isinstance(one, Updated) and one.verdict is not None:
                self.window = one.verdict.windows[self.stage]


def replays(pipeline: Pipeline) -> dict[Member, Replay]:
    """An empty record of each member."""
    last = len(pipeline.stages) - 1
    windows = pipeline.first_windows()
    return {
        member: Replay(stage, stage == 0, stage == last, stage >= pipeline.first_trained, windows[stage])
        for stage, group in enumerate(pipeline.stages)
        for member in group
    }


def replay(log: Iterable[Entry], pipeline: Pipeline) -> dict[Member, Replay]:
    """Every member of a log, all checks made."""
    members = replays(pipeline)
    for entry in log:
        members[entry.member].happened(entry.event)
        for action in entry.actions:
            members[entry.member].asked(action)
    return members


def key(about: Work | Message) -> Key:
    """A tensor has the name of the pass that makes it or needs it."""
    return about.kind.value, about.step, about.item

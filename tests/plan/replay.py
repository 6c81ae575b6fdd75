"""What must hold at one stage, checked event by event against a record that knows no schedule."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from isthmus.plan.types import Action, Arrived, Done, Event, Optimize, Pass, Report, Resized, Run, Send
from tests.plan.driver import Entry

Key = tuple[Pass, int, int]


@dataclass(slots=True)
class Replay:
    """One stage of a log; `computed` and `sends` are what it asked for, in order."""

    is_first: bool
    is_last: bool
    is_trained: bool
    window: int
    computed: list[Run | Optimize | Report] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    inputs: set[Key] = field(default_factory=set)
    outputs: set[Key] = field(default_factory=set)
    kept: set[tuple[int, int]] = field(default_factory=set)
    unsent: set[Key] = field(default_factory=set)
    running: Action | None = None

    def passes(self, kind: Pass, step: int) -> list[int]:
        runs = [one for one in self.computed if isinstance(one, Run)]
        return [run.microbatch for run in runs if (run.kind, run.step) == (kind, step)]

    def happened(self, event: Event) -> None:
        match event:
            case Arrived():
                self.inputs.add(_key(event))
            case Resized(window=window):
                self.window = window
            case Done(action=Send() as send):
                self.unsent.discard(_key(send))
            case Done(action=action):
                assert action == self.running
                self.running = None
                if isinstance(action, Run):
                    self._ended(action)

    def asked(self, action: Action) -> None:
        match action:
            case Send():
                assert _key(action) in self.outputs
                self.sends.append(action)
            case Run() | Optimize() | Report():
                assert self.running is None, "compute is one resource"
                self.running = action
                self.computed.append(action)
                if isinstance(action, Run):
                    self._began(action)

    def _began(self, run: Run) -> None:
        needs_input = not (self.is_last if run.kind is Pass.BACKWARD else self.is_first)
        assert not needs_input or _key(run) in self.inputs, "runs before its input is there"
        if run.kind is Pass.BACKWARD:
            assert (Pass.FORWARD, run.step, run.microbatch) in self.outputs
        elif run.kind is Pass.FORWARD and self.is_trained:
            self.kept.add((run.step, run.microbatch))
            assert len(self.kept) <= self.window, "more in flight than the window allows"
        else:
            self.unsent.add(_key(run))
            assert len(self.unsent) <= self.window, "more in flight than the window allows"

    def _ended(self, run: Run) -> None:
        self.outputs.add(_key(run))
        if run.kind is Pass.BACKWARD:
            self.kept.remove((run.step, run.microbatch))
        elif self.is_last:
            self.unsent.discard(_key(run))


def replay(log: Sequence[Entry], *, windows: Sequence[int], first_trained: int = 0) -> list[Replay]:
    """Every stage of a log, all checks made."""
    last = len(windows) - 1
    stages = [
        Replay(stage == 0, stage == last, stage >= first_trained, window)
        for stage, window in enumerate(windows)
    ]
    for entry in log:
        stages[entry.stage].happened(entry.event)
        for action in entry.actions:
            stages[entry.stage].asked(action)
    return stages


def _key(event: Arrived | Run | Send) -> Key:
    return event.kind, event.step, event.microbatch

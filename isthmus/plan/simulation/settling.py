"""The end of a step in a simulation, as the workers settle it: tallies go up, the verdict comes down.

Both are urgent and too small to take time on a line. A stage tells the one before it when all its ranks have
run their last backward and the stage behind it has told; the first stage then sets the windows of the next
step from what all have measured in this one.
"""

from collections.abc import Callable, Sequence
from functools import partial

from isthmus.plan.rank_windows import Measured, first_windows, next_windows
from isthmus.plan.scenario import Scenario
from isthmus.plan.simulation.lines import Ways
from isthmus.plan.types import Pass
from isthmus.plan.window import Hop


class _Tally:
    """What one stage has measured in a step, and who has come to its end."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.has_heard = False
        self.busy_s = 0.0
        self.shortest_s: dict[Pass, float] = {}


class Settling:
    """All stages' part in it; `on_verdict` is told the stage and the step when a stage may update."""

    def __init__(
        self, scenario: Scenario, ways: Sequence[Ways], *, on_verdict: Callable[[int, int], None]
    ) -> None:
        self._scenario = scenario
        self._ways = ways
        self._on_verdict = on_verdict
        self._tallies = [_Tally() for _ in scenario.stages]
        self.windows = [scenario.windows or first_windows(scenario, max_in_flight=scenario.max_in_flight)]
        """The windows of each stage's ranks, of every step so far and of the next."""

    def note_pass(self, stage: int, busy_s: float) -> None:
        """A rank of this stage has computed."""
        self._tallies[stage].busy_s += busy_s

    def note_travel(self, stage: int, kind: Pass, travel_s: float) -> None:
        """Something has come to this stage."""
        shortest_s = self._tallies[stage].shortest_s
        shortest_s[kind] = min(travel_s, shortest_s.get(kind, travel_s))

    def end(self, stage: int, step: int) -> None:
        """A rank of this stage has run its last backward of the step."""
        self._tallies[stage].num_ended += 1
        self._tell_up(stage, step)

    def _tell_up(self, stage: int, step: int) -> None:
        tally = self._tallies[stage]
        is_last = stage == len(self._ways)
        if tally.num_ended < self._scenario.stages[stage].num_ranks or not (is_last or tally.has_heard):
            return
        if stage == 0:
            self.windows.append(self._next_windows())
            self._tell_down(0, step)
        else:
            self._ways[stage - 1].up.flow.whisper(partial(self._hear, stage - 1, step))

    def _hear(self, stage: int, step: int) -> None:
        self._tallies[stage].has_heard = True
        self._tell_up(stage, step)

    def _tell_down(self, stage: int, step: int) -> None:
        if stage < len(self._ways):
            self._ways[stage].down.flow.whisper(partial(self._tell_down, stage + 1, step))
        self._tallies[stage] = _Tally()
        self._on_verdict(stage, step)

    def _next_windows(self) -> tuple[int, ...]:
        scenario = self._scenario
        if scenario.windows is not None or not scenario.policy.hides_round_trips:
            return self.windows[0]
        measured = Measured(
            pass_s=tuple(tally.busy_s / scenario.num_microbatches for tally in self._tallies),
            hops=tuple(self._measured_hop(index) for index in range(len(self._ways))),
        )
        return next_windows(scenario, measured, max_in_flight=scenario.max_in_flight)

    def _measured_hop(self, index: int) -> Hop:
        """Travel less latency is time on the line; to frozen stages nothing comes back."""
        before, behind = self._tallies[index : index + 2]
        forward_s = behind.shortest_s.get(Pass.FORWARD, 0.0)
        backward_s = before.shortest_s.get(Pass.BACKWARD, forward_s)
        load = self._scenario.hops[index]
        on_line_s = max(0.0, (forward_s + backward_s) / 2 - load.line.latency_s)
        return Hop(
            forward_s=on_line_s,
            backward_s=on_line_s,
            latency_s=load.line.latency_s,
            coding_s=load.forward_coding_s + load.backward_coding_s,
        )

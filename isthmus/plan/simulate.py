"""Drives the very scheduler that the workers run, on a virtual clock.

    clock ──► Arrived, Done ──► PipelineScheduler ──► Run       its end, after the time of a pass
      ▲                                           ──► Send      coded, on the line, under way, Arrived
      └───────────────────────────────────────────┴─► Optimize  settled with the other stages, the next step

There is one scheduler per rank of each stage. Micro-batches go to ranks by `routing`; messages of one pair of
ranks keep their order, and pairs share their line, by `flows`; steps end, and windows change, by `settling`.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from isthmus.events import Span
from isthmus.plan.faults import CloudFault, CloudFaultKind
from isthmus.plan.pipeline import PipelineScheduler
from isthmus.plan.routing import route, shares
from isthmus.plan.scenario import Scenario
from isthmus.plan.simulation.clockwork import Clock
from isthmus.plan.simulation.copies import Checkpointing, Copies
from isthmus.plan.simulation.lines import Disturbance, Way, open_ways, pace_of
from isthmus.plan.simulation.settling import Settling
from isthmus.plan.simulation.timeline import LineTraffic, SimulatedStep, Stopped, Timeline
from isthmus.plan.types import Action, Arrived, Done, Event, Lost, Optimize, Pass, Resized, Run, Send, Started


def simulate(
    scenario: Scenario,
    *,
    num_steps: int = 1,
    seed: int = 0,
    faults: Sequence[Disturbance] = (),
    checkpoint: Checkpointing | None = None,
) -> Timeline:
    """Run a scenario for so many steps; the seed draws the jitter, and nothing else is random."""
    return _Simulation(scenario, num_steps, seed, faults, checkpoint).run()


class _Stage:
    """One stage: how long its ranks take, and how many have updated their weights in this step."""

    def __init__(self, index: int, scenario: Scenario, faults: Sequence[Disturbance]) -> None:
        load = scenario.stages[index]
        self.index = index
        self.pace = pace_of(faults, load.cloud)
        self.duration_s = {Pass.FORWARD: load.forward_s, Pass.BACKWARD: load.backward_s}
        self.update_s = load.update_s
        self.ranks: list[_Rank] = []
        self.num_updated = 0


class _Rank:
    """One rank: its scheduler, and when the thread that codes what it sends each way is free."""

    def __init__(self, stage: _Stage, index: int, track: str, scheduler: PipelineScheduler) -> None:
        self.stage = stage
        self.index = index
        self.track = track
        self.on = scheduler.on
        self.coded_s = dict.fromkeys((Pass.FORWARD, Pass.BACKWARD), 0.0)


class _Route:
    """Who takes which micro-batch of one step: ranks and shares by stage."""

    def __init__(self, scenario: Scenario, step: int) -> None:
        counts = [stage.num_ranks for stage in scenario.stages]
        by_count = {
            one: route(speeds=[1.0] * one, num_microbatches=scenario.num_microbatches, step=step)
            for one in counts
        }
        taken = {one: shares(ranks, num_ranks=one) for one, ranks in by_count.items()}
        self.ranks = [by_count[one] for one in counts]
        self.shares = [taken[one] for one in counts]


class _Simulation:
    """One run from its start to its end."""

    def __init__(
        self,
        scenario: Scenario,
        num_steps: int,
        seed: int,
        faults: Sequence[Disturbance],
        checkpoint: Checkpointing | None,
    ) -> None:
        self._scenario = scenario
        self._num_steps = num_steps
        self._clock = Clock()
        share = 0.0 if checkpoint is None else checkpoint.share
        self._ways = open_ways(self._clock, scenario, seed=seed, faults=faults, share=share)
        self._settling = Settling(scenario, self._ways, on_verdict=self._update)
        self._copies = Copies(self._clock, checkpoint, self._ways, note=self._note)
        self._stages = [_Stage(index, scenario, faults) for index in range(scenario.num_stages)]
        for stage in self._stages:
            stage.ranks = self._ranks(stage)
        self._routes: dict[int, _Route] = {}
        self._spans: list[Span] = []
        self._ends_s: list[float] = []
        self._busy_s: defaultdict[int, list[float]] = defaultdict(lambda: [0.0] * scenario.num_stages)
        self._stopped: Stopped | None = None
        for fault in faults:
            if isinstance(fault, CloudFault) and fault.kind is CloudFaultKind.GONE:
                self._clock.at(fault.at_s, self._lose, fault.cloud)

    def run(self) -> Timeline:
        """Let everything happen."""
        for stage in self._stages:
            for rank in stage.ranks:
                self._start(rank, 0)
        self._clock.run()
        if self._stopped is None and len(self._ends_s) < self._num_steps:
            raise ValueError(f"with windows {self._settling.windows[-1]} stages wait for each other for ever")
        return Timeline(
            spans=tuple(self._spans),
            steps=tuple(self._step(number) for number in range(len(self._ends_s))),
            traffic=self._traffic(),
            stopped=self._stopped,
        )

    def _ranks(self, stage: _Stage) -> list[_Rank]:
        scenario, load = self._scenario, self._scenario.stages[stage.index]
        tracks = [f"{load.cloud}/{index}" for index in range(load.num_ranks)]
        return [
            _Rank(
                stage,
                index,
                track if load.num_ranks > 1 else load.cloud,
                PipelineScheduler(
                    stage=stage.index,
                    num_stages=scenario.num_stages,
                    policy=scenario.policy,
                    window=self._settling.windows[0][stage.index],
                    first_trained=scenario.first_trained,
                ),
            )
            for index, track in enumerate(tracks)
        ]

    # What the schedulers ask for.

    def _start(self, rank: _Rank, step: int) -> None:
        microbatches = self._route(step).shares[rank.stage.index][rank.index]
        self._feed(rank, Started(step=step, microbatches=microbatches))

    def _feed(self, rank: _Rank, event: Event) -> None:
        for action in rank.on(event):
            self._carry_out(rank, action)

    def _carry_out(self, rank: _Rank, action: Action) -> None:
        match action:
            case Run():
                now_s = self._clock.now_s
                end_s = rank.stage.pace.end_s(now_s, rank.stage.duration_s[action.kind])
                self._clock.at_end(end_s, self._ran, rank, action, now_s)
            case Send():
                self._send(rank, action)
            case Optimize():
                self._settling.end(rank.stage.index, action.step)

    def _ran(self, rank: _Rank, run: Run, start_s: float) -> None:
        stage, busy_s = rank.stage.index, self._clock.now_s - start_s
        self._note(rank.track, run.kind.value, _name(run), start_s)
        self._settling.note_pass(stage, busy_s)
        self._busy_s[run.step][stage] += busy_s
        self._feed(rank, Done(action=run))

    def _send(self, rank: _Rank, send: Send) -> None:
        if send.kind is Pass.BACKWARD:
            receiver = self._stages[rank.stage.index - 1]
            way = self._ways[receiver.index].up
        else:
            receiver = self._stages[rank.stage.index + 1]
            way = self._ways[rank.stage.index].down
        peer = receiver.ranks[self._route(send.step).ranks[receiver.index][send.microbatch]]
        if way.coding_s:
            begun_s = max(self._clock.now_s, rank.coded_s[send.kind])
            rank.coded_s[send.kind] = coded_s = begun_s + way.coding_s
            self._clock.at(coded_s, self._coded, rank, peer, send, way, begun_s)
        else:
            self._put_on_line(rank, peer, send, way)

    def _coded(self, rank: _Rank, peer: _Rank, send: Send, way: Way, begun_s: float) -> None:
        self._note(way.track, "encode", _name(send), begun_s, way.num_bytes)
        self._put_on_line(rank, peer, send, way)

    def _put_on_line(self, rank: _Rank, peer: _Rank, send: Send, way: Way) -> None:
        way.flow.send(
            (rank.index, peer.index),
            way.num_bytes,
            sent=partial(self._feed, rank, Done(action=send)),
            arrived=partial(self._arrived, peer, send, way, self._clock.now_s),
        )

    def _arrived(self, rank: _Rank, send: Send, way: Way, start_s: float) -> None:
        self._note(way.track, "transfer", _name(send), start_s, way.num_bytes)
        self._settling.note_travel(rank.stage.index, send.kind, self._clock.now_s - start_s)
        self._feed(rank, Arrived(kind=send.kind, step=send.step, microbatch=send.microbatch))

    # The end of a step.

    def _update(self, stage_index: int, step: int) -> None:
        stage, now_s = self._stages[stage_index], self._clock.now_s
        stage.num_updated = 0
        end_s = stage.pace.end_s(now_s, stage.update_s)
        for rank in stage.ranks:
            self._clock.at_end(end_s, self._updated, rank, step, now_s)

    def _updated(self, rank: _Rank, step: int, start_s: float) -> None:
        stage = rank.stage
        self._note(rank.track, "optimize", f"optimize {step}", start_s)
        self._busy_s[step][stage.index] += self._clock.now_s - start_s
        stage.num_updated += 1
        if stage.num_updated == len(stage.ranks):
            self._copies.offer(stage.index, step + 1)
            if stage.index == 0:
                self._ends_s.append(self._clock.now_s)
        self._feed(rank, Done(action=Optimize(step=step)))
        before, window = (self._settling.windows[one][stage.index] for one in (step, step + 1))
        if window != before:
            self._feed(rank, Resized(window=window))
        if step + 1 < self._num_steps:
            self._start(rank, step + 1)

    def _lose(self, cloud: str) -> None:
        if len(self._ends_s) == self._num_steps or all(one.cloud != cloud for one in self._scenario.stages):
            return
        for rank in (rank for stage in self._stages for rank in stage.ranks):
            rank.on(Lost(peer=cloud))
        self._stopped = Stopped(
            cloud=cloud,
            at_s=self._clock.now_s,
            step=len(self._ends_s),
            safe_step=self._copies.safe_step,
            lost_s=self._clock.now_s - self._copies.safe_s,
        )
        self._clock.stop()

    # What is told.

    def _note(self, track: str, kind: str, name: str, start_s: float, num_bytes: int = 0) -> None:
        end_s = self._clock.now_s
        self._spans.append(
            Span(track=track, name=name, kind=kind, start_s=start_s, end_s=end_s, num_bytes=num_bytes)
        )

    def _step(self, number: int) -> SimulatedStep:
        totals = zip(self._busy_s[number], self._scenario.stages, strict=True)
        return SimulatedStep(
            step=number,
            start_s=self._ends_s[number - 1] if number else 0.0,
            end_s=self._ends_s[number],
            busy_s=tuple(busy_s / stage.num_ranks for busy_s, stage in totals),
            windows=self._settling.windows[number],
        )

    def _traffic(self) -> tuple[LineTraffic, ...]:
        return tuple(
            LineTraffic(
                between=one.between,
                down_bytes=one.down.flow.num_bytes,
                up_bytes=one.up.flow.num_bytes,
                checkpoint_bytes=one.down.flow.background_bytes + one.up.flow.background_bytes,
            )
            for one in self._ways
        )

    def _route(self, step: int) -> _Route:
        if step not in self._routes:
            self._routes[step] = _Route(self._scenario, step)
        return self._routes[step]


def _name(about: Run | Send) -> str:
    return f"{about.kind.value} {about.step}.{about.microbatch}"

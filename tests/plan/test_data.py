"""Data parallel between clouds in the simulator: properties under any delays, crashes and partitions."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.job.faults import CloudFault, CloudFaultKind, Fault, FaultKind
from isthmus.plan.data import FACTS, DataScheduler
from isthmus.plan.data_times import DataTimes, simulated_data
from isthmus.plan.lines import Disturbance
from isthmus.plan.membership import (
    DataEnded,
    DataParallel,
    DataState,
    Ledger,
    Piece,
    Report,
    RoundCommit,
    RoundEnded,
    Ruling,
    Share,
    Snapshot,
    weights_of,
)
from isthmus.plan.orders import Orders
from isthmus.plan.scenario import Line
from isthmus.plan.simulate import Timeline, simulate
from isthmus.plan.types import (
    Arrived,
    Done,
    Facts,
    Joined,
    Lost,
    Member,
    Message,
    MessageKind,
    Outcome,
    ScheduleError,
    Send,
    Started,
    Stop,
    WorkKind,
)
from tests.plan.recorder import Recorded

modest = settings(max_examples=40)
ALL_FACTS: dict[MessageKind, type[Facts]] = {**FACTS, MessageKind.ORDER: Orders}


def ranks(cloud: str, number: int = 1) -> tuple[Member, ...]:
    return tuple(Member(cloud, rank) for rank in range(number))


def data(num_clouds: int, num_ranks: int = 1, **more: object) -> DataParallel:
    """Rounds of three fragments, each 6 steps."""
    bare = DataParallel(
        clouds=tuple(ranks(f"c{index}", num_ranks) for index in range(num_clouds)),
        num_steps=24,
        num_microbatches=4,
        sync_every=6,
        num_fragments=3,
        delay_steps=1,
        quorum=1,
        grace_s=2.0,
        wait_s=1e5,
    )
    return replace(bare, **more)  # type: ignore[arg-type]


def times(spec: DataParallel, **more: object) -> DataTimes:
    """Steps of a second."""
    number = len(spec.clouds)
    bare = DataTimes(
        forward_s=(0.075,) * number,
        backward_s=(0.175,) * number,
        num_parameters=3_000_000,
        sum_s=0.01,
        outer_s=0.02,
    )
    return replace(bare, **more)  # type: ignore[arg-type]


def mesh(spec: DataParallel, line: Line | None = None) -> dict[tuple[str, str], Line]:
    """A line between each two clouds."""
    line = line or Line(down_bps=100e6, up_bps=100e6, latency_s=0.05)
    return dict.fromkeys(combinations((cloud[0].cloud for cloud in spec.clouds), 2), line)


def gone(cloud: str, at_s: float, duration_s: float = 0.0) -> CloudFault:
    return CloudFault(at_s=at_s, kind=CloudFaultKind.GONE, cloud=cloud, duration_s=duration_s)


def cut(first: str, second: str, at_s: float, duration_s: float) -> Fault:
    return Fault(at_s=at_s, kind=FaultKind.CUT, between=(first, second), duration_s=duration_s)


def run(
    spec: DataParallel,
    how: DataTimes | None = None,
    lines: dict[tuple[str, str], Line] | None = None,
    faults: Sequence[Disturbance] = (),
    patience_s: float = 0.0,
) -> tuple[Recorded, Timeline]:
    """Simulate; what all runs have in common is checked here."""
    recorded = Recorded(simulated_data(spec, how or times(spec)))
    timeline = simulate(
        recorded, lines or mesh(spec), faults=faults, patience_s=patience_s, line_patience_s=1.0
    )
    recorded.check(ALL_FACTS)
    return recorded, timeline


# Oracles.


def rounds_of(timeline: Timeline) -> list[tuple[Member, float, RoundEnded]]:
    return [(one.member, one.at_s, one.fact) for one in timeline.told if isinstance(one.fact, RoundEnded)]


def ends_of(timeline: Timeline) -> dict[Member, DataEnded]:
    return {one.member: one.fact for one in timeline.told if isinstance(one.fact, DataEnded)}


def leaders(spec: DataParallel) -> list[Member]:
    return [cloud[0] for cloud in spec.clouds]


def final_chain(timeline: Timeline, spec: DataParallel) -> list[RoundEnded]:
    """The rounds behind the digest on which all clouds agree at the end; others were given up."""
    ends = ends_of(timeline)
    assert len({(end.rounds, end.digest) for end in ends.values()}) == 1
    (digest,) = {end.digest for end in ends.values()}
    known: defaultdict[int, dict[str, RoundEnded]] = defaultdict(dict)
    for _, _, told in rounds_of(timeline):
        known[told.number][told.digest] = told
    chain: list[RoundEnded] = []
    for number in reversed(range(spec.num_rounds)):
        chain.append(known[number][digest])
        before = [*known[number - 1]] if number else [""]
        (digest,) = (one for one in before if follows(one, chain[-1]))
    return chain[::-1]


def follows(digest: str, told: RoundEnded) -> bool:
    ledger = Ledger(num_clouds=1, num_fragments=1)
    ledger.replace(told.number, digest, [0])
    ledger.complete(told.number, RoundCommit(view=told.view, shares=told.shares))
    return ledger.knows(told.number + 1, told.digest)


def check_shares(chain: Sequence[RoundEnded], spec: DataParallel) -> dict[tuple[int, int], int]:
    """Each share begins where the one before ended, or where all fragments of a replaced cloud were.

    Returns up to where each cloud is in each fragment.
    """
    until: dict[tuple[int, int], int] = {}
    least: dict[int, list[int]] = defaultdict(lambda: [0])
    for told in chain:
        fragment = told.number % spec.num_fragments
        for share in told.shares:
            before = until.get((share.cloud, fragment), 0)
            assert share.until >= share.since
            assert share.since == before or (share.since <= before and share.since in least[share.cloud])
            until[share.cloud, fragment] = share.until
        for cloud in range(len(spec.clouds)):
            least[cloud].append(min(until.get((cloud, one), 0) for one in range(spec.num_fragments)))
    return until


def check_all_once(timeline: Timeline, spec: DataParallel) -> None:
    """Every step of a cloud is in one share of each fragment, unless it was too late for the last one."""
    chain = final_chain(timeline, spec)
    last = check_shares(chain, spec)
    assert all(any(share.num_tokens for share in told.shares) for told in chain)
    for cloud, leader in enumerate(leaders(spec)):
        for fragment in range(spec.num_fragments):
            shares = [
                share
                for told in chain[fragment :: spec.num_fragments]
                for share in told.shares
                if share.cloud == cloud
            ]
            assert all(one.until == other.since for one, other in pairwise(shares))
            assert not shares or shares[0].since == 0
            if any(share.cloud == cloud for share in chain[fragment :: spec.num_fragments][-1].shares):
                assert last[cloud, fragment] == ends_of(timeline)[leader].cursor
            else:
                assert spec.quorum < len(spec.clouds)


# What is drawn.


@st.composite
def specs(draw: st.DrawFn, *, min_clouds: int = 1) -> DataParallel:
    number, num_ranks = draw(st.integers(min_clouds, 4)), draw(st.integers(1, 2))
    sync_every = draw(st.integers(1, 8))
    return DataParallel(
        clouds=tuple(ranks(f"c{index}", num_ranks) for index in range(number)),
        num_steps=draw(st.integers(1, 24)),
        num_microbatches=draw(st.integers(1, 2)),
        sync_every=sync_every,
        num_fragments=draw(st.integers(1, sync_every)),
        delay_steps=draw(st.integers(0, sync_every - 1)),
        quorum=draw(st.integers(1, number)),
        grace_s=draw(st.sampled_from([0.0, 0.5, 5.0])),
        save_every_s=draw(st.sampled_from([None, 0.0, 4.0])),
        gathers=draw(st.booleans()),
        wait_s=1e5,
    )


@st.composite
def times_of(draw: st.DrawFn, spec: DataParallel) -> DataTimes:
    """Clouds of different speeds."""
    passes = st.floats(0.05, 1.0)
    return DataTimes(
        forward_s=tuple(draw(passes) for _ in spec.clouds),
        backward_s=tuple(draw(passes) for _ in spec.clouds),
        update_s=draw(st.sampled_from([0.0, 0.1])),
        sum_s=draw(st.sampled_from([0.0, 0.2])),
        outer_s=draw(st.sampled_from([0.0, 0.2])),
        mix_s=draw(st.sampled_from([0.0, 0.1])),
        coding_s=draw(st.sampled_from([0.0, 0.1])),
        num_parameters=draw(st.sampled_from([0, 100_000, 1_000_000])),
    )


@st.composite
def lines_of(draw: st.DrawFn, spec: DataParallel) -> dict[tuple[str, str], Line]:
    rate, jitter = st.floats(1e6, 1e9), st.sampled_from([0.0, 0.3])
    return {
        pair: Line(
            down_bps=draw(rate), up_bps=draw(rate), latency_s=draw(st.floats(0.0, 0.4)), jitter_s=draw(jitter)
        )
        for pair in mesh(spec)
    }


@st.composite
def faults_of(draw: st.DrawFn, spec: DataParallel, *, crashes: bool = True) -> list[Disturbance]:
    """Clouds that vanish and return, and lines that are cut for a while."""
    names = [cloud[0].cloud for cloud in spec.clouds]
    kinds: list[st.SearchStrategy[Disturbance]] = []
    if crashes:
        kinds.append(st.builds(gone, st.sampled_from(names), st.floats(0.0, 30.0), st.floats(1.0, 20.0)))
    if len(names) > 1:
        pairs = st.sampled_from(list(combinations(names, 2)))
        cuts = st.builds(
            lambda pair, at_s, length_s: cut(pair[0], pair[1], at_s, length_s),
            pairs,
            st.floats(0.0, 30.0),
            st.floats(0.1, 20.0),
        )
        kinds.append(cuts)
    return draw(st.lists(st.one_of(kinds), min_size=1, max_size=6)) if kinds else []


# Without losses.


@modest
@given(st.data())
def test_all_clouds_apply_the_same_rounds_and_every_step_is_in_them_once(draw: st.DataObject) -> None:
    spec = draw.draw(specs())
    recorded, timeline = run(spec, draw.draw(times_of(spec)), draw.draw(lines_of(spec)))
    assert all(recorded.outcome(member) is Outcome.FINISHED for member in spec.members)
    order = defaultdict(list)
    for member, _, told in rounds_of(timeline):
        order[member].append((told.number, told.digest, told.shares))
    assert all(one == order[leaders(spec)[0]] for one in order.values())
    assert [number for number, _, _ in order[leaders(spec)[0]]] == list(range(spec.num_rounds))
    check_all_once(timeline, spec)


def test_exact_synchronisation_is_every_step_without_delay() -> None:
    spec = data(3, num_steps=8, sync_every=1, num_fragments=1, delay_steps=0, quorum=3)
    _, timeline = run(spec)
    for told in final_chain(timeline, spec):
        spans = {(share.since, share.until) for share in told.shares}
        assert (spans, len(told.shares)) == ({(told.number, told.number + 1)}, 3)


def test_one_cloud_alone_needs_nobody() -> None:
    spec = data(1)
    _, timeline = run(spec, lines={})
    check_all_once(timeline, spec)


@pytest.mark.parametrize("num_clouds", [2, 3, 4])
def test_traffic_is_that_of_a_ring(num_clouds: int) -> None:
    """2 (R - 1) / R N bits leave each cloud in H steps."""
    spec = data(num_clouds, num_steps=60)
    how = times(spec, num_parameters=12_000_000)
    _, timeline = run(spec, how)
    num_passes = spec.num_rounds / spec.num_fragments
    expected = num_passes * 2 * (num_clouds - 1) / num_clouds * 12_000_000 * how.delta_bits / 8
    for cloud in leaders(spec):
        sent = sum(
            one.down_bytes if one.between[0] == cloud.cloud else one.up_bytes
            for one in timeline.traffic
            if cloud.cloud in one.between
        )
        assert sent == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("num_clouds", [2, 3, 4])
def test_streaming_is_overlapped_where_the_bandwidth_suffices(num_clouds: int) -> None:
    """25 M parameters of 4 bits, H = 30, 0.6 of the bandwidth used, 100 ms: the recipe's bound."""
    spec = data(
        num_clouds,
        num_steps=300,
        num_microbatches=4,
        sync_every=30,
        num_fragments=10,
        delay_steps=4,
        quorum=num_clouds,
    )
    step_s = 4 * 0.1
    traffic_bits = 2 * (num_clouds - 1) / num_clouds * 25e6 * 4
    bandwidth_bps = traffic_bits / (spec.sync_every * step_s) / 0.6
    # Each cloud has this bandwidth, and divides it between its lines.
    line = Line(
        down_bps=bandwidth_bps / (num_clouds - 1), up_bps=bandwidth_bps / (num_clouds - 1), latency_s=0.1
    )
    how = times(
        spec, forward_s=(0.03,) * num_clouds, backward_s=(0.07,) * num_clouds, num_parameters=25_000_000
    )
    _, timeline = run(spec, how, mesh(spec, line))
    steps_s = timeline.steps[-1].end_s / spec.num_steps
    assert steps_s <= 1.02 * step_s
    check_all_once(timeline, spec)


def test_without_delay_the_same_exchange_is_not_overlapped() -> None:
    spec = data(2, num_steps=60, delay_steps=0)
    _, timeline = run(spec)
    late = replace(spec, delay_steps=1)
    assert timeline.steps[-1].end_s > run(late)[1].steps[-1].end_s + 3.0


# Unequal clouds.


def test_a_slow_cloud_runs_fewer_steps_and_is_in_every_round() -> None:
    spec = data(2, num_steps=60, grace_s=10.0)
    how = times(spec, forward_s=(0.075, 0.25), backward_s=(0.175, 0.5))
    _, timeline = run(spec, how)
    fast, slow = (ends_of(timeline)[leader].cursor for leader in leaders(spec))
    assert (fast, 20 <= slow <= 40) == (60, True)
    assert all(len(told.shares) == 2 for told in final_chain(timeline, spec))
    check_all_once(timeline, spec)


def test_weights_are_the_tokens_of_a_share() -> None:
    spec = data(2, num_steps=60, num_microbatches=2)
    how = times(spec, forward_s=(0.15, 0.25), backward_s=(0.35, 0.75), microbatch_tokens=100)
    _, timeline = run(spec, how)
    for told in final_chain(timeline, spec):
        assert all(share.num_tokens == 200 * (share.until - share.since) for share in told.shares)


def test_a_round_does_not_wait_longer_than_its_grace_period() -> None:
    """A cloud with a thin line has its deltas in the next round of the fragment."""
    spec = data(3, quorum=2, grace_s=0.5)
    thin = Line(down_bps=4e6, up_bps=4e6, latency_s=0.05)
    lines = {pair: thin if "c2" in pair else line for pair, line in mesh(spec).items()}
    _, timeline = run(spec, lines=lines)
    chain = final_chain(timeline, spec)
    assert any(len(told.shares) == 2 for told in chain)
    check_shares(chain, spec)


# Losses.


def test_survivors_continue_at_once_and_a_cloud_that_returns_ends_with_the_same_state() -> None:
    spec = data(3, num_steps=48, quorum=2, grace_s=2.0, save_every_s=3.0)
    recorded, timeline = run(spec, faults=[gone("c2", 13.3, 9.0)])
    applied_s = [at_s for member, at_s, _ in rounds_of(timeline) if member == Member("c0")]
    between = [after - before for before, after in pairwise(applied_s)]
    assert max(between) <= 2.0 + spec.grace_s
    assert all(recorded.outcome(member) is Outcome.FINISHED for member in spec.members)
    chain = final_chain(timeline, spec)
    check_shares(chain, spec)
    assert {len(told.live) for told in chain} == {2, 3}
    assert {len(told.participating) for told in chain} >= {2, 3}
    assert len(chain[-1].shares) == 3
    assert len(recorded.lives[Member("c2")]) == 2


def test_a_survivor_keeps_its_local_steps() -> None:
    """The cloud that vanishes had sent its last shard to one of the others only."""
    spec = data(3, quorum=2)
    for at_s in (7.1, 7.15, 7.2, 7.25, 7.3):
        _, timeline = run(spec, faults=[gone("c1", at_s)])
        for leader in (Member("c0"), Member("c2")):
            assert ends_of(timeline)[leader].cursor == spec.num_steps


def test_a_newcomer_never_gives_its_state_away() -> None:
    """A cloud that has lost everything comes back as the first in order, and is the source of nothing."""
    spec = data(3, num_steps=48, quorum=2)
    recorded, timeline = run(spec, faults=[gone("c0", 20.0, 5.0)])
    chain = final_chain(timeline, spec)
    assert {told.number: told.digest for told in chain if told.number < 9} == {
        told.number: told.digest
        for member, _, told in rounds_of(timeline)
        if member == Member("c1") and told.number < 9
    }
    second = recorded.lives[Member("c0")][1]
    kinds = {action.message.kind for action in second.actions if isinstance(action, Send)}
    assert MessageKind.STATE not in kinds


@pytest.mark.parametrize("on_partition", ["wait", "continue"])
@pytest.mark.parametrize("away_s", [3.0, 8.0, 20.0])
def test_a_stale_newcomer_that_is_the_first_in_order_is_the_source_of_nothing(
    on_partition: Literal["wait", "continue"], away_s: float
) -> None:
    """It comes back with an old save, and a donor is lost while its state is under way."""
    spec = data(3, num_steps=60, quorum=1, save_every_s=2.0, on_partition=on_partition)
    slow = Line(down_bps=20e6, up_bps=20e6, latency_s=0.05)
    lost = [gone("c1", 15.0 + away_s + delay_s, 6.0) for delay_s in (0.2, 1.0, 3.0)]
    for donor in lost:
        recorded, timeline = run(spec, lines=mesh(spec, slow), faults=[gone("c0", 15.0, away_s), donor])
        chain = {told.number: told.digest for told in final_chain(timeline, spec)}
        known = {told.number: told.digest for member, _, told in rounds_of(timeline) if member.cloud == "c2"}
        # The cloud that was there all the time has never given up a round.
        assert known == {number: chain[number] for number in known}
        second = recorded.lives[Member("c0")][1]
        before_s = next(
            now_s
            for event, now_s, _ in second.log
            if isinstance(event, Done) and isinstance(event.work.facts, Snapshot)
        )
        sent = [one for _, now_s, every in second.log if now_s < before_s for one in every]
        kinds = {one.message.kind for one in sent if isinstance(one, Send)}
        # It may sum what others send for its shard, but nothing of its own is in that.
        assert not kinds & {MessageKind.STATE, MessageKind.DELTA}


def test_views_after_all_have_restarted_are_above_those_that_were_saved() -> None:
    """Else a cloud with an old state of a high view would rank before one with a new state."""
    spec = data(2)
    scheduler = DataScheduler(spec, spec.clouds[0])
    cursors = (0,) * 6
    state = DataState(
        view=999_999,
        rounds=0,
        digest="",
        cursors=cursors,
        step=0,
        cursor=0,
        mixed=0,
        since=(0, 0, 0),
        num_tokens=(0, 0, 0),
    )
    actions = scheduler.on(Started(0, state, restarts=1), 0.0)
    views = [
        one.message.facts.view
        for one in actions
        if isinstance(one, Send) and isinstance(one.message.facts, Ruling)
    ]
    assert views
    assert min(views) > state.view


@settings(max_examples=12)
@given(st.floats(8.0, 15.0), st.integers(0, 2), st.sampled_from([0.5, 2.0, 4.0]))
def test_an_open_round_commits_within_a_second_of_its_due_time_and_the_time_out(
    at_s: float, cloud: int, timeout_s: float
) -> None:
    """A cloud takes in what it hears when a pass has ended, so passes are short here."""
    spec = data(3, num_steps=100, quorum=2, grace_s=30.0)
    how = times(spec, forward_s=(0.02,) * 3, backward_s=(0.05,) * 3)
    recorded = Recorded(simulated_data(spec, how))
    timeline = simulate(recorded, mesh(spec), faults=[gone(f"c{cloud}", at_s)], patience_s=timeout_s)
    survivors = [one for one in leaders(spec) if one.cloud != f"c{cloud}"]
    due_s: defaultdict[int, float] = defaultdict(float)
    for leader in survivors:
        for event, now_s, _ in recorded.lives[leader][0].log:
            if isinstance(event, Done) and event.work.kind is WorkKind.DELTA:
                due_s[event.work.item] = max(due_s[event.work.item], now_s)
    committed = [(now_s, told.number) for member, now_s, told in rounds_of(timeline) if member in survivors]
    assert {number for _, number in committed} == set(range(spec.num_rounds))
    for now_s, number in committed:
        # A round that was due before the loss waits for the time-out; later ones do not.
        latest_s = due_s[number] if due_s[number] < at_s - 1.0 else max(due_s[number], at_s + timeout_s)
        assert now_s <= latest_s + 1.0


def check_donors(recorded: Recorded, spec: DataParallel) -> None:
    """The donor has no fewer rounds than any cloud that has accepted the view and comes from a view as new.

    What an older view has completed and not committed is superseded by a newer one, which had a majority.
    """
    for leader in leaders(spec):
        for life in recorded.lives[leader]:
            reports: dict[int, list[Report]] = defaultdict(list)
            installed = {0}
            for event, _, actions in life.log:
                if isinstance(event, Arrived) and isinstance(event.message.facts, Report):
                    reports[event.message.facts.view].append(event.message.facts)
                for action in actions:
                    if isinstance(action, Send) and isinstance(action.message.facts, Ruling):
                        ruling = action.message.facts
                        if ruling.is_installed and ruling.view not in installed:
                            installed.add(ruling.view)
                            best = ruling.base_view, ruling.base
                            found = [(one.current_view, one.complete) for one in reports[ruling.view]]
                            assert max(found, default=best) <= best


@pytest.mark.slow
@settings(max_examples=250)
@given(st.data())
def test_whatever_fails_and_returns_all_clouds_end_with_the_same_rounds(draw: st.DataObject) -> None:
    spec = draw.draw(specs(min_clouds=2))
    faults = draw.draw(faults_of(spec))
    recorded, timeline = run(
        spec,
        draw.draw(times_of(spec)),
        draw.draw(lines_of(spec)),
        faults,
        draw.draw(st.sampled_from([0.0, 2.0])),
    )
    assert ends_of(timeline)
    if any(recorded.outcome(member) is Outcome.FAILED for member in spec.members):
        # The others have finished while this one did not see all of them.
        end_s = min(one.at_s for one in timeline.told if isinstance(one.fact, DataEnded))
        assert any(one.at_s <= end_s <= one.at_s + one.duration_s + 10.0 for one in faults)
    check_shares(final_chain(timeline, spec), spec)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.data())
def test_a_round_is_never_committed_twice_differently(draw: st.DataObject) -> None:
    """Lines fail in any way, and one cloud of several vanishes and returns, so a majority never forgets."""
    spec = draw.draw(specs(min_clouds=3))
    faults = draw.draw(faults_of(spec, crashes=False))
    faults += draw.draw(
        st.lists(st.builds(gone, st.just("c0"), st.floats(0.0, 30.0), st.floats(1.0, 20.0)), max_size=1)
    )
    recorded, timeline = run(spec, draw.draw(times_of(spec)), draw.draw(lines_of(spec)), faults)
    digests = defaultdict(set)
    for _, _, told in rounds_of(timeline):
        digests[told.number].add(told.digest)
        assert 2 * len(told.live) > len(spec.clouds)
    assert all(len(one) == 1 for one in digests.values())
    check_donors(recorded, spec)


@modest
@given(st.data())
def test_every_run_ends_also_if_clouds_do_not_return(draw: st.DataObject) -> None:
    options: list[Literal["wait", "continue"]] = ["wait", "continue"]
    on_partition = draw.draw(st.sampled_from(options))
    spec = replace(draw.draw(specs(min_clouds=2)), wait_s=200.0, on_partition=on_partition)
    names = st.sampled_from([cloud[0].cloud for cloud in spec.clouds])
    for_good = draw.draw(st.lists(st.builds(gone, names, st.floats(0.0, 20.0)), min_size=1, max_size=2))
    faults = [*draw.draw(faults_of(spec)), *for_good]
    recorded, timeline = run(spec, draw.draw(times_of(spec)), draw.draw(lines_of(spec)), faults)
    outcomes = {recorded.outcome(leader) for leader in leaders(spec)}
    assert timeline.stopped is not None or outcomes - {None}


# Partitions.


def island(spec: DataParallel, clouds: Sequence[str], at_s: float, duration_s: float) -> list[Fault]:
    """Cut all lines between these clouds and the others."""
    return [cut(*pair, at_s, duration_s) for pair in mesh(spec) if (pair[0] in clouds) != (pair[1] in clouds)]


@pytest.mark.parametrize("num_clouds", [2, 4])
def test_two_halves_wait_for_each_other(num_clouds: int) -> None:
    spec = data(num_clouds, num_steps=48)
    clouds = [f"c{index}" for index in range(num_clouds // 2)]
    _, timeline = run(spec, faults=island(spec, clouds, 10.0, 30.0))
    # What was on its way at 10 s, or is decided before they give each other up, is still applied.
    assert not [at_s for _, at_s, _ in rounds_of(timeline) if 13.0 < at_s < 40.0]
    check_all_once(timeline, spec)


def test_with_continue_two_halves_go_on_and_one_history_stays() -> None:
    spec = data(2, num_steps=96, on_partition="continue")
    _, timeline = run(spec, faults=island(spec, ["c0"], 10.0, 30.0))
    alone = {
        member for member, at_s, told in rounds_of(timeline) if 13.0 < at_s < 40.0 and len(told.live) == 1
    }
    assert alone == set(leaders(spec))
    check_shares(final_chain(timeline, spec), spec)


def test_a_majority_goes_on_without_the_rest() -> None:
    spec = data(3, num_steps=60, quorum=2)
    _, timeline = run(spec, faults=island(spec, ["c0"], 10.0, 30.0))
    during = [(member.cloud, told.live) for member, at_s, told in rounds_of(timeline) if 13.0 < at_s < 40.0]
    assert set(during) == {("c1", (1, 2)), ("c2", (1, 2))}
    check_shares(final_chain(timeline, spec), spec)


@pytest.mark.parametrize("pair", [("c0", "c1"), ("c0", "c2"), ("c1", "c2")])
def test_one_line_that_fails_for_long_leaves_two_of_three(pair: tuple[str, str]) -> None:
    spec = data(3, num_steps=60, quorum=2)
    recorded, timeline = run(spec, faults=[cut(*pair, 10.0, 30.0)])
    during = {told.live for _, at_s, told in rounds_of(timeline) if 13.0 < at_s < 40.0}
    assert len(during) == 1
    assert not set(pair) <= {f"c{cloud}" for cloud in during.pop()}
    assert all(recorded.outcome(member) is Outcome.FINISHED for member in spec.members)


def test_a_cloud_that_waits_in_vain_fails_with_a_cure() -> None:
    spec = data(2, wait_s=50.0)
    recorded, _ = run(spec, faults=[gone("c1", 5.0)])
    assert recorded.outcome(Member("c0")) is Outcome.FAILED
    (stop,) = [action for action in recorded.lives[Member("c0")][0].actions if isinstance(action, Stop)]
    assert "c0" in stop.reason
    assert "on_partition" in stop.hint


def test_clouds_that_no_line_joins_exchange_over_a_hub() -> None:
    spec = data(3, num_steps=48, quorum=2)
    star = {pair: line for pair, line in mesh(spec).items() if "c0" in pair}
    recorded, timeline = run(spec, lines=star)
    check_all_once(timeline, spec)
    # Without its hub no two clouds see each other, so both wait until it is back.
    recorded, timeline = run(spec, lines=star, faults=[gone("c0", 10.0, 20.0)])
    assert not [at_s for _, at_s, _ in rounds_of(timeline) if 12.0 < at_s < 30.0]
    assert all(recorded.outcome(member) is Outcome.FINISHED for member in spec.members)
    check_shares(final_chain(timeline, spec), spec)


def test_a_share_over_the_median_of_norms_counts_less() -> None:
    def share(cloud: int, num_tokens: int, norm: float) -> Share:
        return Share(cloud=cloud, since=0, until=1, num_tokens=num_tokens, norm=norm)

    assert weights_of([share(0, 1, 0.0), share(1, 3, 0.0)]) == [0.25, 0.75]
    clipped = weights_of([share(0, 2, 1.0), share(1, 2, 2.0), share(2, 4, 16.0)])
    assert clipped == [0.25, 0.25, 0.5 / 8]
    # Of two the median is their mean.
    assert weights_of([share(0, 1, 1.0), share(1, 1, 3.0)]) == [0.5, 0.5 * 2 / 3]


# What cannot be.


def test_what_belongs_to_an_older_view_is_ignored() -> None:
    spec = data(3)
    scheduler = DataScheduler(spec, spec.clouds[1])
    scheduler.on(Started(0), 0.0)
    scheduler.on(Lost(Member("c0")), 1.0)
    scheduler.on(Joined(Member("c0")), 2.0)
    share = Share(cloud=0, since=0, until=2, num_tokens=2)
    stale = Message(
        MessageKind.DELTA,
        0,
        0,
        Member("c0"),
        (Member("c1"),),
        Piece(view=0, share=share, shard=0, num_shards=3),
    )
    assert scheduler.on(Arrived(stale), 3.0) == ()


@pytest.mark.parametrize(
    "message",
    [
        Message(MessageKind.DELTA, 0, 0, Member("c0"), (Member("c1"),)),
        Message(MessageKind.IDS, 0, 0, Member("c0"), (Member("c1"),)),
        Message(MessageKind.COMMIT, 99, 0, Member("c0"), (Member("c1"),), RoundCommit(view=0, shares=())),
    ],
)
def test_what_is_not_awaited_is_refused(message: Message) -> None:
    spec = data(2)
    scheduler = DataScheduler(spec, spec.clouds[1])
    scheduler.on(Started(0), 0.0)
    with pytest.raises(ScheduleError):
        scheduler.on(Arrived(message), 0.0)


@pytest.mark.parametrize(
    "change",
    [
        {"clouds": ()},
        {"clouds": (ranks("c0"), ranks("c1", 2))},
        {"num_fragments": 7},
        {"delay_steps": 6},
        {"quorum": 3},
        {"num_steps": 0},
    ],
)
def test_what_cannot_work_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"cloud|quorum|sync_every"):
        replace(data(2), **change)  # type: ignore[arg-type]

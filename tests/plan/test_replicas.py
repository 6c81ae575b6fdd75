"""Copies of a model on several clouds: traffic, shares of the work, and what is sustainable."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.job import DataStrategy
from isthmus.plan.codecs import Loss
from isthmus.plan.plan import DataSettings, Form
from isthmus.plan.planner import plan
from isthmus.plan.replicated import (
    data_plans,
    path,
    share_out,
    sync_choices,
    sync_costs,
    sync_loss,
    sync_note,
    sync_traffic,
)
from isthmus.plan.scenario import Line, StageLoad
from isthmus.plan.study import study
from tests.plan.cures import overrides, tables, ways
from tests.plan.jobs import THIRD_CLOUD, link, two_clouds

BILLION = 10**9
DATA = "strategy.kind=data"


def lines(*pairs: tuple[int, int], bps: float = 1e9) -> dict[tuple[int, int], Line]:
    """The lines between these clouds, both ways."""
    line = Line(down_bps=bps, up_bps=bps, latency_s=0.05)
    return {one: line for pair in pairs for one in (pair, pair[::-1])}


@given(st.integers(2, 6))
def test_traffic_is_that_of_a_ring(num_clouds: int) -> None:
    every = lines(*combinations(range(num_clouds), 2))
    traffic = sync_traffic(range(num_clouds), every, num_bytes=4.0)
    for cloud in range(num_clouds):
        sent = sum(number for (source, _), number in traffic.items() if source == cloud)
        assert sent == pytest.approx(2 * (num_clouds - 1) / num_clouds * 4.0)


def test_what_is_not_linked_goes_through_others() -> None:
    two = lines((0, 1), (1, 2))
    assert path(0, 2, two) == (0, 1, 2)
    assert path(0, 3, two) == ()
    traffic = sync_traffic(range(3), two, num_bytes=3.0)
    assert traffic[0, 1] == pytest.approx(2 * (1.0 + 1.0))


@given(
    st.lists(
        st.builds(
            StageLoad,
            cloud=st.just("any"),
            num_ranks=st.integers(1, 4),
            forward_s=st.sampled_from([0.25, 0.5, 0.7, 3.0]),
            backward_s=st.sampled_from([0.25, 0.5, 1.0]),
            update_s=st.sampled_from([0.0, 0.3]),
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 20),
)
def test_shares_are_the_best_there_are(loads: list[StageLoad], number: int) -> None:
    def is_done(by_s: float) -> bool:
        rounds = [int((by_s - one.update_s) / (one.forward_s + one.backward_s) + 1e-9) for one in loads]
        return sum(max(0, done) * one.num_ranks for done, one in zip(rounds, loads, strict=True)) >= number

    found_s = share_out(loads, number)
    assert is_done(found_s)
    assert not is_done(found_s - 1e-3)


def costs_s(sync: DataSettings, *, bps: float = 1e9) -> float:
    load = StageLoad(cloud="any", forward_s=0.5, backward_s=0.5)
    joined = lines((0, 1), bps=bps)
    loads = dict.fromkeys(range(2), load)
    return sync_costs(loads, joined, sync, num_parameters=BILLION, num_microbatches=4).step_s


def test_every_step_waits_for_its_traffic() -> None:
    # 4 GB there and back: 2·(1/2)·N·32 bit = 32 Gbit at 1 Gbit/s.
    assert costs_s(DataSettings(inner_steps=1, num_fragments=1, bits=32)) == pytest.approx(2.0 + 0.2 + 32)


def test_rare_synchronisation_is_hidden_where_it_is_sustainable() -> None:
    sync = DataSettings(inner_steps=30, num_fragments=6, bits=4)
    assert costs_s(sync) == pytest.approx(2.0)
    # 4 Gbit each 30 steps at 0.6 of 10 Mbit/s.
    assert costs_s(sync, bps=1e7) == pytest.approx(4e9 / 30 / 0.6e7)


def test_the_time_of_a_step_is_that_of_the_simulator() -> None:
    """The round trip of a round counts where the formula, which knows bytes alone, finds it hidden."""
    near = data_plans(study(two_clouds(DATA, "strategy.inner_steps=1", "link.0.rtt=1 ms")))
    far = data_plans(study(two_clouds(DATA, "strategy.inner_steps=1", "link.0.rtt=400 ms")))
    assert all(one.estimate.is_simulated for one in (*near, *far))
    # Shards, sums, a report and a verdict: four times one way, each behind the last.
    gain_s = far[0].estimate.step_s - near[0].estimate.step_s
    assert gain_s == pytest.approx(4 * 0.1995, rel=0.2)


def test_quality_is_told() -> None:
    rare = DataSettings(inner_steps=30, num_fragments=6, bits=4)
    exact = DataSettings(inner_steps=1, num_fragments=1, bits=32)
    assert (sync_loss(3, rare), sync_loss(3, exact)) == (Loss.SOME, Loss.NONE)
    assert "1.4" in sync_note(3, rare, delay_steps=1)


def test_what_is_given_is_tried_alone() -> None:
    every = list(sync_choices(DataStrategy(kind="data"), num_layers=30))
    assert every[0] == DataSettings(inner_steps=1, num_fragments=1, bits=32)
    assert {one.inner_steps for one in every} == {1, 30, 40, 50, 75, 100}
    given = DataStrategy.model_validate({"kind": "data", "inner_steps": 20, "fragments": 4, "bits": 8})
    found = list(sync_choices(given, num_layers=30))
    assert found == [DataSettings(inner_steps=20, num_fragments=4, bits=8)]


def refused(*changes: str, more: str = "") -> tuple[str, list[str]]:
    """The sentence where the model has no copies, and the ways out, each of which leads to a plan."""
    with pytest.raises(UserError) as caught:
        plan(two_clouds(DATA, *changes, more=more), is_quick=True)
    found = ways(caught.value.hint)
    for way in found:
        plan(two_clouds(DATA, *changes, *overrides(way), more=more + tables(way)), is_quick=True)
    return caught.value.message, found


def test_who_lacks_memory_for_a_copy_is_named() -> None:
    sentence, found = refused("cloud.west.memory=6.5 GiB")
    assert sentence == (
        "the whole model fits on no two linked clouds: even with recompute and optimizer on the host, a rank "
        "of 'west' needs 6.161 GiB for the whole model, and limits.memory_share leaves it 5.85 GiB"
    )
    assert found == [
        'set strategy.kind to "pipeline", which gives each cloud some of the layers',
        "set limits.memory_share to 0.95",
        "devices of 6.9 GiB in 'west' would do",
    ]


def test_a_pipeline_is_no_cure_where_it_does_not_fit_either() -> None:
    _, found = refused("cloud.east.memory=1 GiB", "cloud.west.memory=1 GiB")
    assert found == ["devices of 6.9 GiB in 'east' and devices of 6.9 GiB in 'west' would do"]


def test_clouds_with_room_for_copies_are_to_be_linked() -> None:
    more = THIRD_CLOUD + link("west", "north")
    sentence, found = refused("cloud.west.memory=1 GiB", more=more)
    assert sentence == (
        "the whole model fits on no two linked clouds: 'east' and 'north' have room, but no link joins them"
    )
    assert 'add a [[link]] with between = ["east", "north"], bandwidth and rtt' in found


def test_one_cloud_has_no_other_to_be_made_one_with() -> None:
    job = two_clouds(DATA)
    alone = job.model_copy(update={"cloud": job.cloud[:1], "link": ()})
    with pytest.raises(UserError, match="data parallel between clouds needs two clouds"):
        plan(alone)


def test_where_the_form_is_free_copies_that_do_not_fit_are_no_error() -> None:
    tight = ("cloud.east.memory=5 GiB", "cloud.west.memory=5 GiB")
    assert data_plans(study(two_clouds(*tight))) == []
    assert plan(two_clouds(*tight), is_quick=True).form is Form.PIPELINE


def test_of_many_clouds_those_that_links_join_take_part() -> None:
    names = [f"c{number}" for number in range(6)]
    clouds = [THIRD_CLOUD.replace("north", one).replace("02", f"1{one[1]}") for one in names]
    more = "".join(clouds) + link("c0", "c1") + link("c1", "c2") + link("c3", "c4") + link("c4", "c5")
    found = data_plans(study(two_clouds(DATA, more=more)))
    assert {one.clouds for one in found} == {("east", "west"), ("c0", "c1", "c2"), ("c3", "c4", "c5")}

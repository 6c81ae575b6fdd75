"""Cuts, bottlenecks and frozen layers: what goes together, what is said of it, and which cut is chosen."""

import pytest

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.plan.job_facts import check_cuts, frozen_notes, links_along
from isthmus.plan.plan import Form
from isthmus.plan.planner import plan
from tests.plan.jobs import THIRD_CLOUD, link, two_clouds

PIPELINE = "strategy.kind=pipeline"
HALVES = (range(6), range(6, 12))


def check(job: Job, *, num_frozen: int = 0, num_steps: int = 101) -> None:
    links = links_along(job, ("east", "west"))
    check_cuts(links, HALVES, num_frozen=num_frozen, hidden_width=2048, num_steps=num_steps)


def test_bottlenecks_are_narrower_than_the_model() -> None:
    check(two_clouds("link.0.boundary=bottleneck(2047)"))
    with pytest.raises(UserError, match="is no bottleneck where hidden states are 2048 wide"):
        check(two_clouds("link.0.boundary=bottleneck(2048)"))


def test_bottlenecks_have_something_to_learn_from() -> None:
    job = two_clouds("link.0.boundary=bottleneck(8)")
    check(job, num_frozen=5)
    with pytest.raises(UserError, match="all layers below it are frozen"):
        check(job, num_frozen=6)


def test_bottlenecks_begin_together() -> None:
    more = THIRD_CLOUD + link("west", "north") + 'boundary = "bottleneck(8, warmup=50)"\n'
    job = two_clouds("link.0.boundary=bottleneck(8, warmup=20)", PIPELINE, more=more)
    with pytest.raises(UserError, match=r"warm-ups of \[20, 50\] steps"):
        plan(job, is_quick=True)


def test_bottlenecks_begin_before_the_run_ends() -> None:
    job = two_clouds("link.0.boundary=bottleneck(8)")
    check(job)
    with pytest.raises(UserError, match=r"of east-west begins after 100 steps, but the run has 6$") as caught:
        check(job, num_steps=6)
    assert caught.value.hint == "lower its warmup, or set train.steps to more than 100"
    with pytest.raises(UserError, match=r"begins after 1 step, but the run has 1$"):
        check(two_clouds("link.0.boundary=bottleneck(8, warmup=1)"), num_steps=1)


def test_a_bottleneck_that_no_plan_crosses_need_not_begin() -> None:
    job = two_clouds("link.0.boundary=bottleneck(8)", "link.0.bandwidth=1 Mbps", "link.0.rtt=900 ms")
    assert plan(job, is_quick=True).form is Form.ALONE


def notes(*overrides: str, layers: tuple[range, ...] = HALVES) -> str:
    return " ".join(frozen_notes(two_clouds(*overrides), ("east", "west"), layers))


def test_what_frozen_layers_spare_is_said() -> None:
    assert notes() == ""
    assert "nothing goes back over east-west; west caches" in notes("model.frozen_layers=6")
    assert "as model.cache_frozen says" in notes("model.frozen_layers=6", "model.cache_frozen=0")
    assert "with several ranks" in notes("model.frozen_layers=6", "cloud.west.ranks=2")
    assert "strategy.layers = [5, …]" in notes("model.frozen_layers=5")


def test_the_cut_lies_behind_frozen_layers_where_the_way_back_would_take_long() -> None:
    frozen = (PIPELINE, "link.0.codec=raw", "model.frozen_layers=5")
    narrow, wide = (
        plan(two_clouds(*frozen, f"link.0.bandwidth={bandwidth}"), is_quick=True)
        for bandwidth in ("['10 Gbps', '500 Mbps']", "100 Gbps")
    )
    assert narrow.stages[0].layers == (0, 5)
    assert narrow.links[0].up_bytes == 0
    assert any("nothing goes back" in one for one in narrow.notes)
    assert wide.links[0].up_bytes > 0, "frozen layers are fast, so the first cloud takes more than these"
    assert any("strategy.layers = [5, …]" in one for one in wide.notes)


def test_a_bottleneck_keeps_the_cut_out_of_frozen_layers() -> None:
    job = two_clouds(PIPELINE, "model.frozen_layers=5", "link.0.boundary=bottleneck(64, warmup=20)")
    stage = plan(job, is_quick=True).stages[0]
    assert stage.layers is not None
    assert stage.layers[1] > 5
    with pytest.raises(UserError, match="all layers below it are frozen"):
        plan(two_clouds(PIPELINE, "model.frozen_layers=12", "link.0.boundary=bottleneck(64)"))

"""Where money counts, orders and codecs are searched for it: held to every way there is, one by one."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations, product

import pytest

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.plan.codecs import Loss, codec_levels
from isthmus.plan.plan import Plan
from isthmus.plan.planner import plan
from tests.plan.jobs import THIRD_CLOUD, link, two_clouds

# The planner takes one that is nearly as cheap and milder.
NEARLY = 1.021
WIDTH = 2048
PIPELINE = "strategy.kind=pipeline"
SMALL = (PIPELINE, "model.config.num_hidden_layers=3", "train.batch_tokens=16384")
LONG = "limits.deadline=1000 d"
PRICES = ("cloud.east.usd_per_hour=9", "cloud.west.usd_per_hour=2", "link.0.usd_per_gib=0.3")
SPEEDS = ("cloud.east.accelerator=h100", "link.0.bandwidth=9 Gbps")
NORTH = THIRD_CLOUD + link("west", "north", bandwidth="300 Mbps") + link("east", "north", bandwidth="9 Gbps")
NORTH_PRICES = ("cloud.north.usd_per_hour=3", "link.1.usd_per_gib=0.02", "link.2.usd_per_gib=9")
OPEN = ("link.1.codec=auto", "link.2.codec=auto")


def usd(found: Plan) -> float:
    assert found.estimate.total_usd is not None
    return found.estimate.total_usd


def every_way(names: Sequence[str], num_links: int) -> Iterator[tuple[str, ...]]:
    """Every order, cut, number of micro-batches and codec that is allowed, as changes to the job."""
    rungs = [one for one in codec_levels(WIDTH, shares_ids=True) if one.loss <= Loss.SLIGHT]
    cuts = [pairwise((0, *inner, 3)) for inner in combinations(range(1, 3), len(names) - 1)]
    layers = [[stop - start for start, stop in cut] for cut in cuts]
    for order, counts, number, rung in product(permutations(names), layers, (1, 4, 16), rungs):
        codec = f'{{forward = "{rung.forward}", backward = "{rung.backward}"}}'
        yield (
            f"strategy.clouds={list(order)}",
            f"strategy.layers={counts}",
            f"strategy.microbatches={number}",
            *(f"link.{index}.codec={codec}" for index in range(num_links)),
        )


def cheapest_usd(names: Sequence[str], *given: str, more: str = "", num_links: int = 1) -> float:
    ways = every_way(names, num_links)
    return min(usd(plan(two_clouds(*given, *way, more=more), is_quick=True)) for way in ways)


@pytest.mark.parametrize("link_price", ["0", "0.3", "20"])
def test_two_clouds_find_the_cheapest_of_all_ways(link_price: str) -> None:
    given = (*SMALL, *PRICES, *SPEEDS, f"link.0.usd_per_gib={link_price}")
    assert usd(plan(two_clouds(*given, LONG))) <= NEARLY * cheapest_usd(("east", "west"), *given)


def test_three_clouds_find_the_cheapest_order_and_not_the_fastest() -> None:
    given = (*SMALL, *PRICES, *SPEEDS, *NORTH_PRICES)
    chosen = plan(two_clouds(*given, *OPEN, LONG, more=NORTH))
    names = ("east", "west", "north")
    assert usd(chosen) <= NEARLY * cheapest_usd(names, *given, more=NORTH, num_links=3)
    fastest = plan(two_clouds(*given, *OPEN, more=NORTH))
    assert usd(chosen) < usd(fastest)
    assert chosen.estimate.total_s >= fastest.estimate.total_s


def priced(*overrides: str) -> Job:
    given = (PIPELINE, *PRICES, "limits.codec_loss=some", "link.0.usd_per_gib=2", "link.0.bandwidth=50 Gbps")
    return two_clouds(*given, *overrides)


def test_a_budget_makes_codecs_no_stronger_than_it_must() -> None:
    free = plan(priced())
    roomy = plan(priced(f"limits.budget_usd={1.2 * usd(free)}"))
    assert [one.forward_codec for one in roomy.links] == [one.forward_codec for one in free.links]
    tight = plan(priced(f"limits.budget_usd={0.7 * usd(free)}"))
    assert usd(tight) <= 0.7 * usd(free)
    assert tight.lossiness > free.lossiness
    assert "fewer bytes to pay for" in tight.links[0].reason


def test_the_cheapest_that_is_named_is_what_a_deadline_would_choose() -> None:
    least = plan(priced(LONG))
    with pytest.raises(UserError, match="the cheapest plan costs") as caught:
        plan(priced(f"limits.budget_usd={0.9 * usd(least)}"))
    assert "set limits.budget_usd to" in (caught.value.hint or "")
    named = float(str(caught.value).partition("$")[2].partition(",")[0])
    assert named == pytest.approx(usd(least), rel=0.03)


def test_no_codec_beyond_the_allowed_loss_saves_money() -> None:
    careful = plan(priced(LONG, "limits.codec_loss=none"))
    assert [(one.forward_codec, one.backward_codec) for one in careful.links] == [("raw", "raw")]
    assert plan(priced(LONG, "limits.codec_loss=some")).loss is Loss.SOME


UNPRICED = '[[accelerator]]\nname = "mine"\nflops = "312 TFLOPS"\nmemory = "40 GiB"\n'


def test_what_has_no_price_is_not_taken_to_be_free() -> None:
    mine = ("cloud.west.accelerator=mine", "cloud.east.usd_per_hour=3")
    for limit in ("limits.budget_usd=1000", LONG):
        chosen = plan(two_clouds(*mine, limit, more=UNPRICED))
        assert chosen.clouds == ("east",)
        assert any("has no known price, for want of that of west" in one.reason for one in chosen.runners_up)
    with pytest.raises(UserError, match="the cheapest plan costs"):
        plan(two_clouds(*mine, "limits.budget_usd=0.0001", more=UNPRICED))
    with pytest.raises(UserError, match="the price of cloud 'west' is not known"):
        plan(two_clouds(PIPELINE, *mine, "limits.budget_usd=5", more=UNPRICED))


def test_of_plans_that_cost_the_same_the_faster_is_taken() -> None:
    free = ("cloud.east.usd_per_hour=0", "cloud.west.usd_per_hour=0")
    cheap, fast = plan(two_clouds(*free, LONG)), plan(two_clouds(*free))
    assert cheap.estimate.total_s <= 1.02 * fast.estimate.total_s
    paid = (PIPELINE, *free, "link.0.usd_per_gib=1")
    assert plan(two_clouds(*paid, LONG)).estimate.step_s <= 1.1 * plan(two_clouds(*paid)).estimate.step_s

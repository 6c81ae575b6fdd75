"""The plan is as fast as the fastest of all subsets, orders, cuts, micro-batches and codecs, one by one."""

import random
from collections.abc import Iterator
from itertools import combinations, pairwise, permutations, product
from pathlib import Path

import pytest

from isthmus.job import Job
from isthmus.job.load import parse_job
from isthmus.plan.planner import plan
from isthmus.plan.scenario import HopLoad, Scenario, scenario_bound_s
from isthmus.plan.simulated import simulate_scenario
from isthmus.plan.study import CloudOrder, Setting, Study, study

# Plans that are nearly as good as the best make way for those with less loss.
NEARLY = 1.02
NAMES = ("east", "west", "north", "south")
FEW = (0, 1, 2, 3, 4, 6, 8, 9)
"""Jobs for which brute force takes no more than a second or two."""
KINDS = ("a100-40gb", "h100", "l4", "mi300x")


def random_job(seed: int, *overrides: str) -> Job:
    """Two to four clouds of random speed, joined by random links, with a model of few layers."""
    draw = random.Random(seed)
    num_clouds = draw.choice([2, 2, 3, 3, 4])
    num_layers = draw.randint(4, 8 if num_clouds < 4 else 5)
    # With four clouds and all codecs brute force would take minutes.
    losses = ["none", "slight", "some"] if num_clouds < 4 else ["none", "slight"]
    clouds = "".join(
        f'[[cloud]]\nname = "{name}"\naccelerator = "{draw.choice(KINDS)}"\nmemory = "4 TiB"\n'
        f'ranks = {draw.choice([1, 1, 2])}\nlisten = "{name}.example.com:7600"\n'
        f"usd_per_hour = {draw.choice([1, 2, 5])}\n"
        for name in NAMES[:num_clouds]
    )
    links = "".join(
        f'[[link]]\nbetween = ["{first}", "{second}"]\nbandwidth = "{10 ** draw.uniform(2, 4.5):.0f} Mbps"\n'
        f'rtt = "{draw.choice([1, 10, 40, 150])} ms"\ncodec = "auto"\n'
        f"usd_per_gib = {draw.choice([0, 0.05, 1])}\n"
        for first, second in combinations(NAMES[:num_clouds], 2)
        if (first, second) in pairwise(NAMES) or draw.random() < 0.8
    )
    text = (
        f'name = "random"\n[model.config]\nmodel_type = "llama"\nvocab_size = {draw.choice([1000, 32000])}\n'
        f"hidden_size = 4096\nintermediate_size = 11008\nnum_hidden_layers = {num_layers}\n"
        'num_attention_heads = 32\n[data]\nsource = "corpus/*.jsonl"\nsequence_length = 2048\n'
        f"[train]\nsteps = 100\nbatch_tokens = {2048 * draw.choice([4, 8, 12, 16, 24])}\n"
        'precision = "bfloat16"\n'
        f'[strategy]\nkind = "{draw.choice(["auto", "pipeline"])}"\n'
        f'[limits]\ncodec_loss = "{draw.choice(losses)}"\n'
    )
    return parse_job(text + clouds + links, file=Path("random.toml"), overrides=overrides)


def orders(ready: Study) -> Iterator[tuple[int, ...]]:
    num_clouds = len(ready.clouds)
    sizes = [num_clouds] if ready.job.strategy.kind == "pipeline" else range(1, num_clouds + 1)
    for size in sizes:
        for order in permutations(range(num_clouds), size):
            if all(pair in ready.links for pair in pairwise(order)):
                yield order


def hops(ready: Study, order: tuple[int, ...], setting: Setting) -> list[list[HopLoad]]:
    """Each hop of an order with each of its codecs."""
    found = []
    row = CloudOrder(study=ready, setting=setting, clouds=order)
    for cut, pair in enumerate(pairwise(order)):
        crossing = row.crossing(cut, has_gradient=True)
        allowed = ready.links[pair].options(crossing)
        found.append([row.hop(cut, crossing, one.pair) for one in allowed])
    return found


def every_scenario(ready: Study) -> Iterator[Scenario]:
    for order, number in product(orders(ready), ready.microbatch_choices()):
        setting = Setting(num_microbatches=number)
        coded = list(product(*hops(ready, order, setting)))
        for inner in combinations(range(1, ready.model.num_layers), len(order) - 1):
            ends = pairwise((0, *inner, ready.model.num_layers))
            stages = [
                ready.stage_load(cloud, setting, range(*layers))
                for cloud, layers in zip(order, ends, strict=True)
            ]
            for one in coded:
                yield Scenario(stages=tuple(stages), hops=one, num_microbatches=number)


def fastest_s(ready: Study) -> float:
    """The fastest step of all; what cannot be faster by the bound, which has its own test, is left out."""
    best_s = float("inf")
    bounded = [(scenario_bound_s(one), number, one) for number, one in enumerate(every_scenario(ready))]
    for bound_s, _, one in sorted(bounded, key=lambda one: one[:2]):
        if bound_s >= best_s:
            break
        best_s = min(best_s, simulate_scenario(one, num_steps=2).step_s)
    return best_s


def check_against_brute_force(seed: int) -> None:
    job = random_job(seed)
    chosen = plan(job, is_quick=True)
    assert chosen.scenario is not None
    step_s = simulate_scenario(chosen.scenario, num_steps=2).step_s
    assert chosen.estimate.step_s == pytest.approx(step_s, rel=0.005)
    assert step_s <= NEARLY * fastest_s(study(job)) * (1 + 1e-9)


@pytest.mark.parametrize("seed", FEW)
def test_no_way_is_faster(seed: int) -> None:
    check_against_brute_force(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted(set(range(200)) - set(FEW)))
def test_no_way_is_faster_in_many_jobs(seed: int) -> None:
    check_against_brute_force(seed)


@pytest.mark.parametrize("seed", [5, 10])
def test_a_fifth_cloud_makes_no_plan_slower(seed: int) -> None:
    """Five clouds are searched by a beam, four one by one."""
    four = random_job(seed, "strategy.kind=auto")
    assert len(four.cloud) == 4
    fifth = four.cloud[0].model_copy(update={"name": "far"})
    line = four.link[0].model_copy(update={"between": ("east", "far"), "bandwidth_bps": (1e6, 1e6)})
    five = four.model_copy(update={"cloud": (*four.cloud, fifth), "link": (*four.link, line)})
    slower = plan(five, is_quick=True).estimate.step_s / plan(four, is_quick=True).estimate.step_s
    assert slower <= 1.05

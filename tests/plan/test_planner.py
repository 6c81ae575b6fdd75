"""What is chosen, what it is said to take, and the one sentence where nothing can be chosen."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.job import load_job
from isthmus.plan.codecs import Loss
from isthmus.plan.plan import (
    DataSettings,
    Form,
    PipelineSettings,
    Plan,
    decisions_of,
    plan_to_json,
    scenario_of,
)
from isthmus.plan.planner import plan
from isthmus.plan.simulated import simulate_scenario
from tests.plan.jobs import THIRD_CLOUD, link, two_clouds

EXAMPLES = Path(__file__).parents[2] / "examples"
PIPELINE = "strategy.kind=pipeline"


def microbatches(chosen: Plan) -> int:
    assert isinstance(chosen.settings, PipelineSettings)
    return chosen.settings.num_microbatches


def test_a_pipeline_shares_equal_clouds_equally() -> None:
    chosen = plan(two_clouds(PIPELINE))
    assert chosen.form is Form.PIPELINE
    cut = chosen.stages[0].layers
    assert cut in ((0, 6), (0, 7)), "the head is at the last stage"
    assert 64 % microbatches(chosen) == 0
    assert 0 < chosen.estimate.bubble < 0.5


def test_what_it_says_is_what_the_simulator_finds() -> None:
    chosen = plan(two_clouds(PIPELINE))
    assert chosen.scenario is not None
    assert chosen.estimate.is_simulated
    timeline = simulate_scenario(chosen.scenario, num_steps=4)
    assert chosen.estimate.step_s == pytest.approx(timeline.step_s, rel=0.02)
    assert chosen.estimate.bubble == pytest.approx(timeline.bubble, abs=0.02)
    crossed = sum(one.down_bytes + one.up_bytes for one in timeline.traffic) / 4
    assert chosen.estimate.wan_bytes == crossed
    assert tuple(stage.window for stage in chosen.stages) == timeline.steps[-1].windows


def test_figures_belong_together() -> None:
    estimate = plan(two_clouds(PIPELINE, "cloud.east.usd_per_hour=3", "cloud.west.usd_per_hour=5")).estimate
    assert estimate.tokens_per_s * estimate.step_s == pytest.approx(65536)
    assert estimate.usd_per_step == pytest.approx(estimate.step_s * 8 / 3600)
    assert estimate.total_s == 100 * estimate.step_s
    assert estimate.usd_per_million_tokens == pytest.approx((estimate.usd_per_step or 0) / 65536 * 1e6)


def test_a_thin_link_is_coded_and_a_thick_one_is_not() -> None:
    thick = plan(two_clouds(PIPELINE, "link.0.bandwidth=100 Gbps")).links[0]
    thin = plan(two_clouds(PIPELINE, "link.0.bandwidth=500 Mbps")).links[0]
    # bf16 halves what is copied between a device and its host, which counts on a line that is faster.
    assert thick.forward_codec in ("raw", "bf16")
    assert thick.backward_codec in ("raw", "bf16")
    assert "int" in thin.forward_codec
    assert thin.down_bytes < thick.down_bytes / 1.9
    assert "on the line" in thin.reason


def test_a_given_codec_is_kept() -> None:
    chosen = plan(two_clouds(PIPELINE, "link.0.codec=raw", "link.0.bandwidth=500 Mbps"))
    assert chosen.links[0].forward_codec == "raw"
    assert chosen.estimate.limiting == "bandwidth of east-west"
    assert chosen.estimate.reliefs["bandwidth of east-west"] > 0.3


def test_no_loss_means_no_lossy_codec() -> None:
    chosen = plan(two_clouds(PIPELINE, "limits.codec_loss=none", "link.0.bandwidth=500 Mbps"))
    assert chosen.loss is Loss.NONE
    assert chosen.links[0].forward_codec == "raw"


def test_auto_compares_all_forms() -> None:
    chosen = plan(two_clouds())
    forms = {chosen.form, *(one.form for one in chosen.runners_up)}
    assert forms == {Form.ALONE, Form.PIPELINE, Form.DATA}
    assert all(one.reason for one in chosen.runners_up)
    assert chosen.runners_up[0].what.partition(";")[0] in chosen.reason


def test_a_useless_link_leaves_one_cloud_alone() -> None:
    chosen = plan(two_clouds("link.0.bandwidth=1 Mbps", "limits.codec_loss=none"))
    assert chosen.form is Form.ALONE
    assert chosen.links == ()
    assert "bandwidth" in next(one.reason for one in chosen.runners_up if one.form is Form.PIPELINE)


def test_a_model_too_large_for_one_cloud_is_cut_or_spared() -> None:
    small = ("cloud.east.memory=16 GiB", "cloud.west.memory=16 GiB", "model.config.num_hidden_layers=24")
    chosen = plan(two_clouds(PIPELINE, *small))
    assert all(stage.memory_bytes <= 0.9 * 16 * 2**30 for stage in chosen.stages)
    assert chosen.memory_share is not None
    assert chosen.memory_share <= 0.9


def test_little_memory_bounds_what_is_in_flight() -> None:
    tight = ("cloud.east.memory=9 GiB", "cloud.west.memory=9 GiB", "link.0.rtt=400 ms")
    chosen = plan(two_clouds(PIPELINE, *tight))
    assert isinstance(chosen.settings, PipelineSettings)
    assert chosen.memory_words or chosen.settings.max_in_flight is not None


def test_the_slow_link_is_used_least() -> None:
    more = THIRD_CLOUD + link("west", "north") + link("east", "north", bandwidth="20 Mbps", rtt="300 ms")
    chosen = plan(two_clouds(PIPELINE, more=more))
    assert chosen.clouds[1] == "west"
    assert {frozenset(one.between) for one in chosen.links} == {
        frozenset(("east", "west")),
        frozenset(("west", "north")),
    }


def test_faster_devices_get_more_layers() -> None:
    # Layers that are not compiled take as long as their launches, on any device.
    given = ("cloud.west.accelerator=h100", "strategy.clouds=['east', 'west']", "train.compile=true")
    chosen = plan(two_clouds(PIPELINE, *given))
    counts = [stop - start for start, stop in (stage.layers or (0, 0) for stage in chosen.stages)]
    assert counts[0] < counts[1]


def test_what_the_job_gives_is_kept() -> None:
    given = ("strategy.clouds=['west', 'east']", "strategy.layers=[5, 7]", "strategy.microbatches=8")
    chosen = plan(two_clouds(PIPELINE, *given, "strategy.windows=[3, 1]", "strategy.policy=wan-1f1b"))
    assert chosen.clouds == ("west", "east")
    assert [stage.layers for stage in chosen.stages] == [(0, 5), (5, 12)]
    assert microbatches(chosen) == 8
    assert chosen.scenario is not None
    assert chosen.scenario.windows == (3, 1)


@pytest.mark.parametrize("policy", ["gpipe", "1f1b"])
def test_other_policies_are_planned_too(policy: str) -> None:
    chosen = plan(two_clouds(PIPELINE, f"strategy.policy={policy}", "strategy.microbatches=16"))
    wan = plan(two_clouds(PIPELINE, "strategy.microbatches=16"))
    assert chosen.estimate.step_s >= wan.estimate.step_s * 0.999


def test_nothing_goes_back_into_frozen_layers() -> None:
    given = ("strategy.layers=[6, 6]", "strategy.microbatches=16")
    frozen = plan(two_clouds(PIPELINE, *given, "model.frozen_layers=6"))
    whole = plan(two_clouds(PIPELINE, *given))
    assert frozen.links[0].up_bytes == 0
    assert frozen.scenario is not None
    assert frozen.scenario.first_trained == 1
    assert frozen.stages[0].busy_s < 0.6 * whole.stages[0].busy_s


def test_data_parallel_has_its_settings() -> None:
    chosen = plan(two_clouds("strategy.kind=data", "strategy.inner_steps=50", "strategy.bits=4"))
    assert chosen.form is Form.DATA
    assert isinstance(chosen.settings, DataSettings)
    expected = DataSettings(inner_steps=50, num_fragments=6, bits=4)
    assert replace(chosen.settings, delay_steps=0) == expected
    assert chosen.settings.delay_steps >= 1
    num_parameters = plan(two_clouds("strategy.kind=data", "strategy.inner_steps=50", "strategy.bits=8"))
    assert num_parameters.estimate.wan_bytes == pytest.approx(2 * chosen.estimate.wan_bytes)
    assert "loss" in chosen.notes[0]


def test_a_deadline_asks_for_the_cheapest_plan_within_it() -> None:
    fast = plan(two_clouds())
    slow = plan(two_clouds(f"limits.deadline={fast.estimate.total_s * 3:.0f} s"))
    assert slow.estimate.total_s <= fast.estimate.total_s * 3
    assert (slow.estimate.usd_per_step or 0) <= (fast.estimate.usd_per_step or 0)
    assert slow.form is Form.ALONE


def test_a_budget_asks_for_the_fastest_plan_within_it() -> None:
    free = plan(two_clouds("link.0.usd_per_gib=10"))
    tight = plan(two_clouds("link.0.usd_per_gib=10", "limits.budget_usd=1.0"))
    assert (tight.estimate.total_usd or 0) <= 1.0
    assert tight.estimate.step_s >= free.estimate.step_s * 0.98


@pytest.mark.parametrize(
    ("changes", "what", "cure"),
    [
        (
            [PIPELINE, "cloud.east.memory=1 GiB", "cloud.west.memory=1 GiB"],
            "nothing fits: .* needs",
            r"devices of [\d.]+ GiB in 'east'",
        ),
        (
            [PIPELINE, "cloud.east.memory=1 MiB"],
            "nothing fits: .* a rank of 'east'",
            "devices of .* in 'east'",
        ),
        (
            [PIPELINE, "cloud.east.memory=4 GiB", "cloud.west.memory=4 GiB", "limits.memory_share=0.5"],
            "nothing fits: even with recompute",
            "memory_share to 0.85",
        ),
        (["limits.budget_usd=0.001"], "cheapest plan costs", r"limits.budget_usd to 0.\d+"),
        (["limits.deadline=1 s"], "fastest plan takes", "limits.deadline to"),
        (["cloud.west.accelerator=h10"], "'h10' is not in the catalogue", "h100"),
        (["model.config.num_hidden_layers=-3"], "num_hidden_layers .* is -3", None),
        (["train.batch_tokens=1000"], "no whole number of sequences", "1024"),
        ([PIPELINE, "strategy.microbatches=7"], "cannot be divided into 7", "divisor"),
        ([PIPELINE, "strategy.layers=[5, 5]"], "adds up to 10", "add up"),
        ([PIPELINE, "strategy.layers=[12]"], "1 entries for 2 stages", "one number for each"),
        ([PIPELINE, "strategy.clouds=['east', 'mars']"], "names 'mars'", "east, west"),
        (
            [PIPELINE, "model.config.num_hidden_layers=1"],
            "2 clouds need 2 layers at least, and the model has 1",
            "fewer clouds",
        ),
        (
            ["strategy.kind=data", "limits.codec_loss=none", "strategy.inner_steps=30"],
            "more quality",
            'codec_loss to "slight"',
        ),
    ],
)
def test_every_obstacle_is_one_sentence_with_a_way_out(
    changes: list[str], what: str, cure: str | None
) -> None:
    with pytest.raises(UserError, match=what) as caught:
        plan(two_clouds(*changes))
    if cure is not None:
        assert re.search(cure, caught.value.hint or "")


def test_unknown_figures_of_a_link_are_to_be_measured() -> None:
    more = THIRD_CLOUD + '[[link]]\nbetween = ["west", "north"]\n'
    with pytest.raises(UserError, match="west-north has no bandwidth") as caught:
        plan(two_clouds(more=more))
    assert "isthmus probe" in (caught.value.hint or "")


def test_clouds_in_a_star_make_no_row() -> None:
    fourth = THIRD_CLOUD.replace("north", "south").replace("7602", "7603")
    more = THIRD_CLOUD + fourth + link("east", "north") + link("east", "south")
    with pytest.raises(UserError, match="in a row") as caught:
        plan(two_clouds(PIPELINE, more=more))
    assert caught.value.hint


def test_a_budget_without_prices_is_refused() -> None:
    own = '[[accelerator]]\nname = "mine"\nflops = "100 TFLOPS"\nmemory = "40 GiB"\n'
    with pytest.raises(UserError, match="price of cloud") as caught:
        plan(
            two_clouds(
                "cloud.east.accelerator=mine",
                "cloud.west.accelerator=mine",
                "limits.budget_usd=5",
                more=own,
            )
        )
    assert "usd_per_hour" in (caught.value.hint or "")


def test_a_plan_is_the_same_every_time_and_survives_its_file() -> None:
    chosen = plan(two_clouds(PIPELINE))
    text = plan_to_json(chosen)
    assert text == plan_to_json(plan(two_clouds(PIPELINE)))
    assert scenario_of(text) == chosen.scenario
    assert decisions_of(text) == chosen.decisions
    assert json.loads(text)["version"] == 1
    assert scenario_of(plan_to_json(replace(chosen, scenario=None))) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2, "scenario": null}'])
def test_a_file_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="plan of this run"):
        scenario_of(text)


@pytest.mark.parametrize(
    ("name", "form", "clouds"),
    [
        ("plan-generator", Form.GENERATOR_DISCRIMINATOR, ("gpus", "npus")),
        ("plan-encoder-decoder", Form.PIPELINE, ("source", "target")),
        ("plan-70b", Form.PIPELINE, None),
        ("plan-two-clouds", None, None),
    ],
)
def test_examples_are_planned(name: str, form: Form | None, clouds: tuple[str, ...] | None) -> None:
    chosen = plan(load_job(EXAMPLES / f"{name}.toml"), is_quick=True)
    assert form in (None, chosen.form)
    assert clouds in (None, chosen.clouds)
    assert (chosen.memory_share or 0) <= 0.9 + 1e-9


def test_the_encoder_is_cut_from_the_decoder_and_nowhere_else() -> None:
    chosen = plan(load_job(EXAMPLES / "plan-encoder-decoder.toml"), is_quick=True)
    assert [stage.layers for stage in chosen.stages] == [(0, 24), (24, 48)]


def test_ids_cross_and_hidden_states_do_not() -> None:
    job = load_job(EXAMPLES / "plan-generator.toml")
    chosen = plan(job)
    per_sequence = chosen.links[0].down_bytes / (job.train.batch_tokens / 512)
    assert 1200 <= per_sequence <= 2200
    assert chosen.links[0].up_bytes == 0


def test_handling_delays_every_message() -> None:
    plain, slow = (
        plan(two_clouds(PIPELINE, "strategy.microbatches=4", *more), is_quick=True)
        for more in ((), ("link.0.handling=50 ms",))
    )
    assert slow.scenario is not None
    assert slow.scenario.hops[0].line.handling_s == 0.05
    assert slow.estimate.step_s >= plain.estimate.step_s + 2 * 0.05 - 1e-9


def test_limits_are_held_against_simulated_figures() -> None:
    free = plan(two_clouds(PIPELINE))
    limit_s = free.estimate.total_s * 1.001
    within = plan(two_clouds(PIPELINE, f"limits.deadline={limit_s} s"))
    assert within.estimate.total_s <= limit_s
    with pytest.raises(UserError, match="fastest plan takes") as caught:
        plan(two_clouds(PIPELINE, f"limits.deadline={free.estimate.total_s / 2} s"))
    wanted = re.search(r'limits.deadline to "([^"]+)"', caught.value.hint or "")
    assert wanted is not None
    assert plan(two_clouds(PIPELINE, f"limits.deadline={wanted.group(1)}")).estimate.is_simulated


def test_traffic_without_a_price_is_told() -> None:
    found = plan(two_clouds(PIPELINE))
    told = [one for one in found.notes if "the price leaves out the traffic" in one]
    assert bool(told) is any(one.usd_per_gib is None for one in found.links)

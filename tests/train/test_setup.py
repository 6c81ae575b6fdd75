"""What cannot run is said in one sentence with its cure, before anything starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.job import Job, PipelineStrategy, stage_order
from isthmus.job.codec import parse_codec
from isthmus.job.load import parse_job
from isthmus.plan.codecs import Cut, Pair, texts_of
from isthmus.plan.plan import Decisions, follow
from isthmus.plan.scenario import Policy
from isthmus.train.build import blueprint_of, check_fits
from isthmus.train.pipeline_config import decide, plan_run, run_config, stage_layers
from isthmus.train.runs import check_job

TINY = """
name = "tiny"
[model.config]
model_type = "llama"
vocab_size = 300
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
[data]
source = "builtin:tales"
sequence_length = 32
[strategy]
kind = "pipeline"
[train]
steps = 4
batch_tokens = 512
"""


FIGURES = ("link.0.rtt=40 ms", "link.0.bandwidth=100 Mbps")


def clouds(*names: str) -> str:
    return "".join(
        f'[[cloud]]\nname = "{name}"\ndevice = "cpu"\nlisten = "127.0.0.1:{7600 + number}"\n'
        for number, name in enumerate(names)
    )


def links(*pairs: tuple[str, str]) -> str:
    return "".join(f'[[link]]\nbetween = ["{first}", "{second}"]\n' for first, second in pairs)


def tiny_job(*overrides: str, network: str | None = None) -> Job:
    network = network or clouds("east", "west") + links(("east", "west"))
    return parse_job(TINY + network, file=Path("tiny.toml"), overrides=overrides)


def decided(job: Job) -> Decisions:
    """What a run of the job follows: its plan, or a rule where nothing can be planned."""
    plan = plan_run(job)
    return decide(job, None if plan is None else plan.decisions)


def fits(job: Job, decisions: Decisions | None = None) -> None:
    blueprint = blueprint_of(job, config={}, num_labels=None)
    decisions = decide(job) if decisions is None else decisions
    followed = follow(job, stage_order(job), decisions)
    check_fits(followed, stage_layers(job, decisions, blueprint.num_layers), blueprint)


@pytest.mark.parametrize(("model_type", "keeps_padding"), [("llama", False), ("qwen3_moe", True)])
def test_padding_crosses_where_experts_see_it(model_type: str, keeps_padding: bool) -> None:
    job = tiny_job(f"model.config.model_type={model_type}")
    blueprint = blueprint_of(job, config={}, num_labels=None)
    config = run_config(job, decide(job), blueprint, num_validation_microbatches=0)
    assert config.keeps_padding == keeps_padding


def test_the_order_of_the_job_is_the_order_of_the_stages() -> None:
    network = clouds("a", "b", "c") + links(("b", "a"), ("c", "b"), ("a", "c"))
    assert stage_order(tiny_job(network=network)) == ("a", "b", "c")


def test_else_the_links_give_the_order() -> None:
    network = clouds("middle", "left", "right") + links(("middle", "left"), ("right", "middle"))
    assert stage_order(tiny_job(network=network)) == ("left", "middle", "right")


def test_a_single_cloud_is_a_pipeline_of_one_stage() -> None:
    job = tiny_job(network=clouds("alone"))
    assert stage_layers(job, decided(job), 2) == (range(2),)


@pytest.mark.parametrize(
    "pairs", [(("a", "b"), ("c", "d")), (("a", "b"), ("a", "c"), ("a", "d"))], ids=["islands", "star"]
)
def test_clouds_that_are_not_in_a_row_are_refused(pairs: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(UserError, match="in a row") as caught:
        stage_order(tiny_job(network=clouds("a", "b", "c", "d") + links(*pairs)))
    assert caught.value.hint


def test_without_figures_micro_batches_are_chosen_by_a_rule() -> None:
    assert plan_run(tiny_job()) is None
    found = decide(tiny_job())
    assert (found.num_microbatches, found.max_in_flight) == (16, 16)
    assert found.policy == Policy.WAN_ONE_F_ONE_B.value
    assert stage_layers(tiny_job(), found, 2) == (range(1), range(1, 2))
    assert "figures of link east-west" in found.reasons[0]
    assert "16" in found.reasons[1]


def test_what_is_given_is_not_chosen() -> None:
    given = ("strategy.microbatches=4", "strategy.max_in_flight=3", "strategy.policy=gpipe")
    for figures in ((), FIGURES):
        found = decided(tiny_job(*given, *figures))
        assert (found.num_microbatches, found.max_in_flight, found.policy) == (4, 3, Policy.GPIPE.value)
        assert not any("micro-batches" in reason for reason in found.reasons)


def test_with_figures_the_planner_chooses_and_says_why() -> None:
    plan = plan_run(tiny_job(*FIGURES, "model.config.num_hidden_layers=5"))
    assert plan is not None
    assert plan.decisions is not None
    assert sum(plan.decisions.layers) == 5
    text = " ".join(plan.decisions.reasons)
    for word in ("cut: east layers 0", "micro-batches: ", "planned: pipeline"):
        assert word in text


def test_other_clouds_follow_the_decisions_of_the_first() -> None:
    first = decided(tiny_job(*FIGURES, "model.config.num_hidden_layers=5"))
    elsewhere = tiny_job("link.0.rtt=900 ms", "link.0.bandwidth=1 Mbps", "model.config.num_hidden_layers=5")
    assert decide(elsewhere, first) == first


def test_given_layers_and_clouds_are_kept() -> None:
    given = ("strategy.clouds=['west', 'east']", "strategy.layers=[3, 1]", "model.config.num_hidden_layers=4")
    for figures in ((), FIGURES):
        job = tiny_job(*given, *figures)
        assert stage_order(job) == ("west", "east")
        assert stage_layers(job, decided(job), 4) == (range(3), range(3, 4))


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("strategy.microbatches=5", "cannot be divided"),
        ("train.batch_tokens=8192000", "one step reads"),
        ("model.config.num_hidden_layers=1", "cannot be cut into 2 stages"),
        ("cloud.west.memory=10 KiB", "needs .* but it has 10 KiB"),
        ("model.config.max_position_embeddings=16", "longer than the model"),
        ("model.config.vocab_size=200", "too small"),
        ("model.frozen_layers=3", "3 layers cannot be frozen in a model of 2"),
        ("link.0.boundary=bottleneck(32)", "is no bottleneck where hidden states are 32 wide"),
        ("link.0.boundary=bottleneck(8)", "begins after 100 steps, but the run has 4"),
    ],
)
def test_every_mistake_has_a_cure(override: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=what) as caught:
        check_job(tiny_job(override), tokenizer_folder=tmp_path)
    assert caught.value.hint


def test_a_model_that_cannot_be_cut_is_refused_before_tokens_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus.train.runs.open_data", lambda *_args, **_options: pytest.fail("tokens"))
    job = tiny_job('model.config={model_type="cpmant", vocab_size=300}')
    with pytest.raises(UserError, match="CpmAntForCausalLM cannot be cut into stages: its layers get more"):
        check_job(job, tokenizer_folder=tmp_path, plans=False)


def test_a_job_for_probing_only_is_refused() -> None:
    network = clouds("east", "west") + links(("east", "west"))
    with pytest.raises(UserError, match=r"no \[data\]"):
        decide(parse_job('name = "x"\n' + network, file=Path("x.toml")))


def test_a_model_that_fits_passes() -> None:
    fits(tiny_job("cloud.west.memory=100 MiB"))


def test_bottlenecks_learn_and_begin_together(tmp_path: Path) -> None:
    both = ("link.0.boundary=bottleneck(4, warmup=2)", "model.frozen_layers=1")
    with pytest.raises(UserError, match="all layers below it are frozen"):
        check_job(tiny_job(*both), tokenizer_folder=tmp_path)
    network = clouds("a", "b", "c") + links(("a", "b"), ("b", "c"))
    apart = (
        "model.config.num_hidden_layers=3",
        "link.0.boundary=bottleneck(4, warmup=2)",
        "link.1.boundary=bottleneck(4, warmup=3)",
    )
    with pytest.raises(UserError, match="begin together"):
        check_job(tiny_job(*apart, network=network), tokenizer_folder=tmp_path)


def cut_of(job: Job, clouds: tuple[str, ...], *, planned: Pair | None = None) -> Cut:
    job = job.model_copy(update={"strategy": PipelineStrategy(kind="pipeline", clouds=clouds)})
    decisions = replace(decide(job), codecs=() if planned is None else (texts_of(planned),))
    blueprint = blueprint_of(job, config={}, num_labels=None)
    (cut,) = run_config(job, decisions, blueprint, num_validation_microbatches=0).pipeline.cuts
    return cut


def test_cuts_take_what_the_job_says_and_else_what_was_planned() -> None:
    planned = Pair(forward=parse_codec("bf16"), backward=parse_codec("rotate | int8"))
    job = tiny_job("link.0.codec={forward='auto', backward='fp16'}", "link.0.bandwidth=['1 Mbps', '2 Mbps']")
    up = cut_of(job, ("west", "east"))
    down = cut_of(job, ("east", "west"), planned=planned)
    assert texts_of(up.codecs) == ("raw", "fp16")
    assert texts_of(down.codecs) == ("bf16", "fp16")
    assert (down.bandwidths_bps, up.bandwidths_bps) == ((1e6, 2e6), (2e6, 1e6))
    assert down.is_free
    assert down.bounds.backward == parse_codec("fp16")
    num_microbatches = decide(job).num_microbatches
    assert (down.crossing.num_steps, down.crossing.num_microbatches) == (4, num_microbatches)
    assert (down.crossing.num_rows, down.crossing.width) == (512 // num_microbatches, 32)
    assert down.least_lossy is None
    budget = ("limits.budget_usd=5", "link.0.usd_per_gib=0.1", "link.0.codec=auto")
    paid = cut_of(tiny_job(*budget), ("east", "west"), planned=planned)
    assert paid.least_lossy == paid.codecs == planned


SHARED_OUT = ("cloud.west.ranks=2", "cloud.west.sharding=full")


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        ((*SHARED_OUT, "strategy.policy=wan-1f1b"), "policy wan-1f1b does not keep"),
        (SHARED_OUT, "as many ranks in every cloud"),
        (
            (*SHARED_OUT, "cloud.east.ranks=2", "strategy.microbatches=1"),
            "as many micro-batches at each",
        ),
    ],
)
def test_what_several_ranks_cannot_do_has_a_cure(overrides: tuple[str, ...], what: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        decide(tiny_job(*overrides))
    assert caught.value.hint


def test_ranks_may_share_out_moments_in_8_bits() -> None:
    shared = ("cloud.west.ranks=2", "cloud.west.sharding=optimizer")
    assert decide(tiny_job(*shared, "train.optimizer_bits=8")).optimizer_bits == 8


def test_ranks_that_share_a_stage_out_need_less_memory_each() -> None:
    job = tiny_job("cloud.west.memory=270 KB", "cloud.west.ranks=4")
    with pytest.raises(UserError, match="needs"):
        fits(job)
    fits(tiny_job("cloud.west.memory=270 KB", "cloud.west.ranks=4", "cloud.west.sharding=optimizer"))


SMALL = ("cloud.west.ranks=4", "cloud.west.memory=500 KB", "strategy.microbatches=16")


def test_ranks_share_a_stage_out_where_the_plan_says_so() -> None:
    job = tiny_job(*FIGURES, *SMALL)
    found = decided(job)
    assert any(reason.startswith("sharding: the ranks of west") for reason in found.reasons)
    followed = follow(job, stage_order(job), found)
    assert [cloud.sharding for cloud in followed.cloud] == ["none", "optimizer"]
    fits(job, found)


def test_ranks_hold_copies_where_nothing_is_planned() -> None:
    job = tiny_job(*SMALL)
    assert {cloud.sharding for cloud in follow(job, stage_order(job), decided(job)).cloud} == {"none"}


def test_moments_in_8_bits_fit_where_others_do_not() -> None:
    job, small = (tiny_job("cloud.west.memory=270 KB", *more) for more in ((), ("train.optimizer_bits=8",)))
    with pytest.raises(UserError, match="needs"):
        fits(job)
    fits(small)


def test_what_memory_holds_bounds_what_the_job_allows() -> None:
    job = tiny_job(*FIGURES, *SMALL, "strategy.max_in_flight=16")
    decisions = decided(job)
    for planned, expected in ((3, 3), ((3, 1), (3, 1)), (None, 16)):
        assert decide(job, replace(decisions, max_in_flight=planned)).max_in_flight == expected


def test_each_stage_may_have_its_own_cap() -> None:
    job = tiny_job("strategy.max_in_flight=[3, 1]")
    assert decide(job).max_in_flight == (3, 1)
    with pytest.raises(UserError, match=r"strategy\.max_in_flight has 3 entries for 2 stages"):
        decide(tiny_job("strategy.max_in_flight=[3, 2, 1]"))


def test_frozen_layers_need_no_gradients() -> None:
    job, frozen = (tiny_job("cloud.east.memory=200 KB", *more) for more in ((), ("model.frozen_layers=1",)))
    with pytest.raises(UserError, match="'east' needs"):
        fits(job)
    fits(frozen)

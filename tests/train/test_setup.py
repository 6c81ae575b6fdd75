"""What cannot run is said in one sentence with its cure, before anything starts."""

from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.job import Job, stage_order
from isthmus.job.codec import parse_codec
from isthmus.job.load import parse_job
from isthmus.plan.codecs import Pair, texts_of
from isthmus.plan.scenario import Policy
from isthmus.plan.steering import Cut
from isthmus.train.build import blueprint_of, check_fits
from isthmus.train.run_config import run_config, set_up
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


@pytest.mark.parametrize(("model_type", "keeps_padding"), [("llama", False), ("qwen3_moe", True)])
def test_padding_crosses_where_experts_see_it(model_type: str, keeps_padding: bool) -> None:
    job = tiny_job(f"model.config.model_type={model_type}")
    blueprint = blueprint_of(job, config={}, num_labels=None)
    config = run_config(job, set_up(job, plans=False), blueprint, num_validation_microbatches=0)
    assert config.keeps_padding == keeps_padding


def test_the_order_of_the_job_is_the_order_of_the_stages() -> None:
    network = clouds("a", "b", "c") + links(("b", "a"), ("c", "b"), ("a", "c"))
    assert stage_order(tiny_job(network=network)) == ("a", "b", "c")


def test_else_the_links_give_the_order() -> None:
    network = clouds("middle", "left", "right") + links(("middle", "left"), ("right", "middle"))
    assert stage_order(tiny_job(network=network)) == ("left", "middle", "right")


def test_a_single_cloud_is_a_pipeline_of_one_stage() -> None:
    assert set_up(tiny_job(network=clouds("alone"))).clouds == ("alone",)


@pytest.mark.parametrize(
    "pairs", [(("a", "b"), ("c", "d")), (("a", "b"), ("a", "c"), ("a", "d"))], ids=["islands", "star"]
)
def test_clouds_that_are_not_in_a_row_are_refused(pairs: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(UserError, match="in a row") as caught:
        stage_order(tiny_job(network=clouds("a", "b", "c", "d") + links(*pairs)))
    assert caught.value.hint


def test_without_figures_micro_batches_are_chosen_by_a_rule() -> None:
    setup = set_up(tiny_job())
    assert setup.layout.num_microbatches == 16
    assert setup.max_in_flight == 16
    assert setup.policy is Policy.WAN_ONE_F_ONE_B
    assert setup.stage_layers(2) == (range(1), range(1, 2))
    assert (setup.plan, setup.decisions) == (None, None)
    assert "figures of link east-west" in setup.notes[0]
    assert "16" in setup.notes[1]


def test_what_is_given_is_not_chosen() -> None:
    given = ("strategy.microbatches=4", "strategy.max_in_flight=3", "strategy.policy=gpipe")
    for figures in ((), FIGURES):
        setup = set_up(tiny_job(*given, *figures))
        assert (setup.layout.num_microbatches, setup.max_in_flight, setup.policy) == (4, 3, Policy.GPIPE)
        assert not any("micro-batches" in note for note in setup.notes)


def test_with_figures_the_planner_chooses_and_says_why() -> None:
    setup = set_up(tiny_job(*FIGURES, "model.config.num_hidden_layers=5"))
    assert setup.plan is not None
    assert sum(setup.plan.decisions.layers if setup.plan.decisions else ()) == 5
    text = " ".join(setup.notes)
    for word in ("cut: east layers 0", "micro-batches: ", "planned: pipeline"):
        assert word in text


def test_other_clouds_follow_the_decisions_of_the_first() -> None:
    first = set_up(tiny_job(*FIGURES, "model.config.num_hidden_layers=5"))
    elsewhere = tiny_job("link.0.rtt=900 ms", "link.0.bandwidth=1 Mbps", "model.config.num_hidden_layers=5")
    second = set_up(elsewhere, decisions=first.decisions)
    assert second.stage_layers(5) == first.stage_layers(5)
    assert second.layout == first.layout
    assert second.codecs == first.codecs
    assert second.notes == first.notes


def test_given_layers_and_clouds_are_kept() -> None:
    given = ("strategy.clouds=['west', 'east']", "strategy.layers=[3, 1]", "model.config.num_hidden_layers=4")
    for figures in ((), FIGURES):
        setup = set_up(tiny_job(*given, *figures))
        assert setup.clouds == ("west", "east")
        assert setup.stage_layers(4) == (range(3), range(3, 4))


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("strategy.kind=data", "cannot be run yet"),
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


def test_a_job_for_probing_only_is_refused() -> None:
    network = clouds("east", "west") + links(("east", "west"))
    with pytest.raises(UserError, match=r"no \[data\]"):
        set_up(parse_job('name = "x"\n' + network, file=Path("x.toml")))


def test_a_model_that_fits_passes() -> None:
    job = tiny_job("cloud.west.memory=100 MiB")
    check_fits(job, set_up(job), blueprint_of(job, config={}, num_labels=None))


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
    setup = replace(set_up(job), clouds=clouds, codecs=None if planned is None else (planned,))
    blueprint = blueprint_of(job, config={}, num_labels=None)
    (cut,) = run_config(job, setup, blueprint, num_validation_microbatches=0).pipeline.cuts
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
    num_microbatches = set_up(job).layout.num_microbatches
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
        set_up(tiny_job(*overrides))
    assert caught.value.hint


def test_ranks_may_share_out_moments_in_8_bits() -> None:
    shared = ("cloud.west.ranks=2", "cloud.west.sharding=optimizer")
    assert set_up(tiny_job(*shared, "train.optimizer_bits=8")).clouds == ("east", "west")


def test_ranks_that_share_a_stage_out_need_less_memory_each() -> None:
    job = tiny_job("cloud.west.memory=270 KB", "cloud.west.ranks=4")
    blueprint = blueprint_of(job, config={}, num_labels=None)
    with pytest.raises(UserError, match="needs"):
        check_fits(job, set_up(job), blueprint)
    shared = tiny_job("cloud.west.memory=270 KB", "cloud.west.ranks=4", "cloud.west.sharding=optimizer")
    check_fits(shared, set_up(shared), blueprint)


SMALL = ("cloud.west.ranks=4", "cloud.west.memory=500 KB", "strategy.microbatches=16")


def test_ranks_share_a_stage_out_where_the_plan_says_so() -> None:
    job = tiny_job(*FIGURES, *SMALL)
    setup = set_up(job)
    assert any(note.startswith("sharding: the ranks of west") for note in setup.notes)
    for one in (setup, set_up(job, decisions=setup.decisions, plans=False)):
        assert [cloud.sharding for cloud in one.followed(job).cloud] == ["none", "optimizer"]
        check_fits(job, one, blueprint_of(job, config={}, num_labels=None))


def test_ranks_hold_copies_where_nothing_is_planned() -> None:
    job = tiny_job(*SMALL)
    assert {cloud.sharding for cloud in set_up(job).followed(job).cloud} == {"none"}


def test_moments_in_8_bits_fit_where_others_do_not() -> None:
    job, small = (tiny_job("cloud.west.memory=270 KB", *more) for more in ((), ("train.optimizer_bits=8",)))
    blueprint = blueprint_of(job, config={}, num_labels=None)
    with pytest.raises(UserError, match="needs"):
        check_fits(job, set_up(job), blueprint)
    check_fits(small, set_up(small), blueprint)


def test_what_memory_holds_bounds_what_the_job_allows() -> None:
    job = tiny_job(*FIGURES, *SMALL, "strategy.max_in_flight=16")
    decisions = set_up(job).decisions
    assert decisions is not None
    assert set_up(job, decisions=replace(decisions, max_in_flight=3)).max_in_flight == 3
    assert set_up(job, decisions=replace(decisions, max_in_flight=(3, 1))).max_in_flight == (3, 1)
    assert set_up(job, decisions=replace(decisions, max_in_flight=None)).max_in_flight == 16


def test_each_stage_may_have_its_own_cap() -> None:
    job = tiny_job("strategy.max_in_flight=[3, 1]")
    assert set_up(job, plans=False).max_in_flight == (3, 1)
    with pytest.raises(UserError, match=r"strategy\.max_in_flight has 3 entries for 2 stages"):
        set_up(tiny_job("strategy.max_in_flight=[3, 2, 1]"))


def test_frozen_layers_need_no_gradients() -> None:
    job, frozen = (tiny_job("cloud.east.memory=200 KB", *more) for more in ((), ("model.frozen_layers=1",)))
    blueprint = blueprint_of(job, config={}, num_labels=None)
    with pytest.raises(UserError, match="'east' needs"):
        check_fits(job, set_up(job, plans=False), blueprint)
    check_fits(frozen, set_up(frozen, plans=False), blueprint)

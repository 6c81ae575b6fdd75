"""What cannot run is said in one sentence with its cure, before anything starts."""

from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.job.load import parse_job
from isthmus.plan.pipeline import Policy
from isthmus.train.session import check_job
from isthmus.train.setup import blueprint_of, check_fits, set_up, stage_order

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


def test_micro_batches_are_chosen_with_a_reason() -> None:
    setup = set_up(tiny_job())
    assert setup.layout.num_microbatches == 16
    assert setup.max_in_flight == 16
    assert setup.policy is Policy.WAN_ONE_F_ONE_B
    assert "16" in setup.notes[0]


def test_what_is_given_is_not_chosen() -> None:
    given = ("strategy.microbatches=4", "strategy.max_in_flight=3", "strategy.policy=gpipe")
    setup = set_up(tiny_job(*given))
    assert (setup.layout.num_microbatches, setup.max_in_flight, setup.policy) == (4, 3, Policy.GPIPE)
    assert setup.notes == ()


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("strategy.kind=data", "cannot be run yet"),
        ("cloud.west.ranks=2", "ranks"),
        ("link.0.codec=fp16", "codec"),
        ("strategy.microbatches=5", "cannot be divided"),
        ("train.batch_tokens=8192000", "one step reads"),
        ("model.config.num_hidden_layers=1", "cannot be cut into 2 stages"),
        ("cloud.west.memory=10 KiB", "needs .* but it has 10 KiB"),
        ("model.config.max_position_embeddings=16", "longer than the model"),
        ("model.config.vocab_size=200", "too small"),
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

"""Plans of encoder–decoders: where they are cut, what crosses, and what is refused as a run refuses it."""

from functools import cache

import pytest

from isthmus.errors import UserError
from isthmus.job import Job
from isthmus.plan.costs import framed_bytes
from isthmus.plan.plan import Plan
from isthmus.plan.planner import plan
from isthmus.train.build import blueprint_of, made_up_ids
from isthmus.train.pipeline_config import decide, plan_run, stage_layers
from isthmus.train.profiles import Measuring
from tests.plan.jobs import THIRD_CLOUD, link, two_clouds

MEASURING = Measuring()
WIDTH, LENGTH, NUM_SEQUENCES = 64, 32, 8
MODEL = (
    'model.config={model_type="bart", vocab_size=512, d_model=64, encoder_layers=2, decoder_layers=3, '
    "encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, "
    "max_position_embeddings=64}"
)
T5 = (
    'model.config={model_type="t5", vocab_size=512, d_model=64, num_layers=2, num_decoder_layers=2, '
    "num_heads=4, d_kv=16, d_ff=128}"
)
ASKED = (
    'data.task="translation"',
    f"data.sequence_length={LENGTH}",
    f"train.batch_tokens={LENGTH * NUM_SEQUENCES * 4}",
    'strategy={kind="pipeline", microbatches=4}',
    'link.east-west.codec="raw"',
    'train.precision="float32"',
    # Else all is measured twice.
    "train.recompute=false",
)
EAST_NORTH = link("west", "north")


def job(*overrides: str, model: str = MODEL, more: str = "") -> Job:
    return two_clouds(model, *ASKED, *overrides, more=more)


@cache
def planned(*overrides: str, model: str = MODEL, more: str = "") -> Plan:
    return plan(job(*overrides, model=model, more=more), is_quick=True, source=MEASURING)


def layers(found: Plan) -> list[tuple[int, int] | None]:
    return [one.layers for one in found.stages]


def test_the_encoder_ends_where_the_job_says() -> None:
    assert layers(planned('link.east-west.boundary="memory"')) == [(0, 2), (2, 5)]


def test_t5_is_cut_between_its_stacks_alone() -> None:
    assert layers(planned(model=T5)) == [(0, 2), (2, 4)]


def test_behind_a_layer_of_the_decoder_the_memory_crosses_beside_its_states() -> None:
    """A message there is twice the floats, raw, in either direction."""
    at_memory, within = (
        planned(f'strategy={{kind="pipeline", microbatches=4, layers=[{first}, {5 - first}]}}')
        for first in (2, 3)
    )
    states_bytes = 4 * WIDTH * LENGTH * NUM_SEQUENCES
    assert at_memory.scenario is not None
    assert within.scenario is not None
    one, two = at_memory.scenario.hops[0], within.scenario.hops[0]
    for first, second in ((one.forward_bytes, two.forward_bytes), (one.backward_bytes, two.backward_bytes)):
        assert states_bytes < first < framed_bytes(states_bytes + 4 * LENGTH * NUM_SEQUENCES + 500)
        assert second - first == pytest.approx(states_bytes, rel=0.01)


def test_nothing_goes_back_to_a_frozen_encoder() -> None:
    found = planned("model.frozen_layers=2", 'link.east-west.boundary="memory"')
    assert found.scenario is not None
    assert found.scenario.hops[0].backward_bytes == 0
    assert found.scenario.first_trained == 1


def test_three_clouds_have_the_encoder_end_before_the_boundary_that_says_so() -> None:
    more = THIRD_CLOUD + EAST_NORTH + 'boundary = "memory"\n'
    found = planned('strategy.clouds=["east", "west", "north"]', more=more)
    assert layers(found) == [(0, 1), (1, 2), (2, 5)]


def test_a_run_follows_the_plan() -> None:
    asked = job('link.east-west.boundary="memory"')
    chosen = plan_run(asked, source=MEASURING)
    assert chosen is not None
    assert chosen.scenario == planned('link.east-west.boundary="memory"').scenario
    decoder = blueprint_of(asked, config=made_up_ids(asked), num_labels=None).family.decoder
    assert stage_layers(asked, decide(asked, chosen.decisions), 5, decoder) == (range(2), range(2, 5))


@pytest.mark.parametrize(
    ("overrides", "model", "sentence"),
    [
        (("model.frozen_layers=1",), MODEL, "1 layers cannot be frozen in an encoder–decoder"),
        (('data.task="masked-lm"',), MODEL, "trained for translation, not for masked-lm"),
        (('strategy={kind="pipeline", layers=[1, 3]}',), T5, "T5 cannot be cut before layer 1"),
        (
            ('strategy={kind="pipeline", layers=[3, 2]}', 'link.east-west.boundary="memory"'),
            MODEL,
            "lies behind",
        ),
    ],
)
def test_what_a_run_refuses_a_plan_refuses(overrides: tuple[str, ...], model: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        planned(*overrides, model=model)


def test_the_output_of_an_encoder_crosses_no_other_model() -> None:
    with pytest.raises(UserError, match="the model is no encoder–decoder"):
        plan(two_clouds('link.east-west.boundary="memory"'), is_quick=True)

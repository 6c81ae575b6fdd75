"""Where no generator feeds a discriminator: one sentence on what is in the way, and cures that work."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.plan.plan import Form, Plan
from isthmus.plan.planner import plan
from tests.plan.cures import overrides, tables, ways
from tests.plan.jobs import THIRD_CLOUD, link, two_clouds

GENERATOR = (
    "strategy.kind=generator-discriminator",
    "model.config.model_type=xlm-roberta",
    "model.config.max_position_embeddings=1026",
    "data.task=masked-lm",
)
JUDGE = "strategy.discriminator_cloud=west"
SPARED = "even with recompute and optimizer on the host"


def planned(*changes: str, more: str = "") -> Plan:
    return plan(two_clouds(*GENERATOR, *changes, more=more), is_quick=True)


def refusal(*changes: str, more: str = "") -> UserError | None:
    try:
        planned(*changes, more=more)
    except UserError as error:
        return error
    return None


def cured_ways(error: UserError, *changes: str, more: str = "") -> list[str]:
    """The ways out of a refusal, each of which leads to a plan."""
    found = ways(error.hint)
    for way in found:
        settings, added = overrides(way), tables(way)
        assert settings or added, f"{way} cannot be followed"
        plan = planned(*changes, *settings, more=more + added)
        assert plan.form is Form.GENERATOR_DISCRIMINATOR
    return found


def refused(*changes: str, more: str = "") -> tuple[str, list[str]]:
    """The sentence, and the ways out."""
    error = refusal(*changes, more=more)
    assert error is not None
    return error.message, cured_ways(error, *changes, more=more)


def test_the_given_discriminator_is_too_large() -> None:
    sentence, found = refused(JUDGE, "cloud.west.memory=1 GiB")
    assert sentence == (
        f"nothing fits with the discriminator in 'west': {SPARED}, a rank of 'west' needs 5.48 GiB for the "
        "discriminator, and limits.memory_share leaves it 921.6 MiB"
    )
    assert found == ["devices of 6.1 GiB in 'west' would do"]


def test_another_cloud_would_hold_the_discriminator() -> None:
    sentence, found = refused(JUDGE, "cloud.west.memory=4 GiB")
    assert sentence.startswith("nothing fits with the discriminator in 'west': ")
    assert found == [
        'set strategy.discriminator_cloud to "east"',
        "devices of 6.1 GiB in 'west' would do",
    ]


def test_the_generator_is_too_large() -> None:
    sentence, found = refused(JUDGE, "cloud.east.memory=1 GiB")
    assert f"{SPARED}, a rank of 'east' needs 2.61 GiB for a generator" in sentence
    assert found == ["devices of 2.9 GiB in 'east' would do"]


def test_where_both_are_too_large_both_are_to_grow() -> None:
    sentence, found = refused("cloud.east.memory=1 GiB", "cloud.west.memory=1 GiB")
    assert sentence.startswith("discriminator and generator fit on no two linked clouds: ")
    assert found == ["devices of 6.1 GiB in 'east' and devices of 2.9 GiB in 'west' would do"]


def test_the_roles_are_those_that_lack_least() -> None:
    sentence, found = refused("cloud.east.memory=2 GiB", "cloud.west.memory=5 GiB")
    assert "a rank of 'east' needs 2.61 GiB for a generator" in sentence
    assert found == ["devices of 6.1 GiB in 'west' and devices of 2.9 GiB in 'east' would do"]


def test_a_larger_share_of_memory_would_do() -> None:
    _, found = refused("limits.memory_share=0.05")
    assert found[0] == "set limits.memory_share to 0.14"


def test_bfloat16_would_do() -> None:
    long = ("data.sequence_length=8192", "model.config.max_position_embeddings=8194")
    tight = ("train.precision=float32", "model.config.vocab_size=1000", "cloud.west.memory=8 GiB")
    _, found = refused(JUDGE, *long, *tight, "cloud.east.memory=5 GiB")
    assert found[0] == 'set train.precision to "bfloat16"'


def test_who_has_room_is_not_linked() -> None:
    more = THIRD_CLOUD + link("north", "east")
    sentence, found = refused(JUDGE, "cloud.east.memory=1 GiB", more=more)
    assert sentence == (
        "nothing fits with the discriminator in 'west': 'west' and 'north' have room, but no link joins them"
    )
    assert found == [
        'add a [[link]] with between = ["west", "north"], bandwidth and rtt',
        "devices of 2.9 GiB in 'east' would do",
    ]


def test_one_that_cannot_be_dialled_is_to_listen_too() -> None:
    deaf = THIRD_CLOUD.replace('listen = "127.0.0.1:7602"\n', "") + link("north", "east")
    job = two_clouds(*GENERATOR, JUDGE, "cloud.east.memory=1 GiB", more=deaf)
    west = job.cloud_named("west").model_copy(update={"listen": None})
    job = job.model_copy(update={"cloud": (job.cloud[0], west, job.cloud[2])})
    with pytest.raises(UserError) as caught:
        plan(job)
    assert "bandwidth and rtt, and set cloud.west.listen; or " in (caught.value.hint or "")


def test_ranks_in_lock_step_need_even_shares() -> None:
    alike = ("cloud.west.ranks=8", "cloud.west.sharding=full", "train.batch_tokens=12288")
    with pytest.raises(UserError, match=r"ranks in lock-step .*, however much memory there is") as caught:
        planned(JUDGE, *alike)
    assert caught.value.hint == 'set cloud.NAME.sharding to "auto" where it is "full"'
    assert planned(JUDGE, *alike, "cloud.west.sharding=auto").clouds == ("east", "west")


@settings(max_examples=12, deadline=None)
@given(
    st.tuples(*[st.sampled_from([0.5, 2, 3, 4, 6, 40])] * 2),
    st.sampled_from([0.3, 0.6, 0.9]),
    st.sampled_from(["", JUDGE]),
)
def test_every_refusal_can_be_cured(memory_gib: tuple[float, float], share: float, judge: str) -> None:
    east, west = memory_gib
    changes = [f"cloud.east.memory={east} GiB", f"cloud.west.memory={west} GiB"]
    changes += [f"limits.memory_share={share}", *([judge] if judge else [])]
    error = refusal(*changes)
    assert error is None or cured_ways(error, *changes)

"""Clouds begin where all of them can, and never from the first step because a part is missing."""

import json
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import combinations, pairwise
from typing import TypeVar

import pytest

from isthmus.errors import FrameError, UserError
from isthmus.plan.pipeline_parts import Pipeline
from isthmus.plan.types import Member, pack_facts
from isthmus.train.in_cloud import World
from isthmus.train.members import Neighbours, SavedSteps, Start, choose_recent, choose_start, tree
from isthmus.train.pipeline import PipelineConfig
from isthmus.wan.link import Link
from isthmus.wan.memory import MemoryLink
from isthmus.wan.packet import Packet
from tests.train.chain import config

CLOUDS = ("east", "mid", "west")
T = TypeVar("T")


def steps(*whole: int, damaged: tuple[int, ...] = ()) -> SavedSteps:
    return SavedSteps(whole=whole, damaged=damaged)


def start_of(*, num_steps: int = 1000, **saved: SavedSteps) -> Start:
    return choose_start(saved, num_steps=num_steps)


def refusal(*, num_steps: int = 1000, **saved: SavedSteps) -> UserError:
    with pytest.raises(UserError) as error:
        choose_start(saved, num_steps=num_steps)
    assert error.value.hint
    return error.value


def test_nothing_saved_anywhere_is_a_new_run() -> None:
    assert start_of(east=steps(), west=steps()) == Start(step=0)


def test_the_newest_step_that_all_have_is_taken_and_newer_ones_are_told() -> None:
    assert start_of(east=steps(100, 200), west=steps(100, 200)) == Start(step=200)
    older = start_of(east=steps(100, 200), west=steps(50, 100))
    assert older.step == 100
    assert older.note == "step 100 is the newest that every cloud has saved; 'east' has step 200 too"


@pytest.mark.parametrize(
    ("east", "west", "listed"),
    [
        (steps(100, 200), steps(), "'east' has steps 100 and 200, 'west' has none"),
        (steps(100, 200), steps(150), "'east' has steps 100 and 200, 'west' has step 150"),
        (steps(*range(1, 9)), steps(99), "'east' has steps 4, 5, 6, 7 and 8 and 3 older, 'west' has step 99"),
        (
            steps(damaged=(20,)),
            steps(damaged=(20, 30)),
            "'east' has none (step 20 is damaged), 'west' has none (steps 20 and 30 are damaged)",
        ),
    ],
)
def test_without_a_common_step_all_clouds_are_listed(east: SavedSteps, west: SavedSteps, listed: str) -> None:
    found = refusal(east=east, west=west)
    assert found.message == f"no step is saved at every cloud: {listed}"
    assert found.hint == "copy back what is missing, or start again with --resume never"


def test_damage_is_no_reason_to_begin_again() -> None:
    assert start_of(east=steps(10, damaged=(20,)), west=steps(10, 20)).step == 10


def test_a_job_of_fewer_steps_than_were_taken_is_refused() -> None:
    found = refusal(east=steps(100), west=steps(100), num_steps=50)
    assert found.message == "the run has already taken 100 steps, more than the 50 of train.steps"
    assert found.hint == "set train.steps to 100 or more"
    assert start_of(east=steps(50, 100), west=steps(50, 100), num_steps=50).step == 50


@pytest.mark.parametrize("seed", range(20))
def test_a_start_is_common_and_the_newest_whatever_was_saved(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        saved = {name: steps(*sorted(rng.sample(range(1, 6), rng.randint(0, 4)))) for name in ("a", "b", "c")}
        common = set(saved["a"].whole) & set(saved["b"].whole) & set(saved["c"].whole)
        try:
            found = choose_start(saved, num_steps=9).step
        except UserError:
            assert not common
            assert any(one.whole for one in saved.values())
        else:
            assert found == max(common, default=0)


def test_a_cloud_that_was_away_does_not_set_the_others_back() -> None:
    """Where they continue without it, a step that all have counts only if it is one of the last two."""
    recent = choose_recent({"a": steps(30, 40), "b": steps(40), "c": steps(30, 40)}, num_steps=99)
    assert (recent.step, recent.is_common, recent.life) == (40, True, 0)
    interrupted = choose_recent({"a": steps(30, 40), "b": steps(20, 30)}, num_steps=99)
    assert (interrupted.step, interrupted.is_common) == (30, True)
    for c in (steps(10), steps()):
        away = choose_recent({"a": steps(10, 30, 40), "b": steps(10, 30, 40), "c": c}, num_steps=99)
        assert (away.is_common, away.life > 0) == (False, True)
        assert away.note is not None
        assert away.note.startswith("the newest of 'a' has steps")
    assert choose_recent({"a": steps(), "b": steps()}, num_steps=99) == Start(step=0)
    with pytest.raises(UserError, match="step 7 is damaged"):
        choose_recent({"a": steps(damaged=(7,)), "b": steps()}, num_steps=99)


def test_clouds_that_are_left_end_together_and_the_first_of_them_leads() -> None:
    pairs = list(combinations(CLOUDS, 2))

    def work(one: Neighbours) -> tuple[bool, int]:
        if one.index:
            one.part_with(["east"])
            one.agree_on_end()
        return one.is_first, len(one.downs)

    assert joined(CLOUDS, work, pairs) == [(True, 2), (True, 1), (False, 0)]


def joined(
    clouds: Sequence[str],
    work: Callable[[Neighbours], T],
    given: Sequence[tuple[str, str]] | None = None,
) -> list[T]:
    """What every cloud comes to that links in memory join, as a chain unless given."""
    pairs = list(pairwise(clouds)) if given is None else given
    with ExitStack() as stack, ThreadPoolExecutor(len(clouds)) as pool:
        links = {pair: stack.enter_context(MemoryLink(*pair)) for pair in pairs}

        def at(cloud: str) -> T:
            def connect(peer: str, _: int) -> Link:
                return next(link for pair, link in links.items() if {cloud, peer} == {*pair}).end(cloud)

            return work(Neighbours(connect, World(), clouds=clouds, cloud=cloud, links=pairs))

        return list(pool.map(at, clouds))


def told(stream: str, packet: Packet, work: Callable[[Neighbours], object]) -> None:
    """Let the first of two clouds work with what the second has sent."""
    with MemoryLink("east", "west") as link:
        link.end("west").send(stream, packet)
        work(Neighbours(lambda *_: link.end("east"), World(), clouds=["east", "west"], cloud="east"))


STAR = (("mid", "east"), ("mid", "west"), ("mid", "north"))
RING = (("east", "mid"), ("mid", "west"), ("west", "north"), ("north", "east"))


def agreement_of(clouds: Sequence[str]) -> PipelineConfig:
    stages = tuple((Member(cloud),) for cloud in clouds)
    return PipelineConfig(seed=1, pipeline=Pipeline(stages=stages, num_steps=1, num_microbatches=4))


@pytest.mark.parametrize("links", [STAR, RING])
def test_clouds_agree_along_any_links_that_join_them(links: tuple[tuple[str, str], ...]) -> None:
    clouds = ("east", "mid", "west", "north")
    agreed = agreement_of(clouds)
    saved = {"east": steps(10, 20), "mid": steps(10, 20, 30), "west": steps(20), "north": steps(10, 20)}

    def work(one: Neighbours) -> tuple[int, dict[str, str]]:
        name = clouds[one.index]
        found = one.gather_profiles(lambda: f"of {name}", is_wanted=one.index == 0)
        assert one.agree_on_config(agreed if one.index == 0 else None) == agreed
        start = one.agree_on_start(saved[name], num_steps=99)
        one.agree_on_end()
        return start.step, found

    found = joined(clouds, work, links)
    assert [step for step, _ in found] == [20] * 4
    assert found[0][1] == {name: f"of {name}" for name in clouds}


def test_the_tree_has_the_least_depth_and_clouds_that_nothing_joins_are_named() -> None:
    clouds = ("east", "mid", "west", "north")
    assert tree(clouds, RING) == {
        "east": (None, ("mid", "north")),
        "mid": ("east", ("west",)),
        "west": ("mid", ()),
        "north": ("east", ()),
    }
    with pytest.raises(UserError, match="no link joins cloud 'north' to cloud 'east'") as error:
        tree(clouds, STAR[:2])
    assert error.value.hint


def test_what_each_cloud_has_travels_up_and_the_decision_down() -> None:
    saved = [steps(10, 20), steps(10, 20, 30), steps(10, 20)]
    found = joined(CLOUDS, lambda one: one.agree_on_start(saved[one.index], num_steps=99))
    assert [start.step for start in found] == [20, 20, 20]
    assert [start.note for start in found] == [
        "step 20 is the newest that every cloud has saved; 'mid' has step 30 too",
        None,
        None,
    ]


@pytest.mark.parametrize(
    "saved",
    [
        None,
        [],
        {"west": {"whole": [True], "damaged": []}},
        {"west": {"whole": [-1], "damaged": []}},
        {"west": {"whole": ["1"], "damaged": []}},
        {f"c{number}": {"whole": [], "damaged": []} for number in range(65)},
    ],
)
def test_what_is_no_list_of_steps_is_refused(saved: object) -> None:
    packet = Packet({"facts": json.dumps({"clouds": saved})})
    with pytest.raises(FrameError, match="AllSaved"):
        told("start/saved", packet, lambda one: one.agree_on_start(steps(), num_steps=9))


@pytest.mark.parametrize("is_wanted", [True, False])
def test_profiles_travel_up_to_the_first_cloud_that_asks(is_wanted: bool) -> None:
    asked: list[str] = []

    def measure(cloud: str) -> str | None:
        asked.append(cloud)
        return None if cloud == "mid" else f"profile of {cloud}"

    first, *_ = joined(
        CLOUDS,
        lambda one: one.gather_profiles(
            lambda: measure(CLOUDS[one.index]), is_wanted=is_wanted and one.up is None
        ),
    )
    assert first == ({"east": "profile of east", "west": "profile of west"} if is_wanted else {})
    assert sorted(asked) == (sorted(CLOUDS) if is_wanted else [])


@pytest.mark.parametrize(
    "packet",
    [Packet({}), Packet({"clouds": ["west", "north"]}, (b"{}",)), Packet({"clouds": ["west"]}, (b"\xff",))],
)
def test_profiles_that_are_none_are_refused(packet: Packet) -> None:
    with pytest.raises(FrameError, match="profile"):
        told("start/profiles", packet, lambda one: one.gather_profiles(lambda: None, is_wanted=True))


def test_all_clouds_follow_the_run_config_of_the_first_which_knows_them() -> None:
    agreed = config(3, 2)
    clouds = [stage[0].cloud for stage in agreed.pipeline.stages]
    found = joined(clouds, lambda one: one.agree_on_config(agreed if one.up is None else None))
    assert found == [agreed] * 3
    with MemoryLink("north", "west") as link:
        link.end("north").send("start/config", Packet({}, (pack_facts(agreed).encode(),)))
        west = Neighbours(lambda *_: link.end("west"), World(), clouds=["north", "west"], cloud="west")
        with pytest.raises(FrameError, match="without west/0"):
            west.agree_on_config(None)

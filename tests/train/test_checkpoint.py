"""A run that was stopped and resumed at any step ends to the bit like one that never stopped."""

import functools
from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.train.checkpoint import COMPLETE, Checkpoints, State
from isthmus.train.crossing.cut import SavedCuts
from isthmus.train.data.order import Cursor
from isthmus.train.observer import StepEnded
from tests.model.cases import blueprint, build
from tests.train.chain import CLOUDS, Chain, Given, chain, course, make_optimizer
from tests.train.reference import assert_same, parameters_of
from tests.train.test_exactness import batches


def save_all(found: Chain, folder: Path, *, keep: int = 9) -> None:
    """Let every stage save after every step."""
    for index, record in enumerate(found.records):
        record.on_step = functools.partial(
            save, found, index, Checkpoints(folder, cloud=CLOUDS[index], keep=keep)
        )


def save(found: Chain, index: int, checkpoints: Checkpoints, ended: StepEnded) -> None:
    stage = found.stages[index]
    state = State(
        step=ended.step + 1,
        layers=(stage.layers.start, stage.layers.stop),
        cursor=Cursor(epoch=1, position=ended.step),
        cuts=ended.cuts or SavedCuts(),
    )
    checkpoints.save(state, stage=stage, optimizer=found.optimizers[index])


def load_all(found: Chain, folder: Path, step: int) -> list[State]:
    return [
        Checkpoints(folder, cloud=CLOUDS[index]).load(step, stage=stage, optimizer=found.optimizers[index])
        for index, stage in enumerate(found.stages)
    ]


def test_resuming_at_any_step_equals_never_stopping(tmp_path: Path) -> None:
    plan = blueprint("llama")
    steps = batches(plan, 2)
    with chain(plan, course(2, 2)) as whole:
        save_all(whole, tmp_path)
        whole.run(Given(steps))
    expected = parameters_of(whole.stages)
    assert Checkpoints(tmp_path, cloud="north").steps() == (1, 2, 3, 4, 5)
    for step in (1, 3, 4):
        with chain(plan, course(2, 2)) as resumed:
            states = load_all(resumed, tmp_path, step)
            resumed.run(Given(steps), first_step=step)
        assert [state.cursor for state in states] == [Cursor(epoch=1, position=step - 1)] * 2
        assert_same(parameters_of(resumed.stages), expected)


def test_only_the_newest_are_kept_and_only_whole_ones_count(tmp_path: Path) -> None:
    plan = blueprint("gpt2")
    with chain(plan, course(1, 1)) as found:
        save_all(found, tmp_path, keep=2)
        found.run(Given(batches(plan, 1)))
    checkpoints = Checkpoints(tmp_path, cloud="north")
    assert checkpoints.steps() == (4, 5)
    (tmp_path / "checkpoints" / "step-00000005" / "north" / COMPLETE).unlink()
    assert checkpoints.steps() == (4,)
    names = {path.name for path in tmp_path.rglob("*")}
    assert not any(name.startswith(".") for name in names)


def test_a_run_that_went_on_from_an_older_step_drops_what_the_lost_steps_left(tmp_path: Path) -> None:
    """They count neither as newest, for which the new ones would be deleted, nor as another cloud's next."""
    (stage,) = build(blueprint("gpt2"), [range(4)])
    optimizer = make_optimizer(stage, None)
    checkpoints = Checkpoints(tmp_path, cloud="north", keep=2)
    for step in (20, 30, 27):
        state = State(step=step, layers=(0, 4))
        checkpoints.save(state, stage=stage, optimizer=optimizer)
    assert checkpoints.steps() == (20, 27)


def test_what_is_damaged_or_of_another_model_is_refused(tmp_path: Path) -> None:
    plan = blueprint("llama")
    with chain(plan, course(1, 1)) as found:
        save_all(found, tmp_path)
        found.run(Given(batches(plan, 1)))
    folder = tmp_path / "checkpoints" / "step-00000005" / "north"
    with chain(blueprint("qwen2"), course(1, 1)) as other, pytest.raises(UserError, match="cannot be used"):
        load_all(other, tmp_path, 5)
    with chain(plan, course(2, 1)) as other, pytest.raises(UserError, match="layers"):
        load_all(other, tmp_path, 5)
    (folder / "weights.safetensors").write_bytes(b"\x00" * 64)
    with chain(plan, course(1, 1)) as other, pytest.raises(UserError, match="cannot be used"):
        load_all(other, tmp_path, 5)


def test_a_save_that_crashed_half_way_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = blueprint("llama")
    with chain(plan, course(1, 1)) as found:
        save_all(found, tmp_path)
        found.run(Given(batches(plan, 1)))

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("isthmus.train.checkpoint.save_file", full)
        checkpoints = Checkpoints(tmp_path, cloud="north")
        state = State(step=5, layers=(0, 4), cursor=None)
        with pytest.raises(UserError, match="No space left"):
            checkpoints.save(state, stage=found.stages[0], optimizer=found.optimizers[0])
    assert checkpoints.steps() == (1, 2, 3, 4, 5)
    with chain(plan, course(1, 1)) as again:
        load_all(again, tmp_path, 5)
    assert_same(parameters_of(again.stages), parameters_of(found.stages))


def test_a_kill_while_a_step_is_written_again_leaves_nothing_that_passes_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stage,) = build(blueprint("gpt2"), [range(4)])
    optimizer = make_optimizer(stage, None)
    checkpoints = Checkpoints(tmp_path, cloud="north")
    for step in (20, 30):
        checkpoints.save(State(step=step, layers=(0, 4)), stage=stage, optimizer=optimizer)

    def killed(folder: Path, *, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            (folder / "weights.safetensors").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("isthmus.train.checkpoint.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(State(step=30, layers=(0, 4)), stage=stage, optimizer=optimizer)
    assert checkpoints.steps() == (20,)
    checkpoints.save(State(step=30, layers=(0, 4)), stage=stage, optimizer=optimizer)
    assert checkpoints.steps() == (20, 30)
    checkpoints.load(30, stage=stage, optimizer=optimizer)

"""A run that was stopped and resumed at any step ends to the bit like one that never stopped."""

import functools
import json
import shutil
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.errors import UserError
from isthmus.job.codec import parse_boundary, parse_codec
from isthmus.model.blueprint import pretrained_blueprint, split_layers
from isthmus.model.stage import Stage
from isthmus.plan.codecs import Pair
from isthmus.plan.pipeline_parts import PipelineState
from isthmus.plan.types import Member, pack_facts, unpack_facts
from isthmus.train.checkpoint import Checkpoints
from isthmus.train.coding import CodecState
from isthmus.train.in_cloud import World, shard, whole
from isthmus.train.keeper import Keeper, State
from isthmus.train.members import SavedSteps
from isthmus.train.optimizer import Optimizer
from isthmus.train.records import MANIFEST_FILE, DiskStore, Records, open_store
from isthmus.wan.packet import Buffer
from tests.model.cases import blueprint, build, language_head
from tests.model.test_weights import save_model
from tests.train.chain import CLOUDS, Chain, CutCase, Given, Saved, chain, config, make_optimizer
from tests.train.reference import assert_same, parameters_of
from tests.train.resuming import save_now
from tests.train.test_exactness import batches


def keeper(checkpoints: Checkpoints, stage: Stage, optimizer: Optimizer) -> Keeper:
    return Keeper(checkpoints, World(), stage=stage, optimizer=optimizer)


def checkpoints_in(folder: Path, cloud: str = "north", **options: Any) -> Checkpoints:
    return Checkpoints(open_store(folder, None), cloud=cloud, **options)


def save_all(found: Chain, folder: Path, *, keep: int = 9) -> None:
    """Let every stage save after every step."""
    for index, record in enumerate(found.records):
        record.on_save = functools.partial(
            save, found, index, checkpoints_in(folder, CLOUDS[index], keep=keep)
        )


def save(found: Chain, index: int, checkpoints: Checkpoints, saved: Saved) -> None:
    stage = found.stages[index]
    state = State(
        step=saved.step,
        facts={} if saved.facts is None else {"state": pack_facts(saved.facts)},
        wires=saved.wires,
    )
    save_now(keeper(checkpoints, stage, found.optimizers[index]), state)


def load_all(found: Chain, folder: Path, step: int) -> list[Saved]:
    return [load(found, index, folder, step) for index in range(len(found.stages))]


def load(found: Chain, index: int, folder: Path, step: int) -> Saved:
    checkpoints = checkpoints_in(folder, CLOUDS[index])
    state = keeper(checkpoints, found.stages[index], found.optimizers[index]).load(step)
    facts = unpack_facts(state.facts["state"], PipelineState) if state.facts else None
    return Saved(step, facts, dict(state.wires))


def test_resuming_at_any_step_equals_never_stopping(tmp_path: Path) -> None:
    plan = blueprint("llama")
    steps = batches(plan, 2)
    with chain(plan, config(2, 2)) as whole:
        save_all(whole, tmp_path)
        whole.run(Given(steps))
    expected = parameters_of(whole.stages)
    assert checkpoints_in(tmp_path).steps() == (1, 2, 3, 4, 5)
    for step in (1, 3, 4):
        with chain(plan, config(2, 2)) as resumed:
            states = load_all(resumed, tmp_path, step)
            resumed.run(Given(steps), first_step=step, states=states)
        assert_same(parameters_of(resumed.stages), expected)


def alone(model: str = "gpt2") -> tuple[Stage, Optimizer]:
    (stage,) = build(blueprint(model), [range(4)])
    return stage, make_optimizer(stage, None)


def record(folder: Path, step: int, cloud: str = "north") -> Path:
    return folder / "checkpoints" / f"step-{step:08d}" / cloud


def save_steps(folder: Path, *steps: int, keep: int = 9) -> Checkpoints:
    stage, optimizer = alone()
    checkpoints = checkpoints_in(folder, keep=keep)
    for step in steps:
        save_now(keeper(checkpoints, stage, optimizer), State(step=step))
    return checkpoints


def flip(path: Path, *, at: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta"])
def test_a_pretrained_encoder_whose_head_ties_its_biases(model_type: str, tmp_path: Path) -> None:
    save_model(model_type, tmp_path / "origin")
    plan = pretrained_blueprint(str(tmp_path / "origin"), head=language_head(model_type))
    steps = batches(plan, 2)
    with chain(plan, config(2, 2)) as whole:
        save_all(whole, tmp_path)
        whole.run(Given(steps))
    with chain(plan, config(2, 2)) as resumed:
        load_all(resumed, tmp_path, 3)
        resumed.run(Given(steps), first_step=3)
    assert_same(parameters_of(resumed.stages), parameters_of(whole.stages))


def test_only_the_newest_are_kept_and_only_whole_ones_count(tmp_path: Path) -> None:
    plan = blueprint("gpt2")
    with chain(plan, config(1, 1)) as found:
        save_all(found, tmp_path, keep=2)
        found.run(Given(batches(plan, 1)))
    checkpoints = checkpoints_in(tmp_path)
    assert checkpoints.steps() == (4, 5)
    (record(tmp_path, 5) / MANIFEST_FILE).unlink()
    assert checkpoints.steps() == (4,)
    names = {path.name for path in tmp_path.rglob("*")}
    assert not any(name.startswith(".") for name in names)


def test_the_best_one_is_kept_beside_the_newest_until_another_is_better(tmp_path: Path) -> None:
    stage, optimizer = alone()
    checkpoints = checkpoints_in(tmp_path, keep=2)
    bests = {1: None, 2: 1, 3: 1, 4: 1, 5: 3, 6: 3}
    kept = {}
    for step, best in bests.items():
        save_now(keeper(checkpoints, stage, optimizer), State(step=step, best_step=best))
        kept[step] = checkpoints.steps()
    # Step 3 was still there to become the best one, since it was judged before the next save.
    assert kept[4] == (1, 3, 4)
    assert kept[6] == (3, 5, 6)
    # A resumption keeps it, too.
    again = checkpoints_in(tmp_path, keep=2)
    again.inspect()
    again.begin_from(6)
    for step in (7, 8):
        save_now(keeper(again, stage, optimizer), State(step=step, best_step=3))
    assert again.steps() == (3, 7, 8)


def test_tensors_are_saved_by_parameter_name(tmp_path: Path) -> None:
    plan = blueprint("llama")
    with chain(plan, config(2, 2)) as found:
        save_all(found, tmp_path)
        found.run(Given(batches(plan, 2)))
    first, second = (
        json.loads((record(tmp_path, 5, cloud) / MANIFEST_FILE).read_text()) for cloud in CLOUDS[:2]
    )
    assert (first["facts"]["step"], first["facts"]["cloud"], first["facts"]["layers"]) == (5, "north", [0, 2])
    weight = "model.layers.3.self_attn.q_proj.weight"
    shape = list(found.stages[1].tensors_by_name()[weight].shape)
    for name in (weight, f"optimizer/exp_avg/{weight}", f"optimizer/exp_avg_sq/{weight}"):
        assert name not in first["tensors"]
        assert second["tensors"][name]["shape"] == shape
        assert second["tensors"][name]["dtype"] == "float32"
    names = first["tensors"].keys() | second["tensors"].keys()
    assert {name for name in names if "/" not in name} == parameters_of(found.stages).keys()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (4, 1)])
def test_a_run_that_is_cut_otherwise_goes_on_to_the_bit(tmp_path: Path, before: int, after: int) -> None:
    plan = blueprint("llama")
    steps = batches(plan, 2)
    with chain(plan, config(before, 2)) as whole:
        save_all(whole, tmp_path)
        whole.run(Given(steps))
    with chain(plan, config(after, 2)) as cut:
        states = load_all(cut, tmp_path, 3)
        cut.run(Given(steps), first_step=3, states=states)
    assert_same(parameters_of(cut.stages), parameters_of(whole.stages))


def test_what_no_record_has_is_named_with_the_records_that_are_here(tmp_path: Path) -> None:
    plan = blueprint("llama")
    with chain(plan, config(2, 2)) as whole:
        save_all(whole, tmp_path)
        whole.run(Given(batches(plan, 2)))
    shutil.rmtree(record(tmp_path, 3, "east"))
    with chain(plan, config(3, 2)) as cut, pytest.raises(UserError) as error:
        load_all(cut, tmp_path, 3)
    assert "the checkpoint of step 3 lacks model.layers.2." in error.value.message
    assert error.value.message.endswith("in the records that are here: 'north' (layers 0 to 1)")
    assert error.value.hint is not None


def test_halves_of_a_bottleneck_belong_to_their_cut(tmp_path: Path) -> None:
    """Both have the same names in their stages; what was trained for one cut is nothing to another."""
    plan = blueprint("llama")
    agreed = config(3, 2, cuts=(CutCase(boundary=parse_boundary("bottleneck(4, warmup=2)")),) * 2)
    with chain(plan, agreed) as found:
        save_all(found, tmp_path)
        found.run(Given(batches(plan, 2)))
        expected = parameters_of(found.stages)
    with chain(plan, agreed) as again:
        load_all(again, tmp_path, 5)
        middle = again.stages[1]
        assert middle.up is not None
        assert middle.down is not None
        assert torch.equal(middle.up.weight, found.stages[1].up.weight)  # type: ignore[union-attr]
        assert_same(parameters_of(again.stages), expected)
    names = json.loads((record(tmp_path, 5, "east") / MANIFEST_FILE).read_text())["tensors"]
    start, stop = middle.layers.start, middle.layers.stop
    assert {f"boundary.{start}.up.weight", f"boundary.{stop}.down.weight"} <= names.keys()
    other = config(2, 2, cuts=(CutCase(boundary=parse_boundary("bottleneck(4, warmup=2)")),))
    if split_layers(plan.num_layers, 2)[0].stop not in {start, stop}:
        with chain(plan, other) as cut, pytest.raises(UserError, match="lacks boundary"):
            load_all(cut, tmp_path, 5)


def test_facts_and_wires_come_back_as_they_were(tmp_path: Path) -> None:
    stage, optimizer = alone()
    pair = Pair(forward=parse_codec("int8"), backward=parse_codec("raw"))
    shared = torch.arange(3.0)
    wire = CodecState(pair=pair, tensors={"a/b": shared, "c": shared[1:]})
    state = State(
        step=7,
        facts={"standings": [{"since_step": 3}]},
        wires={Member("west"): wire, Member("far-east", 2): CodecState(pair=pair, tensors={})},
    )
    keeping = keeper(checkpoints_in(tmp_path), stage, optimizer)
    save_now(keeping, state)
    found = keeping.load(7)
    assert (found.step, found.facts) == (state.step, state.facts)
    assert found.wires.keys() == state.wires.keys()
    assert {one.pair for one in found.wires.values()} == {pair}
    assert_same(dict(found.wires[Member("west")].tensors), {"a/b": shared, "c": shared[1:]})


def test_lost_steps_are_removed_once_a_new_one_is_saved(tmp_path: Path) -> None:
    """They count neither as newest, for which the new ones would be deleted, nor as another cloud's next."""
    save_steps(tmp_path, 20, 30)
    stage, optimizer = alone()
    checkpoints = checkpoints_in(tmp_path, keep=2)
    checkpoints.begin_from(20)
    assert checkpoints.steps() == (20, 30), "nothing is touched before something new is whole"
    save_now(keeper(checkpoints, stage, optimizer), State(step=27))
    assert checkpoints.steps() == (20, 27)
    assert not record(tmp_path, 30).exists()
    save_now(keeper(checkpoints, stage, optimizer), State(step=30))
    assert checkpoints.steps() == (27, 30)
    assert checkpoints.inspect() == SavedSteps(whole=(27, 30))


def test_a_step_between_the_start_and_the_first_save_was_lost_too(tmp_path: Path) -> None:
    """Else it would take the place of the step that all clouds have."""
    save_steps(tmp_path, 20, 30)
    stage, optimizer = alone()
    checkpoints = checkpoints_in(tmp_path, keep=2)
    checkpoints.begin_from(20)
    save_now(keeper(checkpoints, stage, optimizer), State(step=34))
    assert checkpoints.steps() == (20, 34)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    plan = blueprint("llama")
    coded = CutCase(codecs=Pair(forward=parse_codec("subspace(4)"), backward=parse_codec("subspace(4)")))
    with chain(plan, config(2, 2, cuts=(coded,))) as found:
        save_all(found, tmp_path)
        found.run(Given(batches(plan, 2)))
    with chain(plan, config(2, 2, cuts=(coded,))) as again:
        for file in ("weights", "optimizer", "wire"):
            (path,) = record(tmp_path, 5).glob(f"{file}.*")
            flip(path)
            with pytest.raises(UserError) as error:
                load_all(again, tmp_path, 5)
            assert f"cannot be used: {path.name} is not as it was written" in error.value.message
            flip(path)
        load_all(again, tmp_path, 5)


@pytest.mark.parametrize("harm", ["flipped", "truncated", "deleted", "manifest"])
def test_a_damaged_checkpoint_is_left_out_and_removed_once_a_newer_one_is_whole(
    tmp_path: Path, harm: str
) -> None:
    save_steps(tmp_path, 20, 30)
    (weights,) = record(tmp_path, 30).glob("weights.*")
    match harm:
        case "flipped":
            flip(weights)
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "deleted":
            weights.unlink()
        case "manifest":
            flip(record(tmp_path, 30) / MANIFEST_FILE, at=3)
    notes = list[str]()
    checkpoints = checkpoints_in(tmp_path, note=notes.append)
    assert checkpoints.inspect() == SavedSteps(whole=(20,), damaged=(30,))
    (note,) = notes
    assert note.startswith("the checkpoint step-00000030/north is left out: ")
    stage, optimizer = alone()
    checkpoints.begin_from(20)
    assert record(tmp_path, 30).exists()
    save_now(keeper(checkpoints, stage, optimizer), State(step=40))
    assert checkpoints.steps() == (20, 40)
    assert checkpoints_in(tmp_path).inspect() == SavedSteps(whole=(20, 40))
    assert notes[1:] == ["removed step-00000030/north, which no longer counts: step 40 is whole"]
    assert not (tmp_path / "checkpoints" / "step-00000030").exists()


def test_what_was_cut_short_is_removed_at_the_start_with_a_word(tmp_path: Path) -> None:
    save_steps(tmp_path, 20)
    for cloud in ("north", "west"):
        record(tmp_path, 30, cloud).mkdir(parents=True)
        (record(tmp_path, 30, cloud) / ".weights.0.ab.safetensors.new").touch()
    (record(tmp_path, 20) / "part.1.ab.json").touch()
    record(tmp_path, 10).mkdir(parents=True)
    (record(tmp_path, 10) / "weights.0.ab.safetensors").touch()
    notes: list[str] = []
    assert checkpoints_in(tmp_path, note=notes.append).inspect() == SavedSteps(whole=(20,))
    assert notes == [f"removed step-{step:08d}/north, a checkpoint that was cut short" for step in (10, 30)]
    left = {
        path.relative_to(tmp_path / "checkpoints").as_posix() for path in tmp_path.glob("checkpoints/*/*")
    }
    assert left == {"step-00000020/north", "step-00000030/west"}, "another cloud's is its own"
    assert not list(record(tmp_path, 20).glob("part.*")), "of another try, of the same step"


def test_what_is_of_another_model_or_job_is_refused(tmp_path: Path) -> None:
    plan = blueprint("llama")
    with chain(plan, config(1, 1)) as found:
        save_all(found, tmp_path)
        found.run(Given(batches(plan, 1)))
    with (
        chain(blueprint("qwen2"), config(1, 1)) as other,
        pytest.raises(UserError, match=r"lacks model\.layers"),
    ):
        load_all(other, tmp_path, 5)
    wide = blueprint("llama", intermediate_size=40)
    with (
        chain(wide, config(1, 1)) as other,
        pytest.raises(UserError, match=r"has shape .* in the checkpoint"),
    ):
        load_all(other, tmp_path, 5)
    checkpoints = checkpoints_in(tmp_path, job="1" * 64)
    with pytest.raises(UserError, match="it is of another job"):
        keeper(checkpoints, found.stages[0], found.optimizers[0]).load(5)


def test_a_full_disk_leaves_the_old_checkpoints_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, optimizer = alone()
    checkpoints = save_steps(tmp_path, 4, 5)
    put = DiskStore.put

    def full(store: DiskStore, name: str, data: Iterable[Buffer]) -> None:
        if "optimizer" in name:
            raise OSError(28, "No space left on device")
        put(store, name, data)

    optimizer.load_tensors({"exp_avg/transformer.wpe.weight": torch.ones(1)})
    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "put", full)
        for step in (5, 6):
            with pytest.raises(OSError, match=rf"step {step} cannot be saved in .*: No space left on device"):
                save_now(keeper(checkpoints, stage, optimizer), State(step=step))
    assert checkpoints_in(tmp_path).inspect() == SavedSteps(whole=(4, 5))
    save_now(keeper(checkpoints, stage, optimizer), State(step=6))
    assert checkpoints_in(tmp_path).inspect() == SavedSteps(whole=(4, 5, 6))


def test_a_kill_at_any_write_of_a_save_leaves_nothing_that_passes_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a step is written that is there already: the old one stays, or the new one counts."""
    stage, optimizer = alone()
    put, remove = DiskStore.put, DiskStore.remove
    num_changes = 0
    while True:
        folder = tmp_path / str(num_changes)
        save_steps(folder, 20, 30)
        left = [num_changes]

        def dying(change: Any, left: list[int] = left) -> Any:
            def changed(*arguments: Any) -> None:
                if not left[0]:
                    raise KeyboardInterrupt
                left[0] -= 1
                change(*arguments)

            return changed

        with monkeypatch.context() as patch:
            again = keeper(checkpoints_in(folder), stage, optimizer)
            patch.setattr(DiskStore, "put", dying(put))
            patch.setattr(DiskStore, "remove", dying(remove))
            try:
                save_now(again, State(step=30))
            except KeyboardInterrupt:
                is_over = False
            else:
                is_over = True
        found = checkpoints_in(folder)
        assert found.inspect() == SavedSteps(whole=(20, 30))
        keeper(found, stage, optimizer).load(30)
        (manifest,) = [Records(found.store).manifest("step-00000030/north")]
        assert {path.name for path in record(folder, 30).iterdir()} == {MANIFEST_FILE, *manifest.files}
        if is_over:
            break
        num_changes += 1
    assert num_changes >= 3


@pytest.mark.usefixtures("_one_rank")
def test_a_sharded_stage_is_exported_one_tensor_at_a_time_and_never_gathered_to_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {name: one.detach().clone() for name, one in alone()[0].model.state_dict().items()}
    stage, _ = alone()
    shard(stage, device=torch.device("cpu"), num_ranks=1, keeps_sharded=True)
    gathered: list[weakref.ref[torch.Tensor]] = []

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        assert all(one() is None for one in gathered), "an earlier tensor is still in memory"
        full = whole(tensor).clone()
        gathered.append(weakref.ref(full))
        return full

    monkeypatch.setattr("isthmus.train.keeper.whole", gather)
    checkpoints = checkpoints_in(tmp_path)
    keeping = keeper(checkpoints, stage, make_optimizer(stage, None))
    found = keeping.export(tmp_path / "gathered.safetensors")
    assert found is not None
    assert len(gathered) == len(expected)
    assert_same(found, expected)
    save_now(keeping, State(step=1))
    assert len(gathered) == len(expected)
    again, optimizer = alone()
    with torch.no_grad():
        for one in again.parameters():
            one.zero_()
    keeper(checkpoints, again, optimizer).load(1)
    assert_same(again.tensors_by_name(), {name: whole(one) for name, one in stage.tensors_by_name().items()})

"""Saving beside the computation: what is saved, when the update waits, and what happens if a store fails."""

import queue
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isthmus.errors import UserError
from isthmus.model.families import Absent
from isthmus.plan.types import Event, NotStored, Saved, Stored
from isthmus.train.checkpoint import Checkpoints
from isthmus.train.in_cloud import World
from isthmus.train.keeper import Keeper, State
from isthmus.train.records import MANIFEST_FILE, DiskStore, Records, StoredTensor
from isthmus.train.wire import Failure
from isthmus.wan.handshake import RankSpec
from isthmus.wan.packet import Buffer
from tests.model.cases import blueprint, build
from tests.train.chain import CLOUDS, Given, chain, config, make_optimizer
from tests.train.reference import assert_same
from tests.train.resuming import save_now, state_of
from tests.train.test_codecs import BOTTLENECK, cut
from tests.train.test_exactness import batches

NAME = "step-00000007/north"


class Slow(DiskStore):
    """A disk that writes no tensors before it may."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may_write = threading.Event()

    def put(self, name: str, data: Iterable[Buffer]) -> None:
        if "weights" in name:
            assert self.may_write.wait(60)
        super().put(name, data)


class Failing(DiskStore):
    """A disk that fails so many times."""

    def __init__(self, folder: Path, num_failures: int) -> None:
        super().__init__(folder)
        self.num_failures = num_failures

    def put(self, name: str, data: Iterable[Buffer]) -> None:
        if "weights" in name and self.num_failures:
            self.num_failures -= 1
            raise OSError(13, "Permission denied")
        super().put(name, data)


class Ranks(World):
    """One of two ranks that have no process group; they save and load without one."""

    def __init__(self, rank: int, num_seeing: int = 2) -> None:
        super().__init__(RankSpec(rank=rank, num_ranks=2))
        self.num_seeing = num_seeing

    def broadcast(self, values: object) -> Any:  # noqa: ARG002
        return "ab12"

    def all_reduce(self, values: Any, **_: Any) -> tuple[Any, ...]:  # noqa: ARG002
        return (self.num_seeing,)


def kept(store: DiskStore, world: World | None = None, **options: Any) -> Keeper:
    (stage,) = build(blueprint("llama"), [range(4)])
    checkpoints = Checkpoints(store, cloud="north", keep=9)
    return Keeper(
        checkpoints, world or World(), stage=stage, optimizer=make_optimizer(stage, None), **options
    )


def weights(keeper: Keeper) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in keeper._stage.tensors_by_name().items()}


Events = queue.SimpleQueue[Event | Failure]


def test_the_loop_goes_on_and_the_update_waits_for_the_copy_alone(tmp_path: Path) -> None:
    store, events = Slow(tmp_path), Events()
    keeper = kept(store)
    expected = weights(keeper)
    settle = keeper.save(State(step=7), events.put)
    settle()
    with torch.no_grad():
        for one in keeper._stage.parameters():
            one.fill_(7.0)
    assert events.empty(), "nothing is written yet"
    store.may_write.set()
    saved = events.get(timeout=60)
    assert isinstance(saved, Saved)
    assert isinstance(saved.facts, Stored)
    assert saved.facts.save_s >= saved.facts.stall_s
    again = kept(store)
    again.load(7)
    assert_same(weights(again), expected)


def test_two_states_are_never_in_memory(tmp_path: Path) -> None:
    store, events = Slow(tmp_path), Events()
    keeper = kept(store)
    keeper.save(State(step=7), events.put)()
    second = threading.Thread(target=lambda: keeper.save(State(step=8), events.put)())
    second.start()
    second.join(0.2)
    assert second.is_alive(), "it waits until the first is written"
    memory = {name: one.data_ptr() for name, one in keeper._memory.items()}
    store.may_write.set()
    second.join(60)
    steps = [
        event.step for event in (events.get(timeout=60), events.get(timeout=60)) if isinstance(event, Saved)
    ]
    assert steps == [7, 8]
    assert {name: one.data_ptr() for name, one in keeper._memory.items()} == memory, "it is used again"


def test_a_save_that_fails_is_tried_again_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.train.keeper._FIRST_DELAY_S", 0.01)
    notes: list[str] = []
    keeper = kept(Failing(tmp_path, 2), note=notes.append, patience_s=60.0)
    save_now(keeper, State(step=7))
    assert len(notes) == 2
    assert notes[0].startswith(f"step 7 cannot be saved in {tmp_path}: Permission denied; training continues")


def test_a_save_that_fails_for_too_long_is_reported_with_a_cure(tmp_path: Path) -> None:
    keeper, events = kept(Failing(tmp_path, 9)), Events()
    keeper.save(State(step=7), events.put)
    saved = events.get(timeout=60)
    assert isinstance(saved, Saved)
    assert isinstance(saved.facts, NotStored)
    assert saved.facts.reason == f"step 7 cannot be saved in {tmp_path}: Permission denied"
    assert saved.facts.hint


def test_an_error_of_ours_is_not_taken_for_one_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> dict[str, Tensor]:
        raise KeyError("nothing")

    keeper, events = kept(DiskStore(tmp_path)), Events()
    monkeypatch.setattr(keeper._optimizer, "tensors", missing)
    keeper.save(State(step=7), events.put)()
    failure = events.get(timeout=60)
    assert isinstance(failure, Failure)
    assert isinstance(failure.error, KeyError)


def test_a_store_that_cannot_be_written_to_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match="cannot be reached"):
        kept(DiskStore(tmp_path / "file" / "checkpoints"))
    assert not list(tmp_path.glob("**/.tried*"))


def test_ranks_that_do_not_share_the_store_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 ranks of this cloud do not see"):
        kept(DiskStore(tmp_path), Ranks(0, num_seeing=1))


def test_a_closed_keeper_ends_what_it_writes(tmp_path: Path) -> None:
    """The leader waits for its sibling, which never comes."""
    keeper, events = kept(DiskStore(tmp_path), Ranks(0)), Events()
    keeper.save(State(step=7), events.put)
    keeper.close()
    saved = events.get(timeout=60)
    assert isinstance(saved, Saved)
    assert isinstance(saved.facts, NotStored)
    assert MANIFEST_FILE not in Records(DiskStore(tmp_path)).list().get(NAME, set())


def test_what_a_strategy_names_is_saved_by_the_leader_and_loaded_in_place(tmp_path: Path) -> None:
    """Its sibling has other values, or nothing of that name."""
    store, events = DiskStore(tmp_path), Events()
    theirs: list[dict[str, Tensor]] = [{"outer/w": torch.arange(4.0), "feed/kept": torch.ones(3)}, {}]
    theirs[1]["outer/w"] = torch.zeros(4)
    keepers = [kept(store, Ranks(rank), extra=lambda rank=rank: theirs[rank]) for rank in range(2)]
    for keeper in keepers:
        keeper.save(State(step=7), events.put)()
    assert all(isinstance(events.get(timeout=60), Saved) for _ in keepers)
    found = {"outer/w": torch.zeros(4), "feed/kept": torch.zeros(3)}
    kept(store, extra=lambda: found).load(7)
    assert_same(found, theirs[0])


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_share_what_all_of_them_have_and_any_number_loads_it(tmp_path: Path, first: int) -> None:
    store, events = DiskStore(tmp_path), [Events(), Events()]
    keepers = [kept(store, Ranks(rank)) for rank in range(2)]
    for rank in (first, 1 - first):
        keepers[rank].save(State(step=7), events[rank].put)()
        if rank == 1:
            assert isinstance(events[1].get(timeout=60), Saved)
        elif first == 0:
            assert events[0].empty(), "the record is not complete without the sibling's part"
    assert isinstance(events[0].get(timeout=60), Saved)
    manifest = Records(store).manifest(NAME)
    shares = [0, 0]
    for name, one in manifest.tensors.items():
        assert len(one.pieces) == 1, name
        shares[int(one.pieces[0].file.split(".")[1])] += one.pieces[0].num_rows * one.row_bytes
    assert 0.8 < shares[0] / shares[1] < 1.25
    expected = weights(keepers[0])
    for world in (World(), Ranks(1)):
        again = kept(store, world)
        again.load(7)
        assert_same(weights(again), expected)


def test_what_some_cloud_may_need_is_kept(tmp_path: Path) -> None:
    """With `keep` = 2 a slow cloud would be left without a common step."""
    (stage,) = build(blueprint("llama"), [range(4)])
    checkpoints = Checkpoints(DiskStore(tmp_path), cloud="north", keep=2)
    keeper = Keeper(checkpoints, World(), stage=stage, optimizer=make_optimizer(stage, None))
    for step, safe_step in ((10, 0), (20, 10), (30, 10), (40, 10)):
        events = Events()
        keeper.save(State(step=step), events.put, safe_step=safe_step)
        events.get(timeout=60)
    assert checkpoints.steps() == (10, 20, 30, 40)
    keeper.save(State(step=50), events.put, safe_step=40)
    events.get(timeout=60)
    assert checkpoints.steps() == (40, 50)


# What is in a member, and is no state of the run: it is made again, or belongs to a step that is over.
NO_STATE = re.compile(
    r"\.grad$|inv_freq|_memory|_at_start|position_ids|token_type_ids|\.schedule|_microbatches|_outgoing|_gradients"
    r"|in_flight|_results|_basis|host\b|_given|key\b"
)


def reachable(roots: Mapping[str, object]) -> dict[str, Tensor]:
    """Every tensor that can be reached from some objects, by its path."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    waiting = list(roots.items())
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen or isinstance(value, str | int | float | type(threading) | type):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found[path] = value
            waiting.append((f"{path}.grad", value.grad if value.is_leaf else None))
        else:
            waiting += [(f"{path}.{key}", one) for key, one in parts_of(value)]
    return found


def parts_of(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((str(key), one) for key, one in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((str(number), one) for number, one in enumerate(value))
    elif isinstance(value, Absent):
        # It stands for a module of another stage.
        return
    elif type(value).__module__.startswith(("isthmus.", "torch.optim")) or isinstance(value, nn.Module):
        yield from getattr(value, "__dict__", {}).items()
        for kind in type(value).__mro__:
            names = getattr(kind, "__slots__", ())
            yield from ((name, getattr(value, name)) for name in names if hasattr(value, name))


@pytest.mark.parametrize(
    "codecs",
    [("topk(0.2) | int8", "int8(stochastic)"), ("subspace(4)", "subspace(4)"), ("svd(0.5)", "raw")],
    ids=str,
)
def test_nothing_is_left_out(tmp_path: Path, codecs: tuple[str, str]) -> None:
    """Every tensor that a member holds after a step is in its record, or is known to be no state."""
    plan = blueprint("llama")
    agreed = config(2, 2, num_steps=3, cuts=(cut(*codecs, boundary=BOTTLENECK),))
    with chain(plan, agreed) as found:
        keepers = [
            Keeper(
                Checkpoints(DiskStore(tmp_path), cloud=CLOUDS[index], keep=9), World(),
                stage=found.stages[index], optimizer=found.optimizers[index],
            )
            for index in range(2)
        ]  # fmt: skip
        for index, record in enumerate(found.records):
            record.on_save = lambda saved, index=index: save_now(keepers[index], state_of(saved))  # type: ignore[misc]
        found.run(Given(batches(plan, 2)))
        for index, cloud in enumerate(CLOUDS[:2]):
            cuts = {str(peer): wire.cut for peer, wire in found.wires[index].items()}
            roots = {
                "stage": found.stages[index], "optimizer": found.optimizers[index], "wires": cuts,
                "actor": found.loops[index].actor, "scheduler": found.loops[index].scheduler,
            }  # fmt: skip
            records = Records(DiskStore(tmp_path))
            manifest = records.manifest(f"step-00000003/{cloud}")
            saved = records.get(f"step-00000003/{cloud}", manifest, manifest.tensors)
            held = {path: one for path, one in reachable(roots).items() if not NO_STATE.search(path)}
            assert left_out(held, saved) == []
            # Without one kind of them the comparison finds it.
            for kind in ("optimizer/", *(["wire/"] if "subspace" in codecs[0] else [])):
                some = {name: one for name, one in saved.items() if not name.startswith(kind)}
                assert left_out(held, some) != [], kind


def left_out(held: Mapping[str, Tensor], saved: Mapping[str, StoredTensor]) -> list[str]:
    there = [one.load() for one in saved.values()]
    return [path for path, one in held.items() if not any(is_same(one, other) for other in there)]


def is_same(one: Tensor, saved: Tensor) -> bool:
    # Directions that cross in 16 bits are saved in 16 bits.
    other = saved.to(one.dtype).flatten().nan_to_num(7.5)
    return one.numel() == other.numel() and torch.equal(one.detach().flatten().nan_to_num(7.5), other)

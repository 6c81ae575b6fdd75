"""What members save, kept in memory or as a checkpoint holds it: a run that is stopped continues from it."""

import queue
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from isthmus.plan import types
from isthmus.plan.pipeline_parts import PipelineState
from isthmus.plan.types import Event, Facts, Member, NotStored, pack_facts, unpack_facts
from isthmus.train.keeper import Keeper, State
from isthmus.train.wire import Failure, Wire
from tests.train.chain import Chain, Saved


@dataclass(frozen=True)
class Kept:
    """One member at the start of a step: its weights, its moments, and what the chain saved of it."""

    saved: Saved
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]


Keepings = list[dict[int, Kept]]
"""Of each stage, by the step that it starts."""


def keep_all(found: Chain) -> Keepings:
    """Keep whatever the members of a chain save while it runs."""
    kept: Keepings = [{} for _ in found.stages]

    def keep(index: int, saved: Saved) -> None:
        kept[index][saved.step] = Kept(
            saved=saved,
            weights=_copies(found.stages[index].tensors_by_name()),
            moments=_copies(found.optimizers[index].tensors()),
        )

    for index, record in enumerate(found.records):
        record.on_save = lambda saved, index=index: keep(index, saved)  # type: ignore[misc]
    return kept


def take_up(found: Chain, kept: Keepings, step: int) -> list[Saved]:
    """Give a fresh chain the weights and moments of a step; gives what its run starts with."""
    for stage, optimizer, one in zip(found.stages, found.optimizers, kept, strict=True):
        for name, tensor in stage.tensors_by_name().items():
            tensor.copy_(one[step].weights[name])
        optimizer.load_tensors(_copies(one[step].moments))
    return [one[step].saved for one in kept]


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def state_of(saved: Saved) -> State:
    """What a member saved, as a checkpoint holds it."""
    return State(
        step=saved.step,
        facts={} if saved.facts is None else {"state": pack_facts(saved.facts)},
        wires=saved.wires,
    )


def save_now(keeper: Keeper, state: State) -> None:
    """Save a state, and wait until the store has it."""
    ended: queue.SimpleQueue[Event | Failure] = queue.SimpleQueue()
    keeper.save(state, ended.put)()
    match ended.get(timeout=60):
        case Failure(error=error):
            raise error
        case types.Saved(facts=NotStored(reason=reason)):
            raise OSError(reason)


def restore(state: State, wires: Mapping[Member, Wire]) -> Facts | None:
    """Give wires the codec state of a checkpoint; gives the facts of the scheduler."""
    for peer in state.wires.keys() & wires.keys():
        wires[peer].load(state.wires[peer])
    return unpack_facts(state.facts["state"], PipelineState) if state.facts else None

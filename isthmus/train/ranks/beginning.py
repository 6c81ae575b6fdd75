"""How the ranks of a cloud begin its halves of bottlenecks: alike, with what all of them have observed."""

from collections.abc import Callable, Mapping

from safetensors.torch import load, save
from torch import Tensor

from isthmus.model.bottleneck import Down, Up
from isthmus.train.ranks.world import World


def begin_down(down: Down, world: World) -> dict[str, Tensor]:
    """Begin the sender's half at every rank of its cloud; gives the receiver's, for the leader to send."""
    if world.seat.num_ranks > 1:
        down.observed.pool(world.add_up)
    tensors = down.begin()
    for tensor in down.values().values():
        # Ranks on unlike processors may have decomposed the same matrix to other bits.
        world.copy_from_leader(tensor)
    return tensors


def begin_up(up: Up, world: World, take: Callable[[], Mapping[str, Tensor]]) -> None:
    """Begin the receiver's half at every rank of its cloud, with what only the leader can `take`."""
    if world.seat.num_ranks == 1:
        up.begin(take())
        return
    leaders = take() if world.seat.is_leader else {}
    given = world.spread_bytes(save({name: tensor.contiguous() for name, tensor in leaders.items()}))
    up.begin(load(given))

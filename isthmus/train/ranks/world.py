"""The ranks of one cloud: who they are, and how they exchange words and tensors.

Tensors go through the device's own backend (NCCL, HCCL, XCCL or Gloo). Words go through Gloo beside it, on
the host: the leader, rank 0, gathers what the others have found, and spreads what it has decided.
"""

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from isthmus.errors import RankLost, UserError
from isthmus.train.device import Device
from isthmus.train.ranks.watch import Watch, first_line
from isthmus.wan.seat import Seat

# A rank may wait for a sibling that waits for another cloud; who is gone or frozen, the watch tells sooner.
_TIMEOUT: Final = timedelta(minutes=30)
_LAST_WORD_S: Final = 2.0
_SILENCE_S: Final = 60.0


class World(Protocol):
    """The ranks of one cloud, seen from one of them; every call is made by all of them, in one order."""

    seat: Seat

    def gather(self, words: object) -> list[Any] | None:
        """Plain values of every rank, by rank, at the leader; None elsewhere."""

    def spread(self, words: object) -> Any:
        """The leader's plain values, everywhere."""

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """The bytes of every rank, by rank, at the leader; None elsewhere."""

    def spread_bytes(self, data: bytes) -> bytes:
        """The leader's bytes, everywhere."""

    def totals(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Sums over all ranks."""

    def sums(self, values: Sequence[float]) -> tuple[float, ...]:
        """Sums over all ranks, the same everywhere to the bit."""

    def add_up(self, tensor: Tensor) -> None:
        """Sum a tensor on the device over all ranks, in place."""

    def copy_from_leader(self, tensor: Tensor) -> None:
        """Give a tensor on the device the leader's values, in place."""


class Alone:
    """A cloud of one rank."""

    def __init__(self) -> None:
        self.seat = Seat()

    def gather(self, words: object) -> list[Any] | None:
        """What it is given."""
        return [words]

    def spread(self, words: object) -> Any:
        """What it is given."""
        return words

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """What it is given."""
        return [data]

    def spread_bytes(self, data: bytes) -> bytes:
        """What it is given."""
        return data

    def totals(self, counts: Sequence[int]) -> tuple[int, ...]:
        """What it is given."""
        return tuple(counts)

    def sums(self, values: Sequence[float]) -> tuple[float, ...]:
        """What it is given."""
        return tuple(values)

    def add_up(self, tensor: Tensor) -> None:
        """Leave it as it is."""

    def copy_from_leader(self, tensor: Tensor) -> None:
        """Leave it as it is."""


class Ranks:
    """Several ranks, joined by torch.distributed."""

    def __init__(self, seat: Seat, *, control: dist.ProcessGroup) -> None:
        self.seat = seat
        self._control = control

    def gather(self, words: object) -> list[Any] | None:
        """Plain values of every rank, by rank, at the leader; None elsewhere."""
        found = self.gather_bytes(json.dumps(words).encode())
        return None if found is None else [json.loads(one) for one in found]

    def spread(self, words: object) -> Any:
        """The leader's plain values, everywhere."""
        return json.loads(self.spread_bytes(json.dumps(words).encode()))

    def spread_bytes(self, data: bytes) -> bytes:
        """The leader's bytes, everywhere."""
        with _collective():
            size = torch.tensor([len(data)])
            dist.broadcast(size, 0, group=self._control)
            own = _as_tensor(data) if self.seat.is_leader else torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(own, 0, group=self._control)
        return own.numpy().tobytes()

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """The bytes of every rank, by rank, at the leader; None elsewhere."""
        sizes = torch.zeros(self.seat.num_ranks, dtype=torch.int64)
        sizes[self.seat.rank] = len(data)
        with _collective():
            dist.all_reduce(sizes, group=self._control)
            # Gloo gathers tensors of one size.
            own = _as_tensor(data.ljust(int(sizes.max()), b"\0"))
            found = [torch.empty_like(own) for _ in sizes] if self.seat.is_leader else None
            dist.gather(own, found, 0, group=self._control)
        if found is None:
            return None
        return [one.numpy()[:size].tobytes() for one, size in zip(found, sizes.tolist(), strict=True)]

    def totals(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Sums over all ranks."""
        return tuple(self._sum(torch.tensor(counts, dtype=torch.int64)).tolist())

    def sums(self, values: Sequence[float]) -> tuple[float, ...]:
        """Sums over all ranks, the same everywhere to the bit."""
        return tuple(self._sum(torch.tensor(values, dtype=torch.float64)).tolist())

    def add_up(self, tensor: Tensor) -> None:
        """Sum a tensor on the device over all ranks, in place."""
        with _collective():
            dist.all_reduce(tensor)

    def copy_from_leader(self, tensor: Tensor) -> None:
        """Give a tensor, on the device or the host, the leader's values, in place."""
        with _collective():
            dist.broadcast(tensor, 0)

    def _sum(self, tensor: Tensor) -> Tensor:
        with _collective():
            dist.all_reduce(tensor, group=self._control)
        return tensor


@contextmanager
def join_world(
    seat: Seat,
    device: Device,
    *,
    cloud: str,
    end: Callable[[str], None] = lambda _: None,
    silence_s: float = _SILENCE_S,
) -> Iterator[World]:
    """Meet the other ranks of this cloud; the world ends with the block.

    If it ends before, because a rank is gone or silent for too long, `end` is told why, from another thread.
    """
    if seat.num_ranks == 1:
        yield Alone()
        return
    with Watch(seat, cloud=cloud, end=end, timeout_s=silence_s) as watch:
        with _collective():
            store = _open_store(seat)
            token = watch.meet(store, patience_s=_TIMEOUT.total_seconds())
        # A launcher's store outlives a world, and torch would take up what an earlier one has left there.
        with _process_group(seat, device, PrefixStore(token, store), watch) as world:
            yield world


def _open_store(seat: Seat) -> Store:
    if seat.master is None:
        raise ValueError("several ranks need an address to meet at")
    store = TCPStore(
        seat.master.host,
        seat.master.port,
        is_master=seat.is_leader and not seat.is_served,
        timeout=_TIMEOUT,
        wait_for_workers=False,
    )
    return PrefixStore("isthmus", store)


@contextmanager
def _process_group(seat: Seat, device: Device, store: Store, watch: Watch) -> Iterator[World]:
    try:
        # Before the group ends: that fails the others, who then ask why.
        with _explained(watch):
            with _collective():
                dist.init_process_group(
                    _backend(device), store=store, rank=seat.rank, world_size=seat.num_ranks, timeout=_TIMEOUT
                )
                control = dist.new_group(backend="gloo", timeout=_TIMEOUT)
            world = Ranks(seat, control=control)
            _check_devices(world, device)
            yield world
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _explained(watch: Watch) -> Iterator[None]:
    """Why a rank was lost, where the watch knows; it is also lost in collectives that are not ours."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RankLost, RuntimeError, OSError) as error:
        reason = watch.reason(timeout_s=_LAST_WORD_S)
        if reason is None:
            raise
        raise RankLost(reason) from error


def _backend(device: Device) -> str:
    if not device.is_accelerator:
        return "gloo"
    kind = device.torch_device.type
    return f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(device.torch_device)}"


def _check_devices(world: Ranks, device: Device) -> None:
    """Two ranks on one accelerator would wait for each other for ever."""
    if not device.is_accelerator:
        return
    places = world.spread(world.gather([socket.gethostname(), device.identity]))
    twice = [place for place in places if places.count(place) > 1]
    if twice:
        raise UserError(
            f"several ranks of this cloud would share device {twice[0][1]} of {twice[0][0]}",
            hint="start no more ranks on a machine than it has devices",
        )


@contextmanager
def _collective() -> Iterator[None]:
    """What torch says when a rank does not answer, in our words."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RankLost(
            f"the ranks of this cloud have lost each other: {first_line(error)}",
            hint="the rank that ended first tells why",
        ) from error


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)

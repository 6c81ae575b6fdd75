"""The ranks of one cloud: their process groups, the sharding of their stage, and the sum of their gradients.

Tensors go through the device's own backend (NCCL, HCCL, XCCL or Gloo). Plain values go through Gloo on the
host: the leader, rank 0, gathers what the others have found, and broadcasts what it has decided.
"""

import itertools
import json
import math
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from isthmus.errors import RankLost, UserError
from isthmus.model.bottleneck import Down, Up
from isthmus.model.cut import LayerCall
from isthmus.model.stage import Stage
from isthmus.model.torch_calls import prepare_shards, reduce_shards, shard_groups
from isthmus.train.device import Device
from isthmus.train.watch import Watch, first_line, inside_host
from isthmus.wan.handshake import RankSpec
from isthmus.wan.sockets import listen, listening_ports, stop_accepting

# A rank may wait for a sibling that waits for another cloud; the watch finds a lost rank sooner.
_TIMEOUT: Final = timedelta(minutes=30)
_LAST_WORD_S: Final = 5.0
_SILENCE_S: Final = 60.0


class World:
    """The ranks of one cloud, seen from one of them; every call is made by all of them, in one order.

    Without a control group this is the only rank: everything it gathers, sums or broadcasts is its own.
    """

    def __init__(
        self,
        spec: RankSpec | None = None,
        *,
        control: dist.ProcessGroup | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.spec = spec = spec or RankSpec()
        self.rank, self.num_ranks, self.is_leader = spec.rank, spec.num_ranks, spec.is_leader
        self.watch = watch
        """Carries messages between the leader and the others, outside of collectives."""
        self._control = control

    def gather(self, values: object) -> list[Any] | None:
        """Plain values of every rank, by rank, at the leader; None elsewhere."""
        found = self.gather_bytes(json.dumps(values).encode())
        return None if found is None else [json.loads(one) for one in found]

    def broadcast(self, values: object) -> Any:
        """The leader's plain values, everywhere."""
        return json.loads(self.broadcast_bytes(json.dumps(values).encode()))

    def broadcast_bytes(self, data: bytes) -> bytes:
        """The leader's bytes, everywhere."""
        if self._control is None:
            return data
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, group=self._control)
        own = _as_tensor(data) if self.is_leader else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(own, 0, group=self._control)
        return own.numpy().tobytes()

    def gather_bytes(self, data: bytes) -> list[bytes] | None:
        """The bytes of every rank, by rank, at the leader; None elsewhere."""
        if self._control is None:
            return [data]
        sizes = torch.zeros(self.num_ranks, dtype=torch.int64)
        sizes[self.rank] = len(data)
        dist.all_reduce(sizes, group=self._control)
        # Gloo gathers tensors of one size.
        own = _as_tensor(data.ljust(int(sizes.max()), b"\0"))
        found = [torch.empty_like(own) for _ in sizes] if self.is_leader else None
        dist.gather(own, found, 0, group=self._control)
        if found is None:
            return None
        return [one.numpy()[:size].tobytes() for one, size in zip(found, sizes.tolist(), strict=True)]

    def all_reduce(self, values: Sequence[float], *, dtype: torch.dtype = torch.int64) -> tuple[Any, ...]:
        """Sums over all ranks, the same everywhere to the bit."""
        if self._control is None:
            return tuple(values)
        sums = torch.tensor(values, dtype=dtype)
        dist.all_reduce(sums, group=self._control)
        return tuple(sums.tolist())

    def all_reduce_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors on the device over all ranks, in place, many under way at a time."""
        if self._control is not None:
            for work in [dist.all_reduce(one, async_op=True) for one in tensors]:
                work.wait()

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Give a tensor, on the device or the host, the leader's values, in place."""
        if self._control is not None:
            dist.broadcast(tensor, 0)


@contextmanager
def join_world(
    spec: RankSpec,
    device: Device,
    *,
    cloud: str,
    secret: bytes,
    end: Callable[[str], None] = lambda _: None,
    silence_s: float = _SILENCE_S,
    patience_s: float = math.inf,
) -> Iterator[World]:
    """Meet the other ranks of this cloud, which know its secret; the world ends with the block.

    If a rank is lost or silent for too long before that, `end` gets the reason, on another thread.
    """
    if spec.num_ranks == 1:
        yield World()
        return
    with Watch(spec, cloud=cloud, secret=secret, end=end, timeout_s=silence_s) as watch:
        try:
            # Before the group ends: that fails the others, who then ask why.
            with _explained(watch):
                watch.meet(_launchers_store(spec), patience_s=min(patience_s, _TIMEOUT.total_seconds()))
                before = listening_ports()
                world = _open_world(spec, device, watch)
                # Torch's store and Gloo accept anybody; by now every rank is connected to both.
                stop_accepting(listening_ports() - before)
                yield world
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _launchers_store(spec: RankSpec) -> Store | None:
    """The store of a launcher, if there is one; it outlives a world, and anybody may write to it."""
    if spec.master is None or not spec.is_served:
        return None
    return PrefixStore("isthmus", _connect_to_store(spec.master.host, spec.master.port))


def _open_store(spec: RankSpec, watch: Watch) -> Store:
    """A store for this world. It has no authentication, so rank 0 opens it once all ranks have met."""
    if spec.master is None:
        raise ValueError("several ranks need an address to meet at")
    if not spec.is_leader:
        return _connect_to_store(spec.master.host, watch.await_store(patience_s=_TIMEOUT.total_seconds()))
    host = inside_host(spec)
    listener = listen(host, 0)
    port = listener.getsockname()[1]
    store = TCPStore(
        host or "localhost",
        port,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    watch.announce_store(port)
    return store


def _connect_to_store(host: str, port: int) -> Store:
    return TCPStore(host, port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)


def _open_world(spec: RankSpec, device: Device, watch: Watch) -> World:
    store, num_ranks = _open_store(spec, watch), spec.num_ranks
    dist.init_process_group(
        _backend(device), store=store, rank=spec.rank, world_size=num_ranks, timeout=_TIMEOUT
    )
    world = World(spec, control=dist.new_group(backend="gloo", timeout=_TIMEOUT), watch=watch)
    _check_devices(world, device)
    return world


@contextmanager
def _explained(watch: Watch) -> Iterator[None]:
    """Replace an error of torch by the reason why a rank was lost, where the watch knows it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RankLost, RuntimeError, OSError) as error:
        reason = watch.reason(timeout_s=_LAST_WORD_S)
        if reason is None and isinstance(error, dist.DistError):
            reason = f"the ranks of this cloud have lost each other: {first_line(error)}"
        if reason is None:
            raise
        raise RankLost(reason) from error


def _backend(device: Device) -> str:
    if not device.is_accelerator:
        return "gloo"
    kind = device.torch_device.type
    return f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(device.torch_device)}"


def _check_devices(world: World, device: Device) -> None:
    """Refuse two ranks on one accelerator, which would wait for each other for ever."""
    if not device.is_accelerator:
        return
    places = world.broadcast(world.gather([socket.gethostname(), device.identity]))
    twice = [place for place in places if places.count(place) > 1]
    if twice:
        raise UserError(
            f"several ranks of this cloud would share device {twice[0][1]} of {twice[0][0]}",
            hint="start no more ranks on a machine than it has devices",
        )


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


class Reduction:
    """Gathers parameters when a step or an evaluation starts, and sums gradients over ranks when a step ends.

    By `sharding` of the stage:
    none        every rank has all parameters; gradients are summed in one fixed order
    optimizer   all parameters are gathered before the first pass; gradients are reduced once, after the last
    full        FSDP2 gathers and reduces in every pass, since every rank runs the same passes
    """

    def __init__(self, world: World, stage: Stage, *, sharding: str = "none") -> None:
        self._world = world
        self._stage = stage
        self._sharding = sharding
        self._gathering: list[UnshardHandle] = []
        if sharding == "optimizer":
            root = _root(stage)
            root.set_requires_gradient_sync(False)
            root.set_reshard_after_backward(False)

    def begin(self) -> None:
        """Start to gather what every rank needs whole; each layer waits for its own."""
        if self._sharding == "optimizer":
            started = [module.unshard(async_op=True) for module in _sharded(self._stage)]
            self._gathering = [one for one in started if one is not None]

    def reduce(self) -> None:
        """Sum the gradients over all ranks, and keep this rank's shard of them and of the parameters."""
        for one in self._gathering:
            one.wait()  # Nothing has, at a rank without a micro-batch.
        if self._sharding == "optimizer":
            reduce_now(self._stage)
        if self._world.num_ranks > 1:
            is_sharded = self._sharding != "none"
            replicated = _halves(self._stage) if is_sharded else self._stage.parameters_by_name()
            _sum_gradients(self._world, [one for _, one in sorted(replicated.items()) if one.requires_grad])

    def end_evaluation(self) -> None:
        """Keep this rank's shard of the parameters alone: those that were evaluated may be replaced."""
        if self._sharding != "none":
            for module in _sharded(self._stage):
                module.reshard()

    def squared_norms(self, own: tuple[float, ...]) -> tuple[float, ...]:
        """The squared norm of each parameter's gradient, from what this rank has of it."""
        if self._sharding == "none":
            return own
        present = [one for one in self._stage.parameters_by_name().values() if one.grad is not None]
        # Of a gradient that every rank has whole, the leader's counts.
        counts = [self._world.is_leader or isinstance(one.grad, DTensor) for one in present]
        norms = [norm if count else 0.0 for norm, count in zip(own, counts, strict=True)]
        return self._world.all_reduce(norms, dtype=torch.float64)


def _sum_gradients(world: World, parameters: Sequence[nn.Parameter]) -> None:
    """Sum gradients that every rank has whole; a rank without a micro-batch adds nothing."""
    if not parameters:
        return
    used = world.all_reduce([one.grad is not None for one in parameters])
    gradients = []
    for parameter in itertools.compress(parameters, used):
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients.append(parameter.grad)
    world.all_reduce_tensors(gradients)


def begin_down(down: Down, world: World) -> dict[str, Tensor]:
    """Begin the sender's half at every rank of its cloud; gives the receiver's, for the leader to send."""
    if world.num_ranks > 1:
        down.observed.pool(lambda one: world.all_reduce_tensors([one]))
    tensors = down.begin()
    for tensor in down.values().values():
        # Ranks on unlike processors may have decomposed the same matrix to other bits.
        world.broadcast_tensor(tensor)
    return tensors


def begin_up(up: Up, world: World, basis: Mapping[str, Tensor]) -> None:
    """Begin the receiver's half at every rank of its cloud, with the basis that arrived at the leader."""
    own = {name: tensor.contiguous() for name, tensor in basis.items()}
    up.begin(load(world.broadcast_bytes(save(own))))


def shard(
    stage: Stage,
    *,
    device: torch.device,
    num_ranks: int,
    compute_dtype: torch.dtype | None = None,
    keeps_sharded: bool = False,
    offload: bool = False,
) -> None:
    """Shard a stage on its device over all ranks of the world, which have the same weights.

    With a `compute_dtype` parameters are gathered in it; shards stay in float32.
    """
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (num_ranks,)),
        "reshard_after_forward": keeps_sharded,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute_dtype,
            reduce_dtype=None if compute_dtype is None else torch.float32,
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu") if offload else OffloadPolicy(),
    }
    for layer in _layers(stage):
        fully_shard(layer, **options)
    fully_shard(stage, **options, ignored_params=set(_halves(stage).values()))
    for module in _sharded(stage):
        # Losses are weighted by the targets of the whole step already.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    stage.stream_dtype = compute_dtype
    prepare_shards(stage)


class OwnParts:
    """The part of each parameter that is this rank's: its shard, or a chunk where all ranks have it whole."""

    def __init__(self, world: World, parameters: Mapping[str, Tensor]) -> None:
        self._world = world
        self._parameters = parameters
        self._mesh = init_device_mesh("cpu", (world.num_ranks,)) if world.num_ranks > 1 else None
        self.tensors = {name: self._part(one) for name, one in parameters.items()}
        """Views, by the names of the parameters."""

    def _part(self, parameter: Tensor) -> Tensor:
        if isinstance(parameter, DTensor):
            with torch.no_grad():
                return parameter.to_local()
        if self._mesh is None:
            return parameter
        chunks = parameter.detach().chunk(self._world.num_ranks)
        return chunks[self._world.rank] if self._world.rank < len(chunks) else chunks[0][:0]

    def share(self, names: Iterable[str]) -> None:
        """Give all ranks what each has changed of its own part, where all have these parameters whole."""
        if self._mesh is None:
            return
        shared = {name: one for name in names if not isinstance(one := self._parameters[name], DTensor)}
        with torch.no_grad():
            for name, one in shared.items():
                own = self.tensors[name].clone()
                one.zero_()
                self.tensors[name].copy_(own)
        self._world.all_reduce_tensors([one.detach() for one in shared.values()])

    def sharded(self, name: str, part: Tensor) -> Tensor:
        """A tensor of which each rank has the part on the host that it has of a parameter."""
        if self._mesh is None:
            return part
        like = torch.empty(self._parameters[name].shape, device="meta")
        return DTensor.from_local(
            part, self._mesh, [Shard(0)], run_check=False, shape=like.shape, stride=like.stride()
        )


def whole(tensor: Tensor) -> Tensor:
    """A tensor gathered from its shards; all ranks call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reduce_now(stage: Stage) -> None:
    """Reduce what backwards without synchronisation have left, on all ranks, and reshard the parameters.

    torch has no public call for it; its own pipelines do the same in `perform_reduce_grad`.
    """
    root = _root(stage)
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    reduce_shards(stage)
    root.set_reshard_after_backward(False)
    root.set_requires_gradient_sync(False)


def awaited_gradient_bytes(stage: Stage) -> int:
    """What the gradients that a step still has to make will take; FSDP2 reduces them whole, in float32."""
    if not isinstance(stage, FSDPModule):
        return sum(one.nbytes for one in stage.parameters() if one.requires_grad and one.grad is None)
    awaited = [
        one.sharded_param.numel()
        for group in shard_groups(stage)
        for one in group.fsdp_params
        if one.sharded_param.requires_grad and one.unsharded_accumulated_grad is None
    ]
    return torch.float32.itemsize * int(sum(awaited))


def _halves(stage: Stage) -> dict[str, nn.Parameter]:
    """The parameters of the stage's halves of bottlenecks, by name."""
    return {
        f"{side}.{name}": parameter
        for side, half in (("up", stage.up), ("down", stage.down))
        if half is not None
        for name, parameter in half.named_parameters()
    }


def _root(stage: Stage) -> FSDPModule:
    if not isinstance(stage, FSDPModule):
        raise TypeError("a stage that is not sharded")
    return stage


def _sharded(stage: Stage) -> Iterator[FSDPModule]:
    return (module for module in stage.modules() if isinstance(module, FSDPModule))


def _layers(stage: Stage) -> list[nn.Module]:
    return [one for one in stage.model.modules() if isinstance(getattr(one, "forward", None), LayerCall)]

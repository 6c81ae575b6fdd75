"""The actor of data parallel between clouds: local steps on the whole model, rounds of outer parameters."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isthmus.codec.base import Payload
from isthmus.errors import BadUpdate, FrameError, IsthmusError, PeerLost
from isthmus.events import Span
from isthmus.model.stage import Batch, Stage
from isthmus.plan.end_of_step import Read, Reduced, Round, Scored, Seen, Updated, total_norm
from isthmus.plan.membership import (
    Applied,
    DataParallel,
    Piece,
    RoundCommit,
    Snapshot,
    Taken,
    weights_of,
)
from isthmus.plan.types import Facts, Gathered, Lane, Member, Message, Ran, Work, WorkKind
from isthmus.train.build import BuiltStage
from isthmus.train.data.training_data import Source
from isthmus.train.device import Mark, PassClock
from isthmus.train.in_cloud import Reduction
from isthmus.train.outer import WIDTH, Fragment, Outer
from isthmus.train.pipeline import Passes


class _Delta(NamedTuple):
    """A delta until its round is applied, and what is undone if that happens without it."""

    payload: Payload
    delta: Tensor | None
    residual: Tensor | None


class DataParallelActor:
    """Computes the works of one cloud in data parallel."""

    def __init__(
        self,
        spec: DataParallel,
        member: Member,
        built: BuiltStage,
        outer: Outer,
        *,
        seed: int,
        on_span: Callable[[Span], None],
        source: Source,
    ) -> None:
        self._spec = spec
        self._cloud = spec.cloud_of(member)
        self._stage: Stage = built.stage
        self._optimizer = built.optimizer
        self._outer = outer
        self._world = built.world
        number = sum(len(cloud) for cloud in spec.clouds[: self._cloud]) + member.rank
        self._first_item = number * spec.num_microbatches
        self._source = source
        self._reduction = built.reduction or Reduction(built.world, built.stage)
        self._device = built.device.torch_device
        self._clock = PassClock(built.device, track=member.cloud, on_span=on_span)
        self._passes = Passes(
            built.stage,
            device=self._device,
            seed=seed,
            autocast=built.autocast,
            sends_gradients=False,
            on_near_end=self._clock.near_end,
        )
        self._batches: Sequence[Batch] = ()
        self._num_targets = 0
        self._results: list[tuple[Tensor, Tensor | None, int]] = []
        self._norm = 0.0
        self._num_steps = 0
        """Local steps whose gradients are in no round yet; of exact synchronisation."""
        self._local: list[Tensor] = []
        """The local parameters, while the outer ones are evaluated in their place."""
        self._deltas: dict[int, _Delta] = {}
        self._accepted: set[int] = set()
        self._pieces: defaultdict[tuple[int, int], dict[int, tuple[Piece, Payload]]] = defaultdict(dict)
        """What has arrived for the sums of a round in a view, by cloud."""
        self._sums: dict[tuple[int, int], Payload] = {}
        self._commits: defaultdict[tuple[int, int], dict[int, Payload]] = defaultdict(dict)
        self._states: defaultdict[int, dict[int, Mapping[str, Tensor]]] = defaultdict(dict)
        """What a donor has sent, by its number of rounds and by fragment."""

    def run(self, work: Work) -> Facts | None:
        """Carry out a work; those on the host run on a thread of their own."""
        works: dict[WorkKind, Callable[[Work], Facts | None]] = {
            WorkKind.READ: self._read,
            WorkKind.FORWARD: self._pass,
            WorkKind.BACKWARD: self._pass,
            WorkKind.EVALUATE: self._pass,
            WorkKind.REDUCE: self._reduce,
            WorkKind.UPDATE: self._update,
            WorkKind.SCORE: self._score,
            WorkKind.DELTA: self._delta,
            WorkKind.MIX: self._mix,
            WorkKind.SUM: self._sum,
            WorkKind.OUTER: self._apply,
        }
        with torch.no_grad() if work.lane is Lane.HOST else torch.enable_grad():
            return works[work.kind](work)

    def tensors(self, message: Message) -> tuple[Mapping[str, Tensor], Mark]:
        """What a message carries; all of it is on the host."""
        match message.facts:
            case Piece(shard=shard, num_shards=num_shards):
                fragment = self._outer.fragments[message.item]
                rows = fragment.shard_rows(shard, num_shards)
                found = self._outer.rows_of(self._deltas[message.step].payload, message.item, rows)
                return _named(found), Mark()
            case RoundCommit(view=view):
                return _named(self._sums.pop((view, message.step))), Mark()
            case Snapshot():
                return self._outer.state_of(message.item), Mark()
        return {}, Mark()

    def take(self, message: Message, tensors: Mapping[str, Tensor]) -> None:
        """Keep what has arrived until a round needs it."""
        sender = self._spec.cloud_of(message.sender)
        match message.facts:
            case Piece(view=view, shard=shard, num_shards=number) as piece:
                if shard >= number:
                    raise FrameError(f"shard {shard} of {number} of a delta")
                self._pieces[view, message.step][sender] = piece, _payload(tensors)
            case RoundCommit(view=view):
                self._commits[view, message.step][sender] = _payload(tensors)
            case Snapshot(rounds=rounds):
                self._outer.check_state(message.item, tensors)
                self._states[rounds][message.item] = tensors

    def drop(self, message: Message) -> None:
        """Nothing is kept but what rounds need, which is forgotten with them."""

    # Local steps.

    def _read(self, work: Work) -> Read:
        is_evaluation = bool(work.item)
        self._clock.begin()
        if is_evaluation:
            self._put_outer_in_place()
        self._reduction.begin()
        self._passes.train(not is_evaluation)
        self._results.clear()
        self._batches = self._source.validation() if is_evaluation else self._source.training(work.step)
        own = sum(batch.num_targets for batch in self._batches), sum(map(num_tokens, self._batches))
        self._num_targets, all_tokens = self._world.all_reduce(own)
        return Read(num_targets=self._num_targets, num_tokens=all_tokens)

    def _pass(self, work: Work) -> Ran:
        self._clock.run(work.kind.value, work.name, lambda: self._compute(work))
        return Ran(busy_s=self._clock.take_busy_s())

    def _compute(self, work: Work) -> None:
        # Clouds draw dropout as the micro-batches of one step would.
        item = work.item + self._first_item
        if work.kind is WorkKind.BACKWARD:
            self._passes.backward(step=work.step, item=item, gradients={})
        elif work.item < len(self._batches):
            batch = self._batches[work.item]
            output = self._passes.forward(
                batch,
                {},
                step=work.step,
                item=item,
                num_step_targets=self._num_targets,
                is_evaluation=work.kind is WorkKind.EVALUATE,
            )
            if output.loss is not None:
                self._results.append((output.loss.detach(), output.num_correct, batch.num_targets))

    def _reduce(self, work: Work) -> Gathered:  # noqa: ARG002 - all that was computed is reduced
        self._clock.settle()
        self._reduction.reduce()
        losses = self._world.all_reduce(
            [sum(_read_device(loss for loss, _, _ in self._results))], dtype=torch.float64
        )
        norms = self._reduction.squared_norms(self._optimizer.squared_norms())
        self._norm = total_norm(norms)
        reduced = Reduced(
            seen=Seen(), loss_sum=sum(losses), squared_norms=norms, busy_s=self._clock.take_busy_s()
        )
        return Gathered(of=(reduced,))

    def _update(self, work: Work) -> Updated:
        """Update the local parameters; synchronised exactly they wait for the gradients of all clouds."""
        if self._outer.rule.sync == "exact":
            self._num_steps += 1
        else:
            self._clock.run(
                work.kind.value, work.name, lambda: self._optimizer.update(work.item, norm=self._norm)
            )
        return Updated(verdict=None, learning_rate=self._optimizer.schedule.at(work.item))

    # Evaluation of the outer parameters.

    def _put_outer_in_place(self) -> None:
        self._local = [one.detach().to("cpu", copy=True) for one in self._parameters()]
        self._outer.put_in_place()

    def _score(self, work: Work) -> Scored:  # noqa: ARG002 - all that was evaluated is scored
        self._clock.settle()
        self._reduction.end_evaluation()
        with torch.no_grad():
            for parameter, value in zip(self._parameters(), self._local, strict=True):
                parameter.copy_(value)
        self._local = []
        for fragment in self._outer.fragments:
            self._outer.share(fragment.parameters)
        scored = Round(
            losses=tuple(_read_device(loss for loss, _, _ in self._results)),
            num_correct=int(sum(_read_device(correct for _, correct, _ in self._results))),
            num_targets=sum(count for _, _, count in self._results),
        )
        return Scored(rounds=(scored,))

    def _parameters(self) -> list[Tensor]:
        return [one for fragment in self._outer.fragments for one in fragment.parameters.values()]

    # Rounds.

    def _delta(self, work: Work) -> Taken | None:
        number, index = work.item, self._spec.fragment(work.item)
        outer, fragment = self._outer, self._outer.fragments[index]
        with torch.no_grad():
            if outer.rule.sync == "exact":
                delta = fragment.gradient().div_(max(self._num_steps, 1))
            else:
                local = fragment.local()
                with outer.lock:
                    delta = outer.values[index].to(local.device, copy=True).sub_(local)
            # All ranks have taken theirs before one of them sends it, or none does.
            if not all(self._world.broadcast(self._world.gather(bool(delta.isfinite().all())))):
                name = self._spec.clouds[self._cloud][0].cloud
                raise IsthmusError(
                    f"the parameters of cloud {name!r} are not finite in round {number}",
                    hint="lower train.learning_rate, or look at this cloud's data",
                )
            is_sparse = bool(outer.shifts)
            residual = outer.residuals[index].clone() if outer.residuals else None
            payload = outer.encode(number, self._cloud, delta)
        self._deltas[number] = _Delta(payload, delta.cpu() if is_sparse else None, residual)
        if not is_sparse:
            return None
        (squared,) = self._world.all_reduce([float(delta.double().square().sum())], dtype=torch.float64)
        return Taken(norm=math.sqrt(squared))

    def _sum(self, work: Work) -> None:
        commit = work.facts
        if not isinstance(commit, RoundCommit):
            raise TypeError("SUM comes with the deltas of its round")
        key = commit.view, work.step
        first = self._pieces[key][commit.shares[0].cloud][0]
        num_rows = len(self._outer.fragments[work.item].shard_rows(first.shard, first.num_shards))
        total = torch.zeros(num_rows, WIDTH)
        for share, weight in zip(commit.shares, weights_of(commit.shares), strict=True):
            found = self._received(
                self._pieces[key][share.cloud][1], work.step, share.cloud, num_rows=num_rows
            )
            total.add_(found.mul_(weight))
        self._sums[key] = self._outer.encode_sum(work.step, total)

    def _received(
        self, payload: Payload, number: int, cloud: int, *, num_rows: int, is_sum: bool = False
    ) -> Tensor:
        """What a cloud has sent of a round; a cloud whose numbers cannot be used is named.

        The others continue without one whose update it is; a sum is in a round that is committed already.
        """
        name, what = self._spec.clouds[cloud][0].cloud, "sum" if is_sum else "update"
        wrong = PeerLost if is_sum else BadUpdate
        try:
            if is_sum:
                found = self._outer.decode_sum(number, payload, num_rows=num_rows)
            else:
                found = self._outer.decode(number, cloud, payload, num_rows=num_rows)
        except FrameError as error:
            raise wrong(name, f"its {what} of round {number} is of another shape: {error.message}") from error
        if not bool(found.isfinite().all()):
            raise wrong(name, f"its {what} of round {number} holds numbers that are not finite")
        return found

    def _apply(self, work: Work) -> Facts | None:
        match work.facts:
            case Snapshot(rounds=rounds, fragments=fragments):
                states = self._states.pop(rounds)
                for index in fragments:
                    self._outer.replace(index, states[index])
                self._states.clear()
                return None
            case RoundCommit() as commit:
                return self._apply_round(work.step, work.item, commit)
        raise TypeError("OUTER comes with a round or with a state")

    def _apply_round(self, number: int, index: int, commit: RoundCommit) -> Applied:
        payloads = self._commits[commit.view, number]
        fragment, delta = self._outer.fragments[index], []
        for shard, cloud in enumerate(sorted(payloads)):
            num_rows = len(fragment.shard_rows(shard, len(payloads)))
            delta.append(self._received(payloads[cloud], number, cloud, num_rows=num_rows, is_sum=True))
        if any(share.num_tokens for share in commit.shares):
            self._outer.apply(number, torch.cat(delta))
        if any(share.cloud == self._cloud for share in commit.shares):
            self._accepted.add(number)
        for known in (self._pieces, self._commits, self._sums):
            for key in [one for one in list(known) if one[1] <= number]:
                del known[key]
        return Applied(content=self._outer.digest(index))

    def _mix(self, work: Work) -> None:
        """Mix a round into the local parameters; one beyond the last replaces them by the outer ones."""
        outer, is_whole = self._outer, work.item >= self._spec.num_rounds
        indices = range(len(outer.fragments)) if is_whole else [self._spec.fragment(work.item)]
        with torch.no_grad(), outer.lock:
            for index in indices:
                self._mix_fragment(work.item, index, is_whole=is_whole)
                outer.share(outer.fragments[index].parameters)
        if is_whole:
            self._deltas.clear()
            self._num_steps = 0

    def _mix_fragment(self, number: int, index: int, *, is_whole: bool) -> None:
        outer, fragment = self._outer, self._outer.fragments[index]
        sent, is_accepted = self._deltas.pop(number, None), number in self._accepted
        self._accepted.discard(number)
        match outer.rule.sync:
            case "streaming" if not is_whole:
                keeps = outer.rule.mixing
                for name, value in fragment.pieces(outer.values[index]).items():
                    parameter = fragment.parameters[name]
                    parameter.mul_(keeps).add_(value.to(parameter.device) * (1 - keeps))
            case "sparse" if not is_whole:
                self._shift(fragment, index, sent, is_accepted=is_accepted)
            case _:
                fragment.set(outer.values[index])
        if outer.shifts:
            outer.shifts[index].zero_()
        if outer.rule.sync == "exact" and (is_accepted or is_whole):
            self._num_steps = 0
            for parameter in fragment.parameters.values():
                parameter.grad = None

    def _shift(self, fragment: Fragment, index: int, sent: _Delta | None, *, is_accepted: bool) -> None:
        """Continue from the new outer parameters with the steps that are in no round yet."""
        change = self._outer.shifts[index]
        if sent is not None and is_accepted and sent.delta is not None:
            change = change + sent.delta
        elif sent is not None and sent.residual is not None:
            self._outer.residuals[index].copy_(sent.residual)
        for name, value in fragment.pieces(change).items():
            parameter = fragment.parameters[name]
            parameter.add_(value.to(parameter.device))


def _named(payload: Payload) -> dict[str, Tensor]:
    return {str(number): part for number, part in enumerate(payload)}


def _payload(tensors: Mapping[str, Tensor]) -> Payload:
    return tuple(tensors[name] for name in sorted(tensors, key=int) if name.isdecimal())


def _read_device(values: Iterable[Tensor | None]) -> list[Any]:
    found = [one for one in values if one is not None]
    return torch.stack(found).tolist() if found else []


def num_tokens(batch: Batch) -> int:
    """Tokens without padding."""
    return batch.ids.numel() if batch.mask is None else int(batch.mask.sum())

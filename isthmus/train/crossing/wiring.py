"""From a job to its cuts: what crosses each, how it is coded, and by what codecs are chosen."""

from collections.abc import Sequence
from itertools import pairwise

from isthmus.errors import UserError
from isthmus.job import CodecSpec, Job, LinkSpec
from isthmus.job.boundary import BottleneckSpec
from isthmus.plan.codec_choice import Bounds
from isthmus.plan.ladder import Crossing, Loss, Pair, Stretch, num_learners
from isthmus.train.crossing.cut import RAW, Cut
from isthmus.train.crossing.steering import Terms


def links_along(job: Job, clouds: Sequence[str]) -> tuple[LinkSpec, ...]:
    """The links between neighbouring stages, in order."""
    by_pair = {frozenset(link.between): link for link in job.link}
    return tuple(by_pair[frozenset(pair)] for pair in pairwise(clouds))


def cuts_of(job: Job, clouds: Sequence[str], *, planned: Sequence[Pair] | None = None) -> tuple[Cut, ...]:
    """The cuts of a job; where it leaves a codec open, they begin with what was planned, else raw."""
    return tuple(
        Cut(
            name=link.name,
            boundary=link.boundary,
            codecs=_first_pair(link, None if planned is None else planned[number]),
            guard_every=link.guard_every,
            guard_cosine=link.guard_cosine,
        )
        for number, link in enumerate(links_along(job, clouds))
    )


def num_frozen_layers(job: Job) -> int:
    """How many of the model's first layers are not trained."""
    return 0 if job.model is None else job.model.frozen_layers


def first_trained(stage_layers: Sequence[range], num_frozen: int) -> int:
    """The first stage with anything to learn; the last one has the head."""
    trained = (number for number, layers in enumerate(stage_layers) if layers.stop > num_frozen)
    return next(trained, len(stage_layers) - 1)


def steering_terms(
    job: Job,
    clouds: Sequence[str],
    cuts: Sequence[Cut],
    *,
    num_rows: int,
    num_microbatches: int,
    num_steps: int,
    hidden_width: int,
    trained_from: int,
) -> tuple[Terms, ...]:
    """By what the codecs of each cut are chosen; `num_rows` are the tokens of a micro-batch."""
    num_ranks = [job.cloud_named(cloud).ranks for cloud in clouds]
    return tuple(
        Terms(
            cut=cut,
            crossing=Crossing(
                num_rows=num_rows,
                width=cut.boundary.crossing_width(hidden_width),
                has_gradient=number >= trained_from,
                stretch=Stretch(
                    num_steps=num_steps,
                    num_microbatches=num_microbatches,
                    num_learners=num_learners(*num_ranks[number : number + 2]),
                ),
            ),
            bounds=Bounds(
                loss=Loss[job.limits.codec_loss.upper()],
                forward=_own(link.codec.forward),
                backward=_own(link.codec.backward),
            ),
            is_free=_own(link.codec.forward) is None or _own(link.codec.backward) is None,
            bandwidths_bps=_bandwidths(link, clouds[number]),
        )
        for number, (cut, link) in enumerate(zip(cuts, links_along(job, clouds), strict=True))
    )


def check_cuts(cuts: Sequence[Cut], stage_layers: Sequence[range], *, num_frozen: int) -> None:
    """Refuse more frozen layers than there are, and bottlenecks that cannot learn or begin together."""
    num_layers = stage_layers[-1].stop
    if num_frozen > num_layers:
        raise UserError(
            f"{num_frozen} layers cannot be frozen in a model of {num_layers}",
            hint=f"set model.frozen_layers to 0 to {num_layers}",
        )
    for cut in cuts[: first_trained(stage_layers, num_frozen)]:
        if isinstance(cut.boundary, BottleneckSpec):
            raise UserError(
                f"link {cut.name} has a bottleneck, which is trained, but all layers below it are frozen",
                hint="lower model.frozen_layers, or give the link a codec instead",
            )
    warmups = {cut.num_warmup_steps for cut in cuts if isinstance(cut.boundary, BottleneckSpec)}
    if len(warmups) > 1:
        raise UserError(
            f"the bottlenecks of a run begin together, but have warm-ups of {sorted(warmups)} steps",
            hint="give all of them the same warmup",
        )


def _first_pair(link: LinkSpec, planned: Pair | None) -> Pair:
    forward, backward = _own(link.codec.forward), _own(link.codec.backward)
    if planned is not None:
        pair = Pair(forward=forward or planned.forward, backward=backward or planned.backward)
        if pair.is_possible:
            return pair
    return Pair(forward=forward or RAW, backward=backward or RAW)


def _own(codec: CodecSpec | str) -> CodecSpec | None:
    return codec if isinstance(codec, CodecSpec) else None


def _bandwidths(link: LinkSpec, sender: str) -> tuple[float, float] | None:
    if link.bandwidth_bps is None:
        return None
    there, back = link.bandwidth_bps
    return (there, back) if link.between[0] == sender else (back, there)

"""From a job to its cuts: what crosses each, how it is coded, and by what codecs are chosen."""

from collections.abc import Sequence

from isthmus.job import CodecSpec, Job, LinkSpec
from isthmus.plan.codec_choice import Bounds
from isthmus.plan.cuts import links_along
from isthmus.plan.ladder import Crossing, Loss, Pair, Stretch, num_learners
from isthmus.train.crossing.cut import RAW, Cut
from isthmus.train.crossing.steering import Terms


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
            mildest=cut.codecs if job.limits.counts_money and link.usd_per_gib else None,
        )
        for number, (cut, link) in enumerate(zip(cuts, links_along(job, clouds), strict=True))
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

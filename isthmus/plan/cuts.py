"""What a cut must agree with: bottlenecks with the model and with each other, and both with frozen layers."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from isthmus.errors import UserError
from isthmus.job import Job, LinkSpec
from isthmus.job.boundary import BottleneckSpec


def links_along(job: Job, clouds: Sequence[str]) -> tuple[LinkSpec, ...]:
    """The links between neighbouring stages, in order."""
    by_pair = {frozenset(link.between): link for link in job.link}
    return tuple(by_pair[frozenset(pair)] for pair in pairwise(clouds))


def num_frozen_layers(job: Job) -> int:
    """How many of the model's first layers are not trained."""
    return 0 if job.model is None else job.model.frozen_layers


def first_trained(stage_layers: Sequence[range], num_frozen: int) -> int:
    """The first stage with anything to learn; the last one has the head."""
    trained = (number for number, layers in enumerate(stage_layers) if layers.stop > num_frozen)
    return next(trained, len(stage_layers) - 1)


def check_cuts(
    links: Sequence[LinkSpec],
    stage_layers: Sequence[range],
    *,
    num_frozen: int,
    hidden_width: int,
    num_steps: int,
) -> None:
    """Refuse bottlenecks that are none, that cannot learn, that do not begin together, or never."""
    check_frozen(num_frozen, num_layers=stage_layers[-1].stop)
    for link in links:
        link.boundary.check_width(hidden_width)
    for link in links[: first_trained(stage_layers, num_frozen)]:
        if isinstance(link.boundary, BottleneckSpec):
            raise frozen_bottleneck(link)
    warmups = {link.boundary.num_warmup_steps for link in links if isinstance(link.boundary, BottleneckSpec)}
    if len(warmups) > 1:
        raise UserError(
            f"the bottlenecks of a run begin together, but have warm-ups of {sorted(warmups)} steps",
            hint="give all of them the same warmup",
        )
    for link in links:
        if isinstance(link.boundary, BottleneckSpec):
            _check_begins(link.name, link.boundary, num_steps=num_steps)


def _check_begins(name: str, bottleneck: BottleneckSpec, *, num_steps: int) -> None:
    num_warmup_steps = bottleneck.num_warmup_steps
    if num_warmup_steps >= num_steps:
        steps = "step" if num_warmup_steps == 1 else "steps"
        raise UserError(
            f"the bottleneck of {name} begins after {num_warmup_steps} {steps}, but the run has {num_steps}",
            hint=f"lower its warmup, or set train.steps to more than {num_warmup_steps}",
        )


def check_frozen(num_frozen: int, *, num_layers: int) -> None:
    """Refuse to freeze more layers than there are."""
    if num_frozen > num_layers:
        raise UserError(
            f"{num_frozen} layers cannot be frozen in a model of {num_layers}",
            hint=f"set model.frozen_layers to at most {num_layers}",
        )


def frozen_bottleneck(link: LinkSpec) -> UserError:
    """What is said of a bottleneck with nothing but frozen layers before it."""
    return UserError(
        f"link {link.name} has a bottleneck, which is trained, but all layers below it are frozen",
        hint="lower model.frozen_layers, or give the link a codec instead",
    )


def frozen_notes(job: Job, clouds: Sequence[str], stage_layers: Sequence[range]) -> Iterator[str]:
    """What frozen layers spare on the WAN with these stages, and which cut would spare more."""
    num_frozen = num_frozen_layers(job)
    if num_frozen == 0 or len(clouds) < 2:
        return
    frozen = f"{num_frozen} frozen {'layer' if num_frozen == 1 else 'layers'}"
    number = first_trained(stage_layers, num_frozen)
    if number == 0:
        yield (
            f"{frozen}: they spare the WAN nothing, since {clouds[0]} trains layers above them; "
            f"with strategy.layers = [{num_frozen}, …] nothing would go back, and sequences could be cached"
        )
        return
    between = " and ".join(link.name for link in links_along(job, clouds[: number + 1]))
    yield f"{frozen}: nothing goes back over {between}{_cached(job, clouds, clouds[number])}"


def _cached(job: Job, clouds: Sequence[str], receiver: str) -> str:
    """Whether the first trained stage keeps what frozen layers gave."""
    if job.model is None or job.model.cache_frozen_bytes == 0:
        return ", and nothing is cached, as model.cache_frozen says"
    if any(job.cloud_named(cloud).ranks > 1 for cloud in clouds):
        return ", but nothing is cached: with several ranks a sequence comes to another one every time"
    return f"; {receiver} caches what comes, so a sequence crosses once as far as model.cache_frozen holds it"

"""Hypothesis strategies for whole jobs."""

from itertools import pairwise
from typing import Literal

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from isthmus.errors import FieldError
from isthmus.job import (
    Address,
    CloudSpec,
    CodecSpec,
    DataSpec,
    DataStrategy,
    GeneratorDiscriminatorStrategy,
    Job,
    LinkSpec,
    ModelSpec,
    PipelineStrategy,
)
from isthmus.job.codec import gradient_codec
from isthmus.job.codec_steps import (
    Anchor,
    Bf16,
    Center,
    CodecStep,
    Feedback,
    Format,
    Fp16,
    Integers,
    Raw,
    Rotate,
    Subspace,
    Svd,
    TopK,
    Transform,
)
from isthmus.job.sections import AutoStrategy, CheckpointSpec, CodecSpecs, TrainSpec

with_jobs = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
"""Settings of tests that draw whole jobs, which takes a while."""

CLOUD_NAMES = ("east", "west", "north", "a-1")

words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
texts = st.text(min_size=1, max_size=8)
finite = st.floats(allow_nan=False, allow_infinity=False)
bandwidths = st.floats(min_value=1e3, max_value=1e14)
speeds = st.floats(min_value=1e9, max_value=1e18)
prices = st.floats(min_value=0, max_value=1e6)
durations = st.floats(min_value=0, max_value=60)

shares = st.floats(min_value=0, max_value=1, exclude_min=True)
casts: tuple[Format, ...] = (Raw(), Fp16(), Bf16())
codec_formats = (
    st.sampled_from(casts)
    | st.builds(
        Integers,
        bits=st.sampled_from([4, 8]),
        group=st.none() | st.integers(8, 512),
        is_stochastic=st.booleans(),
    )
    | st.builds(Integers, bits=st.just(2), group=st.none() | st.integers(8, 512))
)
codec_transforms = (
    st.just(())
    | st.tuples(st.builds(TopK, ratio=shares))
    | st.tuples(st.builds(Svd, ratio=shares))
    | st.tuples(st.builds(TopK, ratio=shares), st.builds(Svd, ratio=shares))
    | st.tuples(st.builds(Svd, ratio=shares), st.builds(TopK, ratio=shares))
    | st.tuples(
        st.builds(
            Subspace, rank=st.integers(1, 99), anchor=st.sampled_from(Anchor), every=st.integers(1, 999)
        )
    )
)


@st.composite
def codecs(
    draw: st.DrawFn, transforms: st.SearchStrategy[tuple[Transform, ...]] = codec_transforms
) -> CodecSpec:
    """A codec that makes sense."""
    last = draw(codec_formats)
    steps: list[CodecStep] = list(draw(transforms))
    steps.append(last)
    if isinstance(last, Integers) and draw(st.booleans()):
        steps.insert(-1, Rotate())
    if any(isinstance(step, Subspace) for step in steps):
        return CodecSpec(steps=tuple(steps))
    if draw(st.booleans()):
        steps.insert(0, Center())
    if last != Raw() and draw(st.booleans()):
        steps.insert(0, draw(st.builds(Feedback, decay=shares)))
    return CodecSpec(steps=tuple(steps))


codec_specs = codecs()
auto: Literal["auto"] = "auto"
codec_choices = st.just(auto) | codec_specs


def go_together(pair: tuple[CodecSpec | Literal["auto"], CodecSpec | Literal["auto"]]) -> bool:
    """Whether a link can have both."""
    forward, backward = pair
    if isinstance(forward, CodecSpec) and isinstance(forward.steps[0], Feedback):
        return False
    if isinstance(forward, str) or isinstance(backward, str):
        return True
    try:
        gradient_codec(forward, backward)
    except FieldError:
        return False
    return True


codec_pairs = (
    st.tuples(codec_choices, codec_choices)
    .filter(go_together)
    .map(lambda pair: CodecSpecs(forward=pair[0], backward=pair[1]))
)

config_values = st.recursive(
    st.booleans() | st.integers(min_value=-(2**63), max_value=2**63 - 1) | finite | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
models = st.builds(ModelSpec, source=texts) | st.builds(
    ModelSpec, config=st.dictionaries(texts, config_values, max_size=3)
)
datasets = st.builds(
    DataSpec,
    source=texts,
    sequence_length=st.integers(1, 10**6),
    task=st.just("sequence-classification"),
    tokenizer=texts,
    text_column=st.none() | texts,
    pair_column=st.none() | texts,
    label_column=st.none() | texts,
    validation_source=st.none() | texts,
    validation_share=st.floats(0, 0.5),
) | st.builds(DataSpec, source=texts, task=st.sampled_from(["causal-lm", "question-answering"]))
plans = (
    st.just(AutoStrategy(kind="auto"))
    | st.just(DataStrategy(kind="data"))
    | st.just(GeneratorDiscriminatorStrategy(kind="generator-discriminator"))
    | st.builds(
        PipelineStrategy,
        kind=st.just("pipeline"),
        microbatches=st.none() | st.integers(1, 99),
        max_in_flight=st.none() | st.integers(1, 99) | st.tuples(st.integers(1, 9), st.integers(1, 9)),
    )
)


def clouds(name: str, port: int) -> st.SearchStrategy[CloudSpec]:
    """A cloud that listens at a port of its own."""
    proxies = st.builds(Address, host=st.just("::1"), port=st.integers(1, 65535))
    return st.builds(
        CloudSpec,
        name=st.just(name),
        device=st.sampled_from(["cuda", "npu", "xpu", "cpu", "auto"]),
        ranks=st.integers(1, 16384),
        memory_bytes=st.none() | st.integers(1, 2**50),
        flops=st.none() | speeds,
        listen=st.just(Address(host="127.0.0.1", port=port)),
        gateway=st.none() | proxies,
        proxy=st.none() | proxies,
        certificates=texts,
        usd_per_hour=st.none() | prices,
        inside_bps=bandwidths,
    )


def links(first: str, second: str) -> st.SearchStrategy[LinkSpec]:
    """A link between two clouds."""
    return st.builds(
        LinkSpec,
        between=st.just((first, second)),
        bandwidth_bps=st.none() | st.tuples(bandwidths, bandwidths),
        rtt_s=st.none() | durations,
        jitter_s=durations,
        handling_s=durations,
        connection_bps=st.none() | bandwidths,
        stripes=st.just("auto") | st.integers(1, 64),
        heartbeat_timeout_s=st.floats(1, 3600),
        usd_per_gib=st.none() | prices,
        codec=codec_pairs,
    )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """A job of one to four clouds in a chain."""
    names = CLOUD_NAMES[: draw(st.integers(1, len(CLOUD_NAMES)))]
    return Job(
        name=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True)),
        seed=draw(st.integers(0, 2**63 - 1)),
        model=draw(st.none() | models),
        data=draw(st.none() | datasets),
        cloud=tuple(draw(clouds(name, 7600 + index)) for index, name in enumerate(names)),
        link=tuple(draw(links(first, second)) for first, second in pairwise(names)),
        strategy=draw(plans),
        train=draw(
            st.builds(
                TrainSpec,
                steps=st.integers(1, 10**9),
                batch_tokens=st.integers(1, 10**9),
                learning_rate=st.floats(min_value=1e-12, max_value=1),
            )
        ),
        checkpoint=draw(st.builds(CheckpointSpec, every_s=st.floats(1, 604800))),
    )

"""Hypothesis strategies for whole jobs."""

from itertools import pairwise

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from isthmus.job import (
    Address,
    AutoStrategy,
    CheckpointSpec,
    CloudSpec,
    CodecSpec,
    CodecSpecs,
    CodecStep,
    DataSpec,
    DataStrategy,
    GeneratorDiscriminatorStrategy,
    Job,
    LinkSpec,
    ModelSpec,
    PipelineStrategy,
    TrainSpec,
)
from isthmus.job.codec import CODEC_NAMES

with_jobs = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
"""Settings of tests that draw whole jobs, which takes a while."""

CLOUD_NAMES = ("east", "west", "north", "a-1")

words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
texts = st.text(min_size=1, max_size=8)
finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=1, max_value=1e18)
prices = st.floats(min_value=0, max_value=1e6)
durations = st.floats(min_value=0, max_value=1e6)

codec_values = st.integers(min_value=0, max_value=10**9) | finite.map(abs) | words
codec_steps = st.builds(
    CodecStep,
    name=st.sampled_from(CODEC_NAMES),
    arguments=st.lists(codec_values, max_size=3).map(tuple),
    options=st.dictionaries(words, codec_values, max_size=3).map(lambda options: tuple(options.items())),
)
codec_specs = st.builds(CodecSpec, steps=st.lists(codec_steps, min_size=1, max_size=3).map(tuple))
codec_choices = st.just("auto") | codec_specs

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
    | st.builds(PipelineStrategy, kind=st.just("pipeline"), microbatches=st.none() | st.integers(1, 99))
)


def clouds(name: str, port: int) -> st.SearchStrategy[CloudSpec]:
    """A cloud that listens at a port of its own."""
    proxies = st.builds(Address, host=st.just("::1"), port=st.integers(1, 65535))
    return st.builds(
        CloudSpec,
        name=st.just(name),
        device=st.sampled_from(["cuda", "npu", "xpu", "cpu", "auto"]),
        ranks=st.integers(1, 10**6),
        memory_bytes=st.none() | st.integers(1, 2**60),
        flops=st.none() | positive,
        listen=st.just(Address(host="127.0.0.1", port=port)),
        gateway=st.none() | proxies,
        proxy=st.none() | proxies,
        certificates=texts,
        usd_per_hour=st.none() | prices,
    )


def links(first: str, second: str) -> st.SearchStrategy[LinkSpec]:
    """A link between two clouds."""
    return st.builds(
        LinkSpec,
        between=st.just((first, second)),
        bandwidth_bps=st.none() | st.tuples(positive, positive),
        rtt_s=st.none() | durations,
        jitter_s=durations,
        connection_bps=st.none() | positive,
        stripes=st.just("auto") | st.integers(1, 64),
        heartbeat_timeout_s=st.floats(1, 3600),
        usd_per_gib=st.none() | prices,
        codec=st.builds(CodecSpecs, forward=codec_choices, backward=codec_choices),
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

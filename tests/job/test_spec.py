"""What a job answers: defaults, who dials, digests."""

from pathlib import Path

import pytest
from hypothesis import given
from pydantic import ValidationError

from isthmus.errors import JobError, UserError
from isthmus.job import Address, CloudSpec, Job, LinkSpec, PipelineStrategy, load_job, parse_codec
from isthmus.job.codec import BottleneckSpec, HiddenSpec
from isthmus.job.load import parse_job
from isthmus.job.sections import CodecSpecs, LoraSpec
from tests.job.strategies import jobs, with_jobs

EXAMPLE = Path(__file__).parents[2] / "examples" / "two-clouds.toml"
DESIGN = """
name = "two-clouds"
seed = 7

[model]
source = "Qwen/Qwen3-0.6B"

[data]
source = "corpus/*.jsonl"
sequence_length = 2048

[[cloud]]
name = "east"
device = "cuda"
ranks = 8
memory = "80 GiB"
flops = "312 TFLOPS"
listen = "east.example.com:7600"
gateway = "10.0.0.5:7600"
usd_per_hour = 20

[[cloud]]
name = "west"
device = "npu"
ranks = 16
proxy = "http://10.1.0.1:3128"
certificates = "keys/west"

[[link]]
between = ["east", "west"]
bandwidth = ["1 Gbps", "500 Mbit/s"]
rtt = "60 ms"
jitter = 0
connection_bandwidth = "150 Mbps"
stripes = 8
heartbeat_timeout = "1 min"
usd_per_gib = 0.08
codec = { forward = "rotate | int4", backward = "auto" }
boundary = "bottleneck(32, warmup=20)"
guard_every = 10
guard_cosine = 0.95

[strategy]
kind = "pipeline"
microbatches = 16

[train]
steps = 10
batch_tokens = 4096
learning_rate = 1e-3

[checkpoint]
every = "90 s"
"""


def parse(text: str, *overrides: str) -> Job:
    return parse_job(text, file=Path("job.toml"), overrides=overrides)


def two_clouds(east: str | None, west: str | None) -> Job:
    listens = {"east": east, "west": west}
    clouds = [{"name": name} | ({"listen": at} if at else {}) for name, at in listens.items()]
    return Job.model_validate({"name": "x", "cloud": clouds, "link": [{"between": ["east", "west"]}]})


def test_every_key_arrives_in_si_units() -> None:
    job = parse(DESIGN)
    east, west = job.cloud
    assert (east.memory_bytes, east.flops) == (80 * 2**30, 312e12)
    assert east.listen == Address(host="east.example.com", port=7600)
    assert east.gateway == Address(host="10.0.0.5", port=7600)
    assert (west.listen, west.gateway) == (None, None)
    assert west.proxy == Address(host="10.1.0.1", port=3128)
    assert (west.device, west.ranks, west.certificates) == ("npu", 16, "keys/west")
    (link,) = job.link
    assert link.bandwidth_bps == (1e9, 5e8)
    assert (link.rtt_s, link.jitter_s, link.connection_bps) == (0.06, 0.0, 150e6)
    assert (link.stripes, link.heartbeat_timeout_s, link.usd_per_gib) == (8, 60.0, 0.08)
    assert link.codec == CodecSpecs(forward=parse_codec("rotate | int4"), backward="auto")
    assert link.boundary == BottleneckSpec(rank=32, num_warmup_steps=20)
    assert (link.guard_every, link.guard_cosine) == (10, 0.95)
    assert job.strategy == PipelineStrategy(kind="pipeline", microbatches=16)
    assert (job.train.steps, job.train.batch_tokens, job.train.learning_rate) == (10, 4096, 1e-3)
    assert job.checkpoint.every_s == 90.0
    assert job.data is not None
    assert job.data.sequence_length == 2048


def test_defaults() -> None:
    job = load_job(EXAMPLE)
    east, west = job.cloud
    (link,) = job.link
    assert (job.seed, job.model, job.data) == (0, None, None)
    assert (east.ranks, east.certificates, east.proxy, east.usd_per_hour) == (1, "certs", None, None)
    assert east.gateway == east.listen == Address(host="127.0.0.1", port=7600)
    assert west.listen is None
    assert link.bandwidth_bps == (200e6, 200e6)
    assert (link.stripes, link.heartbeat_timeout_s, link.jitter_s) == ("auto", 30.0, 0.0)
    assert link.codec == CodecSpecs(forward=parse_codec("raw"), backward=parse_codec("raw"))
    assert (link.boundary, link.guard_every, link.guard_cosine) == (HiddenSpec(), 50, 0.98)
    assert job.strategy.kind == "auto"
    assert job.checkpoint.every_s == 300.0


def test_one_cloud_needs_no_link() -> None:
    assert parse('name = "x"\n[[cloud]]\nname = "solo"\n').link == ()


def test_a_model_of_fresh_weights() -> None:
    job = parse('name = "x"\n[[cloud]]\nname = "solo"\n[model.config]\nmodel_type = "llama"\n')
    assert job.model is not None
    assert job.model.config == {"model_type": "llama"}


def test_one_codec_goes_both_ways() -> None:
    codec = parse(EXAMPLE.read_text() + 'codec = "topk(0.1) | int8"\n').link[0].codec
    assert codec.forward == codec.backward == parse_codec("topk(0.1) | int8")


def test_memory_options_are_off_unless_asked_for() -> None:
    train = load_job(EXAMPLE).train
    assert (train.recompute, train.offload_optimizer, train.compile) == (False, False, False)
    assert train.optimizer_bits == 32
    asked = parse(EXAMPLE.read_text() + '[train]\nrecompute = "auto"\nmemory_budget = "40 GiB"\n').train
    assert asked.memory_budget_bytes == 40 * 2**30


def test_adapters_are_read() -> None:
    job = parse(EXAMPLE.read_text() + '[model]\nsource = "a/b"\n[model.lora]\nr = 4\n')
    assert job.model is not None
    assert job.model.lora == LoraSpec(r=4)


def test_a_job_is_frozen() -> None:
    job = load_job(EXAMPLE)
    with pytest.raises(ValidationError, match="frozen"):
        job.seed = 1  # type: ignore[misc]


def test_python_cannot_make_a_job_that_does_not_fit_together() -> None:
    clouds = (CloudSpec(name="east"), CloudSpec(name="west"))
    with pytest.raises(ValidationError, match="neither 'east' nor 'west' listens"):
        Job(name="x", cloud=clouds, link=(LinkSpec(between=("east", "west")),))


def test_python_gives_plain_numbers() -> None:
    link = LinkSpec(between=("a", "b"), bandwidth_bps=(1e9, 2e9), rtt_s=0.1)
    assert (link.bandwidth_bps, link.rtt_s) == ((1e9, 2e9), 0.1)


@pytest.mark.parametrize(
    ("east", "west", "dialer"),
    [("h:1", None, "west"), (None, "h:1", "east"), ("h:1", "h:2", "east")],
)
def test_who_dials(east: str | None, west: str | None, dialer: str) -> None:
    job = two_clouds(east, west)
    (link,) = job.link
    assert job.dialer(link).name == dialer
    assert job.listener(link).name == link.peer_of(dialer)
    assert job.listener(link).listen is not None


@with_jobs
@given(jobs())
def test_every_link_has_one_dialer_and_one_that_listens(job: Job) -> None:
    for link in job.link:
        dialer, listener = job.dialer(link), job.listener(link)
        assert {dialer.name, listener.name} == set(link.between)
        assert listener.listen is not None
        assert link in job.links_of(dialer.name)
        assert link in job.links_of(listener.name)


def test_unknown_cloud_is_a_users_mistake() -> None:
    with pytest.raises(UserError, match="the job has no cloud 'wset'") as caught:
        load_job(EXAMPLE).cloud_named("wset")
    assert caught.value.hint == "did you mean 'west'?"


def test_digest_does_not_depend_on_layout_or_spelling() -> None:
    respelled = DESIGN.replace('"1 min"', '"60 s"').replace("learning_rate = 1e-3", "learning_rate = 0.001")
    assert parse(respelled).digest == parse(DESIGN).digest
    assert len(parse(DESIGN).digest) == 64


@pytest.mark.parametrize("name", ["isthmus", "authority"])
def test_names_that_would_clash_are_reserved(name: str) -> None:
    with pytest.raises(JobError) as error:
        parse_job(f'name = "one"\n[[cloud]]\nname = "{name}"\n', file=Path("one.toml"))
    assert [problem.what for problem in error.value.problems] == [f"{name!r} is no DNS label, or reserved"]

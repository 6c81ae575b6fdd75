"""Wrong job files: each mistake is told with its place and a cure, and a dozen of them word by word."""

from pathlib import Path

import pytest

from isthmus.cli.main import show_error
from isthmus.errors import JobError, Problem
from isthmus.job.load import parse_job

EAST = '[[cloud]]\nname = "east"\nlisten = "127.0.0.1:7600"\n'
WEST = '[[cloud]]\nname = "west"\n'
LINK = '[[link]]\nbetween = ["east", "west"]\n'
GOOD = f'name = "bad"\n{EAST}{WEST}{LINK}'
FILE = Path("bad.toml")


def west(line: str) -> str:
    """The good job with another line in its second cloud."""
    return GOOD.replace(WEST, f"{WEST}{line}\n")


def listening_at(address: str) -> str:
    return GOOD.replace("127.0.0.1:7600", address)


def between(pair: str) -> str:
    return GOOD.replace('["east", "west"]', pair)


def link(line: str) -> str:
    """The good job with another line in its link."""
    return f"{GOOD}{line}\n"


def problems(text: str) -> tuple[Problem, ...]:
    with pytest.raises(JobError) as caught:
        parse_job(text, file=FILE)
    return caught.value.problems


# The file, then the two lines that are printed for it.
PINNED = [
    (GOOD.removeprefix('name = "bad"\n'), "name: is missing", 'for example name = "two-clouds"'),
    (f"sead = 1\n{GOOD}", "sead: is not a known key", "did you mean 'seed'?"),
    (
        west('device = "gpu"'),
        "cloud \"west\": device: must be 'cuda', 'npu', 'xpu', 'cpu' or 'auto', not 'gpu'",
        'for example device = "cuda"',
    ),
    (
        west("memory = 80"),
        "cloud \"west\": memory: '80' has no unit (units: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)",
        'for example memory = "80 GiB"',
    ),
    (
        listening_at("east.example.com"),
        "cloud \"east\": listen: 'east.example.com' is no address",
        'add a port: "east.example.com:7600"',
    ),
    (
        between('["east", "wset"]'),
        "link \"east-wset\": between: there is no cloud 'wset'",
        "did you mean 'west'?",
    ),
    (
        GOOD.replace('listen = "127.0.0.1:7600"\n', ""),
        "link \"east-west\": between: neither 'east' nor 'west' listens, so none can dial the other",
        'give one of them an address: listen = "east.example.com:7600"',
    ),
    (
        link('bandwidth = "50 MB/s"'),
        "link \"east-west\": bandwidth: '50 MB/s' has the unknown unit 'MB/s' (units: bps, kbps, Mbps, Gbps)",
        "bandwidths count bits: did you mean '400 Mbps'?",
    ),
    (
        link("guard_cosine = 1.5"),
        'link "east-west": guard_cosine: must be at most 1, not 1.5',
        "for example guard_cosine = 0.98",
    ),
    (
        link("[model]"),
        "model: has neither source nor config",
        'give one: source = "Qwen/Qwen3-0.6B", or a [model.config] table',
    ),
    (
        link('[strategy]\nclouds = ["east", "west"]'),
        "strategy.kind: is missing",
        'for example kind = "pipeline"',
    ),
    (
        link('[strategy]\nkind = "data"\nmax_in_flight = 4'),
        "strategy.max_in_flight: is not a known key",
        (
            "choose from kind, sync, inner_steps, fragments, bits, microbatches, delay, mixing, "
            "outer_learning_rate, outer_momentum, quorum, grace, on_partition"
        ),
    ),
    (
        "name = bad\n",
        "line 1, column 8: not TOML: Invalid value",
        "put text in quotes, name a key or table only once, close every bracket",
    ),
]


@pytest.mark.parametrize(("text", "what", "cure"), PINNED)
def test_what_is_printed(text: str, what: str, cure: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobError) as caught:
        parse_job(text, file=FILE)
    show_error(caught.value)
    printed = capsys.readouterr().err
    assert printed == f"error: bad.toml has 1 problem\n  {what}\n    cure: {cure}\n"


# The file, the place of the mistake, and what the sentence has to name.
WRONG = [
    (GOOD.replace('"bad"', '"../bad"'), "name", "'../bad'"),
    (GOOD.replace('"bad"', "7"), "name", "not 7"),
    (f"seed = -1\n{GOOD}", "seed", "-1"),
    (f"seed = true\n{GOOD}", "seed", "true"),
    (link("[chekpoint]"), "chekpoint", "known key"),
    ('name = "bad"\n', "cloud", "missing"),
    ('name = "bad"\ncloud = []\n', "cloud", "empty"),
    ('name = "bad"\n[cloud]\nname = "east"\n', "cloud", "a list, not a table"),
    ('name = "bad"\ncloud = ["east"]\n', "cloud[0]", "a table, not 'east'"),
    ('name = "bad"\n[[cloud]]\nranks = 1\n', "cloud[0]: name", "missing"),
    ('name = "bad"\n[[cloud]]\nname = "East"\n', 'cloud "East": name', "DNS label"),
    (f"{GOOD}{WEST}", 'cloud "west": name', "'west' too"),
    (west('device = "cudda"'), 'cloud "west": device', "'cudda'"),
    (west('ranks = "8"'), 'cloud "west": ranks', "whole number, not '8'"),
    (west("ranks = 0"), 'cloud "west": ranks', "at least 1"),
    (west("ranks = 1_000_000"), 'cloud "west": ranks', "at most 16384"),
    (west("flops = [1]"), 'cloud "west": flops', "a list"),
    (west("certificates = 3"), 'cloud "west": certificates', "text"),
    (listening_at("2001:db8::7"), 'cloud "east": listen', "'2001:db8::7'"),
    (listening_at("127.0.0.1:70000"), 'cloud "east": listen', "127.0.0.1:70000"),
    (listening_at("300.1.1.1:7600"), 'cloud "east": listen', "300.1.1.1:7600"),
    (listening_at("0.0.0.0:7600"), 'cloud "east": listen', "'0.0.0.0'"),
    (west('listen = "127.0.0.1:7600"'), 'cloud "west": listen', "'east' listens at 127.0.0.1:7600 too"),
    (west('proxy = "socks5://10.0.0.1:1080"'), 'cloud "west": proxy', "HTTP proxy"),
    (west("usd_per_hour = -1"), 'cloud "west": usd_per_hour', "-1"),
    (between('["east", "moon"]'), 'link "east-moon": between', "'moon'"),
    (between('["east", "east"]'), 'link "east-east": between', "itself"),
    (between('["east"]'), "link[0]: between[1]", "missing"),
    (GOOD.replace("[[link]]", "[link]"), "link", "a list, not a table"),
    (link('[[link]]\nbetween = ["west", "east"]'), 'link "west-east": between', "earlier link"),
    (link('[[cloud]]\nname = "north"'), 'cloud "north"', "no link reaches it"),
    (link('bandwith = "1 Gbps"'), 'link "east-west": bandwith', "known key"),
    (link("rtt_s = 0.1"), 'link "east-west": rtt_s', "known key"),
    (link('bandwidth = "9 Gps"'), 'link "east-west": bandwidth', "'Gps'"),
    (link('bandwidth = ["1 Gbps", "1 Gbps", "1 Gbps"]'), 'link "east-west": bandwidth', "of 3"),
    (link('bandwidth = "0 bps"'), 'link "east-west": bandwidth', "at least 1 kbps"),
    (link('rtt = "-40 ms"'), 'link "east-west": rtt', "negative"),
    (link("rtt = nan"), 'link "east-west": rtt', "'nan'"),
    (link("stripes = 65"), 'link "east-west": stripes', "65"),
    (link('heartbeat_timeout = "10 ms"'), 'link "east-west": heartbeat_timeout', "at least 1 s"),
    (link('heartbeat_timeout = "2 h"'), 'link "east-west": heartbeat_timeout', "at most 1 h"),
    (link('codec = "fp61"'), 'link "east-west": codec', "'fp61'"),
    (link('codec = { backward = "Auto" }'), 'link "east-west": codec.backward', "'Auto'"),
    (link('codec = "feedback(0.9) | topk(0.1) | int8"'), 'link "east-west": codec', "feedback"),
    (link('codec = { forward = "feedback(0.9) | int4" }'), 'link "east-west": codec', "feedback"),
    (link('codec = { forward = "svd(0.6 | fp16" }'), 'link "east-west": codec.forward', "'svd(0.6'"),
    (link('codec = { backward = "subspace(8) | int4" }'), 'link "east-west": codec', "subspace"),
    (link('codec = { foward = "fp16" }'), 'link "east-west": codec.foward', "known key"),
    (link("codec = 16"), 'link "east-west": codec', "16"),
    (link('boundary = "botleneck(8)"'), 'link "east-west": boundary', "'botleneck'"),
    (link("boundary = 8"), 'link "east-west": boundary', "8"),
    (link("guard_every = -1"), 'link "east-west": guard_every', "-1"),
    (link('[model]\nsource = "a/b"\n[model.config]'), "model", "both source and config"),
    (link("[model.config]\nlayers = [{ born = 2024-01-01 }]"), "model.config", "date"),
    (link('[model]\nsource = "a/b"\n[model.lora]\ntargets = []'), "model.lora.targets", "empty"),
    (link('[model]\nsource = "a/b"\n[model.lora]\nr = 0'), "model.lora.r", "at least 1"),
    (link('[model]\nsource = "a/b"\n[model.lora]\nalpha = 0.0'), "model.lora.alpha", "more than 0"),
    (link('[model]\nsource = "a/b"\n[model.lora]\ntargets = [""]'), "model.lora.targets[0]", "empty"),
    (link('[model.config]\nmodel_type = "llama"\n[model.lora]\nr = 4'), "model", "fresh weights"),
    (link("[data]\nsequence_length = 8"), "data.source", "missing"),
    (link('[data]\nsource = ""'), "data.source", "empty"),
    (link('[data]\nsource = "x.txt"\nlabel_column = "topic"'), "data", "label_column"),
    (link('[data]\nsource = "x.txt"\nvalidation_share = 0.6'), "data.validation_share", "0.6"),
    (link('[strategy]\nkind = "pipelin"'), "strategy.kind", "'pipelin'"),
    (link('[strategy]\nkind = "pipeline"\nmicro_batches = 4'), "strategy.micro_batches", "known key"),
    (link('[strategy]\nkind = "pipeline"\nmax_in_flight = 0'), "strategy.max_in_flight", "0"),
    (link('[strategy]\nkind = "pipeline"\nmax_in_flight = [8, true]'), "strategy.max_in_flight[1]", "true"),
    (link('[strategy]\nkind = "pipeline"\nlayers = [12, 0]'), "strategy.layers[1]", "at least 1, not 0"),
    (
        link('[strategy]\nkind = "pipeline"\nlayers = [12, 20]\nmax_in_flight = [8, 2, 1]'),
        "strategy",
        "2 layers, 3 max_in_flight",
    ),
    (link("[train]\nsteps = 1.5"), "train.steps", "whole number, not 1.5"),
    (link("[train]\nlearning_rate = 0"), "train.learning_rate", "more than 0"),
    (link("[train]\nlearning_rate = inf"), "train.learning_rate", "inf"),
    (link('[train]\nmemory_budget = "1 GiB"'), "train", "nothing keeps to"),
    (link('[train]\nmemory_budget = "1 GiB"\nrecompute = true'), "train", "nothing keeps to"),
    (link("[train]\noptimizer_bits = 8\noffload_optimizer = true"), "train", "both together"),
    (link("[train]\noptimizer_bits = 16"), "train.optimizer_bits", "32 or 8, not 16"),
    (link("[train]\ncompile = 1"), "train.compile", "true or false, not 1"),
    (link('[train]\nrecompute = "always"'), "train.recompute", "true, false or 'auto', not 'always'"),
    (f"train = 3\n{GOOD}", "train", "a table, not 3"),
    (link("[checkpoint]\nevery = 5"), "checkpoint.every", "'5' has no unit"),
    ('name = "bad"\nname = "worse"\n', "line 2, column 15", "Cannot overwrite"),
]


@pytest.mark.parametrize(("text", "key", "what"), WRONG)
def test_a_mistake_is_told_with_its_place_and_a_cure(text: str, key: str, what: str) -> None:
    (problem,) = problems(text)
    assert problem.key == key
    assert what in problem.what
    assert problem.cure


@pytest.mark.parametrize(
    ("line", "kind"), [("", "auto"), ("microbatches = 4", "pipeline"), ("bits = 4", "data")]
)
def test_a_missing_kind_is_cured_by_one_that_takes_the_keys_given(line: str, kind: str) -> None:
    (problem,) = problems(link(f"[strategy]\n{line}"))
    assert problem.cure == f'for example kind = "{kind}"'
    assert parse_job(link(f'[strategy]\nkind = "{kind}"\n{line}'), file=FILE).strategy.kind == kind


def test_many_problems_come_at_once() -> None:
    found = problems("""
name = "bad job"
sede = 1

[[cloud]]
name = "east"
ranks = true
listen = "east:0"

[[cloud]]
name = "west"
memory = "80 gib"

[[link]]
between = ["east", "wst"]
rtt = "60"

[train]
steps = "many"
""")
    assert [problem.key for problem in found] == [
        "name",
        'cloud "east": ranks',
        'cloud "east": listen',
        'cloud "west": memory',
        'link "east-wst": rtt',
        "train.steps",
        "sede",
        'link "east-wst": between',
    ]
    assert all(problem.cure for problem in found)


def test_the_cure_for_an_unknown_cloud_is_not_the_other_end() -> None:
    name, missing = problems(GOOD.replace('name = "east"', 'name = "East Coast"'))
    assert (name.key, missing.what) == ('cloud "East Coast": name', "there is no cloud 'east'")
    assert missing.cure == "choose from East Coast"


def test_clouds_without_any_link_are_all_named() -> None:
    found = problems(f'name = "bad"\n{EAST}{WEST}')
    assert [problem.key for problem in found] == ['cloud "east"', 'cloud "west"']

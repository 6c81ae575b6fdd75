"""Wrong job files, and the exact text that each of them prints."""

from pathlib import Path

import pytest

from isthmus.cli.main import show_error
from isthmus.errors import JobError, UserError
from isthmus.job import load_job

EAST = '[[cloud]]\nname = "east"\nlisten = "127.0.0.1:7600"\n'
WEST = '[[cloud]]\nname = "west"\n'
LINK = '[[link]]\nbetween = ["east", "west"]\n'
GOOD = f'name = "bad"\n{EAST}{WEST}{LINK}'

BANDWIDTH = "a bandwidth in bits per second such as '1 Gbps'"
DURATION = "a duration such as '25 ms'"
MEANT = "did you mean 'Gbps'?"
RATES = "(units: bps, kbps, Mbps, Gbps)"
SIZES = "(units: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)"
TIMES = "(units: us, ms, s, min, h, d)"

# Each row: what the case is, the file, the place and what is wrong, the cure.
WRONG = [
    ("no name", GOOD.removeprefix('name = "bad"\n'), "name: is missing", 'for example name = "two-clouds"'),
    (
        "name is no folder",
        GOOD.replace('"bad"', '"../bad"'),
        "name: '../bad' cannot name a folder",
        "use up to 64 letters, digits, '.', '_' and '-', a letter or digit first",
    ),
    (
        "name is a number",
        GOOD.replace('"bad"', "7"),
        "name: must be text, not 7",
        'for example name = "two-clouds"',
    ),
    ("seed is negative", f"seed = -1\n{GOOD}", "seed: must be at least 0, not -1", "for example seed = 7"),
    (
        "seed is true",
        f"seed = true\n{GOOD}",
        "seed: must be a whole number, not true",
        "for example seed = 7",
    ),
    (
        "unknown key, much like a known one",
        f"sead = 1\n{GOOD}",
        "sead: is not a known key",
        "did you mean 'seed'?",
    ),
    (
        "unknown key, like no other",
        f"zzz = 1\n{GOOD}",
        "zzz: is not a known key",
        "choose from name, seed, model, data, cloud, link, strategy, train, checkpoint, limits, accelerator",
    ),
    (
        "unknown section",
        f"{GOOD}[chekpoint]\n",
        "chekpoint: is not a known key",
        "did you mean 'checkpoint'?",
    ),
    ("no clouds", 'name = "bad"\n', "cloud: is missing", "write a [[cloud]] table for each"),
    (
        "an empty list of clouds",
        'name = "bad"\ncloud = []\n',
        "cloud: is empty",
        "write a [[cloud]] table for each",
    ),
    (
        "single brackets around cloud",
        'name = "bad"\n[cloud]\nname = "east"\n',
        "cloud: must be a list of tables, not a table",
        "write a [[cloud]] table for each",
    ),
    (
        "a cloud that is text",
        'name = "bad"\ncloud = ["east"]\n',
        "cloud[0]: must be a table, not 'east'",
        "write a [[cloud]] table for each",
    ),
    (
        "cloud without a name",
        'name = "bad"\n[[cloud]]\nranks = 1\n',
        "cloud[0]: name: is missing",
        'for example name = "east"',
    ),
    (
        "cloud name with a capital",
        'name = "bad"\n[[cloud]]\nname = "East"\n',
        "cloud \"East\": name: 'East' is no DNS label",
        "use up to 63 of a-z, 0-9 and '-', with no '-' at either end",
    ),
    (
        "reserved cloud name",
        'name = "bad"\n[[cloud]]\nname = "isthmus"\n',
        "cloud \"isthmus\": name: 'isthmus' is reserved",
        "choose another name",
    ),
    (
        "two clouds of one name",
        f"{GOOD}{WEST}",
        "cloud \"west\": name: an earlier cloud is named 'west' too",
        "give each cloud its own name",
    ),
    (
        "unknown device",
        GOOD.replace(WEST, f'{WEST}device = "gpu"\n'),
        "cloud \"west\": device: must be 'cuda', 'npu', 'xpu', 'cpu' or 'auto', not 'gpu'",
        'for example device = "cuda"',
    ),
    (
        "mistyped device",
        GOOD.replace(WEST, f'{WEST}device = "cudda"\n'),
        "cloud \"west\": device: must be 'cuda', 'npu', 'xpu', 'cpu' or 'auto', not 'cudda'",
        "did you mean 'cuda'?",
    ),
    (
        "ranks as text",
        GOOD.replace(WEST, f'{WEST}ranks = "8"\n'),
        "cloud \"west\": ranks: must be a whole number, not '8'",
        "for example ranks = 8",
    ),
    (
        "no ranks at all",
        GOOD.replace(WEST, f"{WEST}ranks = 0\n"),
        'cloud "west": ranks: must be at least 1, not 0',
        "for example ranks = 8",
    ),
    (
        "more ranks than any cloud has",
        GOOD.replace(WEST, f"{WEST}ranks = 1_000_000\n"),
        'cloud "west": ranks: must be at most 16384, not 1000000',
        "for example ranks = 8",
    ),
    (
        "memory without a unit",
        GOOD.replace(WEST, f"{WEST}memory = 80\n"),
        f"cloud \"west\": memory: '80' is not a size in bytes such as '80 GiB': it has no unit {SIZES}",
        'for example memory = "80 GiB"',
    ),
    (
        "flops as a list",
        GOOD.replace(WEST, f"{WEST}flops = [1]\n"),
        'cloud "west": flops: must be text with a unit, not a list',
        'for example flops = "312 TFLOPS"',
    ),
    (
        "listen without a port",
        GOOD.replace("127.0.0.1:7600", "east.example.com"),
        "cloud \"east\": listen: 'east.example.com' is no address",
        'add a port: "east.example.com:7600"',
    ),
    (
        "listen at an IPv6 host without brackets",
        GOOD.replace("127.0.0.1:7600", "2001:db8::7"),
        "cloud \"east\": listen: '2001:db8::7' is no address",
        'add a port: "[2001:db8::7]:7600"',
    ),
    (
        "listen at port 70000",
        GOOD.replace("7600", "70000"),
        "cloud \"east\": listen: '127.0.0.1:70000' has port 70000",
        "choose a port from 1 to 65535",
    ),
    (
        "listen at no valid host",
        GOOD.replace("127.0.0.1", "300.1.1.1"),
        "cloud \"east\": listen: '300.1.1.1:7600' has no valid host",
        'write "host:port", such as "east.example.com:7600"',
    ),
    (
        "listen where none can dial",
        GOOD.replace("127.0.0.1", "0.0.0.0"),
        "cloud \"east\": listen: other clouds cannot dial '0.0.0.0'",
        "give the host under which they reach this cloud",
    ),
    (
        "two clouds at one address",
        GOOD.replace(WEST, f'{WEST}listen = "127.0.0.1:7600"\n'),
        "cloud \"west\": listen: cloud 'east' listens at 127.0.0.1:7600 too",
        "give each cloud its own host or port",
    ),
    (
        "proxy of another kind",
        GOOD.replace(WEST, f'{WEST}proxy = "socks5://10.0.0.1:1080"\n'),
        "cloud \"west\": proxy: 'socks5://10.0.0.1:1080' is no HTTP proxy",
        'write "http://host:port"',
    ),
    (
        "negative price",
        GOOD.replace(WEST, f"{WEST}usd_per_hour = -1\n"),
        'cloud "west": usd_per_hour: must be at least 0, not -1',
        "for example usd_per_hour = 20.0",
    ),
    (
        "link to a mistyped cloud",
        GOOD.replace('"west"]', '"wset"]'),
        "link \"east-wset\": between: there is no cloud 'wset'",
        "did you mean 'west'?",
    ),
    (
        "link to a cloud like no other",
        GOOD.replace('"west"]', '"moon"]'),
        "link \"east-moon\": between: there is no cloud 'moon'",
        "choose from east, west",
    ),
    (
        "link of a cloud to itself",
        GOOD.replace('["east", "west"]', '["east", "east"]'),
        "link \"east-east\": between: joins 'east' to itself",
        "name two different clouds",
    ),
    (
        "link with one end",
        GOOD.replace('["east", "west"]', '["east"]'),
        "link[0]: between: must be a list of the names of two clouds",
        'for example between = ["east", "west"]',
    ),
    (
        "the same two clouds twice",
        f'{GOOD}[[link]]\nbetween = ["west", "east"]\n',
        'link "west-east": between: an earlier link joins these two too',
        "keep one of the links",
    ),
    (
        "neither end listens",
        GOOD.replace('listen = "127.0.0.1:7600"\n', ""),
        "link \"east-west\": between: neither 'east' nor 'west' listens, so none can dial the other",
        'give one of them an address: listen = "east.example.com:7600"',
    ),
    (
        "a cloud that no link reaches",
        f'{GOOD}[[cloud]]\nname = "north"\n',
        'cloud "north": no link reaches it',
        'add a [[link]] with between = ["east", "north"]',
    ),
    (
        "mistyped key of a link",
        f'{GOOD}bandwith = "1 Gbps"\n',
        'link "east-west": bandwith: is not a known key',
        "did you mean 'bandwidth'?",
    ),
    (
        "the Python name of a key",
        f"{GOOD}rtt_s = 0.1\n",
        'link "east-west": rtt_s: is not a known key',
        "did you mean 'rtt'?",
    ),
    (
        "bandwidth with an unknown unit",
        f'{GOOD}bandwidth = "9 Gps"\n',
        f"link \"east-west\": bandwidth: '9 Gps' is not {BANDWIDTH}: unknown unit 'Gps', {MEANT} {RATES}",
        'for example bandwidth = "1 Gbps"',
    ),
    (
        "three bandwidths",
        f'{GOOD}bandwidth = ["1 Gbps", "1 Gbps", "1 Gbps"]\n',
        'link "east-west": bandwidth: must be one bandwidth or a list of two, not of 3',
        'for example bandwidth = "1 Gbps"',
    ),
    (
        "no bandwidth",
        f'{GOOD}bandwidth = "0 bps"\n',
        "link \"east-west\": bandwidth: must be at least 1 kbps, not '0 bps'",
        'for example bandwidth = "1 Gbps"',
    ),
    (
        "negative round-trip time",
        f'{GOOD}rtt = "-40 ms"\n',
        f"link \"east-west\": rtt: '-40 ms' is not {DURATION}: it is negative {TIMES}",
        'for example rtt = "60 ms"',
    ),
    (
        "round-trip time that is not a number",
        f"{GOOD}rtt = nan\n",
        f"link \"east-west\": rtt: 'nan' is not {DURATION}: it is not a number followed by a unit {TIMES}",
        'for example rtt = "60 ms"',
    ),
    (
        "too many stripes",
        f"{GOOD}stripes = 65\n",
        'link "east-west": stripes: must be "auto" or a whole number from 1 to 64, not 65',
        "for example stripes = 8",
    ),
    (
        "heartbeat time-out too short",
        f'{GOOD}heartbeat_timeout = "10 ms"\n',
        "link \"east-west\": heartbeat_timeout: must be at least 1 s, not '10 ms'",
        'for example heartbeat_timeout = "30 s"',
    ),
    (
        "heartbeat time-out too long",
        f'{GOOD}heartbeat_timeout = "2 h"\n',
        "link \"east-west\": heartbeat_timeout: must be at most 1 h, not '2 h'",
        'for example heartbeat_timeout = "30 s"',
    ),
    (
        "unknown codec",
        f'{GOOD}codec = "fp61"\n',
        "link \"east-west\": codec: unknown codec 'fp61'",
        "did you mean 'fp16'?",
    ),
    (
        "auto in capitals",
        f'{GOOD}codec = {{ backward = "Auto" }}\n',
        "link \"east-west\": codec.backward: unknown codec 'Auto'",
        "did you mean 'auto'?",
    ),
    (
        "no codec at all",
        f'{GOOD}codec = "none"\n',
        "link \"east-west\": codec: unknown codec 'none'",
        (
            "choose from auto, raw, fp16, bf16, int8, int4, int2, topk, svd, center, rotate, subspace, "
            "feedback"
        ),
    ),
    (
        "feedback for both directions",
        f'{GOOD}codec = "feedback(0.9) | topk(0.1) | int8"\n',
        (
            'link "east-west": codec: the forward codec can have no feedback: what one sample lost would be '
            "added to another"
        ),
        (
            'use it for gradients: codec = { forward = "topk(0.1) | int8", '
            'backward = "feedback(0.9) | topk(0.1) | int8" }'
        ),
    ),
    (
        "feedback for activations alone",
        f'{GOOD}codec = {{ forward = "feedback(0.9) | int4" }}\n',
        (
            'link "east-west": codec: the forward codec can have no feedback: what one sample lost would be '
            "added to another"
        ),
        'leave it out: forward = "int4"',
    ),
    (
        "unclosed codec",
        f'{GOOD}codec = {{ forward = "svd(0.6 | fp16" }}\n',
        "link \"east-west\": codec.forward: 'svd(0.6' in 'svd(0.6 | fp16' is no step of a codec",
        'a codec reads like "svd(0.6) | fp16"',
    ),
    (
        "a gradient's subspace without the activation's",
        f'{GOOD}codec = {{ forward = "raw", backward = "subspace(8) | int4" }}\n',
        (
            'link "east-west": codec: a gradient has a subspace only where its activation has one: '
            "it is the same basis"
        ),
        "give the forward codec the subspace too",
    ),
    (
        "unknown boundary",
        f'{GOOD}boundary = "botleneck(8)"\n',
        "link \"east-west\": boundary: unknown boundary 'botleneck'",
        "did you mean 'bottleneck'?",
    ),
    (
        "boundary is a number",
        f"{GOOD}boundary = 8\n",
        'link "east-west": boundary: must be the text of a boundary, not 8',
        'for example boundary = "bottleneck(64, warmup=100)"',
    ),
    (
        "a guard that asks for more than all",
        f"{GOOD}guard_cosine = 1.5\n",
        'link "east-west": guard_cosine: must be at most 1, not 1.5',
        "for example guard_cosine = 0.98",
    ),
    (
        "a guard that looks backwards",
        f"{GOOD}guard_every = -1\n",
        'link "east-west": guard_every: must be at least 0, not -1',
        "for example guard_every = 50",
    ),
    (
        "unknown direction of a codec",
        f'{GOOD}codec = {{ foward = "fp16" }}\n',
        'link "east-west": codec.foward: is not a known key',
        "did you mean 'forward'?",
    ),
    (
        "codec is a number",
        f"{GOOD}codec = 16\n",
        'link "east-west": codec: must be the text of a codec or a table, not 16',
        'for example codec = "rotate | int4"',
    ),
    (
        "model with two origins",
        f'{GOOD}[model]\nsource = "a/b"\n[model.config]\n',
        "model: has both source and config",
        'give one: source = "Qwen/Qwen3-0.6B", or a [model.config] table',
    ),
    (
        "model with no origin",
        f"{GOOD}[model]\n",
        "model: has neither source nor config",
        'give one: source = "Qwen/Qwen3-0.6B", or a [model.config] table',
    ),
    (
        "date in the model's configuration",
        f"{GOOD}[model.config]\nlayers = [{{ born = 2024-01-01 }}]\n",
        "model.config: layers[0].born cannot be 2024-01-01",
        "use text, finite numbers, true, false, lists and tables",
    ),
    (
        "data without a source",
        f"{GOOD}[data]\nsequence_length = 8\n",
        "data.source: is missing",
        'for example source = "corpus/*.jsonl"',
    ),
    (
        "data with an empty source",
        f'{GOOD}[data]\nsource = ""\n',
        "data.source: must not be empty",
        'for example source = "corpus/*.jsonl"',
    ),
    (
        "a column that the task does not read",
        f'{GOOD}[data]\nsource = "x.txt"\nlabel_column = "topic"\n',
        "data: has a label_column, which causal-lm does not read",
        "leave it out, or set task to sequence-classification or token-classification",
    ),
    (
        "more validation than training",
        f'{GOOD}[data]\nsource = "x.txt"\nvalidation_share = 0.6\n',
        "data.validation_share: must be at most 0.5, not 0.6",
        "for example validation_share = 0.05",
    ),
    (
        "mistyped strategy",
        f'{GOOD}[strategy]\nkind = "pipelin"\n',
        "strategy.kind: must be one of 'auto', 'pipeline', 'data', 'generator-discriminator', not 'pipelin'",
        "did you mean 'pipeline'?",
    ),
    (
        "strategy without a kind",
        f"{GOOD}[strategy]\nmicrobatches = 4\n",
        "strategy.kind: is missing",
        'for example kind = "pipeline"',
    ),
    (
        "keys of another strategy without a kind",
        f"{GOOD}[strategy]\nbits = 4\n",
        "strategy.kind: is missing",
        'for example kind = "data"',
    ),
    (
        "an empty strategy",
        f"{GOOD}[strategy]\n",
        "strategy.kind: is missing",
        'for example kind = "auto"',
    ),
    (
        "bandwidth in bytes",
        f'{GOOD}bandwidth = "50 MB/s"\n',
        (
            f"link \"east-west\": bandwidth: '50 MB/s' is not {BANDWIDTH}: it is in bytes, "
            f"did you mean '400 Mbps'? {RATES}"
        ),
        'for example bandwidth = "1 Gbps"',
    ),
    (
        "key of another strategy",
        f'{GOOD}[strategy]\nkind = "data"\nmicrobatches = 4\n',
        "strategy.microbatches: is not a known key",
        "choose from kind, inner_steps, fragments, bits",
    ),
    (
        "mistyped key of a strategy",
        f'{GOOD}[strategy]\nkind = "pipeline"\nmicro_batches = 4\n',
        "strategy.micro_batches: is not a known key",
        "did you mean 'microbatches'?",
    ),
    (
        "no micro-batch in flight",
        f'{GOOD}[strategy]\nkind = "pipeline"\nmax_in_flight = 0\n',
        "strategy.max_in_flight: must be a whole number of at least 1 or a list of such, not 0",
        "for example 8, or [8, 2] for two stages",
    ),
    (
        "no micro-batch in flight at one stage",
        f'{GOOD}[strategy]\nkind = "pipeline"\nmax_in_flight = [8, true]\n',
        "strategy.max_in_flight: must be a whole number of at least 1 or a list of such, not a list",
        "for example 8, or [8, 2] for two stages",
    ),
    (
        "caps of more stages than there are",
        f'{GOOD}[strategy]\nkind = "pipeline"\nlayers = [12, 20]\nmax_in_flight = [8, 2, 1]\n',
        "strategy: has 2 layers, 3 max_in_flight",
        "give one entry for each stage",
    ),
    (
        "half a step",
        f"{GOOD}[train]\nsteps = 1.5\n",
        "train.steps: must be a whole number, not 1.5",
        "for example steps = 1000",
    ),
    (
        "learning rate of nothing",
        f"{GOOD}[train]\nlearning_rate = 0\n",
        "train.learning_rate: must be more than 0, not 0",
        "for example learning_rate = 0.0003",
    ),
    (
        "learning rate without end",
        f"{GOOD}[train]\nlearning_rate = inf\n",
        "train.learning_rate: must be a finite number, not inf",
        "for example learning_rate = 0.0003",
    ),
    (
        "section that is no table",
        f"train = 3\n{GOOD}",
        "train: must be a table, not 3",
        "write a [train] table",
    ),
    (
        "checkpoints without a unit",
        f"{GOOD}[checkpoint]\nevery = 5\n",
        f"checkpoint.every: '5' is not {DURATION}: it has no unit {TIMES}",
        'for example every = "5 min"',
    ),
    (
        "text without quotes",
        "name = bad\n",
        "line 1, column 8: not TOML: Invalid value",
        "put text in quotes, name a key or table only once, close every bracket",
    ),
    (
        "a key twice",
        'name = "bad"\nname = "worse"\n',
        "line 2, column 15: not TOML: Cannot overwrite a value",
        "put text in quotes, name a key or table only once, close every bracket",
    ),
]


def printed(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(UserError) as caught:
        load_job(path)
    show_error(caught.value)
    return capsys.readouterr().err


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("bad.toml")


@pytest.mark.parametrize(("text", "what", "cure"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_one_problem(text: str, what: str, cure: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here.write_text(text)
    assert printed(here, capsys) == f"error: bad.toml has 1 problem\n  {what}\n    cure: {cure}\n"


def test_many_problems_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here.write_text("""
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
    assert printed(here, capsys) == (
        "error: bad.toml has 8 problems\n"
        "  name: 'bad job' cannot name a folder\n"
        "    cure: use up to 64 letters, digits, '.', '_' and '-', a letter or digit first\n"
        '  cloud "east": ranks: must be a whole number, not true\n'
        "    cure: for example ranks = 8\n"
        "  cloud \"east\": listen: 'east:0' has port 0\n"
        "    cure: choose a port from 1 to 65535\n"
        "  cloud \"west\": memory: '80 gib' is not a size in bytes such as '80 GiB': "
        "unknown unit 'gib', did you mean 'GiB'? (units: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB)\n"
        '    cure: for example memory = "80 GiB"\n'
        "  link \"east-wst\": rtt: '60' is not a duration such as '25 ms': it has no unit "
        "(units: us, ms, s, min, h, d)\n"
        '    cure: for example rtt = "60 ms"\n'
        "  train.steps: must be a whole number, not 'many'\n"
        "    cure: for example steps = 1000\n"
        "  sede: is not a known key\n"
        "    cure: did you mean 'seed'?\n"
        "  link \"east-wst\": between: there is no cloud 'wst'\n"
        "    cure: did you mean 'west'?\n"
    )


def test_clouds_without_any_link_are_all_named(here: Path) -> None:
    here.write_text(f'name = "bad"\n{EAST}{WEST}')
    with pytest.raises(JobError) as caught:
        load_job(here)
    assert [problem.key for problem in caught.value.problems] == ['cloud "east"', 'cloud "west"']

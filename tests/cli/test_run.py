"""Real processes, real links, an emulated WAN: `isthmus run` from job to exported model."""

import json
import re
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from isthmus.cli.main import app
from isthmus.cli.run import run
from isthmus.events import Fact, Span, read_events
from isthmus.job import load_job
from isthmus.model.load import build_stage
from isthmus.train.build import blueprint_of, layout_of
from isthmus.train.data.training_data import Feed, open_data
from isthmus.train.optimizer import Schedule
from isthmus.train.pipeline_config import decide, plan_run
from isthmus.wan.certificates import make_authority, make_request, sign_request
from tests.train.reference import train_alone
from tests.train.test_setup import TINY, clouds, links

THIN_LINK = Path(__file__).parents[2] / "examples" / "thin-link.toml"
NUM_STEPS = 12
CHANGES = [
    f"train.steps={NUM_STEPS}",
    "train.evaluate_every=6",
    "strategy.microbatches=4",
    "model.config.attention_dropout=0.1",
    "link.0.rtt=100 ms",
    "link.0.bandwidth=20 Mbps",
    "checkpoint.every=1 s",
]


def invoke(job: Path, *options: str, changes: Sequence[str] = CHANGES) -> Any:
    app = typer.Typer()
    app.command()(run)
    sets = [text for change in changes for text in ("--set", change)]
    return CliRunner().invoke(app, [str(job), "--json", "--no-profile", *sets, *options])


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "tiny.toml"
    path.write_text(TINY + clouds("east", "west") + links(("east", "west")))
    return path


@pytest.fixture(scope="module")
def finished(job_file: Path) -> dict[str, Any]:
    result = invoke(job_file, "--runs", str(job_file.parent / "runs"))
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def weights(folder: Path) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    return dict(model.state_dict())


def assert_equal_weights(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def train_here(job_file: Path, tmp_path: Path) -> dict[str, Tensor]:
    """The same job in this process, without stages or links."""
    job = load_job(job_file, overrides=CHANGES)
    plan = plan_run(job)
    decisions = decide(job, None if plan is None else plan.decisions)
    data = open_data(job, tokenizer_folder=tmp_path / "tokenizer")
    blueprint = blueprint_of(job, config=data.facts.config, num_labels=None)
    stage = build_stage(blueprint, range(blueprint.num_layers), seed=job.seed)
    with Feed(data, layout_of(job, decisions.num_microbatches)) as feed:
        steps: Sequence[Any] = [feed.training(step) for step in range(NUM_STEPS)]
    schedule = Schedule(
        peak=job.train.learning_rate,
        num_steps=job.train.steps,
        num_warmup_steps=round(job.train.warmup_share * job.train.steps),
    )
    rates = [schedule.at(step) for step in range(NUM_STEPS)]
    train_alone(stage, steps, seed=job.seed, learning_rates=rates, weight_decay=0.1, max_norm=1.0)
    return dict(stage.model.state_dict())


def test_two_processes_give_the_weights_of_one(
    finished: dict[str, Any], job_file: Path, tmp_path: Path
) -> None:
    folder = Path(finished["run"])
    assert_equal_weights(weights(folder), train_here(job_file, tmp_path))


def test_the_run_directory_tells_what_happened(finished: dict[str, Any]) -> None:
    folder = Path(finished["run"])
    assert finished["num_steps"] == NUM_STEPS
    assert finished["last_loss"] < finished["first_loss"]
    assert {one["cloud"] for one in finished["clouds"]} == {"east", "west"}
    assert all(one["received_bytes"] > 0 for one in finished["clouds"])
    assert all(0 <= one["overlapped_share"] <= 1 for one in finished["clouds"])
    assert AutoTokenizer.from_pretrained(folder / "model").vocab_size <= 300
    assert not list(folder.glob(".parts*"))
    assert len(list((folder / "checkpoints").glob(f"step-{NUM_STEPS:08d}/*/manifest.json"))) == 2


def test_the_last_checkpoint_exports_to_the_model_of_the_run(
    finished: dict[str, Any], tmp_path: Path
) -> None:
    folder = Path(finished["run"])
    out = tmp_path / "exported" / "model"
    result = CliRunner().invoke(app, ["export", str(folder.parent), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert_equal_weights(weights(out.parent), weights(folder))
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1
    again = CliRunner().invoke(app, ["export", str(folder), "--out", str(out)])
    assert "exists already" in str(again.exception)
    missing = CliRunner().invoke(app, ["export", str(folder), "--step", "999"])
    assert "step 999 cannot be exported: there is none" in str(missing.exception)


@pytest.mark.slow
def test_a_model_with_a_bottleneck_is_exported_with_the_loss_that_it_had(
    job_file: Path, tmp_path: Path
) -> None:
    narrow = ["link.0.boundary=bottleneck(8, warmup=4)", "link.0.codec=int8", "link.0.rtt=5 ms"]
    changes = [*CHANGES, *narrow, "train.evaluate_without_codec=true"]
    result = invoke(job_file, "--runs", str(tmp_path), changes=changes)
    assert result.exit_code == 0, result.output
    (told,) = re.findall(r"the exported model has a validation loss of ([0-9.]+)", result.output)
    assert float(told) == pytest.approx(json.loads(result.stdout)["plain_validation_loss"], abs=1e-3)
    assert "trust_remote_code=True" in result.output


def test_a_run_that_was_cut_short_goes_on_where_all_clouds_had_saved(
    finished: dict[str, Any], job_file: Path, tmp_path: Path
) -> None:
    root = tmp_path / "runs"
    shutil.copytree(job_file.parent / "runs", root)
    (folder,) = (one.parent for one in root.glob("tiny/*/job.toml"))
    shutil.rmtree(folder / "model")
    # One cloud had saved the last step, the other had not.
    shutil.rmtree(folder / "checkpoints" / f"step-{NUM_STEPS:08d}" / "west")
    result = invoke(job_file, "--runs", str(root))
    assert result.exit_code == 0, result.output
    assert Path(json.loads(result.stdout)["run"]) == folder
    assert "resumed after step" in result.output
    assert "the tokens" not in result.output
    assert_equal_weights(weights(folder), weights(Path(finished["run"])))


@pytest.mark.slow
def test_a_link_that_is_cut_in_mid_step_changes_nothing(
    finished: dict[str, Any], job_file: Path, tmp_path: Path
) -> None:
    faults = tmp_path / "faults.toml"
    cut = '[[fault]]\nat = "{} s"\nbetween = ["east", "west"]\nkind = "cut"\nduration = "500 ms"\n'
    faults.write_text("".join(cut.format(at) for at in range(1, 60)))
    result = invoke(job_file, "--runs", str(tmp_path / "runs"), "--resume", "never", "--faults", str(faults))
    assert result.exit_code == 0, result.output
    folder = Path(json.loads(result.stdout)["run"])
    events = list(read_events(folder / "events" / "east.jsonl"))
    steps = [event.values for event in events if isinstance(event, Fact) and event.kind == "step"]
    assert int(str(steps[-1]["reconnects"])) > 0
    assert_equal_weights(weights(folder), weights(Path(finished["run"])))


def test_a_mistake_ends_the_command_before_anything_starts(job_file: Path, tmp_path: Path) -> None:
    result = invoke(job_file, "--runs", str(tmp_path / "runs"), "--set", "train.batch_tokens=8192000")
    assert result.exit_code == 1
    assert "one step reads" in str(result.exception)
    assert [path.name for path in tmp_path.glob("runs/tiny/*")] == ["tokens"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a device is here")
@pytest.mark.parametrize("options", [(), ("--cloud", "west")])
def test_a_device_that_is_not_here_ends_the_command_before_anything_starts(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_authority(Path("certs"))
    sign_request(make_request(Path("certs"), "west"), cloud="west", folder=Path("certs"))
    result = invoke(job_file, "--set", "cloud.west.device=cuda", *options)
    assert "cloud 'west' asks for cuda, but torch finds cpu only here" in str(result.exception)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--faults", "f.toml"), "--faults disturbs the emulated WAN"),
        (("--restarts", "2"), "--restarts starts all"),
    ],
)
def test_what_only_the_emulated_wan_has_is_refused_for_one_cloud(
    job_file: Path, options: tuple[str, ...], reason: str
) -> None:
    result = invoke(job_file, "--cloud", "west", *options)
    assert str(result.exception).startswith(reason)


CODED = [
    "train.steps=5",
    "train.evaluate_every=5",
    "strategy.microbatches=4",
    "train.batch_tokens=2048",
    "checkpoint.every=1 s",
    "link.0.guard_every=1",
]


@pytest.mark.slow
def test_the_thin_link_is_coded_and_a_resumed_run_ends_the_same(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    whole = invoke(THIN_LINK, "--runs", str(root), changes=CODED)
    assert whole.exit_code == 0, whole.output
    found = json.loads(whole.stdout)
    folder = Path(found["run"])
    assert 4.25 < found["bits_per_element"] < 4.6
    assert found["plain_validation_loss"] not in (None, found["validation_loss"])
    assert all(one["coding_share"] > 0 for one in found["clouds"])
    assert {one["track"] for one in found["coding_errors"]} == {"east→west", "west→east"}
    assert all(0 < one["relative_error"] < 0.5 for one in found["coding_errors"])
    spans = [event for event in read_events(folder / "events" / "west.jsonl") if isinstance(event, Span)]
    assert {"encode", "decode"} <= {span.kind for span in spans}
    expected = weights(folder)
    shutil.rmtree(folder / "model")
    shutil.rmtree(folder / "checkpoints" / "step-00000005" / "west")
    again = invoke(THIN_LINK, "--runs", str(root), changes=CODED)
    assert again.exit_code == 0, again.output
    assert "resumed after step" in again.output
    assert_equal_weights(weights(folder), expected)


@pytest.mark.slow
def test_codecs_are_chosen_while_frozen_layers_cross_once(job_file: Path, tmp_path: Path) -> None:
    changes = [
        "train.steps=12",
        "train.evaluate_every=0",
        "strategy.microbatches=4",
        "model.frozen_layers=1",
        "link.0.codec=auto",
        "limits.codec_loss=some",
        "link.0.bandwidth=1 Mbps",
        "link.0.rtt=10 ms",
    ]
    result = invoke(job_file, "--runs", str(tmp_path / "runs"), changes=changes)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert re.search(r"codec of east-west: activations [^:]*\| int4", text)
    assert "sequences of frozen layers in" in text
    folder = Path(json.loads(result.stdout)["run"])
    transfers = [event for event in read_events(folder / "events" / "east.jsonl") if isinstance(event, Span)]
    assert not any(span.kind == "transfer" for span in transfers)


RANKED = [
    "cloud.east.ranks=2",
    "cloud.east.sharding=optimizer",
    "train.steps=40",
    "train.evaluate_every=20",
    "strategy.microbatches=5",
    "train.batch_tokens=640",
    "model.config.attention_dropout=0.1",
    "link.0.rtt=20 ms",
    "link.0.bandwidth=50 Mbps",
    "checkpoint.every=1 s",
]


def rank_processes() -> list[psutil.Process]:
    """The processes of ranks, the oldest first; a server that has imported torch forks them."""
    servers = [one for one in psutil.Process().children() if "forkserver" in " ".join(one.cmdline())]
    return sorted((one for server in servers for one in server.children()), key=lambda one: one.create_time())


@pytest.mark.slow
def test_ranks_of_a_cloud_train_one_model_and_a_killed_one_does_not_end_the_run(
    job_file: Path, tmp_path: Path
) -> None:
    calm = invoke(job_file, "--runs", str(tmp_path / "calm"), changes=RANKED)
    assert calm.exit_code == 0, calm.output
    assert calm.output.count("the tokens") == 1
    folder = Path(json.loads(calm.stdout)["run"])
    assert {path.name for path in (folder / "events").iterdir()} == {
        "east.jsonl",
        "east.1.jsonl",
        "west.jsonl",
    }
    expected = weights(folder)
    assert expected["model.embed_tokens.weight"].shape == (300, 32)

    def kill() -> None:
        while len(list((tmp_path / "killed").glob("tiny/*/checkpoints/*/*/manifest.json"))) < 2:
            time.sleep(0.02)
        rank_processes()[1].kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    killed = invoke(job_file, "--runs", str(tmp_path / "killed"), "--restarts", "1", changes=RANKED)
    killer.join()
    assert killed.exit_code == 0, killed.output
    text = " ".join(killed.output.split())
    assert "rank 1 of cloud 'east' failed: its process ended with exit code -9; starting again" in text
    assert "resumed after step" in text
    assert_equal_weights(weights(Path(json.loads(killed.stdout)["run"])), expected)

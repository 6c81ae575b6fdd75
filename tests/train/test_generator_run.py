"""A whole run of generators and a discriminator: processes, sockets, an emulated WAN, exported models."""

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

import isthmus
from isthmus.errors import UserError
from isthmus.events import StopRequest
from isthmus.job import Job, load_job
from isthmus.model.heads import IGNORED
from isthmus.observe.report import FeedSummary, read_run, summarize
from isthmus.plan.costs import nothing_measured
from isthmus.plan.feed_plan import clouds_of, shared_out
from isthmus.train.build import Build, blueprint_of
from isthmus.train.data.rows import open_rows
from isthmus.train.data.samples import Pick
from isthmus.train.data.training_data import open_data
from isthmus.train.device import Device
from isthmus.train.export import export_run, steps_to_export
from isthmus.train.generator_role import FeedKind, own_job
from isthmus.train.in_cloud import World
from tests.train.reference import assert_same

EXAMPLE = Path(__file__).parents[2] / "examples" / "generator-discriminator.toml"
CLOUDS = ("judge", "english", "esperanto")
TWO = ("cloud.judge.ranks=2", "cloud.english.ranks=2")
HEARTBEAT_S = 25.0
"""Less than it takes until a silent link is given up."""


def job(*overrides: str) -> Job:
    return load_job(EXAMPLE, overrides=overrides)


@pytest.mark.slow
def test_the_example_runs_and_its_models_are_loaded_by_transformers(tmp_path: Path) -> None:
    run = isthmus.run(job("train.steps=30"), runs=tmp_path).run
    summary = summarize(read_run(run))
    assert summary.num_steps == 30
    assert summary.first_loss is not None
    assert summary.last_loss is not None
    assert summary.last_loss < summary.first_loss
    feed = summary.feed
    assert feed is not None
    assert [one.cloud for one in feed.streams] == ["english", "esperanto"]
    assert 0.7 < feed.original_share < 0.95
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    ids = tokenizer("La juna hundo dormas.", return_tensors="pt")
    encoder = AutoModel.from_pretrained(run / "model")
    assert encoder(**ids).last_hidden_state.shape[-1] == 128
    for name in ("english", "esperanto"):
        generator = AutoModelForMaskedLM.from_pretrained(run / f"generator-{name}")
        assert generator(**ids).logits.shape[-1] == generator.config.vocab_size
    assert summary.num_bytes < 2 * sum(one.num_tokens for one in feed.streams)
    assert asdict(isthmus.report(run).summary)["feed"]["accuracy"] == pytest.approx(feed.accuracy)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "optimizer", "full"])
def test_two_ranks_in_each_cloud_train_the_models_of_one(tmp_path: Path, sharding: str) -> None:
    few = ("train.steps=6", "train.batch_tokens=512")
    several = [f"cloud.{cloud}.{key}" for cloud in CLOUDS for key in ("ranks=2", f"sharding={sharding}")]
    alone = isthmus.run(job(*few), runs=tmp_path / "alone").run
    shared = isthmus.run(job(*few, *several), runs=tmp_path / "shared").run
    expected, found = weights(alone), weights(shared)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-5), name
    one, two = (recorded_feed(run) for run in (alone, shared))
    assert [stream.num_tokens for stream in one.streams] == [stream.num_tokens for stream in two.streams]


def weights(run: Path) -> dict[str, Tensor]:
    folders = ("model", "generator-english", "generator-esperanto")
    return {
        f"{folder}/{name}": one
        for folder in folders
        for name, one in load_file(run / folder / "model.safetensors").items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "left"), [((), [(40, 0), (15, 1)]), (TWO, [(40, 0), (25, 1), (15, 3)])])
def test_a_run_whose_clouds_are_killed_gives_the_weights_of_one_that_was_not(
    tmp_path: Path, ranks: tuple[str, ...], left: list[tuple[int, int]]
) -> None:
    """First a rank of a generator is killed, then the discriminator; all go on from what each had saved."""
    changes = ("train.steps=60", "checkpoint.every=1 s", *ranks)
    expected = weights(isthmus.run(job("train.steps=60", *ranks), runs=tmp_path / "whole").run)

    def hear(cloud: str, about: Mapping[str, Any]) -> None:
        if left and (about["kind"], cloud) == ("step", "judge") and about["step"] >= left[-1][0]:
            _, index = left.pop()
            servers = [one for one in psutil.Process().children() if "forkserver" in " ".join(one.cmdline())]
            ranks = sorted(
                (one for server in servers for one in server.children()), key=psutil.Process.create_time
            )
            ranks[index].kill()

    run = isthmus.run(job(*changes), runs=tmp_path / "killed", restarts=3, on_report=hear).run
    assert not left
    found = weights(run)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def exported(run: Path, folder: Path) -> dict[str, Tensor]:
    """All models, from the newest checkpoint of each."""
    export_run(run, folder, steps=steps_to_export(run))
    return weights(folder)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(), TWO])
def test_a_run_that_was_stopped_goes_on_to_the_weights_of_one_that_was_not(
    tmp_path: Path, ranks: tuple[str, ...]
) -> None:
    expected = weights(isthmus.run(job("train.steps=30", *ranks), runs=tmp_path / "whole").run)
    stop = StopRequest()

    def hear(cloud: str, about: Mapping[str, Any]) -> None:
        if (about["kind"], cloud) == ("step", "judge") and about["step"] == 10:
            stop.ask()

    stopped = isthmus.run(job("train.steps=30", *ranks), runs=tmp_path / "stopped", on_report=hear, stop=stop)
    assert stopped.stopped_at is not None
    assert 10 < stopped.stopped_at < 30
    unfinished = exported(stopped.run, tmp_path / "unfinished")
    run = isthmus.run(job("train.steps=30", *ranks), runs=tmp_path / "stopped").run
    found = weights(run)
    assert unfinished.keys() == expected.keys()
    assert any(not torch.equal(unfinished[name], value) for name, value in expected.items())
    assert_same(exported(run, tmp_path / "finished"), found)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def certificates(folder: Path) -> None:
    def certs(*words: str) -> None:
        command = [sys.executable, "-m", "isthmus", "certs", *words]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    certs("authority")
    for cloud in CLOUDS:
        certs("request", cloud)
        certs("sign", f"certs/{cloud}.csr", "--cloud", cloud)


Sites = dict[str, "subprocess.Popen[str]"]


@contextmanager
def running(folder: Path, *, english: str = "runs", wait: str = "5 s") -> Iterator[Sites]:
    """A site for each cloud; with a folder of its own a generator trains a tokenizer on its own data."""
    certificates(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    (folder / "job.toml").write_text(EXAMPLE.read_text().replace("7600", port))
    folders = {"english": english}
    sites = {name: start(folder, name, runs=folders.get(name, "runs"), wait=wait) for name in CLOUDS}
    try:
        yield sites
    finally:
        for site in sites.values():
            site.kill()
            site.wait()


def kill_english(folder: Path, sites: Sites) -> None:
    """Kill a generator when some steps have been taken."""
    while not any(f"step {n}" in told(folder) for n in range(20, 60)):
        assert sites["judge"].poll() is None
        time.sleep(0.1)
    sites["english"].kill()
    sites["english"].wait()


def batches_trained_on(folder: Path) -> dict[str, int]:
    (run,) = (folder / "runs" / "generator-discriminator").glob("2*")
    return {one.cloud: one.num_batches for one in recorded_feed(run).streams}


def start(folder: Path, cloud: str, *, runs: str = "runs", wait: str) -> subprocess.Popen[str]:
    """One site of a run that goes on without generators that are lost."""
    changes = ["train.steps=120", "strategy.on_lost=continue", f"strategy.wait={wait}"]
    sets = [word for one in changes for word in ("--set", one)]
    command = [sys.executable, "-m", "isthmus", "run", "job.toml", "--cloud", cloud, "--runs", runs, *sets]
    with (folder / f"{cloud}.log").open("w") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "another tokenizer"])
def test_sites_go_on_at_once_without_a_generator_and_tell_what_is_missed(tmp_path: Path, fault: str) -> None:
    with running(tmp_path, english="runs" if fault == "killed" else "other") as sites:
        if fault == "killed":
            kill_english(tmp_path, sites)
        assert sites["judge"].wait(240) == sites["esperanto"].wait(60) == 0
        assert sites["english"].wait(60) == (2 if fault == "another tokenizer" else -9)
    missed = re.search(r"'english' is lost at batch (\d+) of 60, the others continue: .*", told(tmp_path))
    assert missed is not None
    assert (fault in missed[0]) == (fault == "another tokenizer")
    assert batches_trained_on(tmp_path) == {"english": int(missed[1]), "esperanto": 60}
    (run,) = (tmp_path / "runs" / "generator-discriminator").glob("2*")
    longest_s = max(float(one["duration_s"]) for one in read_run(run).steps[1:])
    assert longest_s < HEARTBEAT_S


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_generator_that_is_started_again_is_met_again_and_makes_its_whole_quota(tmp_path: Path) -> None:
    with running(tmp_path, wait="10 min") as sites:
        kill_english(tmp_path, sites)
        sites["english"] = start(tmp_path, "english", wait="10 min")
        assert [sites[cloud].wait(600) for cloud in CLOUDS] == [0, 0, 0]
    assert "cloud 'english' is there again" in told(tmp_path)
    assert batches_trained_on(tmp_path) == {"english": 60, "esperanto": 60}


def told(folder: Path) -> str:
    return (folder / "judge.log").read_text()


def recorded_feed(run: Path) -> FeedSummary:
    feed = summarize(read_run(run)).feed
    assert feed is not None
    return feed


def test_generators_share_batches_by_the_size_of_their_data() -> None:
    assert shared_out(10, [3.0, 1.0], given=[None, None]) == [8, 2]
    assert shared_out(100, [1.0, 1.0, 2.0], given=[None, 40, None]) == [20, 40, 40]
    assert sum(shared_out(601, [1.0, 2.0, 4.0], given=[None] * 3)) == 601


def test_a_generator_has_a_third_of_the_layers_and_data_of_its_own() -> None:
    small = own_job(job("model.config.num_hidden_layers=9"), "esperanto")
    assert small.data is not None
    assert small.data.text_column == "translation"
    assert small.data.pair_column is None
    tables = job().tables()
    strategy = {key: one for key, one in tables["strategy"].items() if key != "generator"}  # type: ignore[attr-defined]
    without = own_job(Job.from_tables({**tables, "strategy": strategy}), "english")
    assert without.model is not None
    assert without.model.config is not None
    assert without.model.config["num_hidden_layers"] == 1
    assert clouds_of(job())[0] == "judge"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("cloud.english.ranks=40", "strategy.batches"),
        ("model.frozen_layers=1", "frozen"),
        ("train.evaluate_every=50", "train.evaluate_every"),
    ],
)
def test_what_cannot_run_is_refused_with_a_cure(override: str, key: str) -> None:
    with pytest.raises(UserError) as found:
        FeedKind().decide(job(override))
    assert key in f"{found.value.message} {found.value.hint}"
    assert found.value.hint


def test_a_generator_without_a_link_to_the_discriminator_is_refused() -> None:
    whole = job()
    with pytest.raises(UserError, match="esperanto") as found:
        FeedKind().decide(whole.model_copy(update={"link": whole.link[:1]}))
    assert 'between = ["judge", "esperanto"]' in str(found.value.hint)


def test_nothing_is_planned_before_a_run() -> None:
    assert FeedKind().plan(job(), source=nothing_measured) is None


def test_a_text_and_its_translation_are_masked_as_one_sequence(tmp_path: Path) -> None:
    """Translation language modelling: a pair is one sequence, enclosed and parted by special tokens."""
    pairs = own_job(job("strategy.generators.english.pair_column=translation"), "english")
    data = open_data(pairs, tokenizer_folder=tmp_path / "tokenizer")
    sample = data.samples.read(Pick(epoch=0, index=0))
    ids = np.where(sample.labels == IGNORED, sample.ids, sample.labels)
    row = next(iter(open_rows("builtin:pairs")))
    told = data.tokenizer.decode(ids).replace(" ", "")
    text, translation = (str(row[key]).replace(" ", "") for key in ("text", "translation"))
    assert text in told
    assert translation[:20] in told
    assert told.count(data.tokenizer.eos_token) == 2


def test_a_generator_with_another_tokenizer_is_refused_before_it_trains(tmp_path: Path) -> None:
    """On a machine of its own a generator would train a tokenizer on its own data."""
    kind, whole = FeedKind(), job()
    data = open_data(whole, tokenizer_folder=tmp_path / "tokenizer")
    blueprint = blueprint_of(whole, config=data.facts.config, num_labels=None)
    config = kind.config_of(whole, kind.decide(whole), blueprint, data, run_id="here")
    build = Build(
        job=whole, config=config, cloud="english", blueprint=blueprint, device=Device("cpu"), world=World()
    )
    role = kind.make(build)
    own = kind.data_job(whole, "english")
    role.feed(open_data(own, tokenizer_folder=tmp_path / "tokenizer"), step=0)
    with pytest.raises(UserError, match="another tokenizer") as found:
        role.feed(open_data(own, tokenizer_folder=tmp_path / "other"), step=0)
    assert "data.tokenizer" in str(found.value.hint)

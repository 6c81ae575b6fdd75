"""What data parallel makes of a job, and what each cloud reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import isthmus
from isthmus.errors import UserError
from isthmus.events import StopRequest
from isthmus.job import load_job
from isthmus.train.build import layout_of
from isthmus.train.data.training_data import Feed, open_data
from isthmus.train.data_role import DataKind, _Share
from isthmus.train.export import export_run, steps_to_export
from isthmus.train.records import Records, open_store
from tests.train.reference import assert_same

EXAMPLE = Path(__file__).parents[2] / "examples" / "data-parallel.toml"
RANKS = "same rank of other clouds: 'east' has 1, 'west' 2"
EXACT = 'strategy={kind="data", sync="exact"}'


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("cloud.west.ranks=2", RANKS),
        (f"{EXACT};cloud.west.ranks=2;cloud.east.ranks=2", "exact synchronisation runs one rank"),
        ("strategy.quorum=3", "a quorum of 3 of 2 clouds"),
        ("model.frozen_layers=1", "trains all weights"),
        ("train.batch_tokens=4097", "cannot be divided"),
    ],
)
def test_what_cannot_run_is_refused_with_a_cure(override: str, what: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        DataKind().decide(load_job(EXAMPLE, overrides=override.split(";")))
    assert caught.value.hint


@pytest.mark.parametrize(("key", "value"), [("optimizer_bits", 8), ("offload_optimizer", True)])
def test_without_a_plan_the_job_says_where_moments_are(key: str, value: object) -> None:
    job = load_job(EXAMPLE, overrides=[f"train.{key}={str(value).lower()}"])
    assert getattr(DataKind().decide(job), key) == value


def test_clouds_read_what_one_process_would_and_read_again_what_was_lost(tmp_path: Path) -> None:
    job = load_job(EXAMPLE)
    data = open_data(job, tokenizer_folder=tmp_path / "tokenizer")
    layout = layout_of(job, 8)
    with Feed(data, layout) as whole:
        expected = [whole.training(step) for step in range(5)]
    feeds = [Feed(data, layout, share=_Share(range(4 * one, 4 * one + 4))) for one in range(2)]
    for step in (0, 1, 2, 1, 2, 4):
        found = [batch for feed in feeds for batch in feed.training(step)]
        assert len(found) == len(expected[step]) == 8
        assert all(torch.equal(one.ids, other.ids) for one, other in zip(found, expected[step], strict=True))
    for feed in feeds:
        feed.close()


@pytest.mark.slow
def test_a_run_that_was_stopped_exports_its_outer_parameters_and_goes_on_to_the_bit(tmp_path: Path) -> None:
    job = load_job(EXAMPLE, overrides=["train.steps=26", "train.evaluate_every=0"])
    whole = isthmus.run(job, runs=tmp_path / "whole", measure=False).run
    stop = StopRequest()

    def hear(cloud: str, about: Mapping[str, Any]) -> None:
        if (about["kind"], cloud) == ("step", "east") and about["step"] == 13:
            stop.ask()

    options: dict[str, Any] = {"runs": tmp_path / "stopped", "measure": False}
    run = isthmus.run(job, on_report=hear, stop=stop, **options).run
    steps = steps_to_export(run)
    assert 13 <= steps["east"] < 26
    export_run(run, tmp_path / "exported", steps=steps)
    found = load_file(tmp_path / "exported" / "model.safetensors")
    records = Records(open_store(run, None))
    name = f"step-{steps['east']:08d}/west"
    saved = records.get(name, manifest := records.manifest(name), manifest.tensors)
    assert_same(found, {one: saved[f"outer/value/{one}"].load() for one in found})
    assert any(not torch.equal(found[one], saved[one].load()) for one in found)
    finished = isthmus.run(job, **options).run
    assert finished == run
    assert_same(*(load_file(one / "model" / "model.safetensors") for one in (finished, whole)))


def two_ranks(east: str, west: str) -> list[str]:
    keys = [
        f"cloud.{name}.{key}"
        for name, how in (("east", east), ("west", west))
        for key in (f"sharding={how}", "ranks=2")
    ]
    return ["strategy.microbatches=1", *keys]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [("full", "full"), ("none", "optimizer")], ids="-".join)
def test_ranks_that_exchange_their_own_shards_train_what_one_rank_does(
    tmp_path: Path, sharding: tuple[str, str]
) -> None:
    common = [
        "train.steps=9",
        "train.evaluate_every=3",
        "train.batch_tokens=1024",
        "model.config.num_hidden_layers=2",
        "strategy.inner_steps=6",
        "strategy.bits=32",
        "checkpoint.every=1 s",
        "checkpoint.overhead=1",
    ]
    found, losses = [], []
    for name, changes in (("one", ["strategy.microbatches=2"]), ("two", two_ranks(*sharding))):
        heard: list[float] = []

        def hear(_: str, about: Mapping[str, Any], heard: list[float] = heard) -> None:
            heard += [about["loss"]] if about["kind"] == "evaluation" else []

        job = load_job(EXAMPLE, overrides=common + changes)
        run = isthmus.run(job, runs=tmp_path / name, measure=False, on_report=hear).run
        found.append(load_file(run / "model" / "model.safetensors"))
        losses.append(heard)
    # An evaluation on the way sees the rounds that have come by then; the last one sees all.
    assert len(losses[0]) == len(losses[1]) == 3
    assert losses[0][-1] == pytest.approx(losses[1][-1], rel=1e-5)
    assert found[0].keys() == found[1].keys()
    for key in found[0]:
        torch.testing.assert_close(found[0][key], found[1][key], rtol=1e-4, atol=1e-6, msg=key)
    # Each rank has saved its own shards; one process puts them together again.
    steps = steps_to_export(run)
    export_run(run, tmp_path / "exported", steps=steps)
    assert load_file(tmp_path / "exported" / "model.safetensors").keys() == found[0].keys()

"""Devices, models and data that are not here are missed before anything starts; and the run is chosen."""

import functools
from pathlib import Path

import pytest
from transformers import LlamaConfig

from isthmus.errors import UserError
from isthmus.job import Job, load_job
from isthmus.job.sections import LoraSpec
from isthmus.plan.plan import PLAN_FILE
from isthmus.train import pipeline_config, runs
from isthmus.train.build import blueprint_of
from isthmus.train.pipeline_role import check_export
from isthmus.train.records import DiskStore, Records
from isthmus.train.runs import (
    check_all_devices,
    check_device,
    choose_run,
    look_at_data,
    look_at_model,
)
from isthmus.wan.doctor import Devices
from isthmus.wan.handshake import RankSpec
from tests.model.test_custom_code import save_own
from tests.model.test_weights import save_model
from tests.train.test_setup import FIGURES, tiny_job


def find(monkeypatch: pytest.MonkeyPatch, found: Devices) -> None:
    monkeypatch.setattr(runs, "find_devices", lambda: found)


def test_what_torch_finds_here_is_told() -> None:
    found = runs.find_devices()
    assert (found.kind is None) == (found.num_devices == 0)


def test_a_device_that_is_not_here_is_refused_with_the_cloud_and_the_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find(monkeypatch, Devices())
    job = tiny_job("cloud.west.device=cuda")
    with pytest.raises(UserError, match="cloud 'west' asks for cuda, but torch finds cpu only here") as error:
        check_all_devices(job)
    assert error.value.hint is not None
    assert error.value.hint.startswith('set cloud.west.device to "cpu" or "auto"')
    with pytest.raises(UserError, match="cloud 'west' asks for cuda"):
        check_device(job.cloud_named("west"), RankSpec())
    check_device(job.cloud_named("east"), RankSpec())


def test_clouds_may_share_a_device_but_ranks_of_one_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, Devices(kind="cuda", num_devices=1))
    check_all_devices(tiny_job("cloud.east.device=cuda", "cloud.west.device=auto"))
    check_all_devices(tiny_job("cloud.east.ranks=4"))
    with pytest.raises(UserError, match="2 ranks of cloud 'east' here need a device each"):
        check_all_devices(tiny_job("cloud.east.device=auto", "cloud.east.ranks=2"))


def test_a_rank_beyond_the_devices_of_its_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, Devices(kind="cuda", num_devices=2))
    east = tiny_job("cloud.east.device=cuda", "cloud.east.ranks=4").cloud_named("east")
    check_device(east, RankSpec(rank=3, num_ranks=4, local_rank=1))
    with pytest.raises(UserError, match="3 ranks of cloud 'east' here need a device each"):
        check_device(east, RankSpec(rank=2, num_ranks=4, local_rank=2))


def test_ranks_that_see_a_single_device_each_are_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, Devices(kind="cuda", num_devices=1))
    east = tiny_job("cloud.east.device=cuda", "cloud.east.ranks=4").cloud_named("east")
    check_device(east, RankSpec(rank=3, num_ranks=4, local_rank=3))


def test_model_and_data_are_looked_at_without_reading_all_of_them(tmp_path: Path) -> None:
    assert look_at_model(tiny_job()).startswith("fresh: llama of")
    text = tmp_path / "a.txt"
    text.write_text("One.\n\nTwo.\n")
    assert look_at_data(tiny_job(f"data.source={text}")) == str(text)
    text.write_text("")
    with pytest.raises(UserError, match="is empty"):
        look_at_data(tiny_job(f"data.source={text}"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"body": "One."}\n')
    with pytest.raises(UserError, match="a row of the data has no 'text'"):
        look_at_data(tiny_job(f"data.source={rows}"))


def of_folder(job: Job, folder: Path, **changes: object) -> Job:
    assert job.model is not None
    model = job.model.model_copy(update={"source": str(folder), "config": None, **changes})
    return job.model_copy(update={"model": model})


def test_an_adapter_with_a_bottleneck_must_be_merged(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    narrow = tiny_job("link.0.boundary=bottleneck(4)")
    for job, merges in ((narrow, False), (narrow, True), (tiny_job(), False)):
        given = of_folder(job, tmp_path, lora=LoraSpec(merge=merges))
        check = functools.partial(check_export, given)
        blueprint = blueprint_of(given, config={}, num_labels=None)
        if merges or job is not narrow:
            check(blueprint)
            continue
        with pytest.raises(UserError, match=r"an adapter alone cannot hold bottleneck\(4") as refused:
            check(blueprint)
        assert "model.lora.merge = true" in str(refused.value.hint)


def test_code_of_a_models_own_runs_by_the_jobs_word_and_goes_with_no_bottleneck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setenv("CODE_RAN", str(tmp_path / "ran"))
    save_own(tmp_path / "own")
    job = tiny_job("link.0.boundary=bottleneck(4)")
    with pytest.raises(UserError, match="brings Python code of its own"):
        blueprint_of(of_folder(job, tmp_path / "own"), config={}, num_labels=None)
    assert not (tmp_path / "ran").exists()
    given = of_folder(job, tmp_path / "own", trust_remote_code=True)
    blueprint = blueprint_of(given, config={}, num_labels=None)
    assert (tmp_path / "ran").exists()
    with pytest.raises(UserError, match="model with code of its own"):
        check_export(given, blueprint)
    check_export(tiny_job(), blueprint)


def test_a_folder_without_weights_is_no_model(tmp_path: Path) -> None:
    LlamaConfig(num_hidden_layers=2, hidden_size=64).save_pretrained(tmp_path)
    job = tiny_job()
    assert job.model is not None
    model = job.model.model_copy(update={"source": str(tmp_path), "config": None})
    with pytest.raises(UserError, match="has no safetensors weights"):
        look_at_model(job.model_copy(update={"model": model}))


def chosen(job: Job, root: Path, *, resume: bool = True) -> Path:
    """The run that is chosen, once it has been left again."""
    with choose_run(job, root=root, resume=resume, note=lambda _: None) as run:
        return run


def save(run: Path, step: int) -> None:
    for cloud in ("east", "west"):
        records = Records(DiskStore(run / "checkpoints"))
        records.commit(f"step-{step:08d}/{cloud}", records.put("unused", "0.ab", {}, {}))


def never(*_: object) -> None:
    raise AssertionError("it was planned again")


def test_a_run_goes_on_with_the_plan_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = chosen(tiny_job(*FIGURES), tmp_path)
    plan = (run / PLAN_FILE).read_text()
    monkeypatch.setattr(pipeline_config, "plan", never)
    job = tiny_job("link.0.rtt=40 ms", "link.0.bandwidth=1 Mbps", "train.steps=9")
    assert chosen(job, tmp_path) == run
    assert (run / PLAN_FILE).read_text() == plan
    assert load_job(run / "job.toml") == job


def test_a_run_that_nothing_was_planned_for_goes_on_without_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = chosen(tiny_job(), tmp_path)
    assert not (run / PLAN_FILE).exists()
    monkeypatch.setattr(pipeline_config, "plan", never)
    assert chosen(tiny_job(*FIGURES), tmp_path) == run


def test_a_job_that_means_something_else_starts_no_run_unless_told_to(tmp_path: Path) -> None:
    run = chosen(tiny_job(), tmp_path)
    save(run, 3)
    with pytest.raises(UserError, match=r"stopped after step 3, started with another job: seed 0, now 5"):
        chosen(tiny_job("seed=5"), tmp_path)
    other = chosen(tiny_job("seed=5"), tmp_path, resume=False)
    assert other != run
    assert chosen(tiny_job(), tmp_path) == run
    assert chosen(tiny_job("seed=5"), tmp_path) == other


def test_a_run_is_held_while_it_is_used(tmp_path: Path) -> None:
    job = tiny_job()
    with choose_run(job, root=tmp_path, resume=True, note=lambda _: None) as run:
        before = (run / "job.toml").read_text()
        with pytest.raises(UserError, match=rf"the run {run} is already run by process \d+"):
            chosen(tiny_job("train.steps=9"), tmp_path)
        assert (run / "job.toml").read_text() == before
        assert chosen(job, tmp_path, resume=False) != run


def test_a_corpus_that_changed_since_the_run_began_is_refused(tmp_path: Path) -> None:
    corpus, texts = tmp_path / "corpus.txt", [f"Text {number} of a corpus.\n\n" for number in range(999)]
    corpus.write_text("".join(texts))
    job = tiny_job(f"data.source={corpus}")
    run = chosen(job, tmp_path / "runs")
    assert chosen(job, tmp_path / "runs") == run
    corpus.write_text("".join(texts).replace("Text 500", "Text 505"))
    with pytest.raises(UserError, match="the data has changed since") as error:
        chosen(job, tmp_path / "runs")
    assert error.value.hint is not None
    assert "--resume never" in error.value.hint
    corpus.write_text("".join(texts))
    assert chosen(job, tmp_path / "runs") == run

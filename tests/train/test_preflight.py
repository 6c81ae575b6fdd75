"""Devices, models and data that are not here are missed before anything starts."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from isthmus.errors import UserError
from isthmus.train import preflight
from isthmus.train.preflight import check_all_devices, check_device, look_at_data, look_at_model
from isthmus.wan.devices import Devices
from isthmus.wan.seat import Seat
from tests.train.test_setup import tiny_job


def find(monkeypatch: pytest.MonkeyPatch, found: Devices) -> None:
    monkeypatch.setattr(preflight, "find_devices", lambda: found)


def test_what_torch_finds_here_is_told() -> None:
    found = preflight.find_devices()
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
        check_device(job.cloud_named("west"), Seat())
    check_device(job.cloud_named("east"), Seat())


def test_clouds_may_share_a_device_but_ranks_of_one_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, Devices(kind="cuda", num_devices=1))
    check_all_devices(tiny_job("cloud.east.device=cuda", "cloud.west.device=auto"))
    check_all_devices(tiny_job("cloud.east.ranks=4"))
    with pytest.raises(UserError, match="2 ranks of cloud 'east' here need a device each"):
        check_all_devices(tiny_job("cloud.east.device=auto", "cloud.east.ranks=2"))


def test_a_rank_beyond_the_devices_of_its_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, Devices(kind="cuda", num_devices=2))
    east = tiny_job("cloud.east.device=cuda", "cloud.east.ranks=4").cloud_named("east")
    check_device(east, Seat(rank=3, num_ranks=4, local_rank=1))
    with pytest.raises(UserError, match="3 ranks of cloud 'east' here need a device each"):
        check_device(east, Seat(rank=2, num_ranks=4, local_rank=2))


def test_ranks_that_see_a_single_device_each_are_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, Devices(kind="cuda", num_devices=1))
    east = tiny_job("cloud.east.device=cuda", "cloud.east.ranks=4").cloud_named("east")
    check_device(east, Seat(rank=3, num_ranks=4, local_rank=3))


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


def test_a_folder_without_weights_is_no_model(tmp_path: Path) -> None:
    LlamaConfig(num_hidden_layers=2, hidden_size=64).save_pretrained(tmp_path)
    job = tiny_job()
    assert job.model is not None
    model = job.model.model_copy(update={"source": str(tmp_path), "config": None})
    with pytest.raises(UserError, match="has no safetensors weights"):
        look_at_model(job.model_copy(update={"model": model}))

"""A model's files in folders and on the hub, and what a user is told where the hub cannot be reached."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from isthmus.errors import UserError
from isthmus.job import hub
from isthmus.job.hub import find_file


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    hub._why_unreachable.cache_clear()
    yield
    hub._why_unreachable.cache_clear()


def test_a_hub_that_cannot_be_reached_is_named_as_the_cause_after_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def refuse(request: urllib.request.Request, **_: Any) -> None:
        asked.append(request.full_url)
        raise urllib.error.URLError(OSError("no route to host"))

    def only_cached(*_: str, local_files_only: bool) -> str:
        assert local_files_only
        raise LocalEntryNotFoundError("not cached")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", only_cached)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for _ in range(2):
        with pytest.raises(UserError, match=r"hub cannot be reached \(no route to host\)") as caught:
            find_file("someone/never-fetched", "config.json")
        assert "folder" in str(caught.value.hint)
        assert "HF_HOME" in str(caught.value.hint)
    assert asked == [constants.ENDPOINT]
    # A model that was fetched before has only the files that were fetched.
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: "config.json")
    assert find_file("someone/fetched", "tokenizer.json") is None
    with pytest.raises(UserError, match=r"no route to host\), and model.safetensors of 'someone/fetched'"):
        find_file("someone/fetched", "model.safetensors", is_required=True)


def test_offline_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        find_file("someone/never-fetched", "config.json")


def test_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_file(str(tmp_path), "config.json") == tmp_path / "config.json"
    assert find_file(str(tmp_path), "tokenizer.json") is None

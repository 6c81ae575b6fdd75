"""The stages' weights come together at the first cloud, also after an export that was stopped half way."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isthmus.model.export import merge, write_part
from isthmus.train import members
from isthmus.train.in_cloud import World
from isthmus.train.members import Neighbours, fresh_folder
from isthmus.wan.memory import MemoryLink
from tests.model.cases import blueprint, build

STAGES = {"east": range(2), "west": range(2, 4)}


def neighbours(link: MemoryLink, cloud: str) -> Neighbours:
    return Neighbours(lambda *_: link.end(cloud), World(), clouds=list(STAGES), cloud=cloud)


def export(run: Path) -> None:
    """What both clouds do at the end of a run."""
    stages = dict(zip(STAGES, build(blueprint("llama"), list(STAGES.values())), strict=True))
    with MemoryLink("east", "west") as link, ThreadPoolExecutor(2) as pool:

        def gather(cloud: str) -> tuple[Path, ...]:
            own = fresh_folder(run / f".parts-{cloud}")
            write_part(stages[cloud], own / cloud)
            return neighbours(link, cloud).gather_parts(own)

        found = dict(zip(STAGES, pool.map(gather, STAGES), strict=True))
    assert [part.name for part in found["east"]] == ["east", "west"]
    merge(found["east"], run / "model")


@pytest.mark.parametrize("left", [".east.k3f/new", "east/model.safetensors", "west/model.safetensors"])
def test_what_a_stopped_export_left_is_no_part_of_the_next(tmp_path: Path, left: str) -> None:
    if left.endswith("new"):
        (tmp_path / ".parts-east" / left).mkdir(parents=True)
    else:
        (tmp_path / ".parts-east" / left).parent.mkdir(parents=True)
        (tmp_path / ".parts-east" / left).write_bytes(b"half")
    export(tmp_path)
    assert (tmp_path / "model" / "config.json").exists()


def test_an_export_that_was_stopped_before_its_parts_left_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    stage = build(blueprint("llama"), list(STAGES.values()))[1]
    with MemoryLink("east", "west") as link, monkeypatch.context() as patch:
        own = fresh_folder(tmp_path / ".parts-west")
        write_part(stage, own / "west")
        patch.setattr(members, "_send", stopped)
        with pytest.raises(KeyboardInterrupt):
            neighbours(link, "west").gather_parts(own)
    export(tmp_path)
    assert (tmp_path / "model" / "config.json").exists()

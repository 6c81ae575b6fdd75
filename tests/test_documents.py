"""README and documents are held to what is there."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
ROOMS = {path.parent.name for path in (ROOT / "isthmus").glob("*/__init__.py")}


def test_the_job_file_of_the_readme_loads(tmp_path: Path) -> None:
    from isthmus.job import load_job

    (text,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    job = tmp_path / "job.toml"
    job.write_text(text)
    assert [cloud.name for cloud in load_job(job).cloud] == ["east", "west"]


def test_the_architecture_names_every_room_and_no_other() -> None:
    assert set(re.findall(r"^\| `isthmus/(\w+)` \|", ARCHITECTURE, re.MULTILINE)) == ROOMS


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(isthmus/[\w/]+\.py)`", ARCHITECTURE))))
def test_every_file_of_the_architecture_can_be_imported(path: str) -> None:
    assert (ROOT / path).is_file()
    importlib.import_module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))


def test_the_reading_order_of_the_architecture_exists() -> None:
    (order,) = re.findall(r"Reading order for a newcomer: (.*?)\.\s", ARCHITECTURE, re.DOTALL)
    named = re.findall(r"`([\w/]+)`", order)
    assert len(named) == 9
    assert all((ROOT / "isthmus" / f"{name}.py").is_file() for name in named)


@pytest.mark.parametrize(
    "page", sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = (ROOT / page).read_text()
    targets = [target for target in re.findall(r"\]\(([^)#]+)", text) if not target.startswith("http")]
    missing = [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()]
    assert not missing


def test_every_command_of_the_readme_exists() -> None:
    from typer.main import get_command

    from isthmus.cli.main import app

    group: Any = get_command(app)
    verbs = set(group.list_commands(None))
    named = set(re.findall(r"^    isthmus (\w+)", README, re.MULTILINE))
    assert named
    assert named <= verbs

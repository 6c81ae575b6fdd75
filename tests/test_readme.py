"""The README's words are held to what is there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_its_python_runs_as_it_stands() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'text': 'hi'}\n"


def test_its_job_file_loads(tmp_path: Path) -> None:
    from isthmus.job import load_job

    (text,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    job = tmp_path / "job.toml"
    job.write_text(text)
    assert [cloud.name for cloud in load_job(job).cloud] == ["east", "west"]


def test_its_tree_names_every_room_and_no_other() -> None:
    (tree,) = re.findall(r"## The tree\n\n```\n(.*?)```", README, re.DOTALL)
    named = set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE))
    rooms = {path.parent.name for path in (ROOT / "isthmus").glob("*/__init__.py")}
    assert named == rooms


@pytest.mark.parametrize(
    "page", sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = (ROOT / page).read_text()
    targets = [target for target in re.findall(r"\]\(([^)#]+)", text) if not target.startswith("http")]
    missing = [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()]
    assert not missing


def test_every_verb_it_names_exists() -> None:
    from typer.main import get_command

    from isthmus.cli.main import app

    verbs = set(get_command(app).commands)  # type: ignore[attr-defined]
    named = set(re.findall(r"^    isthmus (\w+)", README, re.MULTILINE))
    assert named
    assert named <= verbs

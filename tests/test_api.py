"""The Python API: what `import isthmus` costs, and every script of examples/api."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import isthmus
from isthmus.plan.plan import Plan
from tests.plan.jobs import TWO_CLOUDS

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples" / "api").glob("*.py"))


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments], capture_output=True, text=True, cwd=cwd, env=environment
    )


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'pydantic', 'grpc', 'rich', 'numpy'}"
    done = python("-c", f"import sys, isthmus; sys.exit(bool({heavy} & set(sys.modules)))")
    assert done.returncode == 0, done.stderr


def test_the_function_plan_survives_imports_of_the_package_of_this_name() -> None:
    from isthmus.plan.types import Member

    assert Member("east").rank == 0
    assert callable(isthmus.plan)


def test_a_plan_is_simulated_and_its_faults_are_too(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(TWO_CLOUDS)
    job = isthmus.load_job(path, overrides=["strategy.kind=pipeline"])
    chosen = isthmus.plan(job, measure=False)
    assert isinstance(chosen, Plan)
    found = isthmus.simulate(chosen, steps=3)
    assert found.step_s == pytest.approx(chosen.estimate.step_s, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_script_of_the_api_runs(script: Path, tmp_path: Path) -> None:
    done = python(str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_every_function_has_a_script_and_a_place_in_the_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    for script in SCRIPTS:
        assert script.name in page
    for name in ("load_job", "plan", "simulate", "run", "report"):
        assert f"{name}.py" in {script.name for script in SCRIPTS}
        assert f"`{name}(" in page

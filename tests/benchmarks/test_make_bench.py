"""`make bench` runs every script that the results cite."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = re.compile(r"benchmarks/\w+\.py")


def recipe(target: str) -> str:
    """The commands of a target of the Makefile."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_every_script_that_the_results_cite_exists_and_is_run() -> None:
    cited = set(SCRIPT.findall((ROOT / "docs" / "results.md").read_text()))
    assert len(cited) > 10
    assert {one for one in cited if not (ROOT / one).is_file()} == set()
    everywhere, on_gpu = (set(SCRIPT.findall(recipe(target))) for target in ("bench", "bench-gpu"))
    assert cited == everywhere | on_gpu
    assert "$(MAKE) bench-gpu" in recipe("bench")

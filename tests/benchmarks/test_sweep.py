"""Grids of jobs × seeds: every cell is a job, and what runs came to becomes a table and a plot."""

import json
from pathlib import Path

import pytest
import sweep

from isthmus.job.load import load_job

SWEEPS = Path(sweep.__file__).parent / "sweeps"
GIVEN = {"data": "DATA", "model": "MODEL"}


@pytest.mark.parametrize("is_tiny", [False, True])
@pytest.mark.parametrize(("name", "number"), [("table2", 2 * 10 * 3), ("fig9", 5 * 5 * 3)])
def test_every_cell_of_a_grid_is_a_job(name: str, number: int, is_tiny: bool) -> None:
    grid = sweep.read_grid(SWEEPS / f"{name}.toml", GIVEN, is_tiny=is_tiny)
    cells = list(grid.runs())
    assert is_tiny or len(cells) == number
    assert len({cell.id for cell in cells}) == len(cells)
    for cell in cells:
        job = load_job(grid.job, overrides=cell.overrides)
        assert job.seed == cell.seed
        assert job.train.keep_best == grid.metric
    assert grid.baseline in list(grid.axes.values())[-1]


def test_differences_are_those_of_paired_seeds(tmp_path: Path) -> None:
    grid = sweep.read_grid(SWEEPS / "table2.toml", GIVEN, is_tiny=True)
    values = {("raw", 1): 20.0, ("raw", 2): 30.0, ("int4", 1): 19.0, ("int4", 2): 29.5, ("int4", 3): 99.0}
    about = {"num_bytes_per_step": 1e3, "ratio_to_float32": 7.5, "step_s": None}
    with (tmp_path / "results.jsonl").open("w") as file:
        for (codec, seed), value in values.items():
            names = ["es-en", codec]
            record = {"id": f"{codec}{seed}", "names": names, "seed": seed, "value": value, **about}
            file.write(json.dumps(record) + "\n")
        file.write(
            json.dumps({"id": "x", "names": ["es-en", "raw"], "seed": 3, "failed": "no memory"}) + "\n"
        )
    raw, int4 = sweep.lines_of(grid, sweep.read_records(tmp_path))
    assert (raw.mean, raw.num_seeds, raw.lost) == (25.0, 2, None)
    assert int4.lost is not None
    assert (int4.lost.mean, int4.lost.num_seeds) == (-0.75, 2)
    assert -1.0 <= int4.lost.low < -0.75 < int4.lost.high <= -0.5
    text = sweep.table(grid, [raw, int4])
    assert "| es-en | int4 | 49.17 | -0.75 [-0." in text
    assert "es-en · int4" in sweep.plot(grid, [raw, int4])


def test_a_cell_that_has_ended_is_not_run_again(tmp_path: Path) -> None:
    grid = sweep.read_grid(SWEEPS / "table2.toml", GIVEN, is_tiny=True)
    with (tmp_path / "results.jsonl").open("w") as file:
        file.writelines(json.dumps({"id": cell.id}) + "\n" for cell in grid.runs())
    sweep.Sweep(grid=grid, out=tmp_path, at_once=2, until_s=float("inf")).run()
    assert [one.name for one in tmp_path.iterdir()] == ["results.jsonl"]

"""A run as its directory holds it: spans and facts of all clouds, and the plan that it began with."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.errors import UserError
from isthmus.events import EVENTS_FOLDER, STARTED_KIND, Fact, Span, read_events
from isthmus.plan.scenario import Scenario
from isthmus.plan.search.plan_file import PLAN_FILE, scenario_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What was predicted: the scenario that drives the simulator, and the estimate as plan.json has it."""

    scenario: Scenario | None
    estimate: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What happened."""

    run: Path
    spans: tuple[Span, ...]
    facts: tuple[Fact, ...]
    planned: Planned | None

    @property
    def starts_s(self) -> tuple[float, ...]:
        """When ranks began, and when they went on after a stop."""
        return tuple(fact.at_s for fact in self.facts if fact.kind == STARTED_KIND)

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """What was noted of each step."""
        return step_values(self.facts)


def find_run(folder: Path) -> Path:
    """The folder itself if it is a run, else the newest run in it."""
    runs = sorted(one.parent for one in folder.glob(f"*/{EVENTS_FOLDER}"))
    is_run = (folder / EVENTS_FOLDER).is_dir()
    if not is_run and not runs:
        raise UserError(f"{folder} holds no run", hint="give the folder of a run, runs/<name>/<id>")
    return folder if is_run else runs[-1]


def event_files(run: Path) -> list[Path]:
    """The events of a run, a file for each rank, by cloud and rank."""
    files = sorted((run / EVENTS_FOLDER).glob("*.jsonl"), key=_cloud_and_rank)
    if not files:
        raise UserError(f"{run} holds no events", hint="give the folder of a run, runs/<name>/<id>")
    return files


def step_values(facts: Iterable[Fact]) -> list[Mapping[str, Any]]:
    """What was noted of each step, in order; of one that was done again after a stop, the last."""
    by_step = {fact.values["step"]: fact.values for fact in facts if fact.kind == "step"}
    return list(by_step.values())


def read_run(run: Path) -> Recorded:
    """Read the events of all clouds that are here, and the plan if there is one."""
    events = [event for file in event_files(run) for event in read_events(file)]
    return Recorded(
        run=run,
        spans=tuple(event for event in events if isinstance(event, Span)),
        facts=tuple(sorted((one for one in events if isinstance(one, Fact)), key=lambda one: one.at_s)),
        planned=_read_plan(run / PLAN_FILE),
    )


def _cloud_and_rank(file: Path) -> tuple[str, int]:
    cloud, _, rank = file.stem.partition(".")
    return cloud, int(rank or 0)


def _read_plan(path: Path) -> Planned | None:
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8")
    scenario = scenario_of(text)
    estimate = json.loads(text).get("estimate")
    return Planned(scenario=scenario, estimate=estimate if isinstance(estimate, dict) else {})

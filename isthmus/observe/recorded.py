"""A run as its directory holds it: spans and facts of all clouds, and the plan that it began with."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.errors import UserError
from isthmus.events import EVENTS_FOLDER, STARTED_KIND, Fact, Span, read_events
from isthmus.plan.scenario import Scenario
from isthmus.plan.search.choice import PLAN_FILE, scenario_of


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

    def values(self, kind: str) -> list[Mapping[str, Any]]:
        """The values of all facts of a kind, in order."""
        return [fact.values for fact in self.facts if fact.kind == kind]


def find_run(folder: Path) -> Path:
    """The folder itself if it is a run, else the newest run in it."""
    runs = sorted(one.parent for one in folder.glob(f"*/{EVENTS_FOLDER}"))
    is_run = (folder / EVENTS_FOLDER).is_dir()
    if not is_run and not runs:
        raise UserError(f"{folder} holds no run", hint="give the folder of a run, runs/<name>/<id>")
    return folder if is_run else runs[-1]


def read_run(run: Path) -> Recorded:
    """Read the events of all clouds that are here, and the plan if there is one."""
    files = sorted((run / EVENTS_FOLDER).glob("*.jsonl"))
    if not files:
        raise UserError(f"{run} holds no events", hint="give the folder of a run, runs/<name>/<id>")
    events = [event for file in files for event in read_events(file)]
    return Recorded(
        run=run,
        spans=tuple(event for event in events if isinstance(event, Span)),
        facts=tuple(sorted((one for one in events if isinstance(one, Fact)), key=lambda one: one.at_s)),
        planned=_read_plan(run / PLAN_FILE),
    )


def _read_plan(path: Path) -> Planned | None:
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8")
    scenario = scenario_of(text)
    estimate = json.loads(text).get("estimate")
    return Planned(scenario=scenario, estimate=estimate if isinstance(estimate, dict) else {})

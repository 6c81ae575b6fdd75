"""A plan as a file, `plan.json`, and what is read of it again: the scenario, and the decisions of a run."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from isthmus.errors import UserError
from isthmus.plan.costs.memory import Sharding
from isthmus.plan.scenario import Policy, Scenario, caps_from_json, scenario_from_dict, scenario_to_dict
from isthmus.plan.search.choice import Decisions, PipelineSettings, Plan

PLAN_FILE: Final = "plan.json"
VERSION: Final = 1
_HOW: Final = "make it again with this version of Isthmus"


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """A plan as plan.json holds it."""
    values = asdict(plan)
    values |= {
        "version": VERSION,
        "form": plan.form.value,
        "loss": plan.loss.name.lower(),
        "what": plan.what,
        "decisions": None if plan.decisions is None else asdict(plan.decisions),
        "scenario": None if plan.scenario is None else scenario_to_dict(plan.scenario),
        "warmup_scenario": None if plan.warmup_scenario is None else scenario_to_dict(plan.warmup_scenario),
        "runners_up": [{**asdict(one), "form": one.form.value} for one in plan.runners_up],
    }
    if isinstance(plan.settings, PipelineSettings):
        values["settings"]["policy"] = plan.settings.policy.value
    values["estimate"] |= {
        "total_s": plan.estimate.total_s,
        "total_usd": plan.estimate.total_usd,
        "total_wan_bytes": plan.estimate.total_wan_bytes,
    }
    values["estimate"]["bubble"]["total"] = plan.estimate.bubble.total
    return values


def plan_to_json(plan: Plan) -> str:
    """The text of plan.json."""
    return json.dumps(plan_to_dict(plan), indent=2) + "\n"


def scenario_of(text: str) -> Scenario | None:
    """The scenario that a plan.json holds, None where its form has none."""
    scenario = _read(text, "scenario")
    return None if scenario is None else scenario_from_dict(scenario)


def decisions_of(text: str) -> Decisions | None:
    """The decisions that a plan.json holds, None where its form has none."""
    values = _read(text, "decisions")
    return None if values is None else decisions_from_dict(values)


def decisions_from_dict(values: Mapping[str, Any]) -> Decisions:
    """What `asdict` made of decisions, as JSON gives it back."""
    try:
        return Decisions(
            layers=tuple(int(one) for one in values["layers"]),
            num_microbatches=int(values["num_microbatches"]),
            max_in_flight=caps_from_json(values["max_in_flight"]),
            recompute=bool(values["recompute"]),
            codecs=tuple((str(forward), str(backward)) for forward, backward in values["codecs"]),
            reasons=tuple(str(one) for one in values["reasons"]),
            # Older plans do not have these.
            sharding=tuple(Sharding(one).value for one in values.get("sharding", ())),
            offload_optimizer=bool(values.get("offload_optimizer", False)),
            optimizer_bits=int(values.get("optimizer_bits", 32)),
            policy=Policy(values["policy"]).value if values.get("policy") is not None else None,
        )
    except (KeyError, TypeError, ValueError):
        raise UserError("the decisions of a plan cannot be read", hint=_HOW) from None


def _read(text: str, key: str) -> Any:
    try:
        values = json.loads(text)
        version, value = values["version"], values[key]
    except (ValueError, KeyError, TypeError):
        raise UserError("the plan of this run cannot be read", hint=_HOW) from None
    if version != VERSION:
        raise UserError(f"the plan of this run has format {version}, not {VERSION}", hint=_HOW)
    return value

"""From a job to the costs of its model: measured once for each configuration, and kept beside the runs."""

import hashlib
import json
import logging
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

from isthmus.job import Job
from isthmus.job.write import replace_file
from isthmus.model.blueprint import Blueprint, fresh_blueprint, pretrained_blueprint
from isthmus.model.costs import MeasuredModel, Training
from isthmus.model.families import HEADS
from isthmus.plan.costs.source import PlannedModel
from isthmus.plan.costs.table import CostTable, read_table, write_table
from isthmus.plan.search.facts import model_config

log = logging.getLogger(__name__)

_NUM_LABELS: Final = 2
# What torch and transformers raise where a model asks for the values of tensors that have none.
_UNMEASURABLE: Final = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)


class Measuring:
    """Measures the costs of models; with a folder, what was measured is read from there next time."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._known: dict[str, PlannedModel | None] = {}

    def __call__(self, job: Job, config: Mapping[str, object] | None = None) -> PlannedModel | None:
        """The job's model, or one of another configuration; None where it cannot be measured."""
        if job.model is None or job.data is None:
            return None
        key = _digest(job, config)
        if key not in self._known:
            self._known[key] = self._measured(job, config, key)
        return self._known[key]

    def _measured(self, job: Job, config: Mapping[str, object] | None, key: str) -> PlannedModel | None:
        blueprint = _blueprint(job, config)
        if job.model is None:
            return None
        training = Training(num_frozen_layers=job.model.frozen_layers, lora=job.model.lora)
        path = None if self._folder is None else self._folder / f"{key}.json"

        def remember(table: CostTable) -> None:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, write_table(table))

        try:
            model = MeasuredModel(
                blueprint,
                training,
                has_bfloat16=job.train.precision == "bfloat16",
                known=None if path is None else read_table(path),
                remember=remember,
            )
        except _UNMEASURABLE as error:
            log.warning("the costs of %s cannot be measured: %s", blueprint.config.model_type, error)
            return None
        sizes = model.table.sizes
        return PlannedModel(
            costs_of=model.costs,
            num_layers=len(sizes.kinds),
            width=sizes.width,
            vocabulary_size=sizes.vocabulary_size,
            messages=model.table.messages,
            max_length=sizes.max_length,
        )


def _blueprint(job: Job, config: Mapping[str, object] | None) -> Blueprint:
    if job.model is None or job.data is None:
        raise ValueError("the job has no [model] or no [data] section")
    head = HEADS[job.data.task]
    num_labels = None if job.data.task.endswith("lm") else _NUM_LABELS
    if config is None and job.model.source is not None:
        return pretrained_blueprint(
            job.model.source,
            head=head,
            num_labels=num_labels,
            trust_remote_code=job.model.trust_remote_code,
        )
    return fresh_blueprint(config or job.model.config or {}, head=head, num_labels=num_labels)


def _digest(job: Job, config: Mapping[str, object] | None) -> str:
    """What the costs of a model depend on."""
    model, task = job.model, None if job.data is None else job.data.task
    if model is None:
        raise ValueError("the job has no [model] section")
    parts = {
        "config": dict(config or model_config(job)),
        "source": model.source if config is None else None,
        "task": task,
        "precision": job.train.precision,
        "frozen": model.frozen_layers,
        "lora": None if model.lora is None else model.lora.model_dump(mode="json"),
        "versions": {name: version(name) for name in ("isthmus", "torch", "transformers")},
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

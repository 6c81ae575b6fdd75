"""Result files: one JSON object a line, each naming its run; lines of one run add up to one record."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from quality.cut import FLOAT32_BYTES
from quality.fitting import Run
from quality.rows import ROWS
from quality.workers import Ended

Record = dict[str, Any]


def record_of(ended: Ended, machine: Mapping[str, object]) -> Record:
    """All that a table needs to know of a run, and where it ran."""
    run, found = ended.run, ended.found
    row = ROWS[run.row]
    record: Record = {
        "id": run.id,
        "task": run.task,
        "row": run.row,
        "seed": run.seed,
        "num_steps": run.num_steps,
        "forward": row.forward,
        "backward": row.backward,
        "shrink": row.shrink,
        "duration_s": round(ended.duration_s, 1),
        **machine,
    }
    if found is None:
        return record | {"failed": True}
    traffic = found.traffic
    num_bytes = traffic.forward_bytes + traffic.backward_bytes
    return record | {
        "loss_on": found.loss_on,
        "loss_off": found.loss_off,
        "train_losses": [round(loss, 5) for loss in found.train_losses],
        "bytes_per_message": num_bytes / max(2 * traffic.messages, 1),
        "bits_per_element": 8 * num_bytes / max(2 * traffic.elements, 1),
        "forward_bits_per_element": 8 * traffic.forward_bytes / max(traffic.elements, 1),
        "backward_bits_per_element": 8 * traffic.backward_bytes / max(traffic.elements, 1),
        "raw_bytes_per_message": FLOAT32_BYTES * traffic.elements / max(traffic.messages, 1),
        **found.facts,
    }


def append(file: TextIO, record: Record) -> None:
    """Write a record so that it is on the disk when the next run starts."""
    file.write(json.dumps(record, ensure_ascii=False) + "\n")
    file.flush()


def read(paths: Iterable[Path]) -> dict[str, Record]:
    """The records of some files by run."""
    records: dict[str, Record] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            if not record.get("failed"):
                records.setdefault(record["id"], {}).update(record)
    return records


def is_done(run: Run, records: Mapping[str, Record]) -> bool:
    """Whether a run's quality is known."""
    return "loss_on" in records.get(run.id, {})

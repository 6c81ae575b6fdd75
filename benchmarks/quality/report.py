"""Records of many runs as tables: what crosses, how long a step would take, and what quality it costs."""

import statistics as plain
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from bench import show

from quality.intervals import Difference, paired_difference
from quality.records import Record
from quality.rows import ROWS, Side

TASKS: Final[Mapping[str, str]] = {
    "mt": "Translation Es→En, cut between encoder and decoder",
    "lm1": "Language model, one cut",
    "lm3": "Language model, three cuts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of a table; `lost` is what it loses to the row beside, in BLEU or in percent of the loss."""

    task: str
    row: str
    side: Side
    bits_per_element: float
    bytes_per_message: float
    ratio_float32: float
    step_s: float
    on: float
    off: float
    loss_on: float
    lost: Difference | None
    lost_off: Difference | None


def lines_of(records: Mapping[str, Record], task: str, *, beside: str = "raw") -> list[Line]:
    """The rows of a task, in the order of the comparison; only runs of as many steps as most have."""
    some = [one for one in records.values() if one.get("task") == task and _is_complete(one)]
    if task == "lm3":
        # Raw cuts change no bit, so one cut and three are the same run.
        some += [one for one in records.values() if one.get("task") == "lm1" and one.get("row") == "raw"]
    if not some:
        return []
    num_steps = plain.mode(one["num_steps"] for one in some)
    by_row: dict[str, list[Record]] = {name: [] for name in ROWS}
    for one in some:
        if one["num_steps"] == num_steps:
            by_row[one["row"]].append(one)
    return [_line(task, name, some, by_row[beside]) for name, some in by_row.items() if some]


def byte_law_s(byte_share: float) -> float:
    """The seconds of a step of the seed's translation run, whose Table 2 follows this line."""
    return 0.07 + 4.34 * byte_share


def show_lines(lines: Sequence[Line]) -> None:
    """Print the table of a task."""
    is_translation = lines[0].task == "mt"
    unit, lost, digits = ("BLEU", "BLEU lost", 2) if is_translation else ("loss", "loss, % more", 4)
    rows = []
    for line in lines:
        mean, interval = _difference(line.lost)
        rows.append(
            {
                "row": line.row,
                "codecs": ROWS[line.row].label,
                "bits": f"{line.bits_per_element:.2f}",
                "kB": f"{line.bytes_per_message / 1e3:.1f}",
                "to fp32": f"{line.ratio_float32:.1f}×",
                "to bf16": f"{line.ratio_float32 / 2:.1f}×",
                "byte law": f"{byte_law_s(1 / line.ratio_float32):.2f} s",
                unit: f"{line.on:.{digits}f}",
                f"{unit}, codec off": f"{line.off:.{digits}f}",
                lost: mean,
                "95 % interval": interval,
                "codec off": f"{line.lost_off.mean:+.2f}" if line.lost_off else "",
                "seeds": str(line.lost.num_seeds) if line.lost else "",
            }
        )
    show(rows, title=TASKS[lines[0].task])


def as_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The lines as plain values."""
    return [asdict(line) for line in lines]


def _line(task: str, name: str, some: Sequence[Record], beside: Sequence[Record]) -> Line:
    measure = _bleu_lost if task == "mt" else _loss_gained
    key = "bleu" if task == "mt" else "loss"
    bits = plain.mean(one["bits_per_element"] for one in some)
    return Line(
        task=task,
        row=name,
        side=ROWS[name].side,
        bits_per_element=bits,
        bytes_per_message=plain.mean(one["bytes_per_message"] for one in some),
        ratio_float32=32 / bits,
        step_s=byte_law_s(bits / 32),
        on=plain.mean(one[f"{key}_on"] for one in some),
        off=plain.mean(one[f"{key}_off"] for one in some),
        loss_on=plain.mean(one["loss_on"] for one in some),
        lost=measure(some, beside, "on"),
        lost_off=measure(some, beside, "off"),
    )


def _bleu_lost(some: Sequence[Record], beside: Sequence[Record], state: str) -> Difference | None:
    return _paired(some, beside, lambda one: -float(one[f"bleu_{state}"]))


def _loss_gained(some: Sequence[Record], beside: Sequence[Record], state: str) -> Difference | None:
    """In percent of the other's loss with the same seed."""
    reference = {one["seed"]: float(one[f"loss_{state}"]) for one in beside}
    return _paired(
        [one for one in some if one["seed"] in reference],
        beside,
        lambda one: 100 * float(one[f"loss_{state}"]) / reference[one["seed"]],
    )


def _paired(
    some: Sequence[Record], beside: Sequence[Record], measure: Callable[[Record], float]
) -> Difference | None:
    return paired_difference(
        {one["seed"]: measure(one) for one in some}, {one["seed"]: measure(one) for one in beside}
    )


def _is_complete(record: Record) -> bool:
    return "loss_on" in record and (record["task"] != "mt" or "bleu_on" in record)


def _difference(lost: Difference | None) -> tuple[str, str]:
    if lost is None:
        return "", ""
    return f"{lost.mean:+.2f}", f"{lost.low:+.2f} … {lost.high:+.2f}"

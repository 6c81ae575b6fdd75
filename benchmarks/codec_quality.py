"""Measures what codecs cost in quality: paired trainings of two tasks, each row beside raw.

python benchmarks/codec_quality.py --prepare CORPORA --data DIR      once: token ids from the corpora
python benchmarks/codec_quality.py --data DIR --out DIR              train; results are appended as they come
python benchmarks/codec_quality.py --data DIR --score FILE…          BLEU of the hypotheses written out
python benchmarks/codec_quality.py --report FILE… [--svg FILE]       tables, intervals, plot

The cut lies inside one process, in the graph, as `isthmus.codec.chain.cross` has it, so that many trainings
share one device. Bytes are those of the packets: payload, header, alignment, and token ids where the receiver
needs them only for the cut's sake; those of a bottleneck are counted behind its raw warm-up. "Codec off"
evaluates the trained model with exact numbers at the cut; a bottleneck, being part of the model, stays.
"""

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench import Choice, Deadline, finish, machine, options
from mps import shared_gpu
from quality import language, translation
from quality.data import read_references
from quality.fitting import Run
from quality.language import LanguageTask
from quality.plot import draw
from quality.prepare import prepare
from quality.records import Record, append, is_done, read, record_of
from quality.report import TASKS, as_json, lines_of, show_lines
from quality.rows import MAIN_ROWS, ROWS
from quality.translation import TranslationTask
from quality.workers import Task, train_all

from isthmus.train.device import Device

NUM_STEPS = {"mt": 3000, "lm1": 800, "lm3": 800}
NUM_TINY_STEPS = 6
HEADLINE_TASK = "mt"
NUM_SEEDS, NUM_HEADLINE_SEEDS = 3, 5


def make_task(name: str, folder: Path, device: torch.device, *, is_tiny: bool, warm_up: float | None) -> Task:
    """The task of a name; its bottlenecks begin after this share of the steps."""
    changes: dict[str, Any] = {} if warm_up is None else {"raw_warmup_share": warm_up}
    if name == "mt":
        size = translation.TINY if is_tiny else translation.FULL
        return TranslationTask(folder, device, replace(size, **changes))
    recipe = replace(language.TINY if is_tiny else language.FULL, **changes)
    return LanguageTask(folder, device, recipe, num_cuts=1 if name == "lm1" else 3)


def runs_of(given: argparse.Namespace) -> list[Run]:
    """What is asked for, seed by seed, so that what has ended when time is up is paired."""
    num_steps = dict.fromkeys(TASKS, NUM_TINY_STEPS) if given.tiny else NUM_STEPS
    seeds = given.seeds or range(NUM_HEADLINE_SEEDS)
    rows = sorted(given.rows, key=lambda row: "svd" in ROWS[row].forward)  # the slow ones last
    return [
        Run(task=task, row=row, seed=seed, num_steps=given.steps or num_steps[task])
        for seed in seeds
        for task in given.tasks
        for row in rows
        if _is_wanted(task, row, seed, has_seeds=bool(given.seeds))
    ]


def _is_wanted(task: str, row: str, seed: int, *, has_seeds: bool) -> bool:
    if task == "lm3" and row == "raw":
        return False  # raw cuts change no bit: the report takes raw of one cut
    is_headline = task == HEADLINE_TASK and ROWS[row].is_headline
    return has_seeds or seed < (NUM_HEADLINE_SEEDS if is_headline else NUM_SEEDS)


def train(given: argparse.Namespace) -> None:
    """Train what is asked for and not yet done, as far as time allows."""
    started_s, deadline = time.monotonic(), Deadline.after(given.deadline_s)
    given.out.mkdir(parents=True, exist_ok=True)
    results, hypotheses = given.out / "quality.jsonl", given.out / "hypotheses.jsonl"
    done = read([*given.skip_done, *([results] if results.exists() else [])])
    runs = [run for run in runs_of(given) if not is_done(run, done)]
    print(f"{len(runs)} trainings to do, {len(done)} done")
    if not runs:
        return
    with (
        results.open("a") as file,
        hypotheses.open("a") as said,
        shared_gpu(is_wanted=given.mps) as is_shared,
    ):
        about = machine("torch", "transformers") | {"device": Device("auto").name}
        about |= {"mps": is_shared, "workers": given.workers, "warm_up": given.warm_up}
        ended_runs = train_all(
            runs,
            partial(make_task, is_tiny=given.tiny, warm_up=given.warm_up),
            given.data,
            num_workers=given.workers,
            deadline=deadline,
        )
        for count, ended in enumerate(ended_runs, start=1):
            record = record_of(ended, about)
            append(file, record)
            if ended.found is not None and ended.found.hypotheses:
                append(said, {"id": ended.run.id, **ended.found.hypotheses})
            elapsed_s = time.monotonic() - started_s
            print(f"{elapsed_s:5.0f} s  {count}/{len(runs)}  {told(record)}", flush=True)


def told(record: Record) -> str:
    """A run that has ended, on one line."""
    if record.get("failed"):
        return f"{record['id']:24} failed"
    return (
        f"{record['id']:24} {record['duration_s']:5.1f} s  {record['bits_per_element']:6.2f} bits  "
        f"loss {record['loss_on']:.4f}, codec off {record['loss_off']:.4f}"
    )


def report(given: argparse.Namespace) -> None:
    """Print the tables and a JSON line, and draw the plot."""
    records = read(given.report)
    panels = [lines for task in TASKS if (lines := lines_of(records, task, beside=given.beside))]
    for lines in panels:
        show_lines(lines)
    if given.svg is not None and panels:
        given.svg.write_text(draw(panels), encoding="utf-8")
    finish("codec_quality", rows=[as_json(lines) for lines in panels])


def score_files(given: argparse.Namespace) -> None:
    """Write BLEU beside the hypotheses."""
    from quality.scoring import score  # sacrebleu need not be where the trainings ran

    out = given.score[0].with_name("scores.jsonl")
    with out.open("w") as file:
        for record in score(given.score, read_references(given.data)):
            append(file, record)
            print(f"{record['id']:24} {record['bleu_on']:.2f}  codec off {record['bleu_off']:.2f}")
    print(f"written to {out}")


def main() -> None:
    """Do what is asked for."""
    given = options(
        __doc__,
        data=Path("data"),
        out=Path(),
        prepare=Path,
        score=[],
        report=[],
        beside=Choice("raw", list(ROWS)),
        svg=Path,
        tasks=Choice(list(TASKS), list(TASKS)),
        rows=Choice(list(MAIN_ROWS), list(ROWS)),
        seeds=Choice([], range(100)),
        steps=int,
        warm_up=float,
        deadline_s=float,
        skip_done=[],
        workers=12,
        mps=True,
        tiny=False,
    )
    if given.prepare is not None:
        prepare(given.prepare, given.data)
    elif given.score:
        score_files(given)
    elif given.report:
        report(given)
    else:
        train(given)


if __name__ == "__main__":
    main()

"""Generators and a discriminator over 20 Mbit/s and 100 ms, against the same processes joined without limits.

    python benchmarks/generator_discriminator.py [--steps 200] [--rounds 3] [--device cpu] [--hidden 128]

Both are run in turns by `isthmus.run`, as users do. The prediction is the simulator's, by the scheduler that
the workers run, from times measured without limits; so it does not know the runs that it is held against.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Final

from bench import Choice, finish, options, show

import isthmus
from isthmus.events import Span
from isthmus.job import Job, load_job
from isthmus.observe.report import FeedSummary, Recorded, read_run, summarize
from isthmus.plan.feed_plan import FeedTimes, clouds_of, forecast, strategy_of, token_bits
from isthmus.plan.scenario import Line

EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "generator-discriminator.toml"
THIN: Final = Line(down_bps=20e6, up_bps=20e6, latency_s=0.05)
SHAPES: Final = {"20 Mbit/s, 100 ms": ("20 Mbps", "100 ms"), "no limits": ("100 Gbps", "0 ms")}
NUM_WARM_UP_STEPS: Final = 10
HIDDEN_BYTES: Final = 768 * 2
"""A token's hidden state of width 768 in 16 bits."""
LARGE_VOCABULARY: Final = 250_002
GOALS: Final = {"throughput_ratio": 0.98, "times_fewer_bytes": 500, "prediction_error": 0.05}


def job_of(args: argparse.Namespace, bandwidth: str, rtt: str) -> Job:
    """The example over links of this shape."""
    overrides = [
        f"train.steps={args.steps}",
        "checkpoint.every=7 d",
        f"model.config.hidden_size={args.hidden}",
    ]
    overrides += [f"cloud.{cloud}.device={args.device}" for cloud in ("judge", "english", "esperanto")]
    for link in (0, 1):
        overrides += [f"link.{link}.bandwidth={bandwidth}", f"link.{link}.rtt={rtt}"]
    return load_job(EXAMPLE, overrides=overrides)


def step_s(recorded: Recorded) -> float:
    """The mean time of a step, without the first ones."""
    return statistics.fmean(float(one["duration_s"]) for one in recorded.steps[NUM_WARM_UP_STEPS:])


def feed_of(recorded: Recorded) -> FeedSummary:
    """What the discriminator of a run told."""
    feed = summarize(recorded).feed
    if feed is None:
        raise ValueError("a run without a discriminator")
    return feed


def mean_s(recorded: Recorded, track: str, kind: str) -> float:
    """The mean time of one work of a cloud."""
    spans = [
        one for one in recorded.spans if isinstance(one, Span) and (one.track, one.kind) == (track, kind)
    ]
    return statistics.fmean(one.duration_s for one in spans[NUM_WARM_UP_STEPS:])


def predict(job: Job, recorded: list[Recorded], num_bytes: float) -> float:
    """What the simulator says of a step over the thin line, from times measured without limits."""
    judge, *generators = clouds_of(job)

    def mean(track: str, kind: str) -> float:
        return statistics.fmean(mean_s(one, track, kind) for one in recorded)

    works_s = mean(judge, "discriminate") + mean(judge, "optimize")
    # What a step takes beside its works, such as reading losses.
    beside_s = statistics.fmean(map(step_s, recorded)) - works_s
    times = FeedTimes(
        generate_s=tuple(mean(name, "generate") + mean(name, "optimize") for name in generators),
        discriminate_s=mean(judge, "discriminate") + max(0.0, beside_s),
        update_s=mean(judge, "optimize"),
        batch_bytes=round(num_bytes),
    )
    return forecast(
        strategy_of(job), (judge, *generators), times, {(judge, one): THIN for one in generators}
    ).step_s


def main() -> None:
    """Run both in turns, and print what they took."""
    args = options(
        __doc__, steps=200, rounds=3, hidden=128, device=Choice("cpu", ["cpu", "cuda", "npu", "xpu"])
    )
    found: dict[str, list[Recorded]] = {name: [] for name in SHAPES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for name, shape in SHAPES.items():
                run = isthmus.run(
                    job_of(args, *shape), runs=Path(folder) / f"{number}-{shape[1]}", resume=False
                )
                found[name].append(read_run(run.run))
    thin, free = found.values()
    times_s = {name: [step_s(one) for one in every] for name, every in found.items()}
    ratios = [free_s / thin_s for thin_s, free_s in zip(*times_s.values(), strict=True)]
    num_bytes = sum(summarize(one).num_bytes for one in thin)
    token_bytes = num_bytes / sum(one.num_tokens for run in thin for one in feed_of(run).streams)
    num_batches = args.steps * args.rounds
    job = job_of(args, *SHAPES["20 Mbit/s, 100 ms"])
    predicted_s = predict(job, free, num_bytes / num_batches)
    measured_s = statistics.fmean(times_s["20 Mbit/s, 100 ms"])
    waited_s = sum(feed_of(one).waited_s for one in thin) / num_batches
    result = {
        "throughput_ratio": statistics.fmean(ratios),
        "ratios": ratios,
        "step_s": {name: statistics.fmean(every) for name, every in times_s.items()},
        "waited_s_per_step": waited_s,
        "predicted_step_s": predicted_s,
        "prediction_error": predicted_s / measured_s - 1,
        "token_bytes": token_bytes,
        "times_fewer_bytes": HIDDEN_BYTES / token_bytes,
        "times_fewer_bytes_of_250002_tokens": 8 * HIDDEN_BYTES / token_bits(LARGE_VOCABULARY),
        "goals": GOALS,
        "settings": vars(args),
    }
    rows = [{"joined by": name, "a step": f"{1e3 * one:.1f} ms"} for name, one in result["step_s"].items()]
    rows.append({"joined by": "20 Mbit/s, 100 ms, predicted", "a step": f"{1e3 * predicted_s:.1f} ms"})
    show(
        rows, title=f"throughput over the thin line: {result['throughput_ratio']:.1%} of that without limits"
    )
    finish("generator_discriminator", "torch", "transformers", **result)


if __name__ == "__main__":
    main()

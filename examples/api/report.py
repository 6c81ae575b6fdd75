"""Compare a run with what was predicted for it; trains a few steps first."""

from pathlib import Path

from isthmus import load_job, report, run

if __name__ == "__main__":
    job = load_job(Path(__file__).parents[1] / "demo.toml", overrides=["train.steps=4"])
    found = report(run(job, resume=False).run)
    print(f"loss {found.summary.first_loss:.3f} → {found.summary.last_loss:.3f}")
    step = found.step
    print(f"a step took {step.measured:.2f} s and was predicted to take {step.predicted} s")
    for waits in found.waits["measured"]:
        print(f"{waits.cloud} computed {waits.busy:.0%} of the time")

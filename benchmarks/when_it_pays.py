"""From which model size, bandwidth and round trip on a pipeline over two clouds pays, by simulation.

python benchmarks/when_it_pays.py [--json]

Two clouds of eight H100 each train one model. Each figure is the throughput of the plan that `isthmus plan`
chooses for a link, as a share of the best of all, that over a link without limits among them. Codecs may lose
what int4 loses.
Times are the catalogue's; nothing is run.
"""

import argparse
import json
import tempfile
from pathlib import Path

import isthmus

# Width, width inside the feed-forward blocks, layers, heads.
MODELS = {
    "0.5 B": (896, 4864, 24, 14),
    "1.2 B": (2048, 8192, 16, 32),
    "7 B": (4096, 11008, 32, 32),
    "34 B": (8192, 22016, 48, 64),
}
KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LINKS = (("100 Mbps", "60 ms"), ("1 Gbps", "60 ms"), ("1 Gbps", "200 ms"), ("10 Gbps", "60 ms"))
NO_LIMITS = ("10000 Gbps", "0 ms")
JOB = """
name = "pays"
[model.config]
model_type = "llama"
vocab_size = 32000
max_position_embeddings = 4096
{model}
[data]
source = "corpus/*.jsonl"
sequence_length = 4096
[[cloud]]
name = "east"
accelerator = "h100"
ranks = 8
inside_bandwidth = "400 Gbps"
listen = "east.example.com:7600"
[[cloud]]
name = "west"
accelerator = "h100"
ranks = 8
inside_bandwidth = "400 Gbps"
[[link]]
between = ["east", "west"]
bandwidth = "{bandwidth}"
rtt = "{rtt}"
codec = "auto"
[strategy]
kind = "pipeline"
clouds = ["east", "west"]
[train]
batch_tokens = 4194304
precision = "bfloat16"
compile = true
[limits]
codec_loss = "some"
"""


def step_s(model: tuple[int, ...], bandwidth: str, rtt: str) -> float:
    """The simulated step of the plan for one model and one link."""
    config = "\n".join(f"{key} = {value}" for key, value in zip(KEYS, model, strict=True))
    text = JOB.format(model=config, bandwidth=bandwidth, rtt=rtt)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text(text)
        return isthmus.plan(isthmus.load_job(path), measure=False, is_quick=True).estimate.step_s


def main() -> None:
    """Print the table and a JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args()
    shares: dict[str, list[float]] = {}
    for name, model in MODELS.items():
        steps_s = [step_s(model, *link) for link in LINKS]
        # A plan may be slower than the best by what a less lossy codec is worth, also over the free link.
        least_s = min(step_s(model, *NO_LIMITS), *steps_s)
        shares[name] = [least_s / one for one in steps_s]
        if not options.json:
            print(f"{name:8}" + "".join(f"{share:>20.0%}" for share in shares[name]), flush=True)
    if not options.json:
        print(f"{'':8}" + "".join(f"{' '.join(link):>20}" for link in LINKS))
    print(json.dumps({"benchmark": "when_it_pays", "links": LINKS, "shares": shares}))


if __name__ == "__main__":
    main()

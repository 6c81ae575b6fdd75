"""A job to plan, and changes to it."""

from pathlib import Path

from isthmus.job import Job
from isthmus.job.load import parse_job

TWO_CLOUDS = """
name = "two"

[model.config]
model_type = "llama"
vocab_size = 32000
hidden_size = 2048
intermediate_size = 5504
num_hidden_layers = 12
num_attention_heads = 16

[data]
source = "corpus/*.jsonl"
sequence_length = 1024

[[cloud]]
name = "east"
accelerator = "a100-40gb"
listen = "127.0.0.1:7600"

[[cloud]]
name = "west"
accelerator = "a100-40gb"
listen = "127.0.0.1:7601"

[[link]]
between = ["east", "west"]
bandwidth = "1 Gbps"
rtt = "40 ms"
codec = "auto"

[train]
steps = 100
batch_tokens = 65536
precision = "bfloat16"
"""

THIRD_CLOUD = """
[[cloud]]
name = "north"
accelerator = "a100-40gb"
listen = "127.0.0.1:7602"
"""


def link(first: str, second: str, *, bandwidth: str = "1 Gbps", rtt: str = "40 ms") -> str:
    """A further link."""
    return f'[[link]]\nbetween = ["{first}", "{second}"]\nbandwidth = "{bandwidth}"\nrtt = "{rtt}"\n'


def two_clouds(*overrides: str, more: str = "") -> Job:
    """The job with some keys set, and further tables."""
    return parse_job(TWO_CLOUDS + more, file=Path("two.toml"), overrides=overrides)

"""Small jobs whose weights must not change from one revision to the next.

Whatever a run would choose by measured time is fixed: layers, micro-batches, codecs and their guard. Each job
takes seconds on a CPU, over an emulated WAN that is fast.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import tomlkit

Changes = Mapping[str, Any]

SOURCE: Final = "{source}"
"""Stands in a job for the folder of a model with weights: what the job `raw` of the old revision exports."""
TEXT: Final = "{text}"
"""Stands in a job for the path of a short text."""

_LLAMA: Final = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_GPT2: Final = {
    "model_type": "gpt2",
    "vocab_size": 300,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
}
_BERT: Final = {
    "model_type": "bert",
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_INT4: Final = {"forward": "rotate | int4", "backward": "rotate | int4"}
_STOCHASTIC: Final = {"forward": "rotate | int4", "backward": "rotate | int4(stochastic)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenJob:
    """A job, written as what differs from the plainest one."""

    about: str
    changes: Changes = field(default_factory=dict)
    """Tables that replace keys of the plainest job's tables; None takes a key out."""
    ranks: tuple[int, ...] = (1, 1)
    """Of each cloud, and so the number of clouds."""
    cloud: Changes = field(default_factory=dict)
    """Keys of every cloud."""
    link: Changes = field(default_factory=dict)
    """Keys of every link."""
    new: Changes = field(default_factory=dict)
    """Further changes for the present tree, where a key has been renamed."""
    is_killed: bool = False
    """Whether the run is also killed and started again, which must give the same weights."""

    def text(self, name: str, *, is_new: bool, places: Mapping[str, str]) -> str:
        """The job file; `places` are what stands for paths."""
        tables = _merged(self._plainest(name), self.changes)
        text = tomlkit.dumps(_merged(tables, self.new) if is_new else tables)
        for placeholder, path in places.items():
            text = text.replace(placeholder, path)
        return text

    @property
    def needs_source(self) -> bool:
        """Whether it trains a model with weights."""
        return SOURCE in str(self.changes)

    def _plainest(self, name: str) -> dict[str, Any]:
        clouds = ("east", "west", "north")[: len(self.ranks)]
        line = {"bandwidth": "1 Gbps", "rtt": "2 ms", "guard_every": 0, **self.link}
        return {
            "name": name,
            "seed": 7,
            "model": {"config": dict(_LLAMA)},
            "data": {"source": "builtin:tales", "sequence_length": 32},
            "cloud": [
                {
                    "name": cloud,
                    "device": "cpu",
                    "listen": f"127.0.0.1:{7600 + number}",
                    "ranks": count,
                    **self.cloud,
                }
                for number, (cloud, count) in enumerate(zip(clouds, self.ranks, strict=True))
            ],
            "link": [{"between": list(pair), **line} for pair in pairwise(clouds)],
            "strategy": {
                "kind": "pipeline",
                "policy": "wan-1f1b",
                "microbatches": 4,
                "max_in_flight": 4,
                "clouds": list(clouds),
                "layers": [2, 2] if len(clouds) == 2 else [1, 2, 1],
            },
            "train": {"steps": 6, "batch_tokens": 512, "learning_rate": 3e-3, "evaluate_every": 3},
        }


def _merged(tables: Changes, changes: Changes) -> dict[str, Any]:
    found = dict(tables)
    for key, value in changes.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(found.get(key), Mapping):
            found[key] = _merged(found[key], value)
        else:
            found[key] = value
    return found


def _model(config: Changes) -> Changes:
    """Replace the whole configuration."""
    return {"model": {"config": {**dict.fromkeys(_LLAMA), **config}}}


JOBS: Final[Mapping[str, FrozenJob]] = {
    "raw": FrozenJob(about="nothing coded"),
    "int4": FrozenJob(
        about="int4 both ways, every message measured",
        link={"codec": _INT4, "guard_every": 1, "guard_cosine": 0.0},
    ),
    "stochastic": FrozenJob(about="gradients rounded stochastically", link={"codec": _STOCHASTIC}),
    "state": FrozenJob(
        about="codecs with a state of their own",
        link={"codec": {"forward": "svd(0.5) | int8", "backward": "feedback(0.9) | topk(0.2) | int8"}},
        changes={"train": {"steps": 12}},
    ),
    "dropout": FrozenJob(about="dropout everywhere", changes=_model(_GPT2)),
    "recompute": FrozenJob(
        about="activations computed again",
        changes={"model": {"config": {"attention_dropout": 0.1}}, "train": {"recompute": True}},
    ),
    "bfloat16": FrozenJob(about="computed in bfloat16", changes={"train": {"precision": "bfloat16"}}),
    "padded": FrozenJob(
        about="texts of unequal length classified, by BERT",
        changes={
            **_model(_BERT),
            "data": {
                "source": "builtin:messages",
                "task": "sequence-classification",
                "sequence_length": 32,
            },
        },
        link={"codec": _INT4},
    ),
    "bottleneck": FrozenJob(about="a trained boundary", link={"boundary": "bottleneck(8, warmup=2)"}),
    "frozen": FrozenJob(
        about="a frozen stage, cached, two epochs",
        changes={
            "model": {"frozen_layers": 2},
            "data": {"source": TEXT},
            "train": {"steps": 10, "evaluate_every": 5},
        },
    ),
    "lora": FrozenJob(
        about="adapters on a model with weights",
        changes={"model": {"config": None, "source": SOURCE, "lora": {"r": 4, "alpha": 8.0}}},
    ),
    "gpipe": FrozenJob(about="GPipe", changes={"strategy": {"policy": "gpipe"}}),
    "1f1b": FrozenJob(about="1F1B", changes={"strategy": {"policy": "1f1b"}}),
    "2+3 ranks": FrozenJob(
        about="clouds of 2 and of 3 ranks",
        ranks=(2, 3),
        changes={"strategy": {"microbatches": 8, "max_in_flight": 8}},
        link={"codec": _STOCHASTIC},
    ),
    "sharded": FrozenJob(
        about="two ranks that share all of a stage out, in each cloud",
        ranks=(2, 2),
        cloud={"sharding": "full"},
        changes={"strategy": {"policy": "lock-step"}},
    ),
    "three clouds": FrozenJob(about="three clouds", ranks=(1, 1, 1), link={"codec": _STOCHASTIC}),
    "resume": FrozenJob(
        about="killed behind a checkpoint and started again",
        changes={
            **_model(_GPT2),
            "train": {"steps": 60, "evaluate_every": 25},
            "checkpoint": {"every": "1 s"},
        },
        link={"codec": _STOCHASTIC, "rtt": "60 ms"},
        is_killed=True,
    ),
}
"""By name. Where the present tree has renamed a key, `new` of the job says so; no job needs it yet."""

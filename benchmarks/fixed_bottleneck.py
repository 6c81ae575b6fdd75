"""Measures what low-rank codecs cost in quality: paired trainings of a small language model with one cut.

python benchmarks/fixed_bottleneck.py --data TEXT[.gz]… [--codecs "FORWARD > BACKWARD" …] [--beside FILE]

Each data set trains the same model by each codec with the same seeds, so that differences are paired. Data
sets are byte-level; those given by --words have one id per word. `--beside` reads the JSON line of another
run, for example of another revision, and prints the differences to it in loss and bytes: of the first codec
to its first, of the second to its second, raw to raw, so ranks may differ to make bytes equal. The cut lies
inside one process, as `isthmus.codec.cross` has it. Without data the built-in corpus of tales is used. The
margin is 0.5 % of the loss.
"""

import argparse
import collections
import gzip
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 torch's own custom
from bench import machine
from quality.crossing import cross
from torch import Tensor, nn

from isthmus.codec import CodecEnd, Codecs, Key
from isthmus.job import parse_codec
from isthmus.train.data.rows import open_rows

WIDTH, NUM_LAYERS, NUM_HEADS, LENGTH, BATCH = 128, 4, 4, 64, 16
PEAK_RATE, NUM_WARMUP_STEPS, NUM_VALID_BATCHES = 2e-3, 20, 24
MARGIN = 0.005
NUM_WORDS = 4096
EVALUATION_STEP = 1_000_000
CODECS = [f"subspace({rank}, anchor=tokens) | int4 > int4(stochastic)" for rank in (WIDTH // 4, WIDTH // 8)]


class Model(nn.Module):
    """A decoder with a cut in its middle."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, NUM_HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(NUM_LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary_size, bias=False)

    def forward(self, ids_BT: Tensor, cut: "Cut", step: int) -> Tensor:
        """The mean loss of predicting each next token."""
        x_BTD = self.tokens(ids_BT) + self.places.weight[: ids_BT.shape[1]]
        mask_TT = nn.Transformer.generate_square_subsequent_mask(ids_BT.shape[1])
        for number, layer in enumerate(self.layers):
            if number == NUM_LAYERS // 2:
                x_BTD = cut(x_BTD, ids_BT, step)
            x_BTD = layer(x_BTD, src_mask=mask_TT, is_causal=True)
        scores = self.head(self.norm(x_BTD))
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())


class Cut:
    """Crosses by a codec and counts bytes."""

    def __init__(self, text: str, seed: int) -> None:
        forward, _, backward = text.partition(">")
        codecs = Codecs(
            forward=parse_codec(forward.strip()),
            backward=parse_codec((backward or forward).strip()),
            width=WIDTH,
            seed=seed,
        )
        device = torch.device("cpu")
        self._sending, self._receiving = (
            CodecEnd(codecs, device=device),
            CodecEnd(codecs, device=device),
        )
        self.num_bytes = self.num_rows = 0
        self._count(self._sending, "encode")
        self._count(self._receiving, "encode_gradient")

    def __call__(self, x_BTD: Tensor, ids_BT: Tensor, step: int) -> Tensor:
        key = Key(step=step, microbatch=0)
        if step < EVALUATION_STEP:
            self.num_rows += ids_BT.numel()
        return cross(x_BTD, sending=self._sending, receiving=self._receiving, key=key, ids=ids_BT)

    def _count(self, end: Any, name: str) -> None:
        encode = getattr(end, name)

        def counted(x_ND: Tensor, *, key: Key, **others: Any) -> Any:
            payload = encode(x_ND, key=key, **others)
            if key.step < EVALUATION_STEP:
                self.num_bytes += sum(part.numel() for part in payload)
            return payload

        setattr(end, name, counted)


def train(ids: Tensor, vocabulary_size: int, codec: str, *, seed: int, num_steps: int) -> dict[str, float]:
    """Train once; return the loss on the last tenth of the ids, and bytes per token of both directions."""
    torch.manual_seed(seed)
    model, cut = Model(vocabulary_size), Cut(codec, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    border = len(ids) * 9 // 10
    started_s = time.monotonic()
    for step, batch in enumerate(batches(ids[:border], num_steps, seed=seed)):
        rate = min((step + 1) / NUM_WARMUP_STEPS, 0.5 + 0.5 * math.cos(math.pi * step / num_steps))
        optimizer.param_groups[0]["lr"] = PEAK_RATE * rate
        optimizer.zero_grad(set_to_none=True)
        model(batch, cut, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        held_out = batches(ids[border:], NUM_VALID_BATCHES, seed=0)
        losses = [float(model(one, cut, EVALUATION_STEP + number)) for number, one in enumerate(held_out)]
    return {
        "loss": statistics.mean(losses),
        "bytes_per_token": cut.num_bytes / cut.num_rows,
        "duration_s": time.monotonic() - started_s,
    }


def batches(ids: Tensor, num: int, *, seed: int) -> Iterator[Tensor]:
    """Random windows; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num):
        starts = torch.randint(len(ids) - LENGTH, (BATCH,), generator=generator)
        yield torch.stack([ids[start : start + LENGTH] for start in starts])


def read_ids(path: Path | None, *, is_words: bool) -> tuple[Tensor, int]:
    """Token ids of a text, and how many there can be: bytes, or the most frequent words."""
    if path is None:
        text = "\n".join(str(row["text"]) for row in open_rows("builtin:tales"))
    else:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    if not is_words:
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long(), 256
    words = text.split()
    known = {
        word: number for number, (word, _) in enumerate(collections.Counter(words).most_common(NUM_WORDS - 1))
    }
    return torch.tensor([known.get(word, NUM_WORDS - 1) for word in words]), NUM_WORDS


def interval(differences: list[float]) -> str:
    """The mean of paired differences with its 95 % interval (Student's t)."""
    mean = statistics.mean(differences)
    if len(differences) < 2:
        return f"{mean:+.4f}"
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(differences), 2.5)
    return f"{mean:+.4f} ± {t * statistics.stdev(differences) / math.sqrt(len(differences)):.4f}"


def show(results: list[dict[str, Any]], beside: list[dict[str, Any]]) -> None:
    """Print one line for each data set and codec."""
    print(f"{'data':24} {'codec':58} {'loss':>8} {'B/token':>8}  difference, bytes")
    for first in [one for one in results if one["seed"] == results[0]["seed"]]:
        data, codec = first["data"], first["codec"]
        own = [one for one in results if (one["data"], one["codec"]) == (data, codec)]
        number, numbers = _numbers(results)[codec], _numbers(beside)
        others = {(one["data"], numbers[one["codec"]], one["seed"]): one for one in beside}
        pairs = [(one, others[key]) for one in own if (key := (data, number, one["seed"])) in others]
        loss = statistics.mean(one["loss"] for one in own)
        told = ""
        if pairs:
            told = interval([one["loss"] - other["loss"] for one, other in pairs])
            told += f" ({statistics.mean(one['loss'] / other['loss'] - 1 for one, other in pairs):+.2%})"
            ratios = [one["bytes_per_token"] / other["bytes_per_token"] - 1 for one, other in pairs]
            told += f", {statistics.mean(ratios):+.1%}"
        print(f"{data:24} {codec:58} {loss:8.4f} {first['bytes_per_token']:8.2f}  {told}")


def _numbers(results: list[dict[str, Any]]) -> dict[str, int]:
    """The place of each codec among those of a run; raw has the first."""
    return {
        codec: number
        for number, codec in enumerate(dict.fromkeys(["raw", *(one["codec"] for one in results)]))
    }


def main() -> None:
    """Train all and print a table and a JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="texts, read as bytes")
    parser.add_argument("--words", type=Path, nargs="*", default=[], help="texts, read as words")
    parser.add_argument("--codecs", nargs="+", default=["raw", *CODECS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--beside", type=Path, help="JSON line of another run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sets = [(one, False) for one in options.data] + [(one, True) for one in options.words] or [(None, False)]
    results = []
    for path, is_words in sets:
        ids, vocabulary_size = read_ids(path, is_words=is_words)
        name = "tales" if path is None else f"{path.parent.name}/{'words' if is_words else 'bytes'}"
        for seed in options.seeds:
            for codec in options.codecs:
                found = train(ids, vocabulary_size, codec, seed=seed, num_steps=options.steps)
                results.append({"data": name, "codec": codec, "seed": seed, **found})
                print(
                    f"{name} {codec} seed {seed}: {found['loss']:.4f} in {found['duration_s']:.0f} s",
                    flush=True,
                )
    beside = json.loads(options.beside.read_text().splitlines()[-1])["results"] if options.beside else []
    show(results, beside)
    print(json.dumps({"benchmark": "fixed_bottleneck", "steps": options.steps, "margin": MARGIN,
                      **machine("torch"), "results": results}))  # fmt: skip


if __name__ == "__main__":
    main()

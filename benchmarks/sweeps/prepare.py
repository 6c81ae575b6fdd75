"""Writes the files that the grids beside this read: `python benchmarks/sweeps/prepare.py DATA OUT [--tiny]`.

DATA has the folders tatoeba-en-es, tatoeba-en-de and glue-sst2. Pairs are shuffled and split by the English
sentence, so that no sentence of the test part was trained on; each language pair has a tokenizer of its own.
Of the training sentences of SST-2 10,000 are trained on and 7,000 others are the test part. `--tiny` takes
few of them all.
"""

import csv
import gzip
import hashlib
import json
import lzma
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from isthmus.train.data.tokenizer import train_tokenizer

_VOCABULARY_SIZE: Final = 8_000
_TEST_SHARE: Final = 0.02
_NUM_TRAINED, _NUM_TESTED = 10_000, 7_000


def pairs(path: Path) -> list[dict[str, str]]:
    """The rows of a file of English sentences and their translations, which are the texts here."""
    with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = [one.rstrip("\n").split("\t") for one in file]
    return [{"text": row[1], "translation": row[0]} for row in rows if len(row) >= 2 and row[0] and row[1]]


def is_tested(text: str) -> bool:
    """Whether a sentence belongs to the test part, whatever its translation."""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    return number < _TEST_SHARE * 2**64


def texts(rows: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Both sides of all pairs."""
    for row in rows:
        yield from (row["text"], row["translation"])


def write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows as JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in rows)


def main() -> None:
    """Write the files of all grids."""
    data, out = Path(sys.argv[1]), Path(sys.argv[2])
    most = 2_000 if "--tiny" in sys.argv else None
    out.mkdir(parents=True, exist_ok=True)
    for code in ("es", "de"):
        rows = pairs(data / f"tatoeba-en-{code}" / f"en-{code}.tsv.xz")
        random.Random(0).shuffle(rows)
        rows = rows[:most]
        tokenizer = train_tokenizer(texts(rows), vocab_size=_VOCABULARY_SIZE, encloses=True)
        tokenizer.save_pretrained(out / f"{code}-en.tokenizer")
        write(out / f"{code}-en.jsonl", (one for one in rows if not is_tested(one["translation"])))
        write(out / f"{code}-en.test.jsonl", (one for one in rows if is_tested(one["translation"])))
    with gzip.open(data / "glue-sst2" / "train.tsv.gz", "rt", encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    random.Random(0).shuffle(found)
    found = found[:most]
    labelled = [{"text": one["sentence"].strip(), "label": one["label"]} for one in found]
    write(out / "sst2.jsonl", labelled[:_NUM_TRAINED])
    write(out / "sst2.test.jsonl", labelled[-_NUM_TESTED:] if most is None else labelled[:200])


if __name__ == "__main__":
    main()

"""BLEU of hypotheses that were written out, perhaps on another machine."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from sacrebleu.metrics.bleu import BLEU

from quality.records import Record


def score(files: Iterable[Path], references: list[str]) -> Iterator[Record]:
    """A record for each run: BLEU with the codec as trained, and without."""
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            written = json.loads(line)
            bleu = BLEU()
            record = {"id": written["id"]}
            for name in ("on", "off"):
                known = references[: len(written[name])]
                record[f"bleu_{name}"] = bleu.corpus_score(written[name], [known]).score
            yield record | {"bleu_signature": str(bleu.get_signature())}

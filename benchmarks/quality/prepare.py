"""Turns the two corpora into token ids, once, so that a training reads tensors and nothing else."""

import json
import lzma
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

SPECIALS: Final = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS = range(3)
MAX_PAIR_TOKENS: Final = 40
NUM_TRANSLATION_TOKENS: Final = 8000
NUM_LANGUAGE_TOKENS: Final = 4096
NUM_TEST_SENTENCES: Final = 3000
VALID_SHARE: Final = 0.05
_SPLIT_SEED: Final = 20
_PIECE_BYTES: Final = 20_000


def prepare(source: Path, target: Path) -> None:
    """Read `tatoeba-en-es` and `enwik8-first10M` under `source`, and write what the tasks need."""
    target.mkdir(parents=True, exist_ok=True)
    prepare_translation(source / "tatoeba-en-es" / "en-es.tsv.xz", target)
    prepare_language(source / "enwik8-first10M" / "enwik8.first10M.xz", target)


def prepare_translation(source: Path, target: Path) -> None:
    """Pairs as rows of padded ids, split by English sentence; no test source stands in the training part."""
    with lzma.open(source, "rt", encoding="utf-8") as file:
        pairs = [tuple(line.rstrip("\n").split("\t")[:2]) for line in file]
    train, test = _split(pairs)
    tokenizer = _bpe(NUM_TRANSLATION_TOKENS, (text for pair in train for text in pair))
    tokenizer.save(str(target / "translation-tokenizer.json"))
    tensors: dict[str, Tensor] = {}
    for name, part in (("train", train), ("test", test)):
        english = tokenizer.encode_batch([pair[0] for pair in part])
        spanish = tokenizer.encode_batch([pair[1] for pair in part])
        kept = [
            index
            for index, (one, other) in enumerate(zip(english, spanish, strict=True))
            if max(len(one.ids), len(other.ids)) <= MAX_PAIR_TOKENS - 1
        ]
        tensors[f"{name}_source"] = _padded([spanish[index].ids for index in kept])
        tensors[f"{name}_target"] = _padded([english[index].ids for index in kept])
        if name == "test":
            references = [part[index][0] for index in kept]
            (target / "translation-references.json").write_text(json.dumps(references, ensure_ascii=False))
    save_file(tensors, target / "translation.safetensors")


def prepare_language(source: Path, target: Path) -> None:
    """One long row of ids, and how many bytes the validation part stood for."""
    with lzma.open(source, "rb") as file:
        text = file.read()
    num_train_bytes = int(len(text) * (1 - VALID_SHARE))
    train, valid = (
        part.decode(errors="replace") for part in (text[:num_train_bytes], text[num_train_bytes:])
    )
    tokenizer = _bpe(NUM_LANGUAGE_TOKENS, [train])
    tokenizer.save(str(target / "language-tokenizer.json"))
    ids = {name: _long_ids(tokenizer, part) for name, part in (("train", train), ("valid", valid))}
    save_file(ids, target / "language.safetensors", {"valid_bytes": str(len(valid.encode()))})


def _split(pairs: Sequence[tuple[str, ...]]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    draw = random.Random(_SPLIT_SEED)
    english = sorted({pair[0] for pair in pairs})
    held_out = set(draw.sample(english, min(NUM_TEST_SENTENCES, len(english) // 10)))
    first: dict[str, tuple[str, ...]] = {}
    for pair in pairs:
        if pair[0] in held_out:
            first.setdefault(pair[0], pair)
    test = list(first.values())
    test_sources = {pair[1] for pair in test}
    train = [pair for pair in pairs if pair[0] not in held_out and pair[1] not in test_sources]
    draw.shuffle(train)
    return train, test


def _bpe(num_tokens: int, texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIALS[3]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Each row with its end, padded to MAX_PAIR_TOKENS."""
    padded = torch.full((len(rows), MAX_PAIR_TOKENS), PAD, dtype=torch.int16)
    for index, row in enumerate(rows):
        padded[index, : len(row) + 1] = torch.tensor([*row, EOS], dtype=torch.int16)
    return padded


def _long_ids(tokenizer: Tokenizer, text: str) -> Tensor:
    pieces = [text[start : start + _PIECE_BYTES] for start in range(0, len(text), _PIECE_BYTES)]
    encoded = tokenizer.encode_batch(pieces)
    return torch.tensor([one for piece in encoded for one in piece.ids], dtype=torch.int16)

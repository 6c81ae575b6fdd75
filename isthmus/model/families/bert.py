"""Encoders laid out as BERT is: RoBERTa and XLM-RoBERTa too, and ELECTRA with its projection."""

from typing import Final

from isthmus.model.families.family import Family

BERT: Final = Family(first=("embeddings",), layers="encoder.layer", last=("pooler",))
ELECTRA: Final = Family(first=("embeddings", "embeddings_project"), layers="encoder.layer")

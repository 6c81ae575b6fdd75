"""GPT-2."""

from typing import Final

from isthmus.model.families.family import Family

GPT2: Final = Family(first=("wte", "wpe", "drop"), layers="h", last=("ln_f",))

"""Language-model pre-training across one cut and across three, through the product's own cutter."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.model.blueprint import fresh_blueprint, split_layers
from isthmus.model.heads import HEADS
from isthmus.model.load import build_stage
from isthmus.model.random import RngKey
from isthmus.model.stage import Batch, Stage, StageInput
from quality.cut import Cut, Traffic
from quality.data import Language
from quality.fitting import Fitter, Found, Pace, Run, autocast
from quality.prepare import NUM_LANGUAGE_TOKENS
from quality.rows import ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageRecipe:
    """What is fixed for all rows."""

    config: dict[str, Any]
    batch: int
    length: int
    peak: float = 1e-3
    num_warmup_steps: int = 100
    raw_warmup_share: float = 0.15
    max_valid_batches: int | None = None


def _config(width: int, num_layers: int, num_heads: int, length: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": NUM_LANGUAGE_TOKENS,
        "hidden_size": width,
        "intermediate_size": width * 8 // 3,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "max_position_embeddings": length,
    }


FULL = LanguageRecipe(config=_config(384, 8, 6, 256), batch=16, length=256)
TINY = LanguageRecipe(
    config=_config(48, 4, 2, 32),
    batch=2,
    length=32,
    num_warmup_steps=2,
    raw_warmup_share=0.4,
    max_valid_batches=2,
)


class LanguageTask:
    """Trains the rows of one corpus on one device, with a given number of cuts."""

    def __init__(self, folder: Path, device: torch.device, recipe: LanguageRecipe, *, num_cuts: int) -> None:
        self._data = Language(folder, device)
        self._blueprint = fresh_blueprint(recipe.config, head=HEADS["causal-lm"])
        self._device = device
        self._recipe = recipe
        self._num_stages = num_cuts + 1

    def train(self, run: Run) -> Found:
        """One training, and its loss on the validation part."""
        recipe = self._recipe
        stages = self.stages(run.seed)
        cuts = [self._cut(run, index) for index in range(self._num_stages - 1)]
        pace = Pace(
            peak=recipe.peak,
            num_warmup_steps=recipe.num_warmup_steps,
            num_steps=run.num_steps,
            weight_decay=0.1,
        )
        fitter = Fitter((*stages, *cuts), pace, device=self._device)
        batches = self._data.training(
            seed=run.seed, num_steps=run.num_steps, batch=recipe.batch, length=recipe.length
        )
        num_targets = recipe.batch * (recipe.length - 1)
        for step, ids in enumerate(batches):
            rng_key = RngKey(seed=run.seed, step=step, microbatch=0)
            loss = self._pass(stages, cuts, ids, step=step, rng_key=rng_key)
            fitter.step(step, loss / num_targets)
        return self._found(stages, cuts, fitter)

    def stages(self, seed: int) -> list[Stage]:
        """The model in pieces; how it is cut changes no value it starts with."""
        layers = split_layers(self._blueprint.num_layers, self._num_stages)
        stages = [build_stage(self._blueprint, some, seed=seed) for some in layers]
        return [stage.to(self._device) for stage in stages]

    def _cut(self, run: Run, index: int) -> Cut:
        return Cut(
            ROWS[run.row],
            width=self._recipe.config["hidden_size"],
            vocabulary_size=NUM_LANGUAGE_TOKENS,
            num_warmup_steps=round(self._recipe.raw_warmup_share * run.num_steps),
            seed=100 * run.seed + index,
            needs_ids=True,
            device=self._device,
        ).to(self._device)

    def _pass(
        self,
        stages: list[Stage],
        cuts: list[Cut],
        ids: Tensor,
        *,
        step: int,
        rng_key: RngKey | None = None,
        is_codec_on: bool = True,
    ) -> Tensor:
        """The loss of a batch, summed over its targets."""
        batch = Batch(ids=ids, num_targets=ids[:, 1:].numel(), labels=ids)
        crossing: Tensor | None = None
        with autocast(self._device):
            for stage, cut in zip(stages, cuts, strict=False):
                given = stage(StageInput(batch=batch, crossing=crossing, rng_key=rng_key)).crossing
                crossing = cut(given, ids, step=step, is_codec_on=is_codec_on)
            loss = stages[-1](StageInput(batch=batch, crossing=crossing, rng_key=rng_key)).loss
        if loss is None:
            raise ValueError("the last stage gives the loss")
        return loss  # type: ignore[no-any-return]

    @torch.no_grad()
    def _found(self, stages: list[Stage], cuts: list[Cut], fitter: Fitter) -> Found:
        for part in (*stages, *cuts):
            part.eval()
        recipe = self._recipe
        batches = self._data.validation(
            batch=recipe.batch, length=recipe.length, max_batches=recipe.max_valid_batches
        )
        num_targets = sum(ids[:, 1:].numel() for ids in batches)
        on, off = (
            sum(
                float(self._pass(stages, cuts, ids, step=step, is_codec_on=is_on))
                for step, ids in enumerate(batches)
            )
            / num_targets
            for is_on in (True, False)
        )
        tokens_per_byte = self._data.num_valid_tokens / self._data.valid_bytes
        return Found(
            loss_on=on,
            loss_off=off,
            train_losses=fitter.losses(),
            traffic=sum((cut.traffic for cut in cuts), Traffic()),
            facts={"bits_per_byte": on / math.log(2) * tokens_per_byte},
        )

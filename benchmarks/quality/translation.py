"""Translation from Spanish, the cut between encoder and decoder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 torch's own custom
from tokenizers import Tokenizer
from torch import Tensor

from quality.cut import Cut
from quality.data import Pairs, Translation
from quality.encoder_decoder import Decoder, Encoder, Size
from quality.fitting import Fitter, Found, Pace, Run, autocast
from quality.prepare import EOS, MAX_PAIR_TOKENS, NUM_TRANSLATION_TOKENS, PAD
from quality.rows import ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslationRecipe:
    """What is fixed for all rows."""

    size: Size
    batch_pairs: int
    peak: float = 7e-4
    num_warmup_steps: int = 200
    raw_warmup_share: float = 0.2
    """Share of the steps before a bottleneck begins."""
    smoothing: float = 0.1
    max_pairs: int | None = None


FULL = TranslationRecipe(
    size=Size(
        num_tokens=NUM_TRANSLATION_TOKENS,
        width=512,
        num_heads=8,
        num_layers=3,
        max_length=MAX_PAIR_TOKENS + 1,
        dropout=0.1,
    ),
    batch_pairs=128,
)
TINY = TranslationRecipe(
    size=Size(
        num_tokens=NUM_TRANSLATION_TOKENS,
        width=64,
        num_heads=2,
        num_layers=1,
        max_length=MAX_PAIR_TOKENS + 1,
        dropout=0.1,
    ),
    batch_pairs=8,
    num_warmup_steps=2,
    raw_warmup_share=0.4,
    max_pairs=64,
)


class TranslationTask:
    """Trains the rows of one corpus on one device."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        recipe: TranslationRecipe,
        *,
        make_cut: Callable[..., Cut] = Cut,
    ) -> None:
        self._make_cut = make_cut
        self._data = Translation(folder, device, max_pairs=recipe.max_pairs)
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "translation-tokenizer.json"))
        self._device = device
        self._recipe = recipe

    def train(self, run: Run) -> Found:
        """One training, and its quality on the test part."""
        recipe = self._recipe
        torch.manual_seed(run.seed)
        encoder, decoder = Encoder(recipe.size).to(self._device), Decoder(recipe.size).to(self._device)
        cut = self._make_cut(
            ROWS[run.row],
            width=recipe.size.width,
            vocabulary_size=recipe.size.num_tokens,
            num_warmup_steps=round(recipe.raw_warmup_share * run.num_steps),
            seed=run.seed,
            needs_ids=False,
            device=self._device,
        ).to(self._device)
        pace = Pace(
            peak=recipe.peak,
            num_warmup_steps=recipe.num_warmup_steps,
            num_steps=run.num_steps,
            weight_decay=0.01,
        )
        fitter = Fitter((encoder, cut, decoder), pace, device=self._device)
        # Dropout must not depend on what a row drew for its own parameters.
        torch.manual_seed(run.seed)
        batches = self._data.training(seed=run.seed, num_steps=run.num_steps, batch_pairs=recipe.batch_pairs)
        for step, pairs in enumerate(batches):
            with autocast(self._device):
                memory = cut(encoder(pairs.source_BS), pairs.source_BS, step=step, rows_N=pairs.rows_N)
                loss = self._loss(decoder(memory, pairs.source_BS, pairs.target_BT), pairs, recipe.smoothing)
            fitter.step(step, loss / pairs.num_targets)
        return self._found(encoder, cut, decoder, fitter)

    @torch.no_grad()
    def _found(self, encoder: Encoder, cut: Cut, decoder: Decoder, fitter: Fitter) -> Found:
        losses: dict[str, float] = {}
        hypotheses: dict[str, list[str]] = {}
        for part in (encoder, cut, decoder):
            part.eval()
        for name, is_on in (("on", True), ("off", False)):
            losses[name], hypotheses[name] = self._test(encoder, cut, decoder, is_codec_on=is_on)
        return Found(
            loss_on=losses["on"],
            loss_off=losses["off"],
            train_losses=fitter.losses(),
            traffic=cut.traffic,
            hypotheses=hypotheses,
        )

    def _test(
        self, encoder: Encoder, cut: Cut, decoder: Decoder, *, is_codec_on: bool
    ) -> tuple[float, list[str]]:
        loss = torch.zeros((), device=self._device)
        num_targets, order, said = 0, [], []
        for step, (indices, pairs) in enumerate(self._data.testing(2 * self._recipe.batch_pairs)):
            source_BS = pairs.source_BS
            with autocast(self._device):
                memory = cut(
                    encoder(source_BS), source_BS, step=step, rows_N=pairs.rows_N, is_codec_on=is_codec_on
                )
                loss += self._loss(decoder(memory, source_BS, pairs.target_BT), pairs, 0.0)
                most = min(2 * source_BS.shape[1] + 4, MAX_PAIR_TOKENS)
                said += decoder.translate(memory, source_BS, most).tolist()
            num_targets += pairs.num_targets
            order.append(indices)
        places = np.concatenate(order).argsort()
        return float(loss) / num_targets, [self._text(said[place]) for place in places]

    def _loss(self, scores_BTV: Tensor, pairs: Pairs, smoothing: float) -> Tensor:
        return F.cross_entropy(
            scores_BTV.flatten(0, 1).float(),
            pairs.target_BT.flatten(),
            ignore_index=PAD,
            label_smoothing=smoothing,
            reduction="sum",
        )

    def _text(self, ids: list[int]) -> str:
        end = ids.index(EOS) if EOS in ids else len(ids)
        text: str = self._tokenizer.decode(ids[:end])
        return text.strip()

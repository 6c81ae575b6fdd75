"""Messages that cross a cut, and hidden states as its two ends code them."""

import torch
from emulated import CLOUDS
from torch import Tensor

from isthmus.plan.codecs import Pair, texts_of
from isthmus.plan.pipeline_parts import GRADIENT, HIDDEN
from isthmus.plan.types import Member, Message, MessageKind
from isthmus.train.coding import Coded
from isthmus.train.device import Device, Mark
from isthmus.train.integers import IDS
from isthmus.train.pipeline import PipelineConfig
from isthmus.train.pipeline_role import cut_end

HERE, BEYOND = Member(CLOUDS[0]), Member(CLOUDS[1])


def activation(pair: Pair, item: int = 0) -> Message:
    """The message of an activation from here."""
    forward, backward = texts_of(pair)
    codecs = ((HIDDEN, forward), (GRADIENT, backward))
    return Message(MessageKind.ACTIVATION, 0, item, HERE, (BEYOND,), None, codecs)


def gradient(pair: Pair, item: int = 0) -> Message:
    """The message of the gradient of an activation, which comes back."""
    codecs = ((HIDDEN, str(pair.backward)),)
    return Message(MessageKind.GRADIENT, 0, item, BEYOND, (HERE,), None, codecs)


def coded_both_ways(
    config: PipelineConfig, cut: int, hidden_BTD: Tensor, device: Device
) -> tuple[Coded, Coded]:
    """Hidden states as an activation that crosses a cut, and as the gradient that comes back over it."""
    pair, width = config.pipeline.cuts[cut].codecs, hidden_BTD.shape[-1]
    integers = {IDS: torch.zeros(hidden_BTD.shape[:2], dtype=torch.int64)}
    sending, receiving = (cut_end(config, cut, device, width, is_sender=one) for one in (True, False))
    there = sending.encode(activation(pair), hidden_BTD, integers, after=Mark())
    receiving.decode(activation(pair), there, integers)
    return there, receiving.encode(gradient(pair), hidden_BTD, {}, after=Mark())

"""Tensors to bytes and back; nothing here is trained."""

from isthmus.codec.base import Key, Payload
from isthmus.codec.chain import Codecs, ReceivingEnd, SendingEnd, cross, receiving_end, sending_end

__all__ = [
    "Codecs",
    "Key",
    "Payload",
    "ReceivingEnd",
    "SendingEnd",
    "cross",
    "receiving_end",
    "sending_end",
]

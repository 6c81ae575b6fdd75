"""Tensors to bytes and back; nothing here is trained."""

from isthmus.codec.base import Key, Payload
from isthmus.codec.ends import Codecs, ReceivingEnd, SendingEnd, receiving_end, sending_end
from isthmus.codec.graph import cross

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

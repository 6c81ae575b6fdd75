"""Tensors to bytes and back; nothing here is trained."""

from isthmus.codec.base import Key, Payload
from isthmus.codec.chain import CodecEnd, Codecs

__all__ = ["CodecEnd", "Codecs", "Key", "Payload"]

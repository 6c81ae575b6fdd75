"""A cut whose payloads cross a link as packets, within one process."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.codec.base import Key, Payload
from isthmus.codec.chain import Codecs
from isthmus.wan.link import Link
from isthmus.wan.memory import MemoryLink
from isthmus.wan.packet import Packet
from quality.cut import CountingReceiver, CountingSender, Cut
from quality.rows import Row


class LinkedSender(CountingSender):
    """A sending end whose payloads leave, and whose gradients come, through a link."""

    link: Link

    def encode(
        self,
        x_ND: Tensor,
        *,
        key: Key,
        ids_N: Tensor | None = None,
        keeps: bool = True,
        learns: bool = True,
    ) -> Payload:
        """Encode, and send."""
        payload = super().encode(x_ND, key=key, ids_N=ids_N, keeps=keeps, learns=learns)
        send(self.link, "forward", payload)
        return payload

    def decode_gradient(self, payload: Payload, *, key: Key, num_rows: int) -> Tensor:
        """Decode what has come instead of what is at hand."""
        del payload
        return super().decode_gradient(receive(self.link, "backward"), key=key, num_rows=num_rows)


class LinkedReceiver(CountingReceiver):
    """A receiving end whose payloads come, and whose gradients leave, through a link."""

    link: Link

    def decode(
        self,
        payload: Payload,
        *,
        key: Key,
        num_rows: int,
        ids_N: Tensor | None = None,
        keeps: bool = True,
    ) -> Tensor:
        """Decode what has come instead of what is at hand."""
        del payload
        arrived = receive(self.link, "forward")
        return super().decode(arrived, key=key, num_rows=num_rows, ids_N=ids_N, keeps=keeps)

    def encode_gradient(self, g_ND: Tensor, *, key: Key, keeps: bool = True) -> Payload:
        """Encode, and send."""
        payload = super().encode_gradient(g_ND, key=key, keeps=keeps)
        send(self.link, "backward", payload)
        return payload


def send(link: Link, stream: str, payload: Payload) -> None:
    """A payload as a packet."""
    link.send(stream, Packet({"parts": len(payload)}, [part.numpy().tobytes() for part in payload]))


def receive(link: Link, stream: str) -> Payload:
    """The next payload of a stream."""
    buffers = link.receive(stream).buffers
    return tuple(torch.from_numpy(np.frombuffer(one, dtype=np.uint8).copy()) for one in buffers)


class LinkedCut(Cut):
    """A cut whose ends are joined by a link."""

    def __init__(self, row: Row, *, wan: MemoryLink, **settings: Any) -> None:
        self._wan = wan
        super().__init__(row, **settings)

    def _ends(self, codecs: Codecs, device: torch.device) -> tuple[CountingSender, CountingReceiver]:
        sender, receiver = LinkedSender(codecs, device=device), LinkedReceiver(codecs, device=device)
        sender.link, receiver.link = self._wan.end("east"), self._wan.end("west")
        return sender, receiver

"""A cut inside one process: bottleneck and codecs of a row, in the graph, with every byte counted.

`quality.crossing.cross` equals a real cut bit for bit, so many trainings can share one machine.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isthmus.codec.base import Key, Payload
from isthmus.codec.chain import CodecEnd, Codecs
from isthmus.job.codec import BottleneckSpec, parse_codec
from isthmus.model.bottleneck import Down, Up
from isthmus.wan.packet import Packet, pack
from quality.crossing import cross
from quality.rows import Row

FLOAT32_BYTES = 4
_ID_BYTES = 2
_EVALUATION_STEP = 1_000_000_000
"""Keys of evaluation begin here, so that no training step shares one."""


@dataclass(slots=True)
class Traffic:
    """What has crossed in the steady state, headers included; `elements` are those of the hidden states."""

    forward_bytes: int = 0
    backward_bytes: int = 0
    elements: int = 0
    messages: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.forward_bytes + other.forward_bytes,
            self.backward_bytes + other.backward_bytes,
            self.elements + other.elements,
            self.messages + other.messages,
        )


class CountingSender(CodecEnd):
    """A sending end that adds up what it sends."""

    traffic: Traffic

    def encode(
        self,
        x_ND: Tensor,
        *,
        key: Key,
        ids_N: Tensor | None = None,
        keeps: bool = True,
        learns: bool = True,
    ) -> Payload:
        """As the end does."""
        payload = super().encode(x_ND, key=key, ids_N=ids_N, keeps=keeps, learns=learns)
        if keeps:
            self.traffic.forward_bytes += packet_bytes(*(part.numel() for part in payload))
        return payload


class CountingReceiver(CodecEnd):
    """A receiving end that adds up what it sends back."""

    traffic: Traffic

    def encode_gradient(self, g_ND: Tensor, *, key: Key, keeps: bool = True) -> Payload:
        """As the end does."""
        payload = super().encode_gradient(g_ND, key=key, keeps=keeps)
        self.traffic.backward_bytes += packet_bytes(*(part.numel() for part in payload))
        return payload


class Cut(nn.Module):
    """One cut of a model, as a row of the comparison has it."""

    def __init__(
        self,
        row: Row,
        *,
        width: int,
        vocabulary_size: int,
        num_warmup_steps: int,
        seed: int,
        needs_ids: bool,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._num_warmup_steps = num_warmup_steps if row.shrink else 0
        self._is_raw = row.is_exact
        # Whether the receiver has ids in any case, for its own masks and labels, or only for the anchors.
        self._needs_ids = needs_ids or row.shrink > 0 or "anchor=tokens" in row.forward
        self.down: Down | None = None
        self.up: Up | None = None
        if row.shrink:
            spec = BottleneckSpec(rank=width // row.shrink, num_warmup_steps=num_warmup_steps)
            self.down = Down(spec, width=width, vocabulary_size=vocabulary_size, seed=seed)
            self.up = Up(spec, width=width, vocabulary_size=vocabulary_size)
        codecs = Codecs(
            forward=parse_codec(row.forward),
            backward=parse_codec(row.backward),
            width=width // max(row.shrink, 1),
            seed=seed,
        )
        self._sending, self._receiving = self._ends(codecs, device)
        self.traffic = self._sending.traffic = self._receiving.traffic = Traffic()

    def forward(
        self,
        h_BTD: Tensor,
        ids_BT: Tensor,
        *,
        step: int,
        rows_N: Tensor | None = None,
        is_codec_on: bool = True,
    ) -> Tensor:
        """What arrives behind the cut; `rows_N` are the places of tokens among the padding."""
        if self.training and step < self._num_warmup_steps:
            return self._warm_up(h_BTD, ids_BT, step=step, rows_N=rows_N)
        z_BTR = h_BTD if self.down is None else self.down(h_BTD, ids_BT)
        if is_codec_on and not self._is_raw:
            z_BTR = self._cross(z_BTR, ids_BT, step=step, rows_N=rows_N)
        if self.training:
            self._count(h_BTD, rows_N)
        return z_BTR if self.up is None else self.up(z_BTR, ids_BT)

    def _ends(self, codecs: Codecs, device: torch.device) -> tuple[CountingSender, CountingReceiver]:
        return CountingSender(codecs, device=device), CountingReceiver(codecs, device=device)

    def _warm_up(self, h_BTD: Tensor, ids_BT: Tensor, *, step: int, rows_N: Tensor | None) -> Tensor:
        if self.down is None or self.up is None:
            return h_BTD
        mask_BT = None
        if rows_N is not None:
            mask_BT = torch.zeros_like(ids_BT).flatten().index_fill(0, rows_N, 1).view_as(ids_BT)
        self.down.observe(h_BTD, ids_BT, mask_BT)
        if step == self._num_warmup_steps - 1:
            self.up.begin(self.down.begin())
        return h_BTD

    def _cross(self, z_BTR: Tensor, ids_BT: Tensor, *, step: int, rows_N: Tensor | None) -> Tensor:
        """Only tokens cross; the padding arrives as zeros."""
        key = Key(step=step if self.training else _EVALUATION_STEP + step, microbatch=0)
        z_MR, ids_M = z_BTR.flatten(0, 1), ids_BT.flatten()
        with torch.autocast(z_BTR.device.type, enabled=False):
            z_NR = z_MR if rows_N is None else z_MR[rows_N]
            arrived_NR = cross(
                z_NR.float(),
                sending=self._sending,
                receiving=self._receiving,
                key=key,
                ids=ids_M if rows_N is None else ids_M[rows_N],
            )
            if rows_N is None:
                return arrived_NR.view_as(z_BTR)
            return (
                torch.zeros_like(z_MR, dtype=torch.float32).index_copy(0, rows_N, arrived_NR).view_as(z_BTR)
            )

    def _count(self, h_BTD: Tensor, rows_N: Tensor | None) -> None:
        num_rows = h_BTD.shape[:-1].numel() if rows_N is None else len(rows_N)
        self.traffic.messages += 1
        self.traffic.elements += num_rows * h_BTD.shape[-1]
        if self._needs_ids:
            self.traffic.forward_bytes += num_rows * _ID_BYTES
        if self._is_raw:
            raw_bytes = packet_bytes(num_rows * h_BTD.shape[-1] * FLOAT32_BYTES)
            self.traffic.forward_bytes += raw_bytes
            self.traffic.backward_bytes += raw_bytes


def packet_bytes(*sizes: int) -> int:
    """What buffers of these sizes take on the link: themselves, their alignment, and the packet's header."""
    header = {"step": 1000, "microbatch": 10, "sent_s": 1234.567891234, "crossing": ["float32", [8192, 512]]}
    return pack(Packet(header, [bytes(size) for size in sizes])).num_bytes

"""What must hold of the kernels wherever they run.

TRITON_INTERPRET=1 python -m tests.codec.fused_checks     checks it on the host, in Triton's interpreter
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from isthmus.codec.base import CodedMessage, Coder, CoderSite, Key, Memory, Payload
from isthmus.codec.chain import build_coder
from isthmus.codec.kernels import FusedIntegerCoder
from isthmus.job import parse_codec
from isthmus.job.codec_steps import Integers
from tests.codec.cuts import CPU, activations, noise

TEXTS: Final = ("int8", "int4", "rotate | int8", "rotate | int4")
WIDTH: Final = 1024
MESSAGE: Final = CodedMessage(key=Key(step=3, microbatch=1), seed=0x5DEECE66D1234567)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The coder of a text by kernels, and by torch."""

    fused: Coder
    plain: Coder
    bits: int


def make_pair(text: str) -> Pair:
    """Both coders, on whatever device their tensors are."""
    steps = parse_codec(text).steps
    plain = build_coder(steps, CoderSite(width=WIDTH, device=CPU, memory=Memory()))
    integers = steps[-1]
    assert isinstance(integers, Integers)
    assert integers.group is not None
    fused = FusedIntegerCoder(integers, group=integers.group, rotates=len(steps) > 1, plain=plain)
    return Pair(fused=fused, plain=plain, bits=integers.bits)


def codes_of(payload: Payload, bits: int) -> Tensor:
    """The codes in some order."""
    signed = payload[1].view(torch.int8).int()
    return signed if bits == 8 else torch.stack([((signed + 8) & 15) - 8, (signed + 8) >> 4])


def scales_of(payload: Payload) -> Tensor:
    """The bits of the scales."""
    return payload[0].view(torch.int16).int()


def assert_nearly_same(fused: Payload, plain: Payload, bits: int) -> None:
    """Sums in another order move few elements over an edge, and none by more than one code."""
    for mine, other, share in (
        (scales_of(fused), scales_of(plain), 0.01),
        (codes_of(fused, bits), codes_of(plain, bits), 0.0005),
    ):
        difference = (mine - other).abs()
        assert int(difference.max()) <= 1
        assert float((difference > 0).float().mean()) <= share, float((difference > 0).float().mean())


def check_bytes(device: torch.device) -> None:
    for text in TEXTS:
        pair = make_pair(text)
        x_ND = activations(13, WIDTH).to(device)  # noqa: N806
        assert_nearly_same(pair.fused.encode(x_ND, MESSAGE), pair.plain.encode(x_ND, MESSAGE), pair.bits)


def check_groups(device: torch.device) -> None:
    for text in ("int4(group=8)", "rotate | int4(group=128)", "rotate | int8(group=256)"):
        pair = make_pair(text)
        x_ND = noise(3, WIDTH).to(device)  # noqa: N806
        payload = pair.fused.encode(x_ND, MESSAGE)
        assert_nearly_same(payload, pair.plain.encode(x_ND, MESSAGE), pair.bits)
        arrived = pair.fused.decode(iter(payload), (3, WIDTH), MESSAGE)
        torch.testing.assert_close(arrived, pair.plain.decode(iter(payload), (3, WIDTH), MESSAGE))


def check_each_decodes_the_others_bytes(device: torch.device) -> None:
    for text in TEXTS:
        pair = make_pair(text)
        x_ND = noise(5, WIDTH).to(device)  # noqa: N806
        for sender in (pair.fused, pair.plain):
            payload = sender.encode(x_ND, MESSAGE)
            by_fused, by_plain = (
                one.decode(iter(payload), (5, WIDTH), MESSAGE) for one in (pair.fused, pair.plain)
            )
            assert float((by_fused - by_plain).norm() / by_plain.norm()) < 1e-6
            assert float((by_fused - x_ND).norm() / x_ND.norm()) < (0.02 if pair.bits == 8 else 0.2)


def check_any_bytes_decode(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    for text in ("int8", "int4"):
        pair = make_pair(text)
        codes = torch.randint(0, 256, (5 * WIDTH * pair.bits // 8,), generator=generator, dtype=torch.uint8)
        scales = torch.randint(0, 256, (5 * WIDTH // 64 * 2,), generator=generator, dtype=torch.uint8)
        parts = (scales.to(device), codes.to(device))
        by_fused, by_plain = (
            one.decode(iter(parts), (5, WIDTH), MESSAGE) for one in (pair.fused, pair.plain)
        )
        torch.testing.assert_close(by_fused, by_plain, rtol=0, atol=0, equal_nan=True)


def check_numbers_of_rows(device: torch.device) -> None:
    for num_rows in (0, 1, 3, 4):
        pair = make_pair("rotate | int4")
        x_ND = noise(num_rows, WIDTH).to(device)  # noqa: N806
        payload = pair.fused.encode(x_ND, MESSAGE)
        expected = pair.plain.encode(x_ND, MESSAGE)
        assert [part.shape for part in payload] == [part.shape for part in expected]
        arrived = pair.fused.decode(iter(expected), (num_rows, WIDTH), MESSAGE)
        torch.testing.assert_close(arrived, pair.plain.decode(iter(expected), (num_rows, WIDTH), MESSAGE))


def check_what_is_not_finite(device: torch.device) -> None:
    x_ND = noise(6, WIDTH)  # noqa: N806
    places = {(0, 0): math.nan, (1, 3): math.inf, (1, 4): -math.inf, (5, WIDTH - 1): -math.nan}
    for place, value in places.items():
        x_ND[place] = value
    x_ND = x_ND.to(device)  # noqa: N806
    for text in ("int8", "int4", "int4(stochastic)"):
        pair = make_pair(text)
        arrived = pair.fused.decode(iter(pair.fused.encode(x_ND, MESSAGE)), (6, WIDTH), MESSAGE)
        for mark in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(mark(arrived), mark(x_ND))
        assert bool((arrived[0, 1:64] == 0).all() and (arrived[0, 64:] != 0).any())
    pair = make_pair("rotate | int4")
    arrived = pair.fused.decode(iter(pair.fused.encode(x_ND, MESSAGE)), (6, WIDTH), MESSAGE)
    is_hit = ~x_ND.isfinite().view(6, -1, 256).all(dim=2)
    assert torch.equal(~arrived.isfinite().view(6, -1, 256).any(dim=2), is_hit)


def check_zeros_and_extremes(device: torch.device) -> None:
    for text in ("rotate | int8", "int4(stochastic)"):
        pair = make_pair(text)
        for value in (0.0, 1e-40, 1.0, 1e37):
            x_ND = torch.full((3, WIDTH), value, device=device)  # noqa: N806
            x_ND[:, ::2] *= -1
            arrived = pair.fused.decode(iter(pair.fused.encode(x_ND, MESSAGE)), (3, WIDTH), MESSAGE)
            assert float((arrived - x_ND).abs().max()) <= 0.16 * value + 1e-36
            assert value or not arrived.any()


def check_stochastic_rounding_is_unbiased(device: torch.device) -> None:
    num_rows = 256
    x_D = noise(1, 512).to(device)  # noqa: N806
    for text in ("int8(stochastic)", "rotate | int4(stochastic)"):
        pair = make_pair(text)
        payload = pair.fused.encode(x_D.expand(num_rows, 512), MESSAGE)
        arrived = pair.plain.decode(iter(payload), (num_rows, 512), MESSAGE)
        error_D = arrived.mean(dim=0) - x_D[0]  # noqa: N806
        deviation_D = arrived.std(dim=0) / math.sqrt(num_rows)  # noqa: N806
        assert float(error_D.abs().max()) <= 5 * float(deviation_D.max())
        assert 0.8 < float(error_D.norm() / deviation_D.norm()) < 1.2


def check_randomness_is_of_the_message(device: torch.device) -> None:
    coder = make_pair("int4(stochastic)").fused
    x_ND = noise(3, WIDTH).to(device)  # noqa: N806
    first, again = coder.encode(x_ND, MESSAGE), coder.encode(x_ND, MESSAGE)
    other = coder.encode(x_ND, MESSAGE.sub(1))
    assert torch.equal(first[1], again[1])
    assert torch.equal(first[0], other[0])
    assert float((first[1] != other[1]).float().mean()) > 0.2


def check_half_precision_needs_no_cast(device: torch.device) -> None:
    coder = make_pair("rotate | int8").fused
    x_ND = noise(5, WIDTH).to(device, torch.bfloat16)  # noqa: N806
    for part, of_cast in zip(coder.encode(x_ND, MESSAGE), coder.encode(x_ND.float(), MESSAGE), strict=True):
        assert torch.equal(part, of_cast)


def check_other_widths_are_left_to_torch(device: torch.device) -> None:
    for text, width in (("rotate | int4", 768), ("int8", 300), ("int4(stochastic)", 256)):
        pair = make_pair(text)
        x_ND = noise(3, width).to(device)  # noqa: N806
        payload, expected = (one.encode(x_ND, MESSAGE) for one in (pair.fused, pair.plain))
        assert all(torch.equal(mine, other) for mine, other in zip(payload, expected, strict=True))
        arrived, wanted = (one.decode(iter(payload), (3, width), MESSAGE) for one in (pair.fused, pair.plain))
        assert torch.equal(arrived, wanted)


CHECKS: Final[dict[str, Callable[[torch.device], None]]] = {
    name: value for name, value in list(globals().items()) if name.startswith("check_")
}

if __name__ == "__main__":
    for check in CHECKS.values():
        check(CPU)

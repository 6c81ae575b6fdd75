"""Integers: error bounds, unbiased rounding, levels, and what is not finite."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.codec.formats import pack_codes, unpack_codes
from isthmus.job import parse_codec
from isthmus.plan.codecs import Pair
from isthmus.plan.types import MessageKind
from isthmus.wan.packet import pack
from tests.codec.cuts import KEY, activations, make_cut, noise
from tests.train.chain import CutCase, config
from tests.train.wires import Joined

LAST_CODE = {8: 127, 4: 7}
# How much coarser steps are than the largest element asks for: room for a bf16 scale, rounded either way.
SLACK = 1 + 2**-6


def bound(x_ND: Tensor, bits: int, group: int | None) -> Tensor:  # noqa: N803
    """One step of each element's group."""
    width = x_ND.shape[1]
    if group is None:
        return x_ND.abs().max().expand(x_ND.shape) * SLACK / LAST_CODE[bits]
    pieces = torch.split(x_ND, group, dim=1)
    largest = [piece.abs().amax(dim=1, keepdim=True).expand(piece.shape) for piece in pieces]
    return torch.cat(largest, dim=1)[:, :width] * SLACK / LAST_CODE[bits]


@settings(deadline=None, max_examples=80)
@given(
    bits=st.sampled_from([4, 8]),
    group=st.none() | st.integers(8, 80),
    shape=st.tuples(st.integers(1, 20), st.integers(1, 200)),
    exponent=st.integers(-30, 37),
    is_stochastic=st.booleans(),
)
def test_errors_are_within_half_a_step_or_one(
    bits: int, group: int | None, shape: tuple[int, int], exponent: int, is_stochastic: bool
) -> None:
    inside = ["stochastic"] * is_stochastic + ["scale=tensor" if group is None else f"group={group}"]
    x_ND = noise(*shape, scale=10.0**exponent / 5)  # noqa: N806
    _, arrived = make_cut(f"int{bits}({', '.join(inside)})", width=shape[1]).send(x_ND)
    step_ND = bound(x_ND, bits, group)  # noqa: N806
    assert bool(((arrived - x_ND).abs() <= step_ND * (1 if is_stochastic else 0.5)).all())


@pytest.mark.parametrize("text", ["int8", "int4", "int2", "int8(scale=tensor)", "rotate | int4(stochastic)"])
def test_zeros_stay_zeros(text: str) -> None:
    _, arrived = make_cut(text, width=70).send(torch.zeros(3, 70))
    assert torch.equal(arrived, torch.zeros(3, 70))


@pytest.mark.parametrize("text", ["int8", "int4"])
def test_numbers_near_nothing_arrive_near_nothing(text: str) -> None:
    x_ND = noise(3, 70, scale=1e-40)  # noqa: N806
    _, arrived = make_cut(text, width=70).send(x_ND)
    assert float((arrived - x_ND).abs().max()) < 1e-36


@pytest.mark.parametrize("text", ["int8(stochastic)", "int4(stochastic)", "rotate | int4(stochastic)"])
def test_stochastic_rounding_is_unbiased(text: str) -> None:
    x_D = noise(1, 64)  # noqa: N806
    num_rows = 20_000
    _, arrived = make_cut(text, width=64).send(x_D.expand(num_rows, 64))
    error_D = arrived.mean(dim=0) - x_D[0]  # noqa: N806
    deviation_D = arrived.std(dim=0) / math.sqrt(num_rows)  # noqa: N806
    assert bool((error_D.abs() <= 5 * deviation_D + 1e-6).all())


def test_rounding_to_the_nearest_is_biased_where_stochastic_is_not() -> None:
    x_D = noise(1, 64)  # noqa: N806
    _, arrived = make_cut("int4", width=64).send(x_D.expand(1000, 64))
    assert float((arrived.mean(dim=0) - x_D[0]).abs().max()) > 0.05


def test_the_largest_element_never_wraps_around() -> None:
    for bits in (4, 8):
        x_ND = torch.full((4000, 64), 1.0)  # noqa: N806
        x_ND[:, ::2] = -1.0
        _, arrived = make_cut(f"int{bits}(stochastic)", width=64).send(x_ND)
        assert float((arrived - x_ND).abs().max()) < 1.1 / LAST_CODE[bits]


def test_two_bits_lose_what_theory_says() -> None:
    x_ND = noise(400, 768)  # noqa: N806
    _, arrived = make_cut("int2(group=768)", width=768).send(x_ND)
    loss = float((arrived - x_ND).square().mean() / x_ND.square().mean())
    assert loss == pytest.approx(0.1175, abs=0.002)


def test_groups_keep_outliers_to_themselves() -> None:
    x_ND = noise(64, 256)  # noqa: N806
    x_ND[:, 0] *= 1000
    errors = {}
    for text in ("int8", "int8(scale=tensor)"):
        _, arrived = make_cut(text, width=256).send(x_ND)
        errors[text] = float((arrived - x_ND)[:, 64:].abs().mean())
    assert errors["int8"] * 50 < errors["int8(scale=tensor)"]


@pytest.mark.parametrize("text", ["int8", "int4", "int2", "int8(scale=tensor)", "int4(stochastic)"])
def test_what_is_not_finite_arrives_as_such(text: str) -> None:
    x_ND = noise(4, 130)  # noqa: N806
    strangers = {(0, 0): math.nan, (1, 3): math.inf, (1, 4): -math.inf, (3, 129): math.nan}
    for place, value in strangers.items():
        x_ND[place] = value
    _, arrived = make_cut(text, width=130).send(x_ND)
    assert torch.equal(arrived.isnan(), x_ND.isnan())
    assert torch.equal(arrived.isposinf(), x_ND.isposinf())
    assert torch.equal(arrived.isneginf(), x_ND.isneginf())
    if "tensor" in text:
        return
    assert bool((arrived[0, 1:64] == 0).all())
    clean, alone = noise(4, 130), make_cut(text, width=130)
    _, expected = alone.send(clean)
    assert torch.equal(arrived[2], expected[2])


@settings(deadline=None)
@given(
    bits=st.sampled_from([8, 4, 2]), shape=st.tuples(st.integers(1, 6), st.integers(1, 20)), data=st.data()
)
def test_codes_pack_and_unpack(bits: int, shape: tuple[int, int], data: st.DataObject) -> None:
    lowest, highest = {8: (-127, 127), 4: (-7, 7), 2: (0, 3)}[bits]
    count = shape[0] * shape[1]
    values = data.draw(st.lists(st.integers(lowest, highest), min_size=count, max_size=count))
    codes = torch.tensor(values, dtype=torch.float32).view(shape)
    packed = pack_codes(codes, bits)
    assert packed.shape == (shape[0], -(-shape[1] * bits // 8))
    assert torch.equal(unpack_codes(packed, bits, width=shape[1]), codes)


def test_a_rotation_tames_outliers() -> None:
    x_ND = activations(128, 768)  # noqa: N806
    errors = {}
    for text in ("int4", "rotate | int4"):
        _, arrived = make_cut(text, width=768).send(x_ND)
        errors[text] = float((arrived - x_ND).norm() / x_ND.norm())
    assert errors["rotate | int4"] < errors["int4"]


@pytest.mark.parametrize(("text", "most"), [("rotate | int8", 8.4), ("rotate | int4", 4.35)])
def test_bits_on_the_wire(text: str, most: float) -> None:
    payload, _ = make_cut(text, width=768).send(noise(256, 768))
    num_bits = 8 * sum(part.numel() for part in payload) / (256 * 768)
    assert num_bits == parse_codec(text).bits_per_element(256, 768)
    assert num_bits <= most


@pytest.mark.parametrize(("text", "most"), [("rotate | int8", 8.4), ("rotate | int4", 4.35)])
def test_bits_on_the_wire_with_all_that_is_around_them(text: str, most: float) -> None:
    codec = parse_codec(text)
    agreed = config(2, 128, cuts=(CutCase(codecs=Pair(forward=codec, backward=codec)),))
    ids = torch.arange(256).view(1, 256) + 150_000
    hidden = noise(256, 768).view(1, 256, 768)
    down = {"ids": ids, "labels": ids, "targets": torch.tensor([255, 524_288]), "hidden": hidden}
    place: dict[str, Any] = {"step": 123_456, "item": 127}
    with Joined(agreed, hidden_width=768) as wires:
        _, stream, activation = wires.before.send(
            MessageKind.ACTIVATION, down, codecs=(("hidden", text), ("gradient", text)), **place
        )
        wires.behind.receive(stream, activation)
        _, _, gradient = wires.behind.send(
            MessageKind.GRADIENT, {"hidden": hidden}, codecs=(("hidden", text),), **place
        )
    for packet in (activation, gradient):
        num_bytes = pack(packet).num_bytes
        assert num_bytes > 256 * 768 * codec.bits_per_element(256, 768) / 8
        assert 8 * num_bytes / (256 * 768) <= most


def test_the_bytes_of_a_row_depend_on_that_row_alone() -> None:
    x_ND = noise(100, 768)  # noqa: N806
    whole = make_cut("rotate | int4", width=768).sending.encode(x_ND, key=KEY)
    alone = make_cut("rotate | int4", width=768).sending.encode(x_ND[97:], key=KEY)
    for part, of_rows in zip(whole, alone, strict=True):
        assert torch.equal(part.view(100, -1)[97:].flatten(), of_rows)

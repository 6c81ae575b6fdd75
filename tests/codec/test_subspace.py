"""Rows and gradients in a subspace: algebra, basis versions, anchors, state, and hostile bytes."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.codec.base import Key, Payload
from isthmus.codec.chain import CodecEnd, Codecs
from isthmus.codec.low_rank import Observed, principal_axes, refined_axes, slots_of
from isthmus.errors import FrameError, UserError
from isthmus.job.codec import CodecSpec, gradient_codec, parse_codec
from isthmus.job.codec_steps import NUM_ANCHOR_SLOTS, CodeState, num_due
from isthmus.plan.codecs import Crossing, Pair

CPU = torch.device("cpu")
WIDTH = 24


@dataclass
class Ends:
    """Both ends of a cut, and rows to send over it: of a few strong directions, a mean, and token means."""

    codecs: Codecs
    sending: CodecEnd
    receiving: CodecEnd
    seed: int = 0
    token_share: float = 1.0

    def rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        self.seed += 1
        fixed = torch.Generator().manual_seed(-1)
        basis = torch.linalg.qr(torch.randn(self.codecs.width, self.codecs.width, generator=fixed)).Q
        strength = torch.arange(1, self.codecs.width + 1) ** -1.5
        token = torch.randn(50, self.codecs.width, generator=fixed)
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(0, 50, (num_rows,), generator=generator)
        drawn = torch.randn(num_rows, self.codecs.width, generator=generator)
        return (drawn * strength) @ basis.T + 5.0 + self.token_share * token[ids], ids

    def forward(
        self, x: Tensor, ids: Tensor, key: Key, *, keeps: bool = True, learns: bool | None = None
    ) -> tuple[Payload, Tensor]:
        learns = keeps if learns is None else learns
        payload = self.sending.encode(x, key=key, ids_N=ids, keeps=keeps, learns=learns)
        there = self.receiving.decode(payload, key=key, num_rows=len(x), ids_N=ids, keeps=keeps)
        return payload, there

    def backward(self, g: Tensor, key: Key) -> Tensor:
        payload = self.receiving.encode_gradient(g, key=key)
        return self.sending.decode_gradient(payload, key=key, num_rows=len(g))

    def train(self, steps: range, *, num_rows: int = 64) -> list[Tensor]:
        seen = []
        for step in steps:
            for microbatch in range(2):
                key = Key(step=step, microbatch=microbatch)
                x, ids = self.rows(num_rows)
                payload, there = self.forward(x, ids, key)
                back = self.backward(x.flip(0), key)
                seen += [*payload, there, back]
        return seen


def ends(forward: str, backward: str = "raw", *, width: int = WIDTH) -> Ends:
    codecs = Codecs(forward=parse_codec(forward), backward=parse_codec(backward), width=width, seed=3)
    return Ends(codecs, CodecEnd(codecs, device=CPU), CodecEnd(codecs, device=CPU))


def key(step: int, microbatch: int = 0) -> Key:
    return Key(step=step, microbatch=microbatch)


def sizes(payload: Payload) -> tuple[int, ...]:
    return tuple(part.numel() for part in payload)


def relative_error(x: Tensor, there: Tensor) -> float:
    return float((x - there).norm() / x.norm())


@settings(deadline=None, max_examples=30)
@given(
    num_rows=st.integers(1, 9),
    width=st.integers(1, 40),
    rank=st.integers(1, 40),
    seed=st.integers(0, 2**16),
)
def test_gradients_pass_through_the_exact_adjoint(num_rows: int, width: int, rank: int, seed: int) -> None:
    cut = ends(f"subspace({rank})", width=width)
    generator = torch.Generator().manual_seed(seed)
    x, y, g = (torch.randn(num_rows, width, generator=generator) for _ in range(3))
    ids = torch.zeros(num_rows, dtype=torch.long)
    _, there_x = cut.forward(x, ids, key(0))
    _, there_y = cut.forward(y, ids, key(0, 1))
    linear = (there_x - there_y).double()
    back = cut.backward(g, key(0)).double()
    cut.backward(g, key(0, 1))
    forward_product = (linear * g).sum()
    assert torch.isclose(forward_product, ((x - y) * back).sum(), rtol=1e-3, atol=1e-4)


@settings(deadline=None, max_examples=40)
@given(
    format_text=st.sampled_from(
        [
            "",
            "| fp16",
            "| int8",
            "| int4",
            "| int2",
            "| int4(stochastic)",
            "| rotate | int4",
            "| int8(group=8)",
        ]
    ),
    anchor=st.sampled_from(["none", "tokens"]),
    backward=st.sampled_from(["raw", "bf16", "int4(stochastic)", "rotate | int8"]),
    num_rows=st.integers(0, 12),
    width=st.integers(1, 40),
    rank=st.integers(1, 40),
)
def test_sizes_are_as_foretold(
    format_text: str, anchor: str, backward: str, num_rows: int, width: int, rank: int
) -> None:
    cut = ends(f"subspace({rank}, anchor={anchor}) {format_text}", backward, width=width)
    spec = cut.codecs.forward
    for message, keeps, state in [
        (key(0), False, CodeState.FIRST),
        (key(0), True, CodeState.REFRESH),
        (key(0, 1), True, CodeState.STEADY),
        (key(1), False, CodeState.STEADY),
        (key(1), True, CodeState.REFRESH),
    ]:
        x, ids = cut.rows(num_rows)
        payload, there = cut.forward(x, ids, message, keeps=keeps)
        assert sizes(payload) == spec.part_bytes(num_rows, width, state=state)
        assert there.shape == x.shape
        if keeps:
            coded = cut.receiving.encode_gradient(x, key=message)
            expected = gradient_codec(spec, cut.codecs.backward).wire_bytes(num_rows, width)
            assert sum(sizes(coded)) == expected
            assert cut.sending.decode_gradient(coded, key=message, num_rows=num_rows).shape == x.shape


def test_refined_axes_are_the_principal_ones() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2000, 20, generator=generator) * 2.0 ** -torch.arange(20)
    observed = Observed(width=20, tokens=None)
    for start in range(0, 2000, 100):
        observed.add(x[start : start + 100] + 7, torch.zeros(100, dtype=torch.long))
    covariance = observed.covariance()
    exact = principal_axes(covariance, rank=4)
    for known in (None, exact):
        axes = refined_axes(covariance, rank=4, start_DR=known)
        assert torch.allclose(axes.T @ axes, torch.eye(4), atol=1e-5)
        assert torch.allclose((axes.T @ exact).abs(), torch.eye(4), atol=1e-2)


def test_error_falls_to_what_the_subspace_leaves() -> None:
    cut = ends("subspace(6)")
    cut.train(range(9))
    x, ids = cut.rows(400)
    _, there = cut.forward(x, ids, key(9))
    centred = x - x.mean(dim=0)
    left = torch.linalg.svdvals(centred)[6:].square().sum().sqrt() / x.norm()
    assert relative_error(x, there) < 1.15 * left.item()


def test_integers_of_coordinates_lose_little_beside_what_the_subspace_leaves() -> None:
    errors = []
    for text in ("subspace(6)", "subspace(6) | int4"):
        cut = ends(text)
        cut.train(range(9))
        x, ids = cut.rows(400)
        _, there = cut.forward(x, ids, key(9))
        errors.append(relative_error(x, there))
    assert errors[0] < errors[1] < 1.1 * errors[0]


def test_a_first_message_of_fewer_rows_than_directions_does_no_harm_to_the_next() -> None:
    cut = ends("subspace(16) | int4")
    cut.forward(*cut.rows(3), key(0))
    x, ids = cut.rows(64)
    _, there = cut.forward(x, ids, key(0, 1))
    mean = x.mean(dim=0)
    assert relative_error(x - mean, there - mean) < 0.9


def test_anchors_take_off_what_the_token_says() -> None:
    errors = []
    for anchor in ("none", "tokens"):
        cut = ends(f"subspace(3, anchor={anchor}) | int4")
        cut.train(range(9))
        x, ids = cut.rows(400)
        _, there = cut.forward(x, ids, key(9))
        errors.append(relative_error(x, there))
    assert errors[1] < 0.5 * errors[0]


def test_versions_come_with_the_first_message_then_at_doubling_ages_then_regularly() -> None:
    due = [step for step in range(1, 34) if num_due(step, every=10) > num_due(step - 1, every=10)]
    assert due == [1, 2, 4, 8, 10, 20, 30]
    assert [num_due(step, every=1) for step in range(4)] == [0, 1, 2, 3]


def test_a_gradient_takes_the_basis_of_its_activation_though_a_newer_one_has_come() -> None:
    cut = ends("subspace(4)")
    x, ids = cut.rows(32)
    first, _ = cut.forward(x, ids, key(0))
    g = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
    early = cut.receiving.encode_gradient(g, key=key(0))
    later = []
    for step in (1, 2):
        y, ids = cut.rows(32)
        payload, _ = cut.forward(y, ids, key(step))
        later.append(payload)
    assert len({sizes(first), *map(sizes, later)}) == 1
    back = cut.sending.decode_gradient(early, key=key(0), num_rows=32)
    again = ends("subspace(4)")
    again.forward(x, ids, key(0))
    assert torch.equal(back, again.backward(g, key(0)))
    assert not torch.equal(back, cut.backward(g, key(2)))


def test_a_gradient_without_its_activation_is_refused() -> None:
    cut = ends("subspace(4)")
    with pytest.raises(FrameError, match="whose activation has not passed"):
        cut.receiving.encode_gradient(torch.zeros(3, WIDTH), key=key(0))


def test_evaluation_teaches_nothing() -> None:
    cut, same = (ends("subspace(4, anchor=tokens) | int4") for _ in range(2))
    for one in (cut, same):
        one.train(range(2))
    for microbatch in range(3):
        x, ids = cut.rows(64)
        cut.forward(x, ids, key(2, microbatch), keeps=False)
    same.seed = cut.seed
    for got, expected in zip(cut.train(range(2, 5)), same.train(range(2, 5)), strict=True):
        assert torch.equal(got, expected)


def test_behind_frozen_layers_it_learns_without_waiting_for_gradients() -> None:
    cut = ends("subspace(4, anchor=tokens) | int4")
    sizes = []
    for step in range(8):
        x, ids = cut.rows(64)
        payload, there = cut.forward(x, ids, key(step), keeps=False, learns=True)
        sizes.append(sum(part.numel() for part in payload))
    assert sizes[-1] < sizes[0] / 4
    assert relative_error(x, there) < 0.5
    with pytest.raises(FrameError, match="whose activation has not passed here"):
        cut.backward(x, key(7))


def test_an_evaluation_before_the_first_version_crosses_almost_exactly() -> None:
    cut = ends("subspace(2) | int4")
    x, ids = cut.rows(16)
    _, there = cut.forward(x, ids, key(0), keeps=False)
    assert relative_error(x, there) < 0.01


def test_the_preview_is_what_arrives() -> None:
    cut = ends("subspace(4, anchor=tokens) | int4(stochastic)")
    for step in range(3):
        x, ids = cut.rows(16)
        payload = cut.sending.encode(x, key=key(step), ids_N=ids)
        preview = cut.sending.decode(payload, key=key(step), num_rows=16, ids_N=ids, keeps=False)
        there = cut.receiving.decode(payload, key=key(step), num_rows=16, ids_N=ids)
        assert torch.equal(preview, there)


@pytest.mark.parametrize(
    "forward", ["subspace(4) | int4", "subspace(4, anchor=tokens, every=3) | rotate | int8"]
)
def test_saved_and_restored_it_goes_on_to_the_bit(forward: str) -> None:
    cut, restored = ends(forward, "int4(stochastic)"), ends(forward, "int4(stochastic)")
    cut.train(range(3))
    restored.seed = cut.seed
    restored.sending.load_state_dict(cut.sending.state_dict())
    restored.receiving.load_state_dict(cut.receiving.state_dict())
    for one, other in zip(cut.train(range(3, 8)), restored.train(range(3, 8)), strict=True):
        assert torch.equal(one, other)


def test_a_saved_state_does_not_change_any_more() -> None:
    cut = ends("subspace(4, anchor=tokens) | int4")
    cut.train(range(2))
    state = cut.sending.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    cut.train(range(2, 5))
    assert all(torch.equal(before[name], state[name]) for name in state)


def test_rows_that_are_not_finite_arrive_as_such_and_teach_nothing() -> None:
    cut, clean = ends("subspace(4) | int4"), ends("subspace(4) | int4")
    x, ids = cut.rows(16)
    spoilt = x.clone()
    spoilt[3, 0], spoilt[5, 1] = torch.nan, torch.inf
    x[3], x[5] = x[4], x[4]
    _, there = cut.forward(spoilt, ids, key(0))
    clean.forward(x, ids, key(0))
    assert not there[[3, 5]].isfinite().any()
    assert there[[0, 1, 2, 4]].isfinite().all()
    y, ids = cut.rows(16)
    _, later = cut.forward(y, ids, key(1))
    assert later.isfinite().all()
    back = cut.backward(spoilt, key(0))
    assert not back[3].isfinite().any()
    assert back[[0, 1, 2, 4]].isfinite().all()


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_corrupted_payloads_are_errors_or_give_the_right_shape(data: st.DataObject) -> None:
    cut = ends("subspace(4, anchor=tokens) | int4")
    x, ids = cut.rows(8)
    payload = cut.sending.encode(x, key=key(0), ids_N=ids)
    part = data.draw(st.integers(0, len(payload) - 1))
    bad = [one.clone() for one in payload]
    place = data.draw(st.integers(0, bad[part].numel() - 1))
    bad[part][place] ^= data.draw(st.integers(1, 255))
    if part == 0:
        with pytest.raises(FrameError):
            cut.receiving.decode(tuple(bad), key=key(0), num_rows=8, ids_N=ids)
    else:
        there = cut.receiving.decode(tuple(bad), key=key(0), num_rows=8, ids_N=ids)
        assert there.shape == x.shape


def test_payloads_of_other_sizes_are_refused() -> None:
    cut = ends("subspace(4) | int4")
    x, ids = cut.rows(8)
    payload = cut.sending.encode(x, key=key(0), ids_N=ids)
    for wrong in (
        payload[:1],
        (*payload, payload[0]),
        (payload[0][:-1], payload[1]),
        (payload[1], payload[0]),
    ):
        with pytest.raises(FrameError):
            cut.receiving.decode(wrong, key=key(0), num_rows=8, ids_N=ids)


def test_a_missed_version_is_noticed() -> None:
    cut = ends("subspace(4) | int4")
    x, ids = cut.rows(8)
    cut.sending.encode(x, key=key(0), ids_N=ids)
    steady = cut.sending.encode(x, key=key(0, 1), ids_N=ids)
    with pytest.raises(FrameError, match="a basis version that this end does not have"):
        cut.receiving.decode(steady, key=key(0, 1), num_rows=8, ids_N=ids)
    second = cut.sending.encode(x, key=key(1), ids_N=ids)
    with pytest.raises(FrameError, match="follows one that is missing"):
        cut.receiving.decode(second, key=key(1), num_rows=8, ids_N=ids)


def test_anchors_without_ids_are_refused_in_a_sentence() -> None:
    cut = ends("subspace(4, anchor=tokens)")
    with pytest.raises(UserError, match="needs the token ids at both ends"):
        cut.sending.encode(torch.zeros(2, WIDTH), key=key(0))
    with pytest.raises(FrameError, match="token ids of shape"):
        cut.sending.encode(torch.zeros(2, WIDTH), key=key(0), ids_N=torch.zeros(3))


def test_ids_beyond_the_table_share_its_slots() -> None:
    slots = slots_of(torch.arange(0, 200_000))
    assert torch.equal(slots[:NUM_ANCHOR_SLOTS], torch.arange(NUM_ANCHOR_SLOTS))
    assert slots.min() >= 0
    assert slots.max() < NUM_ANCHOR_SLOTS
    assert len(set(slots[NUM_ANCHOR_SLOTS:].tolist())) > 0.9 * NUM_ANCHOR_SLOTS


def test_sixteen_times_less_than_bf16_with_everything_counted() -> None:
    spec: CodecSpec = parse_codec("subspace(192) | int4")
    assert 32 / spec.bits_per_element(256, 768) > 31


def test_versions_of_a_run_weigh_what_plans_count() -> None:
    cut, num_steps, num_rows = ends("subspace(6, anchor=tokens, every=7) | int4"), 20, 16
    crossing = Crossing(num_rows=num_rows, width=WIDTH, num_steps=num_steps, num_microbatches=2)
    pair = Pair(forward=cut.codecs.forward, backward=cut.codecs.backward)
    sent = 0
    for step in range(num_steps):
        for microbatch in range(2):
            payload, _ = cut.forward(*cut.rows(num_rows), key(step, microbatch))
            sent += sum(sizes(payload))
    foretold = 2 * num_steps * (pair.forward_bytes(crossing) + pair.basis_bytes(crossing))
    assert sent == pytest.approx(foretold)

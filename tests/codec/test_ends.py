"""Both ends of a cut, over all codecs: sizes, shapes, state, and payloads that are not as they should be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isthmus.codec import Key, Payload
from isthmus.errors import FieldError, FrameError, UserError
from isthmus.job import CodecSpec, parse_codec
from isthmus.job.codec import gradient_codec
from isthmus.job.codec_steps import Svd, TopK
from tests.codec.cuts import KEY, activations, make_cut, noise, sizes
from tests.job.strategies import codecs, shares

TEXTS = (
    "raw",
    "fp16",
    "bf16",
    "int8",
    "int8(scale=tensor)",
    "int4",
    "int4(stochastic, group=32)",
    "int2",
    "rotate | int8",
    "center | rotate | int4",
    "feedback(0.9) | center | topk(0.3) | int8",
    "rotate | int4",
    "rotate | int4(stochastic)",
    "rotate | int2(group=128)",
    "topk(0.1) | int8",
    "topk(0.4) | fp16",
    "svd(0.6) | fp16",
    "svd(0.2) | rotate | int4(stochastic)",
    "topk(0.5) | svd(0.5) | int8",
    "svd(0.5) | topk(0.5) | bf16",
    "feedback(0.9) | topk(0.1) | int4",
)

stateless_transforms = (
    st.just(())
    | st.tuples(st.builds(TopK, ratio=shares))
    | st.tuples(st.builds(Svd, ratio=shares))
    | st.tuples(st.builds(TopK, ratio=shares), st.builds(Svd, ratio=shares))
    | st.tuples(st.builds(Svd, ratio=shares), st.builds(TopK, ratio=shares))
)
specs = codecs(stateless_transforms)
shapes = st.tuples(st.integers(0, 40), st.integers(1, 300))


@settings(deadline=None, max_examples=150)
@given(forward=specs, backward=specs, shape=shapes)
def test_sizes_are_as_predicted_and_shapes_are_kept(
    forward: CodecSpec, backward: CodecSpec, shape: tuple[int, int]
) -> None:
    cut = make_cut(forward, backward, width=shape[1])
    sent, arrived = cut.send(noise(*shape))
    sent_back, arrived_back = cut.send_back(noise(*shape, seed=1))
    assert sizes(sent) == forward.part_bytes(*shape)
    assert sizes(sent_back) == gradient_codec(forward, backward).part_bytes(*shape)
    assert arrived.shape == arrived_back.shape == shape
    assert arrived.dtype == arrived_back.dtype == torch.float32
    assert bool(arrived.isfinite().all() and arrived_back.isfinite().all())


@settings(deadline=None, max_examples=100)
@given(spec=specs, shape=shapes, seed=st.integers(0, 2**32))
def test_any_bytes_of_the_right_size_give_the_right_shape(
    spec: CodecSpec, shape: tuple[int, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = tuple(
        torch.randint(256, (size,), dtype=torch.uint8, generator=generator)
        for size in spec.part_bytes(*shape)
    )
    cut = make_cut(spec, spec, width=shape[1])
    assert cut.receiving.decode(parts, key=KEY, num_rows=shape[0]).shape == shape
    assert sizes(cut.receiving.encode_gradient(noise(*shape), key=KEY)) == gradient_codec(
        spec, spec
    ).part_bytes(*shape)


@pytest.mark.parametrize("text", TEXTS)
def test_a_payload_of_the_wrong_size_is_refused(text: str) -> None:
    cut = make_cut(text, width=100)
    parts = cut.sending.encode(noise(20, 100), key=KEY)
    longer = torch.cat([parts[-1], parts[-1][:1]])
    for wrong in ((), parts[:-1], (*parts, parts[0]), (*parts[:-1], parts[-1][:-1]), (*parts[:-1], longer)):
        with pytest.raises(FrameError):
            cut.receiving.decode(wrong, key=KEY, num_rows=20)
    for num_rows in (0, 10, 40, 10**12):
        with pytest.raises(FrameError):
            cut.receiving.decode(parts, key=KEY, num_rows=num_rows)


def test_a_payload_of_other_things_than_bytes_is_refused() -> None:
    cut = make_cut("fp16", width=4)
    with pytest.raises(FrameError, match="other things than bytes"):
        cut.receiving.decode((torch.zeros(16, dtype=torch.int8),), key=KEY, num_rows=2)


@pytest.mark.parametrize("text", ["raw", "fp16", "int8", "int8(scale=tensor)", "svd(0.5)", "subspace(5)"])
@pytest.mark.parametrize("num_skipped", [1, 4, 8])
def test_bytes_at_an_odd_address_are_read_like_others(text: str, num_skipped: int) -> None:
    for shape in ((4, 6), (3, 40), (60, 9), (2, 96)):
        payload, arrived = make_cut(text, width=shape[1]).send(noise(*shape))
        shifted = tuple(torch.cat([part.new_zeros(num_skipped), part])[num_skipped:] for part in payload)
        receiving = make_cut(text, width=shape[1]).receiving
        assert torch.equal(receiving.decode(shifted, key=KEY, num_rows=shape[0]), arrived)


@pytest.mark.parametrize("text", TEXTS)
def test_large_and_small_matrices(text: str) -> None:
    for shape in ((1, 1), (0, 64), (1, 4096), (3000, 130), (1, 3), (5, 1)):
        cut = make_cut(text, width=shape[1])
        payload, arrived = cut.send(noise(*shape))
        assert sum(sizes(payload)) == parse_codec(text).wire_bytes(*shape)
        assert arrived.shape == shape


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_goes_in(text: str, dtype: torch.dtype) -> None:
    cut = make_cut(text, width=64)
    x_ND = noise(8, 64).to(dtype)  # noqa: N806
    _, arrived = cut.send(x_ND)
    _, expected = make_cut(text, width=64).send(x_ND.float())
    assert torch.equal(arrived, expected)


def test_raw_keeps_every_bit_and_copies_none() -> None:
    x_ND = noise(3, 5)  # noqa: N806
    payload, arrived = make_cut("raw", width=5).send(x_ND)
    assert sizes(payload) == (15 * 4,)
    assert payload[0].data_ptr() == x_ND.data_ptr()
    assert torch.equal(arrived, x_ND)


@pytest.mark.parametrize("text", TEXTS)
def test_a_state_restored_continues_bit_for_bit(text: str) -> None:
    one, other = make_cut(text, text, width=96), make_cut(text, text, width=96)
    for step in range(3):
        key = Key(step=step, microbatch=0)
        one.send(activations(40, 96, seed=step), key)
        one.send_back(activations(40, 96, seed=9 + step), key)
    other.sending.load_state_dict(one.sending.state_dict())
    other.receiving.load_state_dict(one.receiving.state_dict())
    for step in range(3, 5):
        key = Key(step=step, microbatch=0)
        x_ND, g_ND = activations(40, 96, seed=step), activations(40, 96, seed=9 + step)  # noqa: N806
        expect_equal(one.send(x_ND, key), other.send(x_ND, key))
        expect_equal(one.send_back(g_ND, key), other.send_back(g_ND, key))


def expect_equal(one: tuple[Payload, Tensor], other: tuple[Payload, Tensor]) -> None:
    (sent, arrived), (sent_too, arrived_too) = one, other
    assert all(map(torch.equal, sent, sent_too))
    assert torch.equal(arrived, arrived_too)


def test_a_state_is_not_shared_with_the_end_it_came_from() -> None:
    cut, other = make_cut("svd(0.5) | fp16", width=30), make_cut("svd(0.5) | fp16", width=30)
    cut.send(noise(40, 30))
    state = {name: tensor.clone() for name, tensor in cut.sending.state_dict().items()}
    other.sending.load_state_dict(cut.sending.state_dict())
    other.send(noise(40, 30, seed=1))
    assert all(torch.equal(tensor, state[name]) for name, tensor in cut.sending.state_dict().items())


def test_a_state_of_another_version_or_codec_is_refused() -> None:
    plain, svd = make_cut("int8", width=30), make_cut("svd(0.5)", width=30)
    svd.send(noise(40, 30))
    with pytest.raises(UserError, match="holds basis of another codec"):
        plain.sending.load_state_dict(svd.sending.state_dict())
    with pytest.raises(UserError, match="version 99"):
        plain.sending.load_state_dict({"version": torch.tensor(99)})


def test_evaluation_changes_nothing() -> None:
    cut = make_cut("svd(0.5) | fp16", width=30)
    cut.send(noise(40, 30))
    before = cut.sending.state_dict()
    payload = cut.sending.encode(noise(40, 30, seed=5), key=KEY, keeps=False, learns=False)
    cut.receiving.decode(payload, key=KEY, num_rows=40, keeps=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in cut.sending.state_dict().items())


@pytest.mark.parametrize("text", TEXTS)
def test_the_sender_sees_what_the_receiver_will(text: str) -> None:
    cut = make_cut(text, width=64)
    payload = cut.sending.encode(noise(8, 64), key=KEY)
    preview = cut.sending.decode(payload, key=KEY, num_rows=8, keeps=False)
    assert torch.equal(preview, cut.receiving.decode(payload, key=KEY, num_rows=8))


def test_the_same_message_is_coded_alike_and_others_are_not() -> None:
    x_ND = noise(8, 64)  # noqa: N806
    text = "int4(stochastic)"

    def codes(key: Key, seed: int = 0) -> Tensor:
        return make_cut(text, width=64, seed=seed).sending.encode(x_ND, key=key)[1]

    assert torch.equal(codes(Key(step=1, microbatch=2)), codes(Key(step=1, microbatch=2)))
    assert not torch.equal(codes(Key(step=1, microbatch=2)), codes(Key(step=2, microbatch=1)))
    assert not torch.equal(codes(KEY), codes(KEY, seed=1))
    forward = make_cut(text, text, width=64)
    backward = forward.receiving.encode_gradient(x_ND, key=KEY)
    assert not torch.equal(forward.sending.encode(x_ND, key=KEY)[1], backward[1])


@pytest.mark.parametrize("text", TEXTS)
def test_a_matrix_need_not_be_contiguous(text: str) -> None:
    x_ND = noise(96, 20).T  # noqa: N806
    expect_equal(make_cut(text, width=96).send(x_ND), make_cut(text, width=96).send(x_ND.contiguous()))


@pytest.mark.parametrize(
    "text", ["svd(0.2)", "svd(0.6)", "svd(0.9)", "subspace(8)", "center | rotate | int4"]
)
@pytest.mark.parametrize("shape", [(20, 96), (96, 20), (64, 64), (130, 70), (257, 33)])
def test_products_of_matrices_do_not_show_how_a_matrix_lies_in_memory(
    text: str, shape: tuple[int, int]
) -> None:
    """BLAS adds in another order where an operand is transposed, or has gaps between its rows."""
    backward = "svd(0.5)" if text.startswith("svd") else "raw"
    expected = make_cut(text, backward, width=shape[1])
    cuts = [make_cut(text, backward, width=shape[1]) for _ in range(2)]
    for step in range(3):
        key = Key(step=step, microbatch=0)
        x_ND, g_ND = noise(*shape, seed=step), noise(*shape, seed=9 + step)  # noqa: N806
        wanted, wanted_back = expected.send(x_ND, key), expected.send_back(g_ND, key)
        for cut, strided in zip(cuts, (transposed, with_gaps), strict=True):
            expect_equal(cut.send(strided(x_ND), key), wanted)
            expect_equal(cut.send_back(strided(g_ND), key), wanted_back)


def transposed(x_ND: Tensor) -> Tensor:  # noqa: N803
    return x_ND.T.contiguous().T


def with_gaps(x_ND: Tensor) -> Tensor:  # noqa: N803
    return torch.cat((x_ND, torch.ones(len(x_ND), 3)), dim=1)[:, :-3]


def test_a_tensor_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="at a cut of width 8"):
        make_cut("int8", width=8).sending.encode(noise(2, 9), key=KEY)


def test_codecs_that_do_not_go_together_make_no_cut() -> None:
    with pytest.raises(FieldError):
        make_cut("int8", "subspace(4)", width=8)

"""Both halves of a bottleneck: what they start from, what they restore, and what they refuse."""

import math

import pytest
import torch
from torch import Tensor

from isthmus.codec.low_rank import Observed, TokenMeans
from isthmus.errors import FrameError, UserError
from isthmus.job.codec import BottleneckSpec, HiddenSpec, Init
from isthmus.job.codec_steps import Anchor
from isthmus.model import bottleneck as bottleneck_module
from isthmus.model.bottleneck import Down, Up, make_anchors

WIDTH, VOCABULARY_SIZE, RANK = 12, 20, 4
FORMS = [
    BottleneckSpec(rank=RANK),
    BottleneckSpec(rank=RANK, anchor=Anchor.NONE),
    BottleneckSpec(rank=RANK, init=Init.RANDOM),
    BottleneckSpec(rank=RANK, init=Init.RANDOM, anchor=Anchor.NONE),
]


class Source:
    """Hidden states that vary around a mean per token id, far from zero, with a few strong directions."""

    def __init__(self, *, seed: int = 0, width: int = WIDTH, vocabulary_size: int = VOCABULARY_SIZE) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._vocabulary_size = vocabulary_size
        self.means_VD = 5 + 2 * self._normal(vocabulary_size, width)
        self._mix_DD = self._normal(width, width) * torch.logspace(0, -2, width)

    def draw(self, batch: int = 6, tokens: int = 15) -> tuple[Tensor, Tensor]:
        ids_BT = torch.randint(0, self._vocabulary_size, (batch, tokens), generator=self._generator)  # noqa: N806
        return self.means_VD[ids_BT] + self._normal(batch, tokens, len(self._mix_DD)) @ self._mix_DD.T, ids_BT

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)


def halves(spec: BottleneckSpec, *, vocabulary_size: int = VOCABULARY_SIZE) -> tuple[Down, Up]:
    return (
        Down(spec, width=WIDTH, vocabulary_size=vocabulary_size, seed=3),
        Up(spec, width=WIDTH, vocabulary_size=vocabulary_size),
    )


def begun(spec: BottleneckSpec, source: Source, *, num_batches: int = 40) -> tuple[Down, Up]:
    down, up = halves(spec)
    for _ in range(num_batches):
        hidden, ids = source.draw()
        down.observe(hidden, ids, None)
    up.begin(down.begin())
    return down, up


def lost_share(down: Down, up: Up, source: Source) -> float:
    """The share of the variance of fresh hidden states that does not arrive."""
    hidden, ids = source.draw(batch=40)
    with torch.no_grad():
        restored = up(down(hidden, ids), ids)
    mean = hidden.flatten(0, 1).mean(0)
    return float((restored - hidden).square().sum() / (hidden - mean).square().sum())


@pytest.mark.parametrize("anchor", Anchor)
@pytest.mark.parametrize("init", Init)
def test_at_full_width_it_is_the_identity_and_so_is_its_gradient(init: Init, anchor: Anchor) -> None:
    source = Source()
    down, up = begun(BottleneckSpec(rank=WIDTH, init=init, anchor=anchor), source)
    hidden, ids = source.draw()
    hidden.requires_grad_()
    restored = up(down(hidden, ids), ids)
    torch.testing.assert_close(restored, hidden, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(hidden)
    restored.backward(grad)
    torch.testing.assert_close(hidden.grad, grad, rtol=1e-5, atol=1e-5)


def test_anchors_and_principal_axes_explain_more() -> None:
    lost = {str(spec): lost_share(*begun(spec, Source()), Source(seed=0)) for spec in FORMS}
    anchored, plain, random, neither = (lost[str(spec)] for spec in FORMS)
    assert anchored < 0.5 * plain < plain < neither
    assert anchored < random < neither


@pytest.mark.parametrize("spec", FORMS, ids=str)
def test_the_share_explained_is_what_fresh_hidden_states_show(spec: BottleneckSpec) -> None:
    source = Source()
    down, up = begun(spec, source)
    assert down.explained_share == pytest.approx(1 - lost_share(down, up, source), abs=0.03)


def test_principal_axes_are_those_of_what_is_left_around_the_anchors() -> None:
    source = Source()
    down, _ = begun(BottleneckSpec(rank=RANK), source, num_batches=200)
    hidden, ids = source.draw(batch=400)
    left = (hidden - source.means_VD[ids]).flatten(0, 1)
    _, axes = torch.linalg.eigh(left.T @ left)
    best = axes[:, -RANK:]
    overlap = torch.linalg.svdvals(down.weight.detach() @ best)
    assert float(overlap.min()) > 0.95


def test_the_mean_of_an_id_is_learnt_and_an_id_that_never_came_takes_the_mean_of_all() -> None:
    source = Source()
    down, _ = halves(BottleneckSpec(rank=RANK))
    for _ in range(60):
        hidden, ids = source.draw()
        down.observe(hidden, ids, (ids != 7).long())
    down.begin()
    known = torch.tensor([[id_ for id_ in range(VOCABULARY_SIZE) if id_ != 7]])
    error = (down.anchors(known)[0] - source.means_VD[known[0]]).square().mean().sqrt()
    spread = (source.means_VD - source.means_VD.mean(0)).square().mean().sqrt()
    assert float(error) < 0.2 * float(spread)
    torch.testing.assert_close(down.anchors(torch.tensor([[7]]))[0, 0], down.anchors.get_parameter("mean"))


def test_padding_and_rows_that_are_not_finite_leave_no_trace() -> None:
    source = Source()
    clean, dirty = (halves(BottleneckSpec(rank=RANK))[0] for _ in range(2))
    factors = torch.tensor([math.nan, math.inf, 99.0])[:, None, None]
    for _ in range(5):
        hidden, ids = source.draw()
        clean.observe(hidden, ids, None)
        mask = torch.ones(9, 15)
        mask[8] = 0
        dirty.observe(torch.cat((hidden, hidden[:3] * factors)), torch.cat((ids, ids[:3])), mask)
    for name, tensor in clean.begin().items():
        torch.testing.assert_close(dirty.begin()[name], tensor)


def test_what_was_long_ago_is_forgotten() -> None:
    observed = Observed(width=2, tokens=TokenMeans(vocabulary_size=1, num_rows=1, width=2))
    ids = torch.zeros(1, 64, dtype=torch.long)
    observed.add(torch.full((1, 64, 2), 100.0), ids, None)
    for _ in range(60):
        observed.add(torch.zeros(1, 64, 2), ids, None)
    assert observed.tokens is not None
    assert float(observed.mean_D.abs().max()) < 1e-6
    assert float(observed.tokens.deviations_of(torch.tensor([0]), observed.mean_D).abs().max()) < 1e-3


def test_a_single_token_of_an_id_does_not_count_as_foreseen() -> None:
    source = Source(vocabulary_size=5000)
    down = Down(BottleneckSpec(rank=RANK), width=WIDTH, vocabulary_size=5000, seed=3)
    hidden, ids = source.draw(batch=2, tokens=50)
    down.observe(hidden, ids, None)
    centred = hidden.flatten(0, 1) - hidden.flatten(0, 1).mean(0)
    expected = centred.square().sum() / 100
    assert float(down.observed.covariance().trace()) == pytest.approx(float(expected), rel=0.1)


def test_large_vocabularies_have_factored_anchors_that_explain_nearly_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bottleneck_module, "_MAX_ENTRIES", 8 * VOCABULARY_SIZE)
    source = Source()
    source.means_VD = 5 + torch.randn(VOCABULARY_SIZE, 3) @ torch.randn(3, WIDTH)
    down, up = begun(BottleneckSpec(rank=2), source)
    assert down.anchors.codes is not None
    assert down.anchors.codes.shape == (VOCABULARY_SIZE, 6)
    factored = lost_share(down, up, source)
    assert down.explained_share == pytest.approx(1 - factored, abs=0.03)
    monkeypatch.undo()
    assert factored == pytest.approx(lost_share(*begun(BottleneckSpec(rank=2), source), source), abs=0.02)


def test_of_a_large_vocabulary_only_the_ids_that_come_first_have_means(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bottleneck_module, "_MAX_ENTRIES", 8)
    monkeypatch.setattr(bottleneck_module, "_MIN_OBSERVED_IDS", 5)
    down, up = halves(BottleneckSpec(rank=2))
    hidden = torch.arange(8.0)[None, :, None].expand(1, 8, WIDTH)
    down.observe(hidden[:, :4], torch.tensor([[3, 9, 3, 4]]), None)
    down.observe(hidden[:, 4:], torch.tensor([[3, 1, 2, 0]]), None)
    assert down.observed.tokens is not None
    rows = down.observed.tokens.row_of_V
    assert sorted(rows[[3, 4, 9]].tolist()) == [0, 1, 2]
    assert sorted(rows[[0, 1, 2]].tolist()) == [3, 4, 5]
    assert rows[5] == 5
    up.begin(down.begin())
    without = down.anchors(torch.tensor([5, int((rows[:3] == 5).nonzero())]))
    torch.testing.assert_close(without, down.anchors.get_parameter("mean").expand(2, WIDTH))


def test_the_form_of_anchors_follows_the_size_of_their_table() -> None:
    def parts(vocabulary_size: int, width: int, anchor: Anchor = Anchor.TOKENS) -> set[str]:
        spec = BottleneckSpec(rank=64, anchor=anchor)
        with torch.device("meta"):
            anchors = make_anchors(spec, width=width, vocabulary_size=vocabulary_size)
        return set(anchors.state_dict())

    assert parts(32_000, 512) == {"mean", "table", "unit"}
    assert parts(151_936, 1024) == parts(32_000, 4096) == {"mean", "codes", "directions", "unit"}
    assert parts(9, 8, Anchor.NONE) == {"mean"}


def test_the_senders_anchors_are_frozen_and_the_receivers_learn() -> None:
    source = Source()
    down, up = begun(BottleneckSpec(rank=RANK), source)
    hidden, ids = source.draw()
    up(down(hidden, ids), ids).square().sum().backward()
    assert {name for name, one in down.named_parameters() if one.grad is not None} == {"weight"}
    assert all(one.grad is not None for one in up.parameters())


def test_under_autocast_the_arithmetic_stays_in_float32() -> None:
    source = Source()
    down, up = halves(BottleneckSpec(rank=WIDTH))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            hidden, ids = source.draw()
            down.observe(hidden.bfloat16(), ids, None)
        up.begin(down.begin())
        restored = up(down(hidden, ids), ids)
    assert restored.dtype == torch.float32
    torch.testing.assert_close(restored, hidden, rtol=1e-5, atol=1e-5)


def test_both_ends_begin_with_the_same_anchors() -> None:
    down, up = halves(BottleneckSpec(rank=RANK))
    assert not down.has_begun
    down.observe(*Source().draw(), None)
    tensors = down.begin()
    assert {name: one.shape for name, one in tensors.items()} == {
        name: one.shape for name, one in up.values().items()
    }
    assert tensors["anchors.table"].dtype is torch.bfloat16
    assert all(one.is_contiguous() for one in tensors.values())
    up.begin(tensors)
    assert down.has_begun
    assert up.has_begun
    for name, one in down.anchors.state_dict().items():
        assert torch.equal(up.anchors.state_dict()[name], one), name


@pytest.mark.parametrize("is_factored", [False, True])
def test_anchors_learn_by_the_same_share_of_their_size_whatever_that_is(
    is_factored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_factored:
        monkeypatch.setattr(bottleneck_module, "_MAX_ENTRIES", 8 * VOCABULARY_SIZE)
    moved = []
    for factor in (0.01, 1.0, 100.0):
        source = Source()
        down, up = halves(BottleneckSpec(rank=RANK))
        hidden, ids = source.draw(batch=40)
        down.observe(factor * hidden, ids, None)
        up.begin(down.begin())
        rows = up.anchors.get_parameter("codes" if is_factored else "table")
        # As large as embeddings whose numbers deviate by one over the root of their width.
        assert float(rows.detach().square().mean()) == pytest.approx(1 / WIDTH, rel=0.01)
        before = up.anchors(ids).detach()
        adam = torch.optim.Adam([rows], lr=1e-3)
        (up(torch.zeros(*ids.shape, RANK), ids) - 2 * factor * hidden).square().sum().backward()
        adam.step()
        change = up.anchors(ids).detach() - before
        moved.append(float(change.norm() / (before - before.mean((0, 1))).norm()))
    assert moved == pytest.approx([moved[1]] * 3, rel=0.05)
    assert moved[1] > 1e-3


def test_anchors_of_tokens_that_all_have_one_mean_begin_at_it() -> None:
    down, up = halves(BottleneckSpec(rank=RANK))
    hidden = torch.ones(2, 3, WIDTH)
    ids = torch.arange(6).view(2, 3)
    down.observe(hidden, ids, None)
    up.begin(down.begin())
    torch.testing.assert_close(up.anchors(ids), hidden)


def test_what_is_observed_survives_being_saved() -> None:
    source = Source()
    spec = BottleneckSpec(rank=RANK)
    whole, before = halves(spec)[0], halves(spec)[0]
    batches = [source.draw() for _ in range(6)]
    for hidden, ids in batches:
        whole.observe(hidden, ids, None)
    for hidden, ids in batches[:3]:
        before.observe(hidden, ids, None)
    after = halves(spec)[0]
    after.load_state_dict(before.state_dict())
    for hidden, ids in batches[3:]:
        after.observe(hidden, ids, None)
    for name, tensor in whole.begin().items():
        assert torch.equal(after.begin()[name], tensor), name


def test_a_random_start_depends_on_the_seed_alone() -> None:
    spec = BottleneckSpec(rank=RANK, init=Init.RANDOM, anchor=Anchor.NONE, num_warmup_steps=0)
    first, again = (halves(spec)[0].begin()["weight"] for _ in range(2))
    other = Down(spec, width=WIDTH, vocabulary_size=VOCABULARY_SIZE, seed=4).begin()["weight"]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.testing.assert_close(first.T @ first, torch.eye(RANK), rtol=0, atol=1e-5)


def test_a_start_from_nothing_or_from_strange_tensors_is_refused() -> None:
    down, up = halves(BottleneckSpec(rank=RANK))
    with pytest.raises(ValueError, match="nothing was"):
        down.begin()
    down.observe(*Source().draw(), None)
    tensors = down.begin()
    with pytest.raises(FrameError, match="instead of"):
        up.begin({"weight": tensors["weight"]})
    with pytest.raises(FrameError, match=r"anchors\.table .* \(20, 12\)"):
        up.begin(tensors | {"anchors.table": torch.zeros(3, WIDTH)})
    with pytest.raises(FrameError, match="weight that is not finite"):
        up.begin(tensors | {"weight": torch.full((WIDTH, RANK), math.inf)})
    assert not up.has_begun


def test_a_cut_refuses_a_bottleneck_that_is_none() -> None:
    with pytest.raises(UserError, match="no bottleneck where hidden states are 16 wide"):
        BottleneckSpec(rank=16).check_width(16)
    BottleneckSpec(rank=16).check_width(17)
    HiddenSpec().check_width(16)

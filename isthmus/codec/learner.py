"""How a sender comes to its editions: when a new one is due, and what is in it."""

from typing import Final

import torch
from torch import Tensor

from isthmus.codec.base import State
from isthmus.codec.edition import Edition, Shapes, pack_edition
from isthmus.codec.moments import Moments, TokenSums, principal
from isthmus.codec.waterfill import allot_bits
from isthmus.job.subspace_sizes import num_due

# What was seen before an edition counts half for the next one, so that the basis follows the training.
_FADING: Final = 0.5
_LEAST_DEVIATION: Final = 1e-8
# Rows of one message that moments are taken from: more would teach little and cost much.
_MAX_ROWS: Final = 128
_STEPS: Final = "steps"


class Learner:
    """Watches the rows of training messages, and issues editions every so many steps."""

    def __init__(self, shapes: Shapes, *, every: int, device: torch.device) -> None:
        self._shapes = shapes
        self._every = every
        self._moments = Moments.zeros(shapes.width, device)
        self._tokens = TokenSums.zeros(shapes.width, device) if shapes.num_anchors else None
        self._first_step: int | None = None
        self._last_step = 0

    def observe(
        self,
        x_ND: Tensor,
        y_ND: Tensor,
        slot_N: Tensor | None,
        *,
        seed: int,
    ) -> None:
        """Take in rows, what is left of them without mean and anchors, and the slots of their token ids."""
        # The first edition has nothing else to go by. Where rows are left out, not always the same positions.
        stride = 1 if self._first_step is None else max(1, -(-len(y_ND) // _MAX_ROWS))
        self._moments.add(y_ND[seed % stride :: stride])
        if self._tokens is not None and slot_N is not None:
            self._tokens.add(x_ND, slot_N)

    def is_due(self, step: int) -> bool:
        """Whether this step wants an edition that the steps before have not had."""
        if self._first_step is None:
            return True
        age, last_age = step - self._first_step, self._last_step - self._first_step
        return num_due(age, every=self._every) > num_due(last_age, every=self._every)

    def issue(self, step: int, *, before: Edition | None, anchor_SD: Tensor) -> Tensor:
        """The bytes of the next edition."""
        mean_D = self._moments.centre()
        if before is not None:
            mean_D = mean_D + before.mean_D
        vectors_DR, variance_R = principal(
            self._moments,
            rank=self._shapes.rank,
            start_DR=None if before is None else before.vectors_DR,
        )
        slot_U, anchor_UD = self._anchors(anchor_SD, mean_D)
        self._turn_over(step)
        return pack_edition(
            number=1 if before is None else before.number + 1,
            mean_D=mean_D,
            deviation_R=variance_R.sqrt().clamp(min=_LEAST_DEVIATION),
            vectors_DR=vectors_DR,
            slot_U=slot_U,
            anchor_UD=anchor_UD,
            bits=self._bits(variance_R),
        )

    def state_dict(self) -> State:
        """All that the next edition depends on, besides the last one."""
        steps = torch.tensor([-1 if self._first_step is None else self._first_step, self._last_step])
        return {_STEPS: steps} | {name: one.clone() for name, one in self._sums().items()}

    def load_state_dict(self, state: State) -> None:
        """Go on learning from where the state was taken."""
        first, self._last_step = state[_STEPS].tolist()
        self._first_step = None if first < 0 else first
        for name, own in self._sums().items():
            own.copy_(state[name])

    def _sums(self) -> State:
        moments, tokens = self._moments, self._tokens
        sums = {"weight": moments.weight, "sum": moments.sum_D, "outer": moments.outer_DD}
        if tokens is not None:
            sums |= {"token_weight": tokens.weight_S, "token_sum": tokens.sum_SD}
        return sums

    def _bits(self, variance_R: Tensor) -> tuple[int, ...]:
        if self._shapes.num_bits is None:
            return (0,) * self._shapes.rank
        return allot_bits(variance_R.tolist(), num_bits=self._shapes.num_bits)

    def _anchors(self, anchor_SD: Tensor, mean_D: Tensor) -> tuple[Tensor, Tensor]:
        if self._tokens is None:
            return torch.empty(0, dtype=torch.int32), torch.empty(0, self._shapes.width)
        return self._tokens.best_updates(anchor_SD, mean_D, num_updates=self._shapes.num_anchors)

    def _turn_over(self, step: int) -> None:
        self._moments.fade(_FADING)
        if self._tokens is not None:
            self._tokens.fade(_FADING)
        self._first_step = step if self._first_step is None else self._first_step
        self._last_step = step

"""The types that all strategies, simulator and workers share: members, works, messages, events, actions.

A strategy is a scheduler and an actor. The scheduler is a pure state machine: it is told what happened and
when, and answers with actions. It never sees a tensor, a link or a clock. A driver carries the actions out
and reports what happens: the simulator on a virtual clock, `train/loop.py` on the real one.

    Started ──► scheduler.on(event, now_s) ──► Run      one work at a time per lane, then Done
    Arrived                                ──► Send     handed to the wire without waiting, then Sent
    Done, Sent, Saved                      ──► Save     the state that `step` starts from, then Saved
    Lost, Joined, Interrupted, Elapsed     ──► Tell     a fact for the journal
                                           ──► Wake     Elapsed at that time
                                           ──► Stop     the end, with its reason

A member sees everything that arrived while it computed before the end of what it computed.
"""

import enum
import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, NamedTuple, Protocol, TypeVar, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from isthmus.errors import FrameError, IsthmusError

Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
"""A duration, as far as a peer may name one; clocks that differ by the age of Unix are within it."""
Count = Annotated[int, Field(ge=0, le=2**53)]
"""A number of something, as far as a peer may name one."""


class ScheduleError(IsthmusError):
    """An event that cannot happen: a driver, or a peer, does not keep to the protocol."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="run the same version of Isthmus and the same job on every cloud")


class Member(NamedTuple):
    """One rank of one cloud."""

    cloud: str
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.cloud}/{self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Small frozen values that schedulers exchange and drivers report: losses, norms, counts, times.

    Each kind of facts is a subclass; `pack_facts` and `unpack_facts` serialise them all, with bounds.
    """

    # Losses and norms may be infinite or NaN.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="constants", extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered(Facts):
    """The facts of all members of a group work, in the order of the group."""

    of: tuple[Facts | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran(Facts):
    """How long the device was busy; an accelerator reports a pass when the next one has been started."""

    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried(Facts):
    """What a wire measured of one message at this end."""

    coding_s: float = 0.0
    rtt_s: float = 0.0
    num_bytes: int = 0
    """Bytes on the line, with everything that surrounds the tensors; 0 where this end received."""
    num_elements: int = 0
    element_bytes: int = 0
    """The size of an element before it was coded."""
    cosine: float = float("nan")
    """The cosine between what was sent and what arrives, where it was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotDone(Facts):
    """A work that came to nothing, since a cloud that is lost now had sent what cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored(Facts):
    """How long a save took until the store had it, and how long the member did not compute for it."""

    save_s: Seconds = 0.0
    stall_s: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NotStored(Facts):
    """A save that the store has not taken, for so long that no more work is to be risked."""

    reason: str
    hint: str = ""


class WorkKind(enum.StrEnum):
    """What a member can do; the values are the kinds of spans."""

    READ = "read"
    """Begin a step or an evaluation; the members that hold data read their micro-batches."""
    FIT = "fit"
    """Fit one half of a bottleneck to what was observed."""
    FORWARD = "forward"
    BACKWARD = "backward"
    EVALUATE = "evaluation"
    """A forward that keeps nothing for a backward."""
    SCORE = "score"
    """Collect the losses of an evaluation from all members of the group."""
    REDUCE = "reduce"
    """Reduce gradients and read losses and norms from the device."""
    UPDATE = "optimize"
    DELTA = "delta"
    """Take the difference between local and outer parameters of one fragment."""
    SUM = "sum"
    OUTER = "outer"
    MIX = "mix"
    GENERATE = "generate"
    DISCRIMINATE = "discriminate"


class Lane(enum.StrEnum):
    """Where a work runs: on the device, or on the host beside it. Each lane runs one work at a time."""

    COMPUTE = "compute"
    HOST = "host"


class Work(NamedTuple):
    """Something to do for one step, for at most one micro-batch.

    The members of `group` (ranks of one cloud) do it together: it starts when all of them have started it,
    and `Done` carries `Gathered` facts. All members of a group get their group works in one order.
    """

    kind: WorkKind
    step: int
    item: int = 0
    facts: Facts | None = None
    group: tuple[Member, ...] = ()
    lane: Lane = Lane.COMPUTE

    @property
    def name(self) -> str:
        """The name of its span."""
        name = f"{self.kind} {self.step}"
        return f"{name}.{self.item}" if self.kind in _PER_ITEM else name


_PER_ITEM = frozenset(
    {WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.EVALUATE, WorkKind.GENERATE, WorkKind.DISCRIMINATE}
    | {WorkKind.DELTA, WorkKind.SUM, WorkKind.OUTER, WorkKind.MIX}
)


class MessageKind(enum.StrEnum):
    """What members send each other; the values are the names of spans and streams."""

    ACTIVATION = "forward"
    EVALUATION = "evaluation"
    """An activation of an evaluation, to which no gradient answers."""
    GRADIENT = "backward"
    BASIS = "basis"
    """What the receiving half of a bottleneck starts with."""
    TALLY = "tally"
    VERDICT = "verdict"
    EVALUATED = "evaluated"
    DELTA = "delta"
    COMMIT = "commit"
    STATE = "state"
    IDS = "ids"
    CREDIT = "credit"
    COVERED = "covered"
    RECORD = "record"
    """A rank tells its leader that its part of a saved step is in the store."""
    SHARD = "shard"
    """The leader of a cloud tells its siblings what to do with their shards."""
    NOTED = "noted"
    """A rank tells its leader what has come to pass with its shard."""
    ORDER = "order"
    """The leader of a cloud tells its siblings which works to run next."""


class Priority(enum.IntEnum):
    """How the link treats a message: urgent ones overtake all others, background ones take what is left."""

    URGENT = 0
    NORMAL = 1
    BACKGROUND = 2


class Message(NamedTuple):
    """Named tensors and facts from one member to others; it is encoded once for all of `to`."""

    kind: MessageKind
    step: int
    item: int
    sender: Member
    to: tuple[Member, ...]
    facts: Facts | None = None
    codecs: tuple[tuple[str, str], ...] = ()
    """The codec of each tensor that is coded, by the tensor's name."""
    priority: Priority = Priority.NORMAL

    @property
    def name(self) -> str:
        """The name of its spans."""
        return f"{self.kind} {self.step}.{self.item}"


# Events.


class Started(NamedTuple):
    """The run starts, or resumes, with this step; `facts` are those that the scheduler saved.

    `restarts` counts how often this member has started before: what it knew then, and did not save, is lost.
    """

    step: int
    facts: Facts | None = None
    restarts: int = 0


class Arrived(NamedTuple):
    """A message has arrived and its tensors are decoded; `travel_s` is its time on the line and under way."""

    message: Message
    travel_s: float = 0.0
    facts: Facts | None = None


class Done(NamedTuple):
    """A work has been carried out."""

    work: Work
    facts: Facts | None = None


class Sent(NamedTuple):
    """The link has taken a message over."""

    message: Message
    facts: Facts | None = None


class Saved(NamedTuple):
    """The store holds the state that this step starts from; with `NotStored` it does not."""

    step: int
    facts: Facts | None = None


class Lost(NamedTuple):
    """A member does not answer; `final` when it has been given up."""

    member: Member
    final: bool = True
    reason: str = ""


class Joined(NamedTuple):
    """A member is there, for the first time or again."""

    member: Member
    facts: Facts | None = None


class Interrupted(NamedTuple):
    """The user or the system asks this member to stop; a common step is saved first."""

    reason: str


class Elapsed(NamedTuple):
    """The time that `Wake` named has come."""


Event = Started | Arrived | Done | Sent | Saved | Lost | Joined | Interrupted | Elapsed


# Actions.


class Run(NamedTuple):
    """Carry out a work."""

    work: Work


class Send(NamedTuple):
    """Hand a message to its wires; with `keeps` its tensors are kept, so that it can be sent again."""

    message: Message
    keeps: bool = False


class Drop(NamedTuple):
    """Forget the tensors of a message that was kept, or that arrived and is not needed."""

    message: Message


class Save(NamedTuple):
    """Save the state that this step starts from, with the scheduler's own facts.

    What was saved at `safe_step` or later is kept: some clouds may have nothing newer. None where other
    clouds do not count. What was saved at `best_step` is kept, too.
    """

    step: int
    facts: Facts | None = None
    safe_step: int | None = None
    best_step: int | None = None


class Tell(NamedTuple):
    """Write a fact to the journal."""

    fact: Facts


class Wake(NamedTuple):
    """Report `Elapsed` at this time."""

    at_s: float


class Outcome(enum.Enum):
    """Why a member stops: `REFORM` returns to the session, which forms a new epoch."""

    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    REFORM = "reform"


class Stop(NamedTuple):
    """End this member's part in the run."""

    outcome: Outcome
    reason: str = ""
    hint: str = ""
    step: int = 0
    """The step that every cloud has saved, where the run was interrupted; of a run that has finished the
    best one, if that was to be kept."""
    without: tuple[str, ...] = ()
    """The clouds that have no part in this end, although they may be there."""


Action = Run | Send | Drop | Save | Tell | Wake | Stop


class Scheduler(Protocol):
    """All decisions of one member that depend on time or on peers."""

    def on(self, event: Event, now_s: float) -> Sequence[Action]:
        """Take in what happened and say what to do now, in this order."""


class Costs(Protocol):
    """What works and messages of one member cost; the simulator takes times, sizes and facts from here."""

    def work_s(self, work: Work) -> float:
        """The duration of a work at full speed."""

    def work_facts(self, work: Work, duration_s: float) -> Facts | None:
        """The facts with which a work ends that took this long."""

    def message_bytes(self, message: Message) -> int:
        """The bytes of a message on the line; 0 for one that is too small to count."""

    def coding_s(self, message: Message) -> float:
        """The time that coding a message takes, at both ends, beside the computation."""

    def saved_bytes(self) -> int:
        """The state of this member that is copied to another cloud when it saves; 0 for none."""


class Strategy(Protocol):
    """What planner and simulator know of a strategy."""

    @property
    def members(self) -> Sequence[Member]:
        """All members, in the order in which clouds and ranks are shown."""

    def scheduler(self, member: Member) -> Scheduler:
        """A fresh scheduler of a member."""

    def costs(self, member: Member) -> Costs:
        """The costs of a member."""


MAX_FACTS_BYTES: Final = 32 * 1024
_MAX_SHOWN: Final = 200

F = TypeVar("F", bound=Facts)


def pack_facts(facts: Facts, *, max_bytes: int = MAX_FACTS_BYTES) -> str:
    """Facts as JSON text; more than `max_bytes` is the caller's mistake."""
    text = _adapter_of(type(facts)).dump_json(facts).decode()
    if len(text) > max_bytes:
        raise ValueError(f"{type(facts).__name__} of {len(text)} bytes is over the limit of {max_bytes}")
    return text


def unpack_facts(text: object, kind: type[F], *, max_bytes: int = MAX_FACTS_BYTES) -> F:
    """The facts of this kind that `pack_facts` gave; anything else is an error of the peer."""
    if not isinstance(text, str) or len(text) > max_bytes:
        raise FrameError(f"a message whose {kind.__name__} is no text or over {max_bytes} bytes")
    try:
        found: F = _adapter_of(kind).validate_json(text, strict=True)
    except ValidationError as error:
        reason = error.errors(include_url=False, include_input=False)[0]
        raise FrameError(f"a message with unreadable {kind.__name__}: {str(reason)[:_MAX_SHOWN]}") from None
    return found


def _adapter_of(kind: type[Facts]) -> TypeAdapter[Any]:
    # mypy does not see that a class is hashable when its instances compare by value.
    return _adapter(cast("Hashable", kind))


@functools.lru_cache(maxsize=256)
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast("type[Facts]", kind))

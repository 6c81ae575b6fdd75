"""Writes the events of a rank to disk, and sends records to the display and to trackers."""

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from isthmus.events import COMPUTE_KINDS, MEASURED_KIND, EventLog, Span
from isthmus.observe.timeline import shared_s, total_s, union
from isthmus.observe.trackers import Tracker
from isthmus.plan.end_of_step import Evaluated, Note, StepEnded
from isthmus.plan.feed import FeedStep, GeneratorLost
from isthmus.plan.membership import DataEnded, RoundEnded
from isthmus.plan.types import Facts, Member, Message
from isthmus.wan.link import Link, LinkState

Report = Callable[[str], None]


class Journal:
    """Takes in what a member's scheduler, actor and wires tell."""

    def __init__(
        self,
        log: EventLog,
        *,
        is_first: bool,
        links: Sequence[Link],
        report: Report,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self._log = log
        self._is_first = is_first
        self._links = list(links)
        self._report = report
        self._trackers = trackers
        self._spans: list[Span] = []
        self._num_rounds = 0
        self._num_averaged = 0
        self._clouds: dict[str, int] = {}
        """How many were live, up to date, and averaged in the last round of data parallel."""
        self._lock = threading.Lock()
        for link in links:
            link.on_state = self.link_state

    def add_link(self, link: Link) -> None:
        """Count what crosses a new link to a member that is there again, and write its changes of state."""
        link.on_state = self.link_state
        self._links.append(link)

    def span(self, span: Span) -> None:
        """Write a span; those of this step are kept for the display."""
        self._log.span(span)
        with self._lock:
            self._spans.append(span)

    def measured(self, *, track: str, message: Message, relative_error: float, cosine: float) -> None:
        """Write what coding has changed of a message."""
        self._log.fact(
            MEASURED_KIND,
            {
                "track": track,
                "step": message.step,
                "microbatch": message.item,
                # JSON has no word for what is not finite: all is lost then.
                "relative_error": relative_error if math.isfinite(relative_error) else None,
                "cosine": cosine,
            },
        )

    def tell(self, fact: Facts) -> None:
        """Write a fact of the scheduler."""
        match fact:
            case StepEnded():
                self._step_ended(fact)
            case Evaluated():
                self._evaluated(fact)
            case FeedStep():
                self._log.fact("feed", asdict(fact))
                self._tell("feed", asdict(fact))
            case GeneratorLost():
                missed = f"is lost at batch {fact.next} of {fact.quota}"
                self.note(f"generator {fact.cloud!r} {missed}, the others continue: {fact.reason}")
            case Note(text=text):
                self.note(text)
            case RoundEnded():
                self._round_ended(fact)
            case DataEnded() if self._is_first and self._num_rounds:
                shares = self._num_averaged / self._num_rounds
                self.note(f"{self._num_rounds} rounds, over {shares:.3g} clouds on average")

    def note(self, text: str) -> None:
        """Tell something in words."""
        self._log.fact("note", {"text": text})
        self._tell("note", {"text": text})

    def link_state(self, peer: Member, state: LinkState, reason: str) -> None:
        """Write that a link has changed its state."""
        values = {"peer": peer.cloud, "rank": peer.rank, "state": state.value, "reason": reason}
        self._log.fact("link", values)
        self._tell("link", values)

    def _step_ended(self, ended: StepEnded) -> None:
        if ended.num_elements:
            sent = {"num_elements": ended.num_elements, "num_bytes": ended.num_bytes}
            self._log.fact("sent", {"step": ended.step, **sent})
        values = {
            **self._traffic(),
            "step": ended.step,
            "loss": ended.loss,
            "duration_s": ended.duration_s,
            "tokens_per_s": ended.num_tokens / ended.duration_s,
        }
        if self._is_first:
            values |= _figures(ended)
            self._log.fact("step", values)
            self._track(ended.step, values)
        self._tell("step", values)

    def _round_ended(self, ended: RoundEnded) -> None:
        clouds = {
            "live": len(ended.live),
            "participating": len(ended.participating),
            "averaged": len(ended.shares),
        }
        self._num_rounds += 1
        self._num_averaged += clouds["averaged"]
        self._log.fact("round", {"number": ended.number, **clouds, "content": ended.content})
        if clouds != self._clouds and self._is_first:
            told = ", ".join(f"{number} {name}" for name, number in clouds.items())
            self.note(f"clouds from round {ended.number} on: {told}")
        self._clouds = clouds

    def _evaluated(self, found: Evaluated) -> None:
        accuracy = found.num_correct / max(found.num_targets, 1)
        metrics = dict(found.metrics)
        values = {**asdict(found), "loss": found.loss, "accuracy": accuracy, **metrics, "metrics": metrics}
        self._log.fact("evaluation", values)
        self._tell("evaluation", values)
        where = "validation/plain" if found.is_plain else "validation"
        shown = ("loss", "accuracy", *metrics)
        self._track(found.step, {f"{where}/{key}": values[key] for key in shown})

    def _traffic(self) -> dict[str, object]:
        """Return the bytes sent so far, and the share of this step's transfers that is overlapped."""
        with self._lock:
            spans, self._spans = self._spans, []
        moving = union((one.start_s, one.end_s) for one in spans if one.kind == "transfer")
        busy = [(one.start_s, one.end_s) for one in spans if one.kind in COMPUTE_KINDS]
        counters = [(link.peer.cloud, link.counters()) for link in self._links]
        sent_bytes: Counter[str] = Counter()
        for peer, one in counters:
            sent_bytes[peer] += sum(one.sent.values())
        return {
            "sent_bytes": dict(sent_bytes),
            "reconnects": sum(one.reconnects for _, one in counters),
            "overlapped_share": shared_s(moving, busy) / total_s(moving) if moving else None,
        }

    def _tell(self, kind: str, values: Mapping[str, object]) -> None:
        self._report(json.dumps({"kind": kind, **values}))

    def _track(self, step: int, values: Mapping[str, object]) -> None:
        numbers = {key: float(one) for key, one in values.items() if isinstance(one, int | float)}
        for tracker in self._trackers:
            tracker.log(step, numbers)


def _figures(ended: StepEnded) -> dict[str, object]:
    """Return the figures of a step that the first stage alone knows."""
    bubbles = [max(0.0, 1 - busy_s / ended.duration_s) for busy_s in ended.busy_s]
    return {
        "norm": ended.norm,
        "learning_rate": ended.learning_rate,
        "num_tokens": ended.num_tokens,
        "bubble": sum(bubbles) / len(bubbles),
        "bubbles": bubbles,
        "windows": list(ended.windows),
    }

"""Shows a run while it trains, as a live table or as lines, and its figures at the end."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from isthmus.cli.output import duration, percent, size
from isthmus.units import shorten

if TYPE_CHECKING:
    from isthmus.observe.report import CodingError, FeedSummary, Summary

_LINE_EVERY_S: Final = 2.0
_LEAST_SHOWN_SHARE: Final = 0.005


class Display:
    """Shows what clouds report while they train; with `site` only what that cloud reports."""

    def __init__(self, console: Console, *, num_steps: int, site: str | None = None) -> None:
        self._console = console
        self._site = site
        self._num_steps = num_steps
        self._step: Mapping[str, Any] = {}
        self._evaluation: Mapping[str, Any] = {}
        self._feed: Mapping[str, Any] = {}
        self._clouds: dict[str, Mapping[str, Any]] = {}
        self._states: dict[tuple[str, str], str] = {}
        self._printed_s = 0.0
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._table)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def hear(self, cloud: str, values: Mapping[str, Any]) -> None:
        """Take in what a cloud has reported."""
        match values["kind"]:
            case "step":
                self._hear_step(cloud, values)
            case "evaluation":
                self._evaluation = values
                without = " without codecs" if values.get("is_plain") else ""
                figures = [
                    f"validation loss {values['loss']:.4f}",
                    *map(metric, values.get("metrics", {}).items()),
                ]
                self._console.print(f"step {values['step']}: {', '.join(figures)}{without}", style="cyan")
            case "feed":
                self._feed = values
            case "link":
                self._hear_link(cloud, values)
            case "note":
                # Reasons name tables of the job, such as [limits], which are no markup.
                text = f"{cloud}: {values['text']}"
                self._console.print(text, style="dim", markup=False, soft_wrap=not self._console.is_terminal)

    def _hear_link(self, cloud: str, values: Mapping[str, Any]) -> None:
        self._states[cloud, values["peer"]] = values["state"]
        reason = f": {values['reason']}" if values["reason"] else ""
        text = f"{cloud}: link to {values['peer']} rank {values['rank']} is {values['state']}{reason}"
        style = "green" if values["state"] == "up" else "yellow"
        self._console.print(text, style=style, markup=False, soft_wrap=not self._console.is_terminal)

    def _hear_step(self, cloud: str, values: Mapping[str, Any]) -> None:
        self._clouds[cloud] = values
        if "bubble" not in values and cloud != self._site:
            return
        self._step = values
        is_due = time.monotonic() - self._printed_s > _LINE_EVERY_S
        is_edge = values["step"] in (0, self._num_steps - 1)
        if not self._console.is_terminal and (is_due or is_edge):
            self._printed_s = time.monotonic()
            self._console.print(self._line(), soft_wrap=True)
            if self._feed:
                self._console.print(self._feed_line(), style="dim", soft_wrap=True)

    def _feed_line(self) -> str:
        """Return what the discriminator told last: of its queues one figure for each generator."""
        one = self._feed
        queued, stale = ("+".join(map(str, one[key])) for key in ("num_queued", "staleness"))
        return (
            f"  accuracy {one['accuracy']:.1%} (all original {one['original_share']:.1%})  queued {queued}  "
            f"stale {stale}  waited {duration(one['waited_s'])}"
        )

    def _line(self) -> str:
        """Return one line, of at most 80 columns unless a run has a million steps."""
        one = self._step
        bubble = f"bubble {one['bubble']:.0%}  " if "bubble" in one else ""
        return (
            f"step {one['step'] + 1}/{self._num_steps}  loss {one['loss']:.4g}  "
            f"{_count(one['tokens_per_s'])} tok/s  {duration(one['duration_s'])}/step  "
            f"{bubble}{self._left()} left"
        )

    def _left(self) -> str:
        num_left = self._num_steps - 1 - int(self._step["step"])
        return duration(num_left * float(self._step["duration_s"]))

    def _table(self) -> Group | Text:
        if not self._step:
            return Text("starting the clouds", style="dim")
        table = Table("link", "state", "sent", "overlapped", "reconnects", box=None)
        for cloud, values in self._clouds.items():
            overlapped = percent(values["overlapped_share"])
            for peer, sent_bytes in values["sent_bytes"].items():
                state = self._states.get((cloud, peer), "up")
                reconnects = str(values["reconnects"])
                table.add_row(f"{cloud} → {peer}", state, size(sent_bytes), overlapped, reconnects)
        lines = [Text(self._line()), *([Text(self._feed_line())] if self._feed else [])]
        return Group(*lines, table)


def metric(found: tuple[str, float]) -> str:
    """Return a metric with its name: `BLEU 23.41`, or a share such as `f1 0.8312`."""
    name, value = found
    return f"BLEU {value:.2f}" if name == "bleu" else f"{name} {value:.4f}"


def show_summary(console: Console, summary: "Summary") -> None:
    """Print what the run came to."""
    table = Table("", "", box=None, show_header=False)
    for name, value in _figures(summary).items():
        if value:
            table.add_row(name, value)
    console.print(table)


def _figures(summary: "Summary") -> dict[str, str]:
    """Return the figures by their names; those that were not measured are empty."""
    first, last, plain = summary.first_loss, summary.last_loss, summary.plain_validation_loss
    without = "" if plain is None else f" ({plain:.3f} without codecs)"
    has_data = any(one.data_share >= _LEAST_SHOWN_SHARE for one in summary.clouds)
    bits = summary.bits_per_element
    return {
        "loss": "" if first is None or last is None else f"{first:.3f} → {last:.3f}",
        **({} if summary.feed is None else feed_figures(summary.feed)),
        "validation loss": ""
        if summary.validation_loss is None
        else f"{summary.validation_loss:.3f}{without}",
        "validation metrics": ", ".join(map(metric, summary.metrics.items())),
        "step time": "" if summary.step_s is None else duration(summary.step_s),
        "bubble": "" if summary.bubble is None else f"{summary.bubble:.0%} ({_each(summary, 'bubble', 0)})",
        "WAN time overlapped": "" if summary.overlapped_share is None else f"{summary.overlapped_share:.0%}",
        "crossed the WAN": size(summary.num_bytes),
        "compression": ""
        if bits is None
        else f"{bits:.2f} bits per element, {32 / bits:.1f}× to float32, {16 / bits:.1f}× to bfloat16",
        "changed by coding, at the worst": ", ".join(map(_coding_error, summary.coding_errors)),
        "coding, beside the computation": _each(summary, "coding_share", 1),
        "waiting for data": _each(summary, "data_share", 1) if has_data else "",
    }


def feed_figures(feed: "FeedSummary") -> dict[str, str]:
    """Return what a discriminator learnt, and how long it waited."""
    return {
        "accuracy": f"{feed.accuracy:.2%} in the last steps; calling all original: {feed.original_share:.2%}",
        "waited for batches": duration(feed.waited_s),
    }


def _each(summary: "Summary", name: str, digits: int) -> str:
    """Return the shares of all clouds, nothing where all are 0."""
    shares = {one.cloud: getattr(one, name) for one in summary.clouds}
    return (
        ", ".join(f"{cloud} {share:.{digits}%}" for cloud, share in shares.items())
        if any(shares.values())
        else ""
    )


def _coding_error(one: "CodingError") -> str:
    if one.relative_error is None:
        return f"{one.track} everything"
    return f"{one.track} {one.relative_error:.2%} (cosine {one.cosine:.4f})"


def _count(number: float) -> str:
    """Return 987 or 12.3k, so that the line is short."""
    return f"{number:.0f}" if number < 10_000 else f"{shorten(number / 1000):g}k"

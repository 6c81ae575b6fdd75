"""What a user sees of a run: a live table or plain lines, and the figures at the end."""

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from isthmus.observe.report import CodingError, Summary
from isthmus.units import format_bytes, format_duration, shorten

_LINE_EVERY_S: Final = 2.0
_LEAST_SHOWN_SHARE: Final = 0.005


class Display:
    """Shows the words that clouds send while they train; of one `site` alone what that one knows."""

    def __init__(self, console: Console, *, num_steps: int, site: str | None = None) -> None:
        self._console = console
        self._site = site
        self._num_steps = num_steps
        self._step: Mapping[str, Any] = {}
        self._evaluation: Mapping[str, Any] = {}
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
                self._console.print(
                    f"step {values['step']}: validation loss {values['loss']:.4f}{without}", style="cyan"
                )
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

    def _line(self) -> str:
        one = self._step
        place = f"step {one['step'] + 1}/{self._num_steps}"
        bubble = f"bubble {one['bubble']:.0%}  " if "bubble" in one else ""
        return (
            f"{place}  loss {one['loss']:.4f}  "
            f"{one['tokens_per_s']:.0f} tokens/s  {format_duration(_short(one['duration_s']))}/step  "
            f"{bubble}hidden {self._hidden()}  {self._left()} left"
        )

    def _hidden(self) -> str:
        shares = [one["hidden_share"] for one in self._clouds.values() if one["hidden_share"] is not None]
        return f"{sum(shares) / len(shares):.0%}" if shares else "–"

    def _left(self) -> str:
        num_left = self._num_steps - 1 - int(self._step["step"])
        return format_duration(_short(num_left * float(self._step["duration_s"])))

    def _table(self) -> Group | Text:
        if not self._step:
            return Text("starting the clouds", style="dim")
        table = Table("link", "state", "sent", "hidden on arrival", "reconnects", box=None)
        for cloud, values in self._clouds.items():
            share = values["hidden_share"]
            hidden = "–" if share is None else f"{share:.0%}"
            for peer, sent_bytes in values["sent_bytes"].items():
                sent = format_bytes(_rounded_bytes(sent_bytes))
                state = self._states.get((cloud, peer), "up")
                table.add_row(f"{cloud} → {peer}", state, sent, hidden, str(values["reconnects"]))
        return Group(Text(self._line()), table)


def show_summary(console: Console, summary: Summary) -> None:
    """Print what the run came to."""
    table = Table("", "", box=None, show_header=False)
    if summary.first_loss is not None and summary.last_loss is not None:
        table.add_row("loss", f"{summary.first_loss:.3f} → {summary.last_loss:.3f}")
    if summary.validation_loss is not None:
        plain = summary.plain_validation_loss
        without = "" if plain is None else f" ({plain:.3f} without codecs)"
        table.add_row("validation loss", f"{summary.validation_loss:.3f}{without}")
    if summary.step_s is not None:
        table.add_row("step time", format_duration(_short(summary.step_s)))
    if summary.bubble is not None:
        each = ", ".join(f"{one.cloud} {one.bubble:.0%}" for one in summary.clouds)
        table.add_row("bubble", f"{summary.bubble:.0%} ({each})")
    if summary.hidden_share is not None:
        table.add_row("WAN time hidden", f"{summary.hidden_share:.0%}")
    table.add_row("crossed the WAN", format_bytes(_rounded_bytes(summary.num_bytes)))
    if summary.bits_per_element is not None:
        table.add_row("compression", _compression(summary))
    if summary.coding_errors:
        table.add_row("changed by coding, at the worst", ", ".join(map(_coding_error, summary.coding_errors)))
    if any(one.coding_share for one in summary.clouds):
        each = ", ".join(f"{one.cloud} {one.coding_share:.1%}" for one in summary.clouds)
        table.add_row("coding, beside the computation", each)
    if any(one.data_share >= _LEAST_SHOWN_SHARE for one in summary.clouds):
        each = ", ".join(f"{one.cloud} {one.data_share:.1%}" for one in summary.clouds if one.data_share)
        table.add_row("waiting for data", each)
    console.print(table)


def _coding_error(one: CodingError) -> str:
    if one.relative_error is None:
        return f"{one.track} everything"
    return f"{one.track} {one.relative_error:.2%} (cosine {one.cosine:.4f})"


def _compression(summary: Summary) -> str:
    return (
        f"{summary.bits_per_element:.2f} bits per element, {summary.ratio_to_float32:.1f}× to float32, "
        f"{summary.ratio_to_bfloat16:.1f}× to bfloat16"
    )


def _short(seconds: float) -> float:
    return shorten(max(seconds, 0.0))


def _rounded_bytes(num_bytes: int) -> int:
    return int(shorten(num_bytes))

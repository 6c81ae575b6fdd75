"""One step as a picture: what each stream of the device and each thread did.

Either as a profiler saw it, which slows the host down while it watches, or as the device's own events and the
spans of the run tell it, which cost next to nothing but do not look into a pass.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.events import Span
from isthmus.observe.draw import box, label, line, to_svg
from isthmus.observe.timeline import Interval, shared_s, total_s, union

_COLOURS = {
    "forward": "#8ecae6",
    "backward": "#2f6f9f",
    "optimize": "#8e4a9e",
    "codec": "#e07a3f",
    "copy": "#7fb069",
    "send": "#f4c95d",
    "decode": "#c98bb9",
    "other": "#9aa4af",
}
# Kernels nearer to each other than this are counted as one piece of work, and drawn as one if no gap shows.
_NEAR_S = 20e-6
_SEEN_PIXELS = 0.5
_LEFT, _RIGHT, _TOP, _ROW = 170.0, 20.0, 46.0, 34.0
# What runs on the streams of cuts and on no other.
_CODEC_KERNELS = ("encode_kernel", "decode_kernel")
_SEND_ROW = "host: send"
_PASSES = ("forward", "backward", "optimize")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Something that went on, in seconds of the clock."""

    kind: str
    start_s: float
    end_s: float

    @property
    def interval(self) -> Interval:
        """From when to when."""
        return self.start_s, self.end_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One stream of the device, or one kind of work of a host's thread."""

    name: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The rows of one step, the stream that computes first."""

    rows: tuple[Row, ...]

    @property
    def compute(self) -> list[Interval]:
        """When the device computed."""
        return union(piece.interval for row in self.rows[:1] for piece in row.pieces)

    def overlapped_share(self, kinds: set[str]) -> float:
        """The share of the time of some work during which the device computed."""
        work = union(piece.interval for row in self.rows[1:] for piece in row.pieces if piece.kind in kinds)
        return shared_s(work, self.compute) / total_s(work) if work else 1.0

    @property
    def busy_share(self) -> float:
        """The share of the step during which the device computed."""
        compute = self.compute
        return total_s(compute) / (compute[-1][1] - compute[0][0]) if compute else 0.0


def read_step(trace: Path, spans: Sequence[Span]) -> Step:
    """The device's work from a Chrome trace, the host's from the spans of the run."""
    found = json.loads(trace.read_text())
    base_s = found.get("baseTimeNanoseconds", 0) / 1e9
    streams: dict[object, list[dict[str, Any]]] = {}
    for event in found["traceEvents"]:
        if event.get("cat") in _ON_DEVICE:
            place = event.get("args", {}).get("stream", event.get("tid"))
            streams.setdefault(place, []).append(event)
    ordered = sorted(streams.values(), key=lambda events: -sum(float(one.get("dur", 0)) for one in events))
    passes = [span for span in spans if span.kind in _PASSES]
    return Step(rows=(*_device_rows(ordered, base_s, passes), *_host_rows(spans)))


def step_of(spans: Sequence[Span], lanes: Sequence[Piece]) -> Step:
    """A step from the spans of the run, whose passes are timed by the device, and from what lanes noted."""
    passes = [
        Piece(kind=one.kind, start_s=one.start_s, end_s=one.end_s) for one in spans if one.kind in _PASSES
    ]
    rows = [Row(name="device: passes", pieces=tuple(passes))]
    for name, kind in (("device: encode, copy", "codec"), ("device: copy, decode", "decode")):
        pieces = tuple(one for one in lanes if one.kind == kind)
        if pieces:
            rows.append(Row(name=name, pieces=pieces))
    return Step(rows=(*rows, *(row for row in _host_rows(spans) if row.name == _SEND_ROW)))


def draw_step(step: Step, *, title: str, width: float = 1200.0) -> str:
    """The text of an SVG file."""
    start_s = min((piece.start_s for row in step.rows for piece in row.pieces), default=0.0)
    end_s = max((piece.end_s for row in step.rows for piece in row.pieces), default=0.0)
    scale = (width - _LEFT - _RIGHT) / max(end_s - start_s, 1e-9)
    shapes = [label(12, 20, title, size=14)]
    for number, row in enumerate(step.rows):
        y = _TOP + number * _ROW
        shapes.append(label(12, y + 12, row.name))
        shapes += [
            box(
                _LEFT + (piece.start_s - start_s) * scale,
                y,
                max(0.3, (piece.end_s - piece.start_s) * scale),
                24,
                _COLOURS.get(piece.kind, _COLOURS["other"]),
                title=f"{piece.kind}, {1e3 * (piece.end_s - piece.start_s):.2f} ms",
            )
            for piece in _joined(row.pieces, near_s=_SEEN_PIXELS / scale)
        ]
    bottom = _TOP + len(step.rows) * _ROW
    shapes += _axis(end_s - start_s, bottom, width)
    shapes += _legend({piece.kind for row in step.rows for piece in row.pieces}, bottom + 44)
    return to_svg(width, bottom + 64, shapes)


def _device_rows(
    streams: Sequence[Sequence[dict[str, Any]]], base_s: float, passes: Sequence[Span]
) -> list[Row]:
    """The stream that works most computes; those of cuts are known by their kernels, if any has such."""
    rows = []
    are_known = any(map(_codes, streams))
    for number, events in enumerate(streams):
        if number == 0:
            pieces = _by_pass((_device_piece(one, base_s, "other") for one in events), passes)
            rows.append(Row(name="compute stream", pieces=_joined(pieces)))
            continue
        is_lane = _codes(events) or not are_known
        pieces = tuple(_device_piece(one, base_s, _lane_kind(one) if is_lane else "other") for one in events)
        name = "stream of a cut" if is_lane else "stream beside it"
        rows.append(Row(name=f"{name} {number}", pieces=_joined(pieces)))
    return rows


def _codes(events: Sequence[dict[str, Any]]) -> bool:
    return any(kernel in str(one.get("name", "")) for one in events for kernel in _CODEC_KERNELS)


def _lane_kind(event: dict[str, Any]) -> str:
    return "codec" if event["cat"] == "kernel" else "copy"


def _device_piece(event: dict[str, Any], base_s: float, kind: str) -> Piece:
    start_s = base_s + float(event["ts"]) / 1e6
    return Piece(kind=kind, start_s=start_s, end_s=start_s + float(event.get("dur", 0)) / 1e6)


def _joined(pieces: Iterable[Piece], *, near_s: float = _NEAR_S) -> tuple[Piece, ...]:
    joined: list[Piece] = []
    for piece in sorted(pieces, key=lambda one: one.start_s):
        last = joined[-1] if joined else None
        if last is not None and piece.kind == last.kind and piece.start_s - last.end_s < near_s:
            joined[-1] = Piece(kind=last.kind, start_s=last.start_s, end_s=max(last.end_s, piece.end_s))
        else:
            joined.append(piece)
    return tuple(joined)


def _by_pass(pieces: Iterable[Piece], passes: Sequence[Span]) -> tuple[Piece, ...]:
    """What the device computed, named by the pass during which it did."""

    def kind(piece: Piece) -> str:
        middle_s = (piece.start_s + piece.end_s) / 2
        return next((span.kind for span in passes if span.start_s <= middle_s <= span.end_s), "other")

    return tuple(Piece(kind=kind(piece), start_s=piece.start_s, end_s=piece.end_s) for piece in pieces)


def _host_rows(spans: Sequence[Span]) -> list[Row]:
    kinds = {
        "host: passes": _PASSES,
        "host: encode, copy": ("encode",),
        _SEND_ROW: ("transfer",),
        "host: decode": ("decode",),
    }
    names = {"encode": "codec", "transfer": "send"}
    rows = []
    for name, wanted in kinds.items():
        # What comes to the stage is no work of its own: only what its courier sends is.
        own = [
            span
            for span in spans
            if span.kind in wanted and (span.kind != "transfer" or span.track == "send")
        ]
        pieces = [
            Piece(kind=names.get(span.kind, span.kind), start_s=span.start_s, end_s=span.end_s)
            for span in own
        ]
        if pieces:
            rows.append(Row(name=name, pieces=tuple(pieces)))
    return rows


def _axis(duration_s: float, y: float, width: float) -> list[str]:
    shapes = [line((_LEFT, y), (width - _RIGHT, y))]
    for tick in range(9):
        x = _LEFT + (width - _LEFT - _RIGHT) * tick / 8
        shapes.append(label(x, y + 14, f"{1e3 * duration_s * tick / 8:.0f} ms", size=10, anchor="middle"))
    return shapes


def _legend(kinds: set[str], y: float) -> list[str]:
    shapes: list[str] = []
    for number, kind in enumerate(one for one in _COLOURS if one in kinds):
        x = _LEFT + 110 * number
        shapes += [box(x, y - 6, 12, 12, _COLOURS[kind]), label(x + 18, y, kind)]
    return shapes

"""What a user sees of a run, elsewhere than on a terminal and on one."""

import io
from typing import Any

from rich.console import Console

from isthmus.cli.display import Display, show_summary
from isthmus.observe.report import CloudSummary, CodingError, Summary

TRAFFIC: dict[str, Any] = {
    "kind": "step",
    "sent_bytes": {"west": 2_000_000},
    "reconnects": 1,
    "overlapped_share": 0.75,
}
FIGURES = {"loss": 2.5, "tokens_per_s": 1234.0, "duration_s": 0.5, "bubble": 0.1}


def step(number: int, **values: Any) -> dict[str, Any]:
    return {**TRAFFIC, "step": number, **values}


def console(*, is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=120, highlight=False)


def table_of(display: Display) -> list[str]:
    plain = Console(file=io.StringIO(), width=80)
    plain.print(display._table())
    return text_of(plain).splitlines()


def text_of(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def test_plain_lines_for_the_first_and_the_last_step() -> None:
    shown = console(is_terminal=False)
    with Display(shown, num_steps=3) as display:
        for number in range(3):
            display.hear("east", step(number, **FIGURES))
            display.hear("west", step(number))
        display.hear("east", {"kind": "evaluation", "step": 3, "loss": 2.25})
        plain = {"kind": "evaluation", "step": 3, "loss": 2.125, "is_plain": True}
        display.hear("east", plain)
        note = "all is well within [limits], " + "and so on " * 20
        display.hear("west", {"kind": "note", "text": note})
    lines = text_of(shown).splitlines()
    assert [line.split()[1] for line in lines[:2]] == ["1/3", "3/3"]
    assert "loss 2.5 " in lines[0]
    assert "1234 tok/s" in lines[0]
    assert "bubble 10%" in lines[0]
    assert "1 s left" in lines[0]
    assert lines[2:] == [
        "step 3: validation loss 2.2500",
        "step 3: validation loss 2.1250 without codecs",
        f"west: {note}",
    ]


def test_the_state_of_a_link_is_told_and_stands_in_the_table() -> None:
    lost = {"kind": "link", "peer": "west", "rank": 0, "state": "reconnecting", "reason": "east:1: refused"}
    for is_terminal in (False, True):
        shown = console(is_terminal=is_terminal)
        with Display(shown, num_steps=3) as display:
            display.hear("east", step(0, **FIGURES))
            display.hear("east", lost)
            if is_terminal:
                assert any("reconnecting" in line for line in table_of(display))
            display.hear("east", {**lost, "state": "up", "reason": ""})
        assert "east: link to west rank 0 is reconnecting: east:1: refused" in text_of(shown)
        assert "east: link to west rank 0 is up" in text_of(shown)


def test_a_second_site_shows_loss_speed_and_time_left() -> None:
    shown = console(is_terminal=False)
    with Display(shown, num_steps=3, site="west") as display:
        for number in range(3):
            display.hear("west", step(number, loss=2.5, tokens_per_s=1234.4, duration_s=0.5))
    assert text_of(shown).splitlines() == [
        "step 1/3  loss 2.5  1234 tok/s  500 ms/step  1 s left",
        "step 3/3  loss 2.5  1234 tok/s  500 ms/step  0 s left",
    ]


def test_the_line_of_a_long_run_fits_80_columns() -> None:
    shown = console(is_terminal=False)
    with Display(shown, num_steps=99_999) as display:
        figures = {"loss": 10.123456, "tokens_per_s": 1_234_567.8, "duration_s": 98.76543, "bubble": 0.987}
        display.hear("east", step(54_321, **figures))
    (line,) = text_of(shown).splitlines()
    assert line == "step 54322/99999  loss 10.12  1230k tok/s  98.8 s/step  bubble 99%  52.2 d left"
    assert len(line) <= 80


def test_a_live_table_names_every_link() -> None:
    shown = console(is_terminal=True)
    with Display(shown, num_steps=3) as display:
        display.hear("east", step(0, **FIGURES))
    assert "east → west" in text_of(shown)
    assert "75%" in text_of(shown)


def test_the_summary_has_every_figure() -> None:
    shown = console(is_terminal=False)
    clouds = (
        CloudSummary(
            cloud="east", bubble=0.25, overlapped_share=0.5, received_bytes=1_000_000, coding_share=0.03
        ),
    )
    found = Summary(
        num_steps=3,
        step_s=0.5,
        first_loss=4.0,
        last_loss=2.0,
        validation_loss=2.5,
        clouds=clouds,
        plain_validation_loss=2.25,
        bits_per_element=4.0,
        ratio_to_float32=8.0,
        ratio_to_bfloat16=4.0,
        coding_errors=(
            CodingError(track="east→west", relative_error=0.0123, cosine=0.9987),
            CodingError(track="west→east", relative_error=None, cosine=0.0),
        ),
    )
    show_summary(shown, found)
    text = text_of(shown)
    figures = ("4.000 → 2.000", "2.500 (2.250 without codecs)", "500 ms", "25%", "50%", "KiB", "3.0%")
    coding = ("east→west 1.23% (cosine 0.9987)", "west→east everything")
    for figure in (*figures, *coding, "4.00 bits per element, 8.0× to float32, 4.0× to bfloat16"):
        assert figure in text, figure


def test_what_a_discriminator_tells_stands_below_the_step() -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    told = {
        "accuracy": 0.945,
        "original_share": 0.867,
        "num_queued": [3, 8],
        "staleness": [0, 2],
        "waited_s": 0.5,
    }
    with Display(console, num_steps=2) as display:
        display.hear("judge", {"kind": "feed", **told})
        display.hear(
            "judge",
            {"kind": "step", "step": 0, "loss": 0.5, "tokens_per_s": 9.0, "duration_s": 1.0, "bubble": 0.1},
        )
    text = console.export_text()
    assert "accuracy 94.5% (all original 86.7%)  queued 3+8  stale 0+2  waited 500 ms" in text

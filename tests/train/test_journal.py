"""What a journal tells of a step, and where."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from isthmus.events import EventLog, Span
from isthmus.plan.end_of_step import StepEnded
from isthmus.plan.types import Member
from isthmus.train.journal import Journal
from isthmus.wan.link import LinkState

ENDED = StepEnded(
    step=4,
    loss=2.0,
    norm=1.0,
    learning_rate=1e-3,
    num_tokens=100,
    duration_s=2.0,
    busy_s=(1.0, 1.5),
    windows=(2, 1),
)


def link(cloud: str, sent_bytes: int, reconnects: int = 0) -> Any:
    """A link as far as a journal looks at it."""
    sent = {"forward": sent_bytes}
    counters = SimpleNamespace(sent=sent, reconnects=reconnects)
    return SimpleNamespace(peer=SimpleNamespace(cloud=cloud), counters=lambda: counters)


def told(tmp_path: Path, links: list[Any], spans: list[Span]) -> dict[str, Any]:
    words: list[str] = []
    with EventLog(tmp_path / "east.jsonl") as log:
        journal = Journal(log, is_first=True, links=links, report=words.append)
        for span in spans:
            journal.span(span)
        journal.tell(ENDED)
    found: dict[str, Any] = json.loads(words[-1])
    return found


def test_links_to_several_ranks_of_a_cloud_count_together(tmp_path: Path) -> None:
    found = told(tmp_path, [link("west", 5, 1), link("west", 7, 2), link("north", 11)], [])
    assert found["sent_bytes"] == {"west": 12, "north": 11}
    assert found["reconnects"] == 3


def test_a_link_that_changes_its_state_is_an_event_and_is_told(tmp_path: Path) -> None:
    words: list[str] = []
    one = link("west", 5)
    with EventLog(tmp_path / "east.jsonl") as log:
        Journal(log, is_first=False, links=[one], report=words.append)
        one.on_state(Member("west", 2), LinkState.SILENT, "cut")
    values = {"peer": "west", "rank": 2, "state": "silent", "reason": "cut"}
    assert json.loads(words[-1]) == {"kind": "link", **values}
    (line,) = (tmp_path / "east.jsonl").read_text().splitlines()
    assert json.loads(line)["values"] == values


def test_what_arrives_while_the_stage_computes_is_hidden(tmp_path: Path) -> None:
    transfer = Span(track="west→east", name="backward 4.0", kind="transfer", start_s=10.0, end_s=12.0)
    forward = Span(track="east", name="forward 4.1", kind="forward", start_s=11.5, end_s=13.0)
    found = told(tmp_path, [], [transfer, forward])
    assert found["overlapped_share"] == 0.25
    assert found["bubbles"] == [0.5, 0.25]

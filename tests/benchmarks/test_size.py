import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from calls import Recorder
from size import (
    Figure,
    above_ceiling,
    count_lines,
    lowered,
    names_defined_twice,
    read_ways,
    static_figures,
    traced_figures,
    without_vocabulary,
)

TEXT = '''"""A docstring
of two lines."""

import os  # counts


class One:
    """Says what it is."""

    text = """not
a docstring"""

    # a comment
    def method(self) -> str:
        """Of the method."""
        return (
            self.text
        )
'''


def test_lines_with_code_count() -> None:
    assert count_lines(TEXT) == 1 + 1 + 2 + 1 + 3
    assert count_lines("") == 0


def test_public_names_of_classes_in_several_modules() -> None:
    texts = {
        "a.py": "class One: ...\nclass _Two: ...\nclass Three:\n    class Four: ...",
        "b.py": "class One: ...\nclass _Two: ...\ndef f():\n    class Four: ...",
        "c.py": "class Three3: ...\nclass Five: ...\nclass Five: ...",
    }
    assert names_defined_twice(texts) == {"One": ["a.py", "b.py"], "Four": ["a.py", "b.py"]}


def test_words_that_all_speak_do_not_count() -> None:
    names = ["isthmus.job", "isthmus.job.spec", "isthmus.jobs", "isthmus.errors", "isthmus.train.loop"]
    assert without_vocabulary(names) == ("isthmus.jobs", "isthmus.train.loop")


def test_a_goal_is_missed_by_more_and_by_nothing_known() -> None:
    assert Figure(name="x", value=4, goal=4).is_met
    assert not Figure(name="x", value=5, goal=4).is_met
    assert not Figure(name="x", value=None, goal=4).is_met
    assert [one.value for one in traced_figures(None)] == [None, None]


def test_ceilings_are_only_ever_lowered() -> None:
    figures = [Figure(name=name, value=value, goal=1) for name, value in (("x", 5), ("y", 7), ("z", None))]
    assert lowered({"x": 4, "y": 9, "z": 3}, figures) == {"x": 4, "y": 7, "z": 3}
    assert lowered({"x": 9}, [Figure(name="x", value=5, goal=8)]) == {"x": 8}, "a goal that is met binds"
    assert above_ceiling(figures, {"x": 4, "y": 9, "z": 3}) == ["x: 5, and the ceiling is 4"]
    assert not above_ceiling(figures, {"x": 5, "y": 7, "z": 3})


def test_files_that_do_not_exist_are_named(tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "types.py").write_text("x = 1\n")
    figures = {one.name: one for one in static_figures(tmp_path)}
    assert figures["lines of code"].value == figures["files"].value == 1
    assert figures["reading path, lines of code"].value == 1
    assert figures["reading path, files that do not exist"].value == 8
    assert "train/loop" in figures["reading path, files that do not exist"].note


def test_the_last_stage_is_the_one_that_has_sent_nothing_yet() -> None:
    first = {"modules": ["isthmus.a"], "classes": ["isthmus.train.wire.Wire", "isthmus.job.spec.Job"]}
    last = {"modules": ["isthmus.b", "isthmus.job.spec"], "classes": None}
    ways = read_ways([first, last])
    assert ways.modules == ("isthmus.b",)
    assert ways.classes == ("isthmus.train.wire.Wire",)
    with pytest.raises(SystemExit, match="HAND_OVERS"):
        read_ways([last, last])


MODULES = {
    "isthmus.wan.link": "class Link:\n    def send(self): return self.after()\n    def after(self): ...",
    "isthmus.codec.base": "class Codec:\n    def encode(self): ...",
    "isthmus.observe.page": "class Page:\n    def draw(self): ...",
    "isthmus.train.wire": """
class Wire:
    def send(self, codec, link, page):
        self.packed()
        thread = Thread(target=lambda: (codec.encode(), link.send(), page.draw(), link.send()))
        thread.start()
        thread.join()
    def packed(self): ...
""",
    "isthmus.model.stage": "class Stage:\n    def forward(self): ...",
    "isthmus.train.build": "def build(): ...",
    "isthmus.cli.run": "def before(): ...",
    "isthmus.train.session": """
def run(stage, wire, codec, link, page, backward):
    wire.packed()
    build()
    stage.forward()
    page.draw()
    wire.send(codec, link, page)
    page.draw()
    backward()
    before()
""",
    "torch.autograd": "def backward(): ...",
}


def scene() -> dict[str, Any]:
    """Modules of the package as far as a trace knows them, all names in one."""
    names: dict[str, Any] = {"Thread": threading.Thread}
    for module, text in MODULES.items():
        space = {"__name__": module, **names}
        exec(compile(text, f"{module}.py", "exec"), space)
        names |= {name: value for name, value in space.items() if not name.startswith("__")}
    return names


def test_a_trace_begins_with_the_session_and_ends_with_the_loss(tmp_path: Path) -> None:
    names = scene()
    recorder = Recorder(tmp_path)
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        names["before"]()
        names["run"](
            names["Stage"](),
            names["Wire"](),
            names["Codec"](),
            names["Link"](),
            names["Page"](),
            names["backward"],
        )
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    (file,) = tmp_path.iterdir()
    found = json.loads(file.read_text())
    rooms = ["train.session", "train.wire", "train.build", "model.stage", "observe.page"]
    assert found["modules"] == [f"isthmus.{room}" for room in rooms]
    assert found["classes"] == ["isthmus.train.wire.Wire", "isthmus.codec.base.Codec"]

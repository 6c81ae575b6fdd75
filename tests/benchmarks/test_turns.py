import json

import pytest
from turns import FIGURES, SCRIPTS, Compared, Figure, compare, read_line


def compared(old: tuple[float, ...], new: tuple[float, ...], *, higher: bool = False) -> Compared:
    return Compared(name="x", old=old, new=new, is_higher_better=higher)


@pytest.mark.parametrize(
    ("old", "new", "higher", "verdict"),
    [
        ((1.0, 1.0), (1.02, 1.02), False, ""),
        ((1.0, 1.0), (1.04, 1.04), False, "worse"),
        ((1.0, 1.0), (0.5, 0.5), False, ""),
        ((1.0, 1.0), (0.96, 0.96), True, "worse"),
        ((1.0, 1.0), (1.5, 1.5), True, ""),
        ((1.0, 1.1), (1.1, 1.2), False, "unclear"),
        ((1.0, 1.0), (), False, "worse"),
        ((), (1.0, 1.0), False, ""),
        ((0.0, 0.0), (0.0, 0.0), False, ""),
        ((0.0, 0.0), (1.0, 1.0), False, "worse"),
        ((1.0,), (0.0,), True, "worse"),
    ],
)
def test_more_than_three_percent_is_worse_unless_rounds_differ_as_much(
    old: tuple[float, ...], new: tuple[float, ...], higher: bool, verdict: str
) -> None:
    assert compared(old, new, higher=higher).verdict == verdict


def test_figures_of_all_rounds_come_together_by_name() -> None:
    old = [[Figure(name="a", value=1.0)], [Figure(name="a", value=3.0)]]
    new = [[Figure(name="b", value=2.0, is_higher_better=True)], []]
    first, second = compare(old, new)
    assert (first.name, first.old, first.new, first.ratio) == ("a", (1.0, 3.0), (), None)
    assert (second.name, second.new, second.is_higher_better) == ("b", (2.0,), True)


def test_the_last_line_of_json_counts() -> None:
    assert read_line('table\n{"case": 1}\n{"benchmark": "x"}\ndone\n') == {"benchmark": "x"}
    assert read_line("no figures") is None


LINES = {
    "schedule.py": {
        "steps": {"isthmus": {"duration_s": 1.05}, "compute alone": {"duration_s": 0.96}},
        "sweep": [{"rtt_s": 0.1, "bandwidth_bps": 1e8, "num_microbatches": 8, "duration_s": 0.42}],
    },
    "link.py": {
        "rows": [
            {"what": "100 Mbit/s line, 20 ms round trip", "ratio": 0.99},
            {"what": "loopback: plain TLS socket", "ratio": 1.9},
            {"what": "loopback: isthmus, 1 stripe", "ratio": 0.9},
        ]
    },
    "codec_auto.py": {
        "worst_excess": 0.02,
        "is_monotone": True,
        "is_wide_milder": False,
        "auto": [{"down_mbps": 100, "up_mbps": 20, "trial": "auto", "steady_s": 0.5}],
        "fixed": [{"down_mbps": 100, "up_mbps": 20, "codecs": ["raw", "raw"], "steady_s": 0.6}],
    },
    "kill_ranks.py": {"others_s": [1.0, 2.5], "same_weights": True},
    "prediction.py": {
        "score": {"mean_error": 0.01, "worst_error": 0.04, "kendall_tau": 0.98},
        "cases": [{"number": 3, "measured_s": 1.5}],
    },
    "stage_speed.py": {
        "settings": [
            {
                "setting": {"is_sharded": True, "is_compiled": False, "codec": codec},
                "plain_s": [1.0, 2.0],
                "isthmus_s": [2.0, 4.0],
            }
            for codec in ("raw", "int4")
        ]
    },
}
VALUES = {
    "schedule.py": [1.05, 0.42],
    "link.py": [0.99, 0.9],
    "codec_auto.py": [1.02, 1.0, 0.0, 0.5, 0.6],
    "kill_ranks.py": [2.5, 1.0],
    "prediction.py": [1.01, 1.04, 0.98, 1.5],
    "stage_speed.py": [0.5, 0.5],
}


@pytest.mark.parametrize("script", FIGURES)
def test_figures_of_each_benchmark(script: str) -> None:
    found = list(FIGURES[script](json.loads(json.dumps(LINES[script]))))
    assert [one.value for one in found] == pytest.approx(VALUES[script])
    assert len({one.name for one in found}) == len(found)


def test_what_runs_by_default_can_be_compared() -> None:
    assert {script.partition(" ")[0] for script in SCRIPTS} <= FIGURES.keys()


def test_an_older_line_names_its_codec_once_for_all_settings() -> None:
    setting: dict[str, object] = {"is_sharded": False, "is_compiled": True}
    measured = {"plain_s": [1.0], "isthmus_s": [1.0]}
    old = {"codec": "int4", "settings": [{"setting": setting, **measured}]}
    new = {"settings": [{"setting": setting | {"codec": "int4"}, **measured}]}
    assert [one.name for one in FIGURES["stage_speed.py"](old)] == [
        one.name for one in FIGURES["stage_speed.py"](new)
    ]

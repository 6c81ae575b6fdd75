"""Facts as a hostile peer would send them: valid ones that were changed, and texts that never were."""

import json
import math
from random import Random
from typing import Any

from isthmus.plan.end_of_step import Cosines, Evaluated, Tally, Verdict
from isthmus.plan.scenario import Hop
from isthmus.plan.types import MAX_FACTS_BYTES, Facts, pack_facts

HOP = Hop(forward_s=0.01, backward_s=0.02, latency_s=0.03, coding_s=0.001)
TALLY = Tally(
    step=0,
    loss_sum=2.5,
    squared_norms=(9.0, -1e-17),
    busy_s=(0.5, 0.25),
    hops=(HOP,),
    travel_s=0.1,
    coding_s=0.002,
    cosines=(Cosines(forward=0.999),),
    element_bytes=(4,),
    gradient_cosine=0.99,
)
VERDICT = Verdict(step=0, norm=3.0, windows=(3, 2, 1), codecs=(("raw", "raw"), ("bf16", "bf16")))
EVALUATED = Evaluated(step=4, loss_sum=3.25, num_correct=5, num_targets=9)
VALID: tuple[Tally | Verdict | Evaluated, ...] = (TALLY, VERDICT, EVALUATED)

VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 64, 65, 2**24, 2**31, 2**53, 2**63, 10**40, -(10**40), 10**4000),
    *(0.0, -0.0, 0.5, -0.5, 1e-320, 1e-9, 1e9, 1e12, 1.1e12, 1e154, 1e300, 1.7e308, -1e308),
    *(float("nan"), float("inf"), float("-inf"), True, False, None),
    *("", "raw", "int8", "rotate | int8", "subspace(16) | int4", "same-basis(4) | int4", "topk(0.1) | int8"),
    *("NaN", "1", "🙂", "\ud800", "x" * 300, "subspace(99999999999) | int4", "int4(" * 50, "a\x00b"),
    *([], {}, [[]], [1], [1, 1, 1], [0.1] * 70, [1] * 1025, [["raw", "raw"]] * 2, [["raw"]], [["raw", 1]]),
    *({"step": 0}, {"forward_s": 1e12, "backward_s": 0.0, "latency_s": 1e12}, {"forward": 2.0}),
)
FLOATS = (0.0, 1e-320, 1e-12, 1e-3, 0.5, 1.0, 1.001, 30.0, 1e9, 1e12, 1e200, -1e-9, math.nan, math.inf)
LETTERS = '{}[]",:0123456789eE+-.nNaAtrufls \\\x00\x7fé'


def hostile_text(random: Random, facts: Facts) -> object:
    """What a peer might put in the place of facts."""
    text = pack_facts(facts)
    match random.randrange(8):
        case 0:
            return "".join(random.choices(LETTERS, k=random.choice((0, 1, 9, 200))))
        case 1:
            return _spoilt(random, text)
        case 2:
            return random.choice((None, 3, b"{}", [], {}, text * 400, "[" * 30_000, '{"step":' * 4000))
        case 3 | 4 | 5:
            return extreme_text(random, facts)
        case _:
            return json.dumps(_changed(random, json.loads(text)))


def extreme_text(random: Random, facts: Facts) -> str:
    """Facts of the same form, with other numbers and codecs."""
    return json.dumps(_extreme(random, json.loads(pack_facts(facts))))


def _spoilt(random: Random, text: str) -> str:
    """A text with some letters changed, left out or put in."""
    letters = list(text)
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(letters))
        letters[place : place + random.randrange(3)] = random.choices(LETTERS, k=random.randrange(3))
    return "".join(letters)[:MAX_FACTS_BYTES]


def _extreme(random: Random, value: Any) -> Any:
    match value:
        case dict():
            return {key: _extreme(random, one) for key, one in value.items()}
        case list():
            return [_extreme(random, one) for one in value]
        case bool():
            return random.choice((True, False))
        case _ if random.random() < 0.6:
            return value
        case float():
            return random.choice(FLOATS)
        case int():
            return random.choice((0, 1, 2, 3, 8, 64, 2**24, 2**53))
        case _:
            return random.choice(("raw", "bf16", "rotate | int8", "rotate | int8(stochastic)"))


def _changed(random: Random, value: Any) -> Any:
    """A document with some values changed, keys left out or added."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        value = _change_once(random, value)
    return value


def _change_once(random: Random, value: Any) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.9:
        return _change_key(random, dict(value))
    if isinstance(value, list) and value and random.random() < 0.8:
        return _change_item(random, list(value))
    return random.choice(VALUES)


def _change_key(random: Random, value: dict[str, Any]) -> dict[str, Any]:
    key = random.choice(list(value))
    chance = random.random()
    if chance < 0.05:
        del value[key]
    elif chance < 0.1:
        value[random.choice(("", "step", "more", "__class__", key * 2))] = random.choice(VALUES)
    else:
        value[key] = _change_once(random, value[key])
    return value


def _change_item(random: Random, value: list[Any]) -> list[Any]:
    place = random.randrange(len(value))
    chance = random.random()
    if chance < 0.1:
        return value * random.choice((0, 2, 3, 600))
    if chance < 0.2:
        return [*value, random.choice(VALUES)]
    value[place] = _change_once(random, value[place])
    return value

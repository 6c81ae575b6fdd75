"""A peer that tries every second is told of once, then ever more rarely."""

from isthmus.wan.relays.complaints import Complaints

REASON = "rank 1 of east has not registered"


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def hear(complaints: Complaints, clock: Clock, *, num_seconds: int, what: str = REASON) -> list[str]:
    """What is told while the same complaint comes every second."""
    told = []
    for _ in range(num_seconds):
        told.append(complaints.tell("10.0.0.7", what))
        clock.now_s += 1.0
    return [words for words in told if words is not None]


def test_a_complaint_is_told_once_and_then_ever_more_rarely_with_its_number() -> None:
    clock = Clock()
    complaints = Complaints(clock=clock)
    assert hear(complaints, clock, num_seconds=60) == [REASON]
    assert hear(complaints, clock, num_seconds=130) == [
        f"{REASON} (60 times in 60 s)",
        f"{REASON} (120 times in 120 s)",
    ]
    assert len(hear(complaints, clock, num_seconds=24 * 3600)) < 32


def test_another_reason_another_peer_and_one_that_has_rested_are_news() -> None:
    clock = Clock()
    complaints = Complaints(clock=clock)
    assert hear(complaints, clock, num_seconds=5) == [REASON]
    assert hear(complaints, clock, num_seconds=5, what="rank 2 of east has not registered")
    assert complaints.tell("10.0.0.8", REASON) == REASON
    assert complaints.tell("10.0.0.7", REASON) is None
    clock.now_s += 31.0
    assert complaints.tell("10.0.0.7", REASON) == REASON


def test_strangers_cannot_fill_the_memory() -> None:
    complaints = Complaints(clock=Clock())
    for number in range(5000):
        assert complaints.tell("10.0.0.7", f"{number} is not the name of a rank") is not None
    assert complaints.tell("10.0.0.7", "4999 is not the name of a rank") is None
    assert complaints.tell("10.0.0.7", "0 is not the name of a rank") is not None

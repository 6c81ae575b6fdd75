"""Times when something goes on: how long they last together, and how much two kinds of them share."""

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that do not touch, in order."""
    merged: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        elif end_s > start_s:
            merged.append((start_s, end_s))
    return merged


def total_s(intervals: Sequence[Interval]) -> float:
    """How long intervals that do not touch last together."""
    return sum(end_s - start_s for start_s, end_s in intervals)


def shared_s(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """For how long both go on."""
    ours, theirs = union(first), union(second)
    shared, i, j = 0.0, 0, 0
    while i < len(ours) and j < len(theirs):
        shared += max(0.0, min(ours[i][1], theirs[j][1]) - max(ours[i][0], theirs[j][0]))
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return shared

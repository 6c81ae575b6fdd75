"""Ends that do not belong together part with one sentence, whichever of them reads the other's hello."""

from dataclasses import fields, replace

import pytest

from isthmus.errors import FrameError
from isthmus.wan.handshake import Hello, mismatch, read_hello

EAST = Hello(cloud="east", peer_cloud="west", job_digest="1" * 64, session="e")
WEST = Hello(cloud="west", peer_cloud="east", job_digest="1" * 64, session="w")


def test_a_hello_crosses_whole() -> None:
    there = replace(WEST, rank=3, met="5f", peer_rank=7, lane=5)
    assert read_hello(there.to_metadata()) == there
    assert mismatch(EAST, read_hello(WEST.to_metadata())) is None


def test_two_releases_part_even_if_they_speak_one_protocol() -> None:
    other = replace(WEST, release="0.7.1")
    sentence = mismatch(EAST, read_hello(other.to_metadata()))
    assert sentence is not None
    assert sentence.startswith("west rank 0 runs Isthmus 0.7.1 ")
    assert f"east rank 0 runs {EAST.release}" in sentence
    assert sentence.endswith("install the same release at both")


def test_a_release_before_releases_were_told_is_named_as_such() -> None:
    """What links of protocol 1 said of themselves."""
    early = [pair for pair in replace(WEST, version=1).to_metadata() if pair[0] != "isthmus-release"]
    sentence = mismatch(EAST, read_hello(early))
    assert sentence is not None
    assert "west rank 0 runs Isthmus of an early release (link protocol 1)" in sentence


def test_a_later_protocol_may_have_other_fields() -> None:
    later = dict(replace(WEST, version=99, release="9.0").to_metadata())
    kept = {
        key: later[key] for key in ("isthmus-version", "isthmus-release", "isthmus-cloud", "isthmus-rank")
    }
    sentence = mismatch(EAST, read_hello([*kept.items(), ("isthmus-colour", "blue")]))
    assert sentence is not None
    assert "west rank 0 runs Isthmus 9.0 (link protocol 99)" in sentence


@pytest.mark.parametrize("name", [field.name for field in fields(Hello)])
def test_a_hello_of_this_protocol_has_every_field(name: str) -> None:
    metadata = [pair for pair in WEST.to_metadata() if pair[0] != f"isthmus-{name}"]
    with pytest.raises(FrameError, match=f"a handshake without {name}"):
        read_hello(metadata)


def test_a_rank_that_was_not_dialled_is_refused_by_both_ends_with_one_sentence_each() -> None:
    dialled = replace(WEST, peer_rank=1)
    here, there = mismatch(dialled, EAST), mismatch(EAST, dialled)
    assert here is not None
    assert here.startswith("west rank 0 has dialled east rank 1, and east rank 0 has answered: ")
    assert there is not None
    assert there.startswith("west rank 0 has dialled east rank 1 and reached east rank 0: ")


def test_a_cloud_that_was_not_dialled_is_refused() -> None:
    assert mismatch(WEST, replace(EAST, cloud="north")) is not None
    assert mismatch(EAST, replace(WEST, peer_cloud="north")) is not None

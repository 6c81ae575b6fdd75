"""A member that fails, or does not keep to what was agreed, ends the run of all."""

from typing import Any

import pytest

from isthmus.errors import LinkError
from isthmus.plan.types import Member, Message, MessageKind, ScheduleError
from isthmus.train.device import Mark
from isthmus.train.wire import Failure, Inbox, Wire
from isthmus.wan.memory import MemoryLink
from tests.model.cases import blueprint
from tests.train.chain import Given, Record, chain, config
from tests.train.test_exactness import batches


def test_an_error_on_a_wires_thread_is_reported() -> None:
    inbox, here, peer = Inbox(), Member("east"), Member("west")
    bad: Any = {"ids": object()}
    with MemoryLink("east", "west") as wan:
        wire = Wire(wan.end("east"), here=here, peer=peer, inbox=inbox, observer=Record(), facts={})
        wire.send(Message(MessageKind.ACTIVATION, 0, 0, here, (peer,)), bad, Mark())
        found = inbox.get(timeout=30)
        wire.abandon()
    assert isinstance(found, Failure)
    assert isinstance(found.error, AttributeError)
    assert found.member == peer


def test_a_stage_that_fails_ends_its_neighbours() -> None:
    plan = blueprint("llama")
    with chain(plan, config(3, 2)) as found:

        def fail(_: object) -> None:
            raise RuntimeError("out of luck")

        found.records[2].on_step = fail
        with pytest.raises((RuntimeError, LinkError)):
            found.run(Given(batches(plan, 2)))


def test_stages_that_disagree_on_the_micro_batches_are_found_out() -> None:
    plan = blueprint("llama")
    with chain(plan, config(2, 1)) as found, pytest.raises((ScheduleError, LinkError)):
        found.run(Given(batches(plan, 2)), configs={0: config(2, 2)})


def test_a_source_with_another_number_of_micro_batches_is_found_out() -> None:
    plan = blueprint("llama")
    with chain(plan, config(2, 1)) as found, pytest.raises((ValueError, LinkError)):
        found.run(Given(batches(plan, 2)))

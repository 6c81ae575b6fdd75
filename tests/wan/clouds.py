"""Real processes with real TLS for end-to-end tests: one per cloud, joined through the emulated WAN."""

import multiprocessing
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from isthmus.job import Job
from isthmus.job.load import parse_job
from isthmus.wan.certificates import Identity
from isthmus.wan.endpoint import Endpoint, Site
from isthmus.wan.handshake import Hello
from isthmus.wan.link import Connection, Dial
from isthmus.wan.local import LocalWan

Work = Callable[[Endpoint, Pipe], Any]

TWO_CLOUDS = """
name = "two"
[[cloud]]
name = "east"
listen = "127.0.0.1:7600"
[[cloud]]
name = "west"
[[link]]
between = ["east", "west"]
"""


def two_clouds(*overrides: str) -> Job:
    return parse_job(TWO_CLOUDS, file=Path("two.toml"), overrides=[f"link.0.{text}" for text in overrides])


@dataclass(frozen=True)
class Result:
    value: Any


class CloudProcess:
    """A cloud that does its work in a process of its own; `pipe` speaks with it, `result` ends it."""

    def __init__(self, job: Job, wan: LocalWan, cloud: str, work: Work) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (job, cloud, wan.identity(cloud), wan.site(cloud), work, theirs)
        self.process = context.Process(target=_be, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, timeout_s: float = 60.0) -> Any:
        assert self.pipe.poll(timeout_s), "the cloud says nothing"
        return self.pipe.recv()

    def result(self, timeout_s: float = 120.0) -> Any:
        while not isinstance(message := self.hear(timeout_s), Result):
            continue
        self.process.join(30)
        assert self.process.exitcode == 0
        return message.value

    def __enter__(self) -> "CloudProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _be(job: Job, cloud: str, identity: Identity, site: Site, work: Work, pipe: Pipe) -> None:
    with Endpoint(job, cloud=cloud, identity=identity, site=site) as endpoint:
        result = work(endpoint, pipe)
    pipe.send(Result(result))


async def dialled(dial: Dial, hello: Hello) -> tuple[Connection, AsyncExitStack]:
    """A connection that stays until the stack is closed."""
    stack = AsyncExitStack()
    connection, _ = await stack.enter_async_context(dial(hello))
    return connection, stack

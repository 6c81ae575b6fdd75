"""A rank that stops ends the world of its cloud, and the run at every other cloud, with the reason."""

import multiprocessing
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from isthmus.errors import Aborted
from isthmus.job import Job
from isthmus.job.load import parse_job
from isthmus.train.device import Device
from isthmus.train.in_cloud import join_world
from isthmus.wan.certificates import Identity
from isthmus.wan.endpoint import Endpoint, Site
from isthmus.wan.handshake import EXIT_LOST, RankSpec
from isthmus.wan.local import LocalWan

NETWORK = """
name = "stopped"
[[cloud]]
name = "east"
device = "cpu"
ranks = 2
[[cloud]]
name = "west"
device = "cpu"
listen = "127.0.0.1:7600"
[[link]]
between = ["east", "west"]
"""
SILENCE_S = 2.5
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One process of cloud east, and the rank that stops."""

    job: Job
    spec: RankSpec
    identity: Identity
    site: Site
    stops: int


def be(rank: Rank, pipe: Connection) -> None:
    """Meet the sibling, let one of the two stop, and wait for it in a collective."""
    with Endpoint(
        rank.job, cloud="east", rank=rank.spec.rank, identity=rank.identity, site=rank.site
    ) as endpoint:

        def end(reason: str) -> None:
            pipe.send(reason)
            endpoint.abort(reason)

        secret = endpoint.inside_secret
        with join_world(
            rank.spec, Device("cpu"), cloud="east", secret=secret, end=end, silence_s=SILENCE_S
        ) as world:
            endpoint.link("west").wait_ready(timeout_s=PATIENCE_S)
            world.all_reduce([1])
            if rank.spec.rank == rank.stops:
                os.kill(os.getpid(), signal.SIGSTOP)
            world.all_reduce([1])


@pytest.mark.slow
@pytest.mark.parametrize("stops", [0, 1])
def test_a_stopped_rank_ends_its_world_and_the_run_with_a_reason(stops: int) -> None:
    context = multiprocessing.get_context("spawn")
    job = parse_job(NETWORK, file=Path("stopped.toml"))
    pipes = [context.Pipe() for _ in range(2)]
    with LocalWan(job) as wan:
        ranks = [
            Rank(
                job=job,
                spec=wan.rank_spec("east", number),
                identity=wan.identity("east"),
                site=wan.site("east", number),
                stops=stops,
            )
            for number in range(2)
        ]
        processes = [
            context.Process(target=be, args=(rank, pipe), daemon=True)
            for rank, (_, pipe) in zip(ranks, pipes, strict=True)
        ]
        for process in processes:
            process.start()
        other = 1 - stops
        try:
            with Endpoint(job, cloud="west", identity=wan.identity("west"), site=wan.site("west")) as west:
                with pytest.raises(Aborted) as caught:
                    west.link("east", other).receive("word", timeout_s=PATIENCE_S)
                assert pipes[other][0].poll(PATIENCE_S)
                reason = f"rank {stops} of cloud 'east' is lost: it has been silent for {SILENCE_S:g} s"
                assert pipes[other][0].recv() == reason
                assert reason in str(caught.value)
            processes[other].join(PATIENCE_S)
            # A collective with a stopped rank never returns, so its process cannot end by itself.
            assert processes[other].exitcode == EXIT_LOST
            assert processes[stops].is_alive()
        finally:
            for process in processes:
                process.kill()
                process.join()

"""A rank that is lost while another waits for it in a collective of torch's own, and the world after it."""

import multiprocessing
import os
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from isthmus.errors import RankLost
from isthmus.job import Address
from isthmus.train.device import Device
from isthmus.train.in_cloud import join_world
from isthmus.wan.handshake import RankSpec

PATIENCE_S = 60.0


def be(spec: RankSpec, pipe: Connection) -> None:
    """Be in one world that ends by an error of rank 1, and in a second that ends with its process."""
    for ending in ("fails", "dies"):
        try:
            with join_world(spec, Device("cpu"), cloud="east", secret=b"east") as world:
                pipe.send(world.all_reduce([spec.rank + 1]))
                if spec.rank == 1:
                    end(ending)
                # As FSDP2 has it: none of the world's own collectives.
                dist.all_reduce(torch.ones(1))
        except (RankLost, RuntimeError, OSError) as error:
            pipe.send([type(error).__name__, str(error)])


def end(ending: str) -> None:
    if ending == "dies":
        os._exit(1)
    raise OSError("the disk is full")


def hear(pipe: Connection) -> object:
    assert pipe.poll(PATIENCE_S)
    return pipe.recv()


@pytest.mark.slow
def test_siblings_know_why_a_rank_was_lost_and_the_next_world_meets_nothing_of_the_last() -> None:
    context = multiprocessing.get_context("spawn")
    # It outlives the worlds that meet there, as that of torchrun does.
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE_S)
    )
    master = Address(host="127.0.0.1", port=store.port)
    specs = [RankSpec(rank=rank, num_ranks=2, master=master, is_served=True) for rank in range(2)]
    pipes = [context.Pipe() for _ in specs]
    processes = [
        context.Process(target=be, args=(spec, there), daemon=True)
        for spec, (_, there) in zip(specs, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    first, second = (here for here, _ in pipes)
    try:
        assert [hear(first), hear(second)] == [(3,), (3,)]
        assert hear(second) == ["OSError", "the disk is full"]
        assert hear(first) == ["RankLost", "the disk is full"]
        assert [hear(first), hear(second)] == [(3,), (3,)]
        assert hear(first) == ["RankLost", "rank 1 of cloud 'east' is lost: its process has ended"]
    finally:
        for process in processes:
            process.kill()
            process.join()

"""A world of one rank in this process, for what torch.distributed does to a stage."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Let collectives run, among this process alone."""
    backend = dist.get_default_backend_for_device(device)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()

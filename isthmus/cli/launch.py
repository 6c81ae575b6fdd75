"""Which rank of its cloud this process is, as torchrun, Slurm or Kubernetes tell it.

torchrun, PyTorchJob   RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
Slurm                  SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_STEP_NODELIST, SLURM_JOB_ID
indexed Job            JOB_COMPLETION_INDEX; MASTER_ADDR is the first pod's name at a headless service
"""

import re
from collections.abc import Mapping
from typing import Final

from isthmus.errors import UserError
from isthmus.job import Address, CloudSpec
from isthmus.wan.handshake import Seat

_DEFAULT_PORT: Final = 29400
# Two jobs on one node must not meet at one port; these are below those that systems hand out by themselves.
_SLURM_PORTS: Final = range(20000, 30000)
_PORTS: Final = range(1, 2**16)
_COUNTS: Final = range(1, 2**31)
_NUMBERS: Final = range(2**31)

_Environment = Mapping[str, str]


def find_seat(environment: _Environment, cloud: CloudSpec) -> Seat:
    """The seat of this process; a cloud of one rank needs no launcher."""
    seat = _from_environment(environment, cloud)
    if seat is None:
        if cloud.ranks == 1:
            return Seat()
        raise UserError(
            f"cloud {cloud.name!r} has {cloud.ranks} ranks, but nothing says which of them this process is",
            hint=f"torchrun --nproc-per-node {cloud.ranks} -m isthmus run JOB --cloud {cloud.name}; "
            "docs/inside-a-cloud.md shows Slurm and Kubernetes",
        )
    if seat.num_ranks != cloud.ranks:
        raise UserError(
            f"cloud {cloud.name!r} has {cloud.ranks} ranks in the job, but {seat.num_ranks} were started",
            hint=f"start {cloud.ranks}, or set cloud.{cloud.name}.ranks to {seat.num_ranks}",
        )
    if not 0 <= seat.rank < seat.num_ranks:
        raise UserError(
            f"this process cannot be rank {seat.rank} of the {seat.num_ranks} of cloud {cloud.name!r}",
            hint="ranks are counted from 0",
        )
    return seat


def _from_environment(environment: _Environment, cloud: CloudSpec) -> Seat | None:
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _from_torchrun(environment)
    if "SLURM_PROCID" in environment:
        # Outside of srun the batch script itself is task 0 of one.
        is_alone = cloud.ranks == 1 and _count(environment, "SLURM_NTASKS", default=1) == 1
        return None if is_alone else _from_slurm(environment)
    if "JOB_COMPLETION_INDEX" in environment:
        return _from_kubernetes(environment, cloud)
    return None


def _from_torchrun(environment: _Environment) -> Seat:
    return Seat(
        rank=_number(environment, "RANK"),
        num_ranks=_count(environment, "WORLD_SIZE"),
        local_rank=_number(environment, "LOCAL_RANK", default=0),
        master=_master(environment, default_port=_DEFAULT_PORT),
        is_served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_slurm(environment: _Environment) -> Seat:
    nodes = environment.get("SLURM_STEP_NODELIST") or _text(environment, "SLURM_JOB_NODELIST")
    port = _SLURM_PORTS[_number(environment, "SLURM_JOB_ID") % len(_SLURM_PORTS)]
    return Seat(
        rank=_number(environment, "SLURM_PROCID"),
        num_ranks=_count(environment, "SLURM_NTASKS"),
        local_rank=_number(environment, "SLURM_LOCALID"),
        master=_master({"MASTER_ADDR": first_host(nodes), **environment}, default_port=port),
    )


def _from_kubernetes(environment: _Environment, cloud: CloudSpec) -> Seat:
    return Seat(
        rank=_number(environment, "JOB_COMPLETION_INDEX"),
        num_ranks=_count(environment, "WORLD_SIZE", default=cloud.ranks),
        local_rank=_number(environment, "LOCAL_RANK", default=0),
        master=_master(environment, default_port=_DEFAULT_PORT) if cloud.ranks > 1 else None,
    )


def first_host(nodes: str) -> str:
    """The first of Slurm's list of nodes, such as `gpu[007-009,12],login1`."""
    match = re.fullmatch(r"([^,\[\]]+)(?:\[([0-9]+)[^\]]*\])?([^,\[\]]*)(?:,.*)?", nodes)
    if match is None:
        raise UserError(f"{nodes!r} is no list of Slurm's nodes", hint="set MASTER_ADDR to the first of them")
    return "".join(part or "" for part in match.groups())


def _master(environment: _Environment, *, default_port: int) -> Address:
    port = _number(environment, "MASTER_PORT", default=default_port, allowed=_PORTS)
    return Address(host=_text(environment, "MASTER_ADDR"), port=port)


def _text(environment: _Environment, key: str) -> str:
    if not environment.get(key):
        raise UserError(
            f"{key} is not set, so the ranks of this cloud cannot find each other",
            hint="set it to the host of rank 0" if key == "MASTER_ADDR" else f"let the launcher set {key}",
        )
    return environment[key]


def _count(environment: _Environment, key: str, *, default: int | None = None) -> int:
    return _number(environment, key, default=default, allowed=_COUNTS)


def _number(
    environment: _Environment, key: str, *, default: int | None = None, allowed: range = _NUMBERS
) -> int:
    if default is not None and not environment.get(key):
        return default
    text = _text(environment, key)
    if not re.fullmatch("[0-9]{1,10}", text) or int(text) not in allowed:
        raise UserError(
            f"{key} is {text!r}, which is no number from {allowed[0]} to {allowed[-1]}",
            hint=f"let the launcher set {key}",
        )
    return int(text)

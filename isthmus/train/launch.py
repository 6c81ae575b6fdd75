"""Starts a run: every rank of a job on this machine, or the one rank of a cloud that this process is.

Launchers tell a process which rank of its cloud it is by environment variables:

torchrun, PyTorchJob   RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
Slurm                  SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_STEP_NODELIST, SLURM_JOB_ID
indexed Job            JOB_COMPLETION_INDEX; MASTER_ADDR is the first pod's name at a headless service

What is wrong with the command is found before torch is imported, which takes seconds.
"""

import functools
import json
import re
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from isthmus.errors import CloudFailed, Terminated, UserError
from isthmus.events import StopRequest
from isthmus.job import Address, CloudSpec, Job
from isthmus.job.faults import load_faults
from isthmus.job.rundir import lock_site
from isthmus.observe.trackers import check_trackers, open_trackers
from isthmus.plan.costs import CostSource
from isthmus.wan.certificates import read_identity
from isthmus.wan.endpoint import Endpoint
from isthmus.wan.handshake import RankSpec
from isthmus.wan.local import STOP_SIGNAL, LocalWan, Report, run_ranks

if TYPE_CHECKING:
    from isthmus.train.profiles import Profiler
    from isthmus.train.session import SessionOptions, Trained

_DEFAULT_PORT: Final = 29400
# Two jobs on one node must not meet at one port; these are below those that systems hand out by themselves.
_SLURM_PORTS: Final = range(20000, 30000)

_Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The options of a run, for all ranks on this machine or for one rank of a cloud."""

    job: Job
    root: Path
    """The folder of run directories."""
    resume: bool
    trackers: tuple[str, ...]
    cache: Path
    """The folder that keeps what was measured."""
    source: Callable[[], CostSource]
    """Makes what measures the costs of models; called after what needs no torch was checked."""
    is_profiled: bool
    on_report: Callable[[str, Mapping[str, Any]], None]
    stop: StopRequest

    def run_here(self, *, faults: Path | None, restarts: int) -> "Trained":
        """Run every rank of every cloud as a process of this machine, joined through an emulated WAN."""
        job = self.job
        check_trackers(self.trackers)
        links, clouds = [link.between for link in job.link], {one.name: one.ranks for one in job.cloud}
        script = load_faults(faults, links=links, clouds=clouds, verb="run") if faults else ()

        from isthmus.train.disturbed import Player
        from isthmus.train.profiles import is_open
        from isthmus.train.profiling import threads_here
        from isthmus.train.runs import check_all_devices, choose_run, writing_to
        from isthmus.train.session import SessionOptions

        check_all_devices(job)
        note = self._noter(job.cloud[0].name)
        learn = self._profiler(note, is_wanted=is_open(job)).all_here
        chosen = choose_run(
            job, root=self.root, resume=self.resume, note=note, learn=learn, source=self.source()
        )
        with writing_to(self.root), chosen as folder, LocalWan(job) as wan:
            player = Player(
                job, script, wan=wan, run=folder, note=lambda cloud, text: self._noter(cloud)(text)
            )
            options = SessionOptions(
                root=self.root,
                run_id=folder.name,
                open_trackers=self._open_trackers,
                num_threads=threads_here(job),
                is_disturbed=bool(script),
            )
            work = functools.partial(_be_rank_here, options=options)

            def tell(failed: CloudFailed, number: int) -> None:
                self._noter(failed.cloud)(f"{failed.message}; starting again, {number} of {restarts}")

            def hear(cloud: str, text: str) -> None:
                report = json.loads(text)
                self.on_report(cloud, report)
                if report["kind"] == "step":
                    player.start()

            found: Mapping[Any, Trained] = run_ranks(
                job,
                work,
                wan,
                on_report=hear,
                stop=self.stop,
                preload=["isthmus.train.session"],
                restarts=restarts,
                on_restart=tell,
            )
            return next(iter(found.values()))

    def run_as(self, cloud: str, spec: RankSpec) -> "Trained":
        """Be one rank of one cloud; the others are started elsewhere."""
        identity = read_identity(Path(self.job.cloud_named(cloud).certificates), cloud)

        from isthmus.train.role import kind_of
        from isthmus.train.runs import check_device, writing_to
        from isthmus.train.session import train_cloud

        check_device(self.job.cloud_named(cloud), spec)
        kind = kind_of(self.job)
        kind.decide(self.job)
        chooses = spec.is_leader and kind.clouds(self.job)[0] == cloud
        check_trackers(self.trackers if chooses else ())
        with ExitStack() as stack:
            stack.enter_context(writing_to(self.root))
            note = self._noter(cloud)
            stack.enter_context(lock_site(self.root, self.job, cloud=cloud, rank=spec.rank, note=note))
            options = self._session_options(cloud, stack, chooses=chooses)
            endpoint = Endpoint(self.job, cloud=cloud, rank=spec.rank, identity=identity)
            self.stop.abort = endpoint.abort
            stack.enter_context(endpoint)
            # Peers get the same message about a full disk.
            stack.enter_context(writing_to(self.root))
            return train_cloud(
                self.job,
                endpoint,
                cloud=cloud,
                report=lambda text: self.on_report(cloud, json.loads(text)),
                options=options,
                spec=spec,
                stop=self.stop,
            )

    def _session_options(self, cloud: str, stack: ExitStack, *, chooses: bool) -> "SessionOptions":
        """Choose the run at the first cloud, once all are measured if the job leaves choices to the plan."""
        from isthmus.plan.models import may_plan
        from isthmus.train.profiles import is_open
        from isthmus.train.runs import check_unplanned, choose_run, find_unfinished
        from isthmus.train.session import SessionOptions

        job, note = self.job, self._noter(cloud)
        profiler, source = self._profiler(note), self.source()

        def choose(found: Mapping[str, str]) -> str:
            def learn(known: Job) -> Job:
                return profiler.with_profiles(known, found)

            chosen = choose_run(
                job,
                root=self.root,
                resume=self.resume,
                note=note,
                is_shared=True,
                learn=learn,
                source=source,
            )
            return stack.enter_context(chosen).name

        is_new = not self.resume or find_unfinished(self.root, job) is None
        is_measured = chooses and self.is_profiled and is_new and is_open(job) and may_plan(job, source)
        if is_measured:
            check_unplanned(job, root=self.root, note=note)
        return SessionOptions(
            root=self.root,
            run_id=choose({}) if chooses and not is_measured else None,
            open_trackers=self._open_trackers,
            choose=choose if is_measured else None,
            profile=functools.partial(profiler.text_of, job, cloud),
        )

    @property
    def _open_trackers(self) -> Callable[[Path], Any]:
        return functools.partial(open_trackers, names=self.trackers, project=self.job.name)

    def _profiler(self, note: Callable[[str], None], *, is_wanted: bool = True) -> "Profiler":
        from isthmus.train.profiles import Profiler

        return Profiler(cache=self.cache, note=note, is_wanted=self.is_profiled and is_wanted)

    def _noter(self, cloud: str) -> Callable[[str], None]:
        return lambda text: self.on_report(cloud, {"kind": "note", "text": text})


def _be_rank_here(
    job: Job,
    endpoint: Endpoint,
    *,
    cloud: str,
    report: Report,
    spec: RankSpec,
    options: "SessionOptions",
) -> "Trained":
    from isthmus.train.runs import writing_to
    from isthmus.train.session import train_cloud

    stop = StopRequest()

    def ask(*_: object) -> None:
        if not stop.ask():
            raise Terminated

    # Signals may reach the whole process group; the process that started this one ends it in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(STOP_SIGNAL, ask)
    with writing_to(options.root):
        return train_cloud(job, endpoint, cloud=cloud, report=report, options=options, spec=spec, stop=stop)


def find_rank(environment: _Environment, cloud: CloudSpec) -> RankSpec:
    """The rank that this process is; a cloud of one rank needs no launcher."""
    spec = _from_environment(environment, cloud)
    if spec is None:
        if cloud.ranks == 1:
            return RankSpec()
        raise UserError(
            f"cloud {cloud.name!r} has {cloud.ranks} ranks, but nothing says which of them this process is",
            hint=f"torchrun --nproc-per-node {cloud.ranks} -m isthmus run JOB --cloud {cloud.name}; "
            "docs/inside-a-cloud.md shows Slurm and Kubernetes",
        )
    if spec.num_ranks != cloud.ranks:
        raise UserError(
            f"cloud {cloud.name!r} has {cloud.ranks} ranks in the job, but {spec.num_ranks} were started",
            hint=f"start {cloud.ranks}, or set cloud.{cloud.name}.ranks to {spec.num_ranks}",
        )
    if not 0 <= spec.rank < spec.num_ranks:
        raise UserError(
            f"this process cannot be rank {spec.rank} of the {spec.num_ranks} of cloud {cloud.name!r}",
            hint="ranks are counted from 0",
        )
    return spec


def _from_environment(environment: _Environment, cloud: CloudSpec) -> RankSpec | None:
    number = functools.partial(_number, environment)
    local_rank, port = number("LOCAL_RANK", 0), number("MASTER_PORT", _DEFAULT_PORT, least=1, most=2**16 - 1)
    host = environment.get("MASTER_ADDR")
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, num_ranks = number("RANK"), number("WORLD_SIZE", least=1)
    elif "SLURM_PROCID" in environment:
        # Outside of srun the batch script itself is task 0 of one.
        if cloud.ranks == 1 and number("SLURM_NTASKS", 1, least=1) == 1:
            return None
        nodes = environment.get("SLURM_STEP_NODELIST") or _text(environment, "SLURM_JOB_NODELIST")
        host = host or first_host(nodes)
        if "MASTER_PORT" not in environment:
            port = _SLURM_PORTS[number("SLURM_JOB_ID") % len(_SLURM_PORTS)]
        rank, num_ranks = number("SLURM_PROCID"), number("SLURM_NTASKS", least=1)
        local_rank = number("SLURM_LOCALID")
    elif "JOB_COMPLETION_INDEX" in environment:
        rank, num_ranks = number("JOB_COMPLETION_INDEX"), number("WORLD_SIZE", cloud.ranks, least=1)
        if cloud.ranks == 1:
            return RankSpec(rank=rank, num_ranks=num_ranks, local_rank=local_rank)
    else:
        return None
    return RankSpec(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=local_rank,
        master=Address(host=host or _text(environment, "MASTER_ADDR"), port=port),
        is_served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def first_host(nodes: str) -> str:
    """The first of Slurm's list of nodes, such as `gpu[007-009,12],login1`."""
    match = re.fullmatch(r"([^,\[\]]+)(?:\[([0-9]+)[^\]]*\])?([^,\[\]]*)(?:,.*)?", nodes)
    if match is None:
        raise UserError(f"{nodes!r} is no list of Slurm's nodes", hint="set MASTER_ADDR to the first of them")
    return "".join(part or "" for part in match.groups())


def _text(environment: _Environment, key: str) -> str:
    if not environment.get(key):
        raise UserError(
            f"{key} is not set, so the ranks of this cloud cannot find each other",
            hint="set it to the host of rank 0" if key == "MASTER_ADDR" else f"let the launcher set {key}",
        )
    return environment[key]


def _number(
    environment: _Environment,
    key: str,
    default: int | None = None,
    *,
    least: int = 0,
    most: int = 2**31 - 1,
) -> int:
    if default is not None and not environment.get(key):
        return default
    text = _text(environment, key)
    if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
        raise UserError(
            f"{key} is {text!r}, which is no number from {least} to {most}",
            hint=f"let the launcher set {key}",
        )
    return int(text)

"""All clouds of a job on one machine: one process per rank, throw-away certificates, an emulated WAN."""

import functools
import itertools
import math
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from isthmus.errors import CloudFailed, IsthmusError, LinkError, RankLost
from isthmus.events import StopRequest
from isthmus.job import Address, Job, LinkSpec
from isthmus.job.faults import Fault
from isthmus.plan.types import Member
from isthmus.wan.certificates import Identity, throwaway
from isthmus.wan.endpoint import Endpoint, Site
from isthmus.wan.handshake import EXIT_LOST, RankSpec, server_name
from isthmus.wan.relay import Relay
from isthmus.wan.shaping import Shape
from isthmus.wan.sockets import Closing

_HOST = "127.0.0.1"


class LocalWan(Closing):
    """The emulated WAN of a job; gives each cloud its identity and where it finds the others."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._identities = throwaway([cloud.name for cloud in job.cloud])
        self._reserved = {
            (cloud.name, rank): _reserve_port()
            for cloud in job.cloud
            if cloud.listen is not None
            for rank in range(cloud.ranks)
        }
        self._meetings = {cloud.name: _reserve_port() for cloud in job.cloud if cloud.ranks > 1}
        self.ranks: Ranks | None = None
        """The processes that use this network, once they run."""
        self._relays: dict[frozenset[str], Relay] = {}
        for number, link in enumerate(job.link):
            self._relays[frozenset(link.between)] = self._emulate(link, seed=job.seed + number)

    def identity(self, cloud: str) -> Identity:
        """A cloud's throw-away key and certificate."""
        return self._identities[cloud]

    def site(self, cloud: str, rank: int = 0) -> Site:
        """What a rank of a cloud binds, and the emulated ways to the clouds that it dials."""
        reach = {
            link.peer_of(cloud): self.relay(*link.between).address
            for link in self._job.links_of(cloud)
            if self._job.dialer(link).name == cloud
        }
        reserved = self._reserved.get((cloud, rank))
        return Site(bind=_address(reserved) if reserved else None, reach=reach)

    def rank_spec(self, cloud: str, rank: int) -> RankSpec:
        """The member of a rank among those of its cloud; all processes here share the machine's devices."""
        before = itertools.takewhile(lambda one: one.name != cloud, self._job.cloud)
        meeting = self._meetings.get(cloud)
        return RankSpec(
            rank=rank,
            num_ranks=self._job.cloud_named(cloud).ranks,
            local_rank=sum(one.ranks for one in before) + rank,
            master=None if meeting is None else _address(meeting),
        )

    def relay(self, first: str, second: str) -> Relay:
        """The WAN between two clouds, to count its bytes or to disturb it."""
        return self._relays[frozenset((first, second))]

    def play(self, faults: Iterable[Fault]) -> None:
        """Let faults happen, each on its link and at its time from now on."""
        script = tuple(faults)
        for link in self._job.link:
            own = [fault for fault in script if set(fault.between) == set(link.between)]
            self.relay(*link.between).play(own, dialer=self._job.dialer(link).name)

    def signal(self, members: Iterable[Member], number: int) -> None:
        """Send a signal to the processes of ranks, if they run."""
        if self.ranks is not None:
            self.ranks.signal(members, number)

    def close(self) -> None:
        """End all relays."""
        for relay in self._relays.values():
            relay.close()
        for reserved in (*self._reserved.values(), *self._meetings.values()):
            reserved.close()

    def _emulate(self, link: LinkSpec, *, seed: int) -> Relay:
        dialer, listener = self._job.dialer(link).name, self._job.listener(link).name
        # Only the names of the listener's ranks lead anywhere, each to its own.
        routes = {
            server_name(cloud, rank): _address(reserved)
            for (cloud, rank), reserved in self._reserved.items()
            if cloud == listener
        }
        up, down = _shape(link, sender=dialer), _shape(link, sender=listener)
        return Relay(routes.get, up=up, down=down, seed=seed)


def _address(reserved: socket.socket) -> Address:
    return Address(host=_HOST, port=reserved.getsockname()[1])


def _shape(link: LinkSpec, *, sender: str) -> Shape:
    return Shape(
        bandwidth_bps=link.bandwidth_bps[link.between.index(sender)] if link.bandwidth_bps else None,
        delay_s=(link.rtt_s or 0.0) / 2,
        jitter_s=link.jitter_s / 2,
        connection_bps=link.connection_bps,
    )


def _reserve_port() -> socket.socket:
    """A port that nobody else is given; it is bound and never listens, so the cloud itself can."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((_HOST, 0))
    return reserved


_LAST_WORDS_S = 3.0

STOP_SIGNAL = signal.SIGUSR1
"""Asks a rank's process for an orderly stop."""

_GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Report = Callable[[str], None]


class RankWork(Protocol):
    """What a rank's process does; it must be picklable."""

    def __call__(self, job: Job, endpoint: Endpoint, *, cloud: str, report: Report, spec: RankSpec) -> Any:
        """Do it and give the result."""


@dataclass(frozen=True, slots=True)
class _Done:
    result: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    message: str
    hint: str | None = None
    is_echo: bool = False
    is_crash: bool = False


_Told = str | _Done | _Failed
"""What a rank tells the first process; text is a report."""


def run_ranks(
    job: Job,
    work: RankWork,
    wan: LocalWan,
    *,
    on_report: Callable[[str, str], None],
    stop: StopRequest | None = None,
    preload: Sequence[str] = (),
    restarts: int = 0,
    on_restart: Callable[[CloudFailed, int], None] = lambda _failed, _number: None,
) -> dict[Member, Any]:
    """Run the work in one process per rank and return the results; a failure of one ends all.

    Args:
        job: names the clouds and their ranks.
        work: what each process calls.
        wan: the emulated network between them.
        on_report: receives what a rank reports, with the rank's name.
        stop: a request to stop, which is passed to the first process as `STOP_SIGNAL`.
        preload: modules that the work imports late; they and the work's own module are imported once for
            all processes. None of them may initialise an accelerator, since processes are forked afterwards.
        restarts: how often a rank whose process has crashed is started again; the others keep theirs.
        on_restart: is told why a rank is started again, and the how manyth time it is.
    """
    ranks = Ranks(job, work, wan, _fork_context(work, preload))
    try:
        with ranks.lock:
            for cloud in job.cloud:
                for rank in range(cloud.ranks):
                    ranks.start(Member(cloud.name, rank))
        with nullcontext() if stop is None else stop.honoured_by(ranks.ask_to_stop):
            return ranks.collect(on_report, restarts=restarts, on_restart=on_restart)
    finally:
        ranks.close()


class Ranks:
    """The processes of all ranks on this machine, and what they tell; a fault may signal them."""

    def __init__(self, job: Job, work: RankWork, wan: LocalWan, context: ForkServerContext) -> None:
        self._job = job
        self._work = work
        self._wan = wan
        self._context = context
        self._processes: dict[Member, BaseProcess] = {}
        self._heard: dict[Member, Connection] = {}
        self._is_stopping = False
        self.lock = threading.Lock()
        """Held while processes are started and ended, so that no signal reaches another one."""
        wan.ranks = self

    def start(self, member: Member) -> None:
        """Start the process of a rank."""
        cloud, rank = member
        heard, telling = self._context.Pipe(duplex=False)
        ends = (self._wan.identity(cloud), self._wan.site(cloud, rank))
        spec = self._wan.rank_spec(cloud, rank)
        arguments = (self._work, self._job, spec, *ends, cloud, telling, dict(os.environ))
        started = self._context.Process(target=_be_rank, args=arguments, daemon=True)
        self._heard[member] = heard
        started.start()
        # Not before, since a process whose start Ctrl-C interrupts cannot be killed.
        self._processes[member] = started
        # Its end here would hide that the process has ended.
        telling.close()

    def ask_to_stop(self) -> None:
        """Ask the first process for an orderly stop."""
        self._is_stopping = True
        self.signal([next(iter(self._processes))], STOP_SIGNAL)

    def signal(self, members: Iterable[Member], number: int) -> None:
        """Send a signal to the processes of ranks that still run."""
        with self.lock:
            for process in [self._processes[one] for one in members if one in self._processes]:
                if process.pid is not None and process.exitcode is None:
                    os.kill(process.pid, number)

    def close(self) -> None:
        """End all processes."""
        # Ranks ignore the signals that reach a whole process group.
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        for connection in self._heard.values():
            connection.close()

    def collect(
        self,
        on_report: Callable[[str, str], None],
        *,
        restarts: int,
        on_restart: Callable[[CloudFailed, int], None],
    ) -> dict[Member, Any]:
        """Wait for the results of all ranks."""
        results: dict[Member, Any] = {}
        failures: dict[Member, _Failed] = {}
        num_restarts: Counter[Member] = Counter()
        num_crashes = 0
        last_words_until_s = math.inf
        silent = [*self._processes]
        while silent and (left_s := last_words_until_s - time.monotonic()) > 0:
            for member in self._ready(silent, None if left_s == math.inf else left_s):
                match words := _hear(self._heard[member], self._processes[member]):
                    case str():
                        on_report(f"{member.cloud}/{member.rank}" if member.rank else member.cloud, words)
                        continue
                    case _Done(result):
                        results[member] = result
                    case _Failed():
                        # An echo belongs to a crash; no rank has more of them than there were crashes.
                        is_free = words.is_echo and num_restarts[member] < num_crashes
                        is_lost = (words.is_crash or words.is_echo) and not (failures or self._is_stopping)
                        if is_lost and (is_free or num_crashes < restarts):
                            num_crashes += not is_free
                            num_restarts[member] += 1
                            on_restart(_first_cause({member: words}, self._job), num_crashes)
                            self._start_again(member)
                            continue
                        failures[member] = words
                        last_words_until_s = min(last_words_until_s, time.monotonic() + _LAST_WORDS_S)
                silent.remove(member)
        if failures:
            raise _first_cause(failures, self._job)
        return results

    def _ready(self, silent: Sequence[Member], timeout_s: float | None) -> list[Member]:
        """The ranks that have said something, or whose processes have ended."""
        ends: dict[Connection | int, Member] = {self._heard[one]: one for one in silent}
        ends |= {self._processes[one].sentinel: one for one in silent}
        ready = {ends[one] for one in wait([*ends], timeout_s) if isinstance(one, Connection | int)}
        return [member for member in silent if member in ready]

    def _start_again(self, member: Member) -> None:
        with self.lock:
            # It may have said that it failed, and still be ending.
            self._processes[member].kill()
            self._processes[member].join()
            self._heard[member].close()
            self.start(member)


def _fork_context(work: RankWork, preload: Sequence[str]) -> ForkServerContext:
    """Start the server from which ranks are forked, unless it runs already.

    Signals to the whole process group must not end the server, which would make its ranks look dead; so it
    starts with them blocked.
    """
    inner: Any = work
    while isinstance(inner, functools.partial):
        inner = inner.func
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([getattr(inner, "__module__", type(inner).__module__), *preload])
    # First, since the start of the tracker unblocks signals.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _be_rank(
    work: RankWork,
    job: Job,
    spec: RankSpec,
    identity: Identity,
    site: Site,
    cloud: str,
    telling: Connection,
    environment: dict[str, str],
) -> None:
    # A forked process has the signal mask and the environment that the server was started with.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GROUP_SIGNALS)
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    # The first process may be slow to listen, which must not hold up a rank.
    words: queue.SimpleQueue[_Told | None] = queue.SimpleQueue()
    threading.Thread(target=_tell, args=(words, telling), name="tell").start()
    try:
        with Endpoint(job, cloud=cloud, rank=spec.rank, identity=identity, site=site) as endpoint:
            result = work(job, endpoint, cloud=cloud, report=words.put, spec=spec)
        words.put(_Done(result))
    except IsthmusError as error:
        # A link or a world that ended is mostly the echo of what ended another process.
        is_echo = isinstance(error, LinkError | RankLost)
        words.put(_Failed(message=error.message, hint=error.hint, is_echo=is_echo))
    finally:
        words.put(None)


def _tell(words: "queue.SimpleQueue[_Told | None]", telling: Connection) -> None:
    while (one := words.get()) is not None:
        telling.send(one)


def _end_with_parent() -> None:
    """Leave no rank behind that trains on beside those of the next start, whatever ended the parent."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(EXIT_LOST)


def _hear(connection: Connection, process: BaseProcess) -> _Told:
    """What a rank says next; if its process has ended without a word, its traceback is on standard error."""
    with suppress(EOFError):
        if connection.poll():
            words: _Told = connection.recv()
            return words
    process.join()
    message = f"its process ended with exit code {process.exitcode}"
    return _Failed(message=message, is_echo=process.exitcode == EXIT_LOST, is_crash=True)


def _first_cause(failures: Mapping[Member, _Failed], job: Job) -> CloudFailed:
    member, first = min(failures.items(), key=lambda one: one[1].is_echo)
    rank = member.rank if job.cloud_named(member.cloud).ranks > 1 else None
    # Where there are only echoes, what they echo is not here, and may be over at another try.
    is_crash = first.is_crash or first.is_echo
    return CloudFailed(member.cloud, first.message, hint=first.hint, rank=rank, is_crash=is_crash)

"""The ways between this rank and one rank of a neighbouring stage: a courier, and this end of their cut.

Every pair of ranks has a cut of its own, for what codecs learn depends on the messages that they have coded.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from torch import Tensor

from isthmus.events import Span
from isthmus.plan.ladder import Pair
from isthmus.plan.types import Arrived, Pass
from isthmus.train.crossing.courier import Courier
from isthmus.train.crossing.cut import CodeState
from isthmus.train.crossing.ends import DownCut, UpCut
from isthmus.train.crossing.messages import BACKWARD, FORWARD, Microbatch, read_address, read_sent_s
from isthmus.wan.link import Link
from isthmus.wan.packet import Packet

Receivers = Mapping[str, Callable[[Packet], None]]


class DownWay:
    """To a rank of the stage behind: activations leave, gradients come back."""

    def __init__(
        self,
        link: Link,
        cut: DownCut,
        *,
        travels: "Travels",
        receivers: Receivers,
        deliver: Callable[[Arrived, Tensor], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.cut = cut
        self._link = link
        self._travels = travels
        self._deliver = deliver
        self.courier = Courier(
            link, receivers={**receivers, BACKWARD: self._on_gradient}, on_failure=on_failure
        )

    def state(self, step: int) -> CodeState:
        """The code at the start of a step: behind what is still to be coded, which nobody may wait for."""
        return self.courier.call(lambda: self.cut.book.state(step))

    def _on_gradient(self, packet: Packet) -> None:
        arrived = read_address(packet, BACKWARD)
        self._travels.note(packet, arrived, self._link)
        self._deliver(arrived, self.cut.unpack(packet, arrived))


class UpWay:
    """To a rank of the stage before: activations arrive, gradients leave.

    The codecs of a step are known with the verdict on the one before. What arrives ahead of it waits.
    """

    def __init__(
        self,
        link: Link,
        cut: UpCut,
        *,
        travels: "Travels",
        receivers: Receivers,
        deliver: Callable[[Arrived, Microbatch], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.cut = cut
        self.state: CodeState | None = None
        """The code at the start of the step that was last to be saved."""
        self._link = link
        self._travels = travels
        self._deliver = deliver
        self._early: deque[Packet] = deque()
        self._known_step: int | None = None
        self._lock = threading.Lock()
        self.courier = Courier(
            link, receivers={**receivers, FORWARD: self._on_microbatch}, on_failure=on_failure
        )

    def know(self, step: int, pair: Pair | None = None, *, save: bool = False) -> None:
        """Learn by what a step is coded, the same as before if not told; all before it is decoded."""
        if pair is not None:
            self.cut.book.switch(pair, step=step)
        if save:
            # Behind the last gradients, which may still have to be coded.
            self.state = self.courier.call(lambda: self.cut.book.state(step))
        self.courier.do(lambda: self._release(step))

    def _release(self, step: int) -> None:
        with self._lock:
            self._known_step = step
            early, self._early = self._early, deque()
            for packet in early:
                self._take(packet, read_address(packet, FORWARD))

    def _on_microbatch(self, packet: Packet) -> None:
        arrived = read_address(packet, FORWARD)
        self._travels.note(packet, arrived, self._link)
        with self._lock:
            self._take(packet, arrived)

    def _take(self, packet: Packet, arrived: Arrived) -> None:
        if self._known_step is None or arrived.step > self._known_step:
            self._early.append(packet)
        else:
            self._deliver(arrived, self.cut.unpack(packet, arrived))


class Travels:
    """How long what comes to a rank was under way; some of a step comes before the rank has begun it."""

    def __init__(self, *, cloud: str, on_span: Callable[[Span], None]) -> None:
        self._cloud = cloud
        self._on_span = on_span
        self._shortest_s: dict[tuple[int, Pass], float] = {}
        self._lock = threading.Lock()

    def take(self, step: int) -> dict[Pass, float]:
        """The shortest way, in seconds, of what came for a step, which is over, by the pass that needs it."""
        with self._lock:
            over = [key for key in self._shortest_s if key[0] <= step]
            taken = {key: self._shortest_s.pop(key) for key in over}
        return {kind: shortest_s for (of, kind), shortest_s in taken.items() if of == step}

    def note(self, packet: Packet, arrived: Arrived, link: Link) -> None:
        """Something has come."""
        now_s = time.time()
        sent_s = min(now_s, read_sent_s(packet) - (link.counters().clock_offset_s or 0.0))
        key = arrived.step, arrived.kind
        with self._lock:
            self._shortest_s[key] = min(self._shortest_s.get(key, math.inf), now_s - sent_s)
        self._on_span(
            Span(
                track=f"{link.peer.cloud}→{self._cloud}",
                name=f"{arrived.kind.value} {arrived.step}.{arrived.microbatch}",
                kind="transfer",
                start_s=sent_s,
                end_s=now_s,
                num_bytes=packet.payload_bytes,
            )
        )

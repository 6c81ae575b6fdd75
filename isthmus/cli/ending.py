"""SIGTERM and Ctrl-C end a command in order, and soon even while torch keeps its main thread.

The first signal asks a run to save a common step and to stop, once it trains; the second ends it at once.
"""

import os
import signal
import socket
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Final, NoReturn, Self

from isthmus.errors import Terminated
from isthmus.events import StopRequest

if TYPE_CHECKING:
    from rich.console import Console

    from isthmus.wan.endpoint import Endpoint

EXIT_TERMINATED: Final = 128 + signal.SIGTERM
_GRACE_S: Final = 5.0
_LAST_WORD_S: Final = 5.0
_SAME_SIGNAL_S: Final = 1.0
_REASONS: Final = {
    signal.SIGINT: "it was stopped by its user",
    signal.SIGTERM: Terminated().message,
}


def stopped_by(number: signal.Signals) -> str:
    """What the user reads at the end."""
    what = "Ctrl-C" if number == signal.SIGINT else number.name
    return f"stopped by {what}; the same command goes on from what was saved last"


def stopped_at(step: int) -> str:
    """What the user reads at the end of an orderly stop."""
    return f"stopped after step {step}, which every cloud has saved; the same command continues from there"


class Ending:
    """Asks for an orderly stop at a signal, or raises in the main thread, or ends the process if that hangs.

    Python runs a handler between two instructions of its own, and one call into torch, where ranks wait for
    each other, may last half an hour. So another thread reads the numbers of signals as they come.
    """

    def __init__(self, console: "Console") -> None:
        self.stop = StopRequest()
        self._asked_s = 0.0
        self._console = console
        self._endpoint: Endpoint | None = None
        self._heard = threading.Event()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def tell_peers_of(self, endpoint: "Endpoint") -> None:
        """Let peers know even if the main thread cannot tell them."""
        self._endpoint = endpoint

    def __enter__(self) -> Self:
        # What the shell has a command in the background ignore, stays ignored.
        heeded = [number for number in _REASONS if signal.getsignal(number) is not signal.SIG_IGN]
        self._handlers_before = {number: signal.signal(number, self._hear) for number in heeded}
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="ending", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        self._writer.close()

    def _hear(self, number: int, _: object) -> None:
        self._heard.set()
        if self._ask():
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        # A launcher that asks twice must not disturb the end that it asked for.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    def _ask(self) -> bool:
        """Ask for an orderly stop, once, where there is something to save."""
        now_s = time.monotonic()
        if self.stop.is_asked:
            # Some launchers send a signal to the process and to its group.
            return now_s - self._asked_s < _SAME_SIGNAL_S
        if not self.stop.ask():
            return False
        self._asked_s = now_s
        self._console.print("stopping when this step has ended and is saved; a second signal stops at once")
        return True

    def _watch(self) -> None:
        with self._reader:
            while number := self._reader.recv(1):
                if number[0] not in _REASONS:
                    continue
                if not self._heard.wait(_GRACE_S) and not self._ask():
                    self._end(signal.Signals(number[0]))
                self._heard.clear()

    def _end(self, number: signal.Signals) -> NoReturn:
        try:
            self._console.show_cursor()
            self._console.print(stopped_by(number), soft_wrap=True)
            if self._endpoint is not None:
                self._tell(self._endpoint, _REASONS[number])
        finally:
            os._exit(128 + number)

    def _tell(self, endpoint: "Endpoint", reason: str) -> None:
        """End the run at all links; a peer that cannot be told keeps nobody here."""
        last_word = threading.Thread(target=endpoint.abort, args=(reason,), name="last-word", daemon=True)
        last_word.start()
        last_word.join(_LAST_WORD_S)

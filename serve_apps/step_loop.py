"""An engine's step loop in a thread of its own; others hand it what to do between two steps. No Ray."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from a2t.duplex.engine import CacheFull, Engine, Finished

T = TypeVar("T")


class StepLoop:
    """Runs an engine in a thread. `do` lets it do something between two steps and gives a future of the result; what is
    `heavy` (a conversation that comes or goes) is done one a step, so that nobody else waits for many of them.

    In that thread it calls `deliver` with finished units, `full` for a conversation whose row is full, and `died` for
    any other failure, which ends the loop.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[list[Finished]], None],
        full: Callable[[CacheFull], None],
        died: Callable[[BaseException], None],
    ):
        self._engine, self._deliver, self._full, self._died = engine, deliver, full, died
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._heavy: deque[Callable[[], None]] = deque()
        self.unit_ms = 0.0  # busy time for a unit, averaged over the last thirty or so
        self.steps, self.busy_s = 0, 0.0  # since it began
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def do(self, action: Callable[[Engine], T], heavy: bool = False) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # it will be done, whether or not somebody still waits for it

        def run() -> None:
            try:
                future.set_result(action(self._engine))
            except Exception as error:  # noqa: BLE001 -- handed to whoever asked
                future.set_exception(error)

        self._work.put((lambda: self._heavy.append(run)) if heavy else run)
        return future

    def stop(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        busy_s, idle = 0.0, True
        try:
            while True:
                with suppress(queue.Empty):
                    while True:
                        action = self._work.get(block=idle)
                        if action is None:
                            return
                        action()
                        idle = False
                if self._heavy:
                    self._heavy.popleft()()
                start = time.perf_counter()
                finished: list[Finished] = []
                try:
                    finished = self._engine.step()
                except CacheFull as error:
                    self._full(error)
                took_s = time.perf_counter() - start
                busy_s += took_s
                self.steps, self.busy_s = self.steps + 1, self.busy_s + took_s
                if finished:
                    self.unit_ms += (1e3 * busy_s / len(finished) - self.unit_ms) / (30 if self.unit_ms else 1)
                    busy_s = 0.0
                    self._deliver(finished)
                idle = not self._engine.busy and not self._heavy
        except BaseException as error:  # noqa: BLE001 -- reported to every conversation and to the health check
            self._died(error)

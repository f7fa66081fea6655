"""One conversation as a named Ray actor: sequence numbers, transcript, the ledger's counts, its state.

It stands between the socket and the engine and outlives both for a while.  It imports no torch, so that hundreds of
them fit on a node.

States: `queued` (in placement's waiting line, before there is an actor), `live`, `paused` (nothing heard for a while),
`closed`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError

from serve_apps.messages import SAMPLE_RATE_IN, Batch, Failure, SessionEnd, SessionOptions, UnitReport, View

log = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Limits:
    backlog_s: float = 30.0  # unprocessed audio; a real-time client never gets near
    unread_reports: int = 256  # results that nobody fetched
    pause_after_s: float = 5.0
    reader_grace_s: float = 60.0  # a conversation that nobody reads from is closed
    poll_s: float = 10.0


class SessionActor:
    """`engine` is the handle of an EngineHost that has promised this session a row."""

    def __init__(self, session_id: str, engine: Any, engine_name: str, limits: Limits | None = None):
        self.id, self._engine, self._engine_name = session_id, engine, engine_name
        self._limits = limits or Limits()
        self._config: dict[str, Any] = {}
        self._opened_at = time.time()
        self._last_input = self._last_read = time.monotonic()
        self._appends = 0
        self._samples = 0
        self._reports: deque[UnitReport] = deque()
        self._last_report: UnitReport | None = None
        self._units = self._evicted = self._misses = 0
        self._unit_ms = 0.0
        self._transcript: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        self._end: SessionEnd | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, options: SessionOptions) -> dict[str, Any] | Failure:
        """Opens the conversation on its engine; returns the settings in force, or why it cannot be opened."""
        settings: dict[str, Any] | Failure = await self._engine.open.remote(self.id, options)
        if isinstance(settings, Failure):
            return settings
        self._config = settings
        self._tasks = [asyncio.create_task(self._collect()), asyncio.create_task(self._watch())]
        return self._config

    @property
    def state(self) -> str:
        if self._end is not None:
            return "closed"
        return "paused" if time.monotonic() - self._last_input > self._limits.pause_after_s else "live"

    async def append(self, number: int, pcm_S: np.ndarray, force_listen: bool) -> None:
        """The client's `number`-th input (from 1). A number seen before changes nothing, so a repeated call is safe.

        Trouble ends the session, and its `events` say so.
        """
        if self._end is not None or number <= self._appends:
            return
        assert number == self._appends + 1, f"input {number} after {self._appends}: one is missing"
        self._appends = number
        self._last_input = time.monotonic()
        self._samples += len(pcm_S)
        waiting_s = self._samples / SAMPLE_RATE_IN - self._units
        if waiting_s > self._limits.backlog_s:
            message = f"{waiting_s:.0f} s of audio wait to be processed; keep below {self._limits.backlog_s:.0f} s"
            await self.finish("input_overflow", Failure("input_overflow", message))
            return
        try:
            await self._engine.push.remote(self.id, number, pcm_S, force_listen)
        except RayActorError:
            await self._engine_lost()

    async def events(self, after: int, timeout: float) -> Batch:
        """Reports of the units after unit `after` (-1: all) as soon as there are any; what came before is forgotten."""
        self._last_read = time.monotonic()
        while self._reports and self._reports[0].unit <= after:
            self._reports.popleft()
        if not self._reports and self._end is None:
            self._news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), timeout)
        self._last_read = time.monotonic()
        return Batch(list(self._reports), self._end)

    async def finish(self, reason: str, failure: Failure | None = None) -> View:
        """Ends the conversation, if it has not ended, and gives its row back. What waits unprocessed is dropped."""
        if self._end is None:
            self._end = SessionEnd(reason, failure)
            self._news.set()
            with suppress(RayActorError):
                await self._engine.close.remote(self.id)
        return self.view()

    def view(self) -> View:
        """What `GET /v1/sessions/{id}` shows."""
        last = self._last_report
        return {
            "id": self.id,
            "state": self.state,
            "engine": self._engine_name,
            "opened_at": self._opened_at,
            "config": self._config,
            "end": None if self._end is None else {"reason": self._end.reason, "failure": _plain(self._end.failure)},
            "input": {"appends": self._appends, "seconds": self._samples / SAMPLE_RATE_IN},
            "units": self._units,
            "memory": {
                "residents": last.residents if last else {},
                "total": last.total if last else 0,
                "peak": last.peak if last else 0,
                "evicted": self._evicted,
                "kv_bytes": last.kv_bytes if last else 0,
                "encoder_bytes": last.encoder_bytes if last else 0,
            },
            "timing": {
                "unit_ms_mean": self._unit_ms / self._units if self._units else 0.0,
                "unit_ms_last": last.unit_ms if last else 0.0,
                "deadline_misses": self._misses,
            },
            "transcript": self._transcript,
        }

    async def exit(self) -> None:
        """Ends this process."""
        ray.actor.exit_actor()

    async def _collect(self) -> None:
        try:
            await self._fetch_reports()
        except RayActorError:
            await self._engine_lost()
        except Exception:
            log.exception("session %s failed", self.id)
            await self.finish("internal_error", Failure("internal_error", "this conversation failed on the server"))

    async def _fetch_reports(self) -> None:
        """Asking for what follows unit N tells the engine that N has arrived."""
        after = -1
        while self._end is None:
            batch: Batch = await self._engine.poll.remote(self.id, after, self._limits.poll_s)
            for report in batch.reports:
                after = report.unit
                self._take(report)
            if batch.end is not None:
                await self.finish(batch.end.reason, batch.end.failure)
            elif len(self._reports) > self._limits.unread_reports:
                message = f"{len(self._reports)} units of results were not fetched; read faster"
                await self.finish("slow_reader", Failure("slow_reader", message))

    def _take(self, report: UnitReport) -> None:
        assert report.unit == self._units, f"unit {report.unit} after {self._units} units"
        self._units += 1
        self._evicted += report.evicted
        self._misses += report.missed
        self._unit_ms += report.unit_ms
        self._last_report = report
        if report.transcript or report.response:
            line = {"unit": report.unit, "transcript": report.transcript, "response": report.response}
            self._transcript.append(line)
        self._reports.append(report)
        self._news.set()

    async def _engine_lost(self) -> None:
        message = "the engine of this conversation is gone; what it heard is in the transcript"
        await self.finish("engine_lost", Failure("engine_lost", message))

    async def _watch(self) -> None:
        """A conversation without a reader (its gateway died) ends itself: detached actors outlive everything else."""
        grace = self._limits.reader_grace_s
        while time.monotonic() - self._last_read < grace:
            await asyncio.sleep(grace / 4)
        await self.finish("reader_lost")
        log.info("session %s: nobody has read from it for %.0f s, so it ends", self.id, grace)
        myself = ray.get_runtime_context().current_actor
        myself.exit.remote()


def _plain(failure: Failure | None) -> dict[str, str] | None:
    return None if failure is None else {"code": failure.code, "message": failure.message}

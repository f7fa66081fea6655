"""One conversation as a named Ray actor: sequence numbers, transcript, the ledger's counts, its state.

It stands between the socket and the engine and outlives both for a while.  It imports no torch, so that hundreds of
them fit on a node.

States: `queued` (in placement's waiting line, before there is an actor), `live`, `paused` (nothing heard for a while),
`closed`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayActorError

from serve_apps.messages import (
    SAMPLE_RATE_IN,
    Attached,
    Batch,
    Failure,
    SessionEnd,
    SessionOptions,
    UnitReport,
    View,
)

log = logging.getLogger("ray.serve")


REPLACED = SessionEnd("replaced", Failure("session_replaced", "another socket has taken this conversation up"))


@dataclass(frozen=True)
class Limits:
    backlog_s: float = 30.0  # unprocessed audio; a real-time client never gets near
    unread_reports: int = 256  # results that nobody fetched
    pause_after_s: float = 5.0
    reader_grace_s: float = 60.0  # a conversation that nobody reads from is closed
    kept_reports: int = 32  # results that were fetched stay for a client that lost its socket before it got them
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
        self._token = ""
        self._reader = 1
        self._fetched = -1  # the last unit that the reader has fetched
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, options: SessionOptions, token: str = "") -> dict[str, Any] | Failure:
        """Opens the conversation on its engine; returns the settings in force, or why it cannot be opened. Whoever
        knows `token` may take it up again; the caller is reader 1."""
        self._token = token
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

    async def attach(self, token: str) -> Attached | Failure:
        """Another socket takes the conversation up; the one before it is told `replaced` and is reader no more."""
        if self._end is not None:
            return Failure("session_closed", "this conversation has ended; open another one")
        if not self._token or not secrets.compare_digest(token.encode(), self._token.encode()):
            return Failure("resume_refused", "the resume token is not this conversation's")
        self._reader += 1
        self._fetched = -1
        self._last_read = time.monotonic()
        self._news.set()
        return Attached(self._reader, self._config, self._appends, self._units)

    async def detach(self, reader: int, grace_s: float) -> View | None:
        """The reader's socket is gone. Returns None once another has attached; ends the conversation, and returns what
        stays of it, if that has not happened after `grace_s` seconds."""
        until = time.monotonic() + grace_s
        while self._reader == reader and self._end is None and time.monotonic() < until:
            self._last_read = time.monotonic()
            await asyncio.sleep(min(0.1, grace_s))
        return await self.finish("client_gone") if self._reader == reader else None

    async def append(self, number: int, pcm_S: np.ndarray, force_listen: bool, reader: int = 1) -> None:
        """The client's `number`-th input (from 1). A number seen before changes nothing, so a repeated call is safe;
        nor does what comes from a socket that has been replaced.

        Trouble ends the session, and its `events` say so.
        """
        if self._end is not None or number <= self._appends or reader != self._reader:
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

    async def events(self, after: int, timeout: float, reader: int = 1) -> Batch:
        """Reports of the units after unit `after` (-1: all that are kept) as soon as there are any, and news of the
        state; what came long before is forgotten."""
        if reader != self._reader:
            return Batch(end=REPLACED)
        self._last_read = time.monotonic()
        self._fetched = max(self._fetched, after)
        while self._reports and self._reports[0].unit <= self._fetched - self._limits.kept_reports:
            self._reports.popleft()
        if not self._unread(after) and self._end is None:
            self._news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), timeout)
        if reader != self._reader:
            return Batch(end=REPLACED)
        self._last_read = time.monotonic()
        return Batch(self._unread(after), self._end, self.state)

    def _unread(self, after: int) -> list[UnitReport]:
        return [r for r in self._reports if r.unit > after]

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
            elif (unread := len(self._unread(self._fetched))) > self._limits.unread_reports:
                message = f"{unread} units of results were not fetched; read faster"
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

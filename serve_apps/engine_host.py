"""The actor that owns one engine: its step loop runs in a thread, everybody else talks to it through a queue.

All conversation logic is in `a2t.duplex.engine`; here are the thread, the promises of rows, the results waiting to be
fetched, and the ways of a conversation to another engine: rebuilt from a session's book after a loss, or handed over
exactly (`seal` here, `adopt` there).  No step waits for a client: results queue up, and a session that does not fetch
them is ended alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from a2t.duplex.engine import CacheFull, Engine, EngineConfig, Finished
from a2t.duplex.journal import Journal
from a2t.kv.cache import ArenaFull
from serve_apps.book import Book
from serve_apps.guest import ENGINE_FAILED, NOT_HERE, Finishing, Guest, Reporter
from serve_apps.messages import Batch, EngineLoad, Failure, Parcel, SessionEnd, SessionOptions, UnitReport
from serve_apps.models import HostConfig as HostConfig
from serve_apps.models import conversation_config, espeak_speech, load_model, settings_in_force, spoken, warm_up
from serve_apps.question import answer
from serve_apps.step_loop import StepLoop
from serve_apps.tally import Tally
from serve_apps.transit import journal_of_record, pack, rebuild, unpack

if TYPE_CHECKING:
    from serve_apps.metrics import EngineGauges

log = logging.getLogger("ray.serve")
T = TypeVar("T")


class EngineHost:
    """Open, push, poll and close conversations on one engine. As a Ray actor: `EngineActor`."""

    def __init__(self, name: str, node: str, config: HostConfig, metrics: bool = False):
        import torch

        torch.set_num_threads(config.threads)
        self._name, self._node, self._config = name, node, config
        self._model = load_model(config.model, config.model_options)
        self._speech = espeak_speech()
        self._reporter = Reporter(self._model)
        self._voice = ThreadPoolExecutor(1, "voice")
        self._guests: dict[str, Guest] = {}
        self._dead: BaseException | None = None
        self._draining = False
        self._waiting = 0
        self._gauges: EngineGauges | None = None  # on Ray's metrics port
        if metrics:
            from serve_apps.metrics import EngineGauges

            self._gauges = EngineGauges(name)
        self._tally = Tally()
        self._asyncio: asyncio.AbstractEventLoop  # set by the first call: an actor is made outside its event loop
        timing = EngineConfig(side_channel_budget_s=config.side_channel_budget_s)
        engine = Engine(self._model, rows=config.rows + 1, capacity=config.capacity, config=timing)
        warm_up(engine)
        self._loop = StepLoop(engine, self._hand_over, self._row_full, self._engine_died)

    # -- what placement and the deployment ask -------------------------------------------------------------------

    async def load(self, waiting: int | None = None) -> EngineLoad:
        """`waiting`: how many sessions wait for a row anywhere, for `stats`."""
        self._sweep()
        if waiting is not None:
            self._waiting = waiting
        return EngineLoad(
            self._name, self._node, self._config.rows, tuple(self._guests), self._loop.unit_ms, self._draining
        )

    async def stats(self) -> dict[str, float]:
        """What autoscaling goes by."""
        load = await self.load()
        return {
            "rows": float(load.rows),
            "held": float(len(load.sessions)),
            "unit_ms": load.unit_ms,
            "waiting": float(self._waiting),
        }

    async def health(self) -> None:
        """Asked for every few seconds, which is also how often the gauges are set."""
        if self._dead is not None:
            raise RuntimeError(f"the step loop of {self._name} died") from self._dead
        if self._gauges is not None:
            load = await self.load()
            self._gauges(self._tally.gauges(load, self._loop.steps, self._loop.busy_s))

    async def reserve(self, session: str, urgent: bool = False) -> bool:
        """Promises a row to a session; False if none is free, or no time for another (`urgent`: however busy it is)."""
        self._sweep()
        if session in self._guests:
            return True
        held = len(self._guests)
        busy = held and (held + 1) * self._loop.unit_ms > 1000 * self._config.max_load and not urgent
        if self._draining or held >= self._config.rows or busy:
            return False
        self._guests[session] = Guest(time.monotonic() + self._config.promise_s)
        return True

    async def drain(self) -> list[str]:
        """Takes no conversation any more; returns those that are still here."""
        self._draining = True
        return list(self._guests)

    def stop(self) -> None:
        self._loop.stop()
        self._voice.shutdown()

    # -- what a session actor asks -------------------------------------------------------------------------------

    async def open(self, session: str, options: SessionOptions, token: str = "") -> dict[str, Any] | Failure:
        """Opens the conversation; returns the settings in force, or why it cannot be opened."""
        guest = self._guests.get(session)
        if guest is None:
            return NOT_HERE
        if self._dead is not None:
            return ENGINE_FAILED
        if guest.book is not None:  # asked again
            return guest.book.settings
        self._asyncio = asyncio.get_running_loop()
        try:
            config = conversation_config(self._model, self._config, options)
            journal = await self._do(lambda engine: guest.begin(engine, config, session))
        except ValueError as error:
            if options.best_effort and options.system_prompt is not None:  # words that the model has no tokens for
                return await self.open(session, replace(options, system_prompt=None), token)
            return Failure("invalid_config", str(error))
        guest.voice = self._speech.open() if options.speech else None
        book = Book(session, options, token)
        book.begin(settings_in_force(config, options.speech, len(journal["prefix_ids"])), journal)
        guest.book = book
        return book.settings

    async def push(self, session: str, number: int, pcm_S: np.ndarray, force_listen: bool) -> None:
        """The session's `number`-th input, from 1; one seen before changes nothing."""
        guest = self._guests.get(session)
        if guest is None or not guest.live or guest.book is None or number <= guest.book.inputs:
            return  # over, gone or known already; `poll` tells the end
        guest.book.hear(number, pcm_S, force_listen)
        guest.force_listen |= force_listen
        if not len(pcm_S):
            return  # its force_listen holds for the next one
        conversation, force, guest.force_listen = guest.conversation, guest.force_listen, False
        assert conversation is not None
        pcm_S = np.array(pcm_S, np.float32)  # what arrives through the object store is read-only
        try:
            await self._do(lambda engine: engine.push(conversation, pcm_S, force))
        except CacheFull as error:
            self._end(guest, Failure("cache_full", str(error)))
        except ValueError:
            if guest.live:  # closed meanwhile otherwise
                raise

    async def poll(self, session: str, after: int, timeout: float) -> Batch:
        """Reports after unit `after`, waiting up to `timeout` seconds for the first."""
        guest = self._guests.get(session)
        if guest is None or guest.book is None:
            return Batch(end=SessionEnd("closed"))
        guest.last_poll = time.monotonic()
        guest.fetched = max(guest.fetched, after)
        guest.book.fetched(guest.fetched)
        if not guest.book.unread(after) and guest.end is None:
            guest.news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(guest.news.wait(), timeout)
        guest.last_poll = time.monotonic()
        return Batch(guest.book.unread(after), guest.end)

    async def close(self, session: str) -> None:
        """Gives the row back, promised or used. Closing twice is no error."""
        if (closed := self._release(session)) is not None:
            await asyncio.wrap_future(closed)

    async def book(self, session: str) -> Book | None:
        """For a session actor that starts again; None if the session is not here, or is stuck here."""
        guest = self._guests.get(session)
        return guest.book if guest is not None and self._dead is None and guest.sealed is None else None

    async def restore(self, session: str, book: Book) -> Failure | None:
        """Rebuilds a conversation whose engine is gone, on the row that is promised to it."""
        guest = self._guests.get(session)
        if guest is None or guest.book is not None:
            return NOT_HERE
        self._asyncio = asyncio.get_running_loop()
        journal = Journal.from_json(book.to_journal())

        def arrive(engine: Engine) -> None:
            guest.conversation = rebuild(engine, journal, book)

        failure = await self._settle(guest, book, arrive)
        self._tally.restored(failure)
        return failure

    async def seal(self, session: str, after: int) -> list[UnitReport] | Failure:
        """Stops the conversation between two units and keeps it ready for another engine to `adopt`; returns the
        reports after unit `after`. Its row stays promised until `close`."""
        guest = self._guests.get(session)
        if guest is None or guest.book is None or guest.end is not None:
            return NOT_HERE
        if guest.sealed is None:
            conversation = guest.conversation
            assert conversation is not None
            files = await self._do(lambda engine: pack(engine, conversation), heavy=True)
            while guest.book.units < conversation.units and guest.end is None:  # the last reports are still being made
                await asyncio.sleep(0.005)
            if guest.end is not None:
                return NOT_HERE
            guest.sealed = Parcel(files, guest.book, tuple(guest.said_ids), guest.force_listen)
        return guest.book.unread(after)

    async def parcel(self, session: str) -> Parcel:
        """What was sealed. Called so that the reference to the answer can be given to another engine."""
        guest = self._guests[session]
        assert guest.sealed is not None, f"session {session} is not sealed"
        return guest.sealed

    async def adopt(self, session: str, parcel: Parcel) -> Failure | None:
        """Goes on with a conversation that another engine (or this one) has sealed, bit for bit."""
        guest = self._guests.get(session)
        if guest is None or (guest.book is not None and guest.sealed is None):
            return NOT_HERE
        self._asyncio = asyncio.get_running_loop()
        guest.sealed = None
        guest.said_ids, guest.force_listen = list(parcel.said_ids), parcel.force_listen
        guest.said = self._model.tokenizer.decode(guest.said_ids) if guest.said_ids else ""

        def arrive(engine: Engine) -> None:
            guest.conversation = unpack(engine, parcel.files, session)

        return await self._settle(guest, parcel.book, arrive)

    async def moved(self, session: str, moves: list[dict[str, Any]]) -> None:
        """How the conversation came here, for its book."""
        guest = self._guests.get(session)
        if guest is not None and guest.book is not None:
            guest.book.moves = list(moves)

    async def query(self, session: str, question: str) -> str | Failure:
        """A typed question, answered from the transcript on a scratch row; the conversation is not touched."""
        guest = self._guests.get(session)
        if guest is None or not guest.live:
            return NOT_HERE
        assert guest.conversation is not None
        return await answer(self._loop, guest.conversation, question, lambda: self._dead is not None)

    async def query_record(self, prompt: str | None, transcript: str, question: str) -> str | Failure:
        """The same about a conversation that is over, or of which there is only text."""
        try:
            journal = journal_of_record(self._model, prompt, transcript)
        except ValueError as error:
            return Failure("invalid_question", str(error))
        return await answer(self._loop, journal, question, lambda: self._dead is not None)

    async def say(self, text: str) -> np.ndarray:
        """Typed text as 16 kHz audio, in the stand-in voice."""
        return await asyncio.wrap_future(self._voice.submit(spoken, text))

    # -- inside --------------------------------------------------------------------------------------------------

    async def _do(self, action: Callable[[Engine], T], heavy: bool = False) -> T:
        return await asyncio.wrap_future(self._loop.do(action, heavy))

    async def _settle(self, guest: Guest, book: Book, arrive: Callable[[Engine], None]) -> Failure | None:
        if self._dead is not None:
            return ENGINE_FAILED
        guest.book, guest.fetched, guest.last_poll = book, book.units - 1, time.monotonic()
        guest.voice = self._speech.open() if book.options.speech else None
        try:
            await self._do(arrive, heavy=True)
        except (ArenaFull, OSError, ValueError) as error:  # OSError: no room for the files that it comes in
            guest.book = None
            return Failure("not_restored", str(error))
        return None

    def _hand_over(self, finished: list[Finished]) -> None:
        """In the engine's thread: speech and reports are made in another, so that the next step can start."""
        self._voice.submit(self._tell, [Finishing.of(f) for f in finished])

    def _tell(self, finished: list[Finishing]) -> None:
        try:
            for unit in finished:
                guest = self._guests.get(unit.session)
                if guest is not None:
                    report = self._reporter.report(guest, unit)
                    self._asyncio.call_soon_threadsafe(self._deliver, guest, report)
        except Exception as error:  # noqa: BLE001 -- reported to every conversation and to the health check
            self._engine_died(error)

    def _deliver(self, guest: Guest, report: UnitReport) -> None:
        if guest.book is None:
            return
        guest.book.take(report)
        self._tally.unit(report)
        if self._gauges is not None:
            self._gauges.unit(report.unit_ms, report.missed)
        if (unread := report.unit - guest.fetched) > self._config.unread_reports:
            self._end(guest, Failure("slow_reader", f"{unread} units of results were not fetched"))
        guest.news.set()

    def _end(self, guest: Guest, failure: Failure) -> None:
        if guest.end is None:
            guest.end = SessionEnd(failure.code, failure)
        guest.news.set()

    def _row_full(self, error: CacheFull) -> None:
        guest = self._guests.get(error.conversation.id)
        if guest is not None:
            failure = Failure("cache_full", str(error))
            # after the reports of the units before it, which take the same way
            self._voice.submit(self._asyncio.call_soon_threadsafe, self._end, guest, failure)

    def _engine_died(self, error: BaseException) -> None:
        self._dead, self._draining = error, True
        log.error("the step loop of %s died", self._name, exc_info=error)
        for guest in list(self._guests.values()):
            self._asyncio.call_soon_threadsafe(self._end, guest, ENGINE_FAILED)

    def _release(self, session: str) -> Future[None] | None:
        guest = self._guests.pop(session, None)
        if guest is None:
            return None
        guest.end = guest.end or SessionEnd("closed")
        guest.news.set()
        return None if self._dead is not None else self._loop.do(guest.leave)

    def _sweep(self) -> None:
        """Frees rows that were promised and never used, or whose session nobody polls any more."""
        now = time.monotonic()
        for session, guest in list(self._guests.items()):
            if guest.abandoned(now, self._config.reader_grace_s):
                log.warning("session %s: its row on %s is freed, nobody uses it", session, self._name)
                self._release(session)

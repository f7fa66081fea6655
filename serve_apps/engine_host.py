"""The actor that owns one engine: its step loop runs in a thread, everybody else talks to it through a queue.

All conversation logic is in `a2t.duplex.engine`; here are the thread, the promises of rows, and the results waiting to
be fetched.  No step waits for a client: results queue up, and a session that does not fetch them is ended alone.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from a2t.data.espeak import SAMPLE_RATE as ESPEAK_RATE
from a2t.data.espeak import Espeak
from a2t.duplex.decoding import DuplexConfig
from a2t.duplex.engine import CacheFull, Conversation, ConversationConfig, Engine, Finished, UnitStats
from a2t.duplex.protocol import TOKEN_TEXT
from a2t.duplex.unit_loop import UnitResult
from a2t.models.base import DuplexModel
from a2t.models.speech import EspeakSpeech, SpeechDecoder, SpeechStream
from serve_apps.messages import Batch, EngineLoad, Failure, SessionEnd, SessionOptions, UnitReport
from serve_apps.step_loop import StepLoop

log = logging.getLogger("ray.serve")
T = TypeVar("T")
ENGINE_FAILED = Failure("engine_failed", "the engine of this conversation failed; what it heard is in the transcript")


@dataclass(frozen=True)
class HostConfig:
    """How an engine is made. `model` is `module:function`, called with `model_options`, that returns a DuplexModel."""

    model: str = "serve_apps.engine_host:embedded"
    model_options: dict[str, Any] = field(default_factory=dict)
    rows: int = 4
    capacity: int = 16_384
    threads: int = 1
    promise_s: float = 60.0  # a promised row that is not used by then is free again
    unread_reports: int = 256
    reader_grace_s: float = 90.0  # a conversation that nobody polls is closed


def embedded() -> DuplexModel:
    """The embedded default with its side channel."""
    from a2t.models.tiny import ADAPTER, load_tiny

    return load_tiny(adapter=ADAPTER)


def load_model(spec: str, options: dict[str, Any]) -> DuplexModel:
    """Raises ValueError if `spec` is not `module:function`."""
    module, _, function = spec.partition(":")
    if not function:
        raise ValueError(f"model {spec!r} is not module:function, as serve_apps.engine_host:embedded is")
    return getattr(importlib.import_module(module), function)(**options)


def espeak_speech() -> SpeechDecoder:
    engine = Espeak()
    return EspeakSpeech(lambda text: engine.say(text).pcm_S, ESPEAK_RATE)


def warm_up(engine: Engine, seconds: int = 2) -> None:
    """A short silent conversation, so that the first caller does not pay for what is set up on first use."""
    conversation = engine.open()
    engine.push(conversation, np.zeros(seconds * engine.model.encoder.samples_per_unit, np.float32))
    engine.run()
    engine.close(conversation)


@dataclass
class Guest:
    """A session on this engine: first a promise of a row, then its conversation and the results not fetched yet."""

    promised_until: float
    conversation: Conversation | None = None
    voice: SpeechStream | None = None
    said_ids: list[int] = field(default_factory=list)  # of the open turn
    said: str = ""
    pushes: int = 0
    force_listen: bool = False
    reports: deque[UnitReport] = field(default_factory=deque)
    end: SessionEnd | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)
    last_poll: float = field(default_factory=time.monotonic)

    def begin(self, engine: Engine, config: ConversationConfig, session: str) -> Conversation:
        """In the engine's thread, as `leave` is: whoever asked may be gone when it happens."""
        self.conversation = engine.open(config, id=session)
        return self.conversation

    def leave(self, engine: Engine) -> None:
        if self.conversation is not None:
            engine.close(self.conversation)


class EngineHost:
    """Open, push, poll and close conversations on one engine. As a Ray actor: `ray.remote(EngineHost)`."""

    def __init__(self, name: str, node: str, config: HostConfig):
        import torch

        torch.set_num_threads(config.threads)
        self._name, self._node, self._config = name, node, config
        self._model = load_model(config.model, config.model_options)
        self._speech = espeak_speech()
        self._special = {self._model.tokenizer.token_id(text): text for text in TOKEN_TEXT.values()}
        self._voice = ThreadPoolExecutor(1, "voice")
        self._guests: dict[str, Guest] = {}
        self._dead: BaseException | None = None
        self._asyncio: asyncio.AbstractEventLoop  # set by the first call: an actor is made outside its event loop
        engine = Engine(self._model, rows=config.rows + 1, capacity=config.capacity)
        warm_up(engine)
        self._loop = StepLoop(engine, self._hand_over, self._row_full, self._engine_died)

    # -- what placement and the deployment ask -------------------------------------------------------------------

    async def load(self) -> EngineLoad:
        self._sweep()
        return EngineLoad(self._name, self._node, self._config.rows, tuple(self._guests), self._loop.unit_ms)

    async def health(self) -> None:
        if self._dead is not None:
            raise RuntimeError(f"the step loop of {self._name} died") from self._dead

    async def reserve(self, session: str) -> bool:
        """Promises a row to a session; False if none is free."""
        self._sweep()
        if session not in self._guests and len(self._guests) >= self._config.rows:
            return False
        self._guests.setdefault(session, Guest(time.monotonic() + self._config.promise_s))
        return True

    def stop(self) -> None:
        self._loop.stop()
        self._voice.shutdown()

    # -- what a session actor asks -------------------------------------------------------------------------------

    async def open(self, session: str, options: SessionOptions) -> dict[str, Any] | Failure:
        """Opens the conversation; returns the settings in force, or why it cannot be opened."""
        guest = self._guests.get(session)
        if guest is None:
            message = f"no row is kept for this session: promises lapse after {self._config.promise_s:.0f} s"
            return Failure("no_row", message)
        if self._dead is not None:
            return ENGINE_FAILED
        self._asyncio = asyncio.get_running_loop()
        try:
            config = self._conversation_config(options)
            conversation = await self._do(lambda engine: guest.begin(engine, config, session))
        except ValueError as error:
            return Failure("invalid_config", str(error))
        guest.voice = self._speech.open() if options.speech else None
        return {
            "max_kv_tokens": config.budget,
            "policy": config.policy,
            "temperature": 0.0 if config.duplex.greedy else config.duplex.temperature,
            "length_penalty": config.duplex.length_penalty,
            "max_tokens": config.duplex.max_new_speak_tokens_per_chunk,
            "tts_enabled": guest.voice is not None,
            "prefix_tokens": len(conversation.journal.prefix_ids),
        }

    async def push(self, session: str, number: int, pcm_S: np.ndarray, force_listen: bool) -> None:
        """The session's `number`-th input, from 1; one seen before changes nothing."""
        guest = self._guests.get(session)
        if guest is None or guest.conversation is None or guest.end is not None or number <= guest.pushes:
            return  # over, or known already; `poll` tells the end
        guest.pushes = number
        guest.force_listen |= force_listen
        if not len(pcm_S):
            return  # its force_listen holds for the next one
        conversation, force, guest.force_listen = guest.conversation, guest.force_listen, False
        pcm_S = np.array(pcm_S, np.float32)  # what arrives through the object store is read-only
        try:
            await self._do(lambda engine: engine.push(conversation, pcm_S, force))
        except CacheFull as error:
            self._end(guest, Failure("cache_full", str(error)))
        except ValueError:
            if guest.end is None:  # closed meanwhile otherwise
                raise

    async def poll(self, session: str, after: int, timeout: float) -> Batch:
        """Reports after unit `after`, waiting up to `timeout` seconds for the first."""
        guest = self._guests.get(session)
        if guest is None:
            return Batch(end=SessionEnd("closed"))
        guest.last_poll = time.monotonic()
        while guest.reports and guest.reports[0].unit <= after:
            guest.reports.popleft()
        if not guest.reports and guest.end is None:
            guest.news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(guest.news.wait(), timeout)
        guest.last_poll = time.monotonic()
        return Batch(list(guest.reports), guest.end)

    async def close(self, session: str) -> None:
        """Gives the row back, promised or used. Closing twice is no error."""
        closed = self._release(session)
        if closed is not None:
            await asyncio.wrap_future(closed)

    # -- inside --------------------------------------------------------------------------------------------------

    async def _do(self, action: Callable[[Engine], T]) -> T:
        return await asyncio.wrap_future(self._loop.do(action))

    def _conversation_config(self, options: SessionOptions) -> ConversationConfig:
        duplex = DuplexConfig()
        if options.temperature is not None:
            duplex = replace(duplex, greedy=options.temperature == 0)
            if options.temperature > 0:
                duplex = replace(duplex, temperature=options.temperature)
        if options.length_penalty is not None:
            duplex = replace(duplex, length_penalty=options.length_penalty)
        if options.max_tokens is not None:
            duplex = replace(duplex, max_new_speak_tokens_per_chunk=min(options.max_tokens, 64))
        config = ConversationConfig(duplex=duplex, system_prompt=options.system_prompt)
        if options.budget is not None:
            config = replace(config, budget=options.budget)
        return config

    def _hand_over(self, finished: list[Finished]) -> None:
        """In the engine's thread: speech and reports are made in another, so that the next step can start."""
        self._voice.submit(self._tell, finished)

    def _tell(self, finished: list[Finished]) -> None:
        try:
            for conversation, result, stats in finished:
                guest = self._guests.get(conversation.id)
                if guest is not None:
                    report = self._report(guest, result, stats)
                    self._asyncio.call_soon_threadsafe(self._deliver, guest, report)
        except Exception as error:  # noqa: BLE001 -- reported to every conversation and to the health check
            self._engine_died(error)

    def _report(self, guest: Guest, result: UnitResult, stats: UnitStats) -> UnitReport:
        decode = self._model.tokenizer.decode
        guest.said_ids += result.response_ids
        whole = decode(guest.said_ids) if guest.said_ids else ""  # what a token adds may depend on those before it
        response, guest.said = whole.removeprefix(guest.said), whole
        speech_S = None
        if guest.voice is not None and (result.speech_ids or result.end_of_turn):
            speech_S = guest.voice.say(result.speech_ids, result.speech_hidden_ND, response, result.end_of_turn)
        if guest.voice is not None and result.listening and guest.said_ids:
            guest.voice.stop()
        if result.end_of_turn or result.listening:
            guest.said_ids, guest.said = [], ""
        embeddings = self._model.encoder.embeddings_per_unit
        written = len(result.transcript_ids) + 2 if result.segment_opened else 0
        return UnitReport(
            unit=result.unit,
            listening=result.listening,
            end_of_turn=result.end_of_turn,
            decision=self._special.get(result.decision) or decode([result.decision]),
            transcript=result.transcript_text.strip(),
            response=response,
            segment_closed_by=result.segment_closed_by,
            residents={kind.name.lower(): count for kind, count in stats.residents.items()},
            peak=stats.peak,
            evicted=stats.evicted,
            unit_ms=stats.unit_ms,
            missed=stats.deadline_missed,
            forwards=stats.forwards,
            kv_bytes=stats.kv_bytes,
            encoder_bytes=stats.encoder_bytes,
            positions=1 + embeddings + len(result.native_ids) + written + 1,
            input_tokens=embeddings,
            output_tokens=len(result.native_ids) + written,
            speech_S=speech_S,
        )

    def _deliver(self, guest: Guest, report: UnitReport) -> None:
        guest.reports.append(report)
        if len(guest.reports) > self._config.unread_reports:
            self._end(guest, Failure("slow_reader", f"{len(guest.reports)} units of results were not fetched"))
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
        self._dead = error
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
            unused = guest.conversation is None and now > guest.promised_until
            orphan = guest.conversation is not None and now - guest.last_poll > self._config.reader_grace_s
            if unused or orphan:
                log.warning("session %s: its row on %s is freed, nobody uses it", session, self._name)
                self._release(session)

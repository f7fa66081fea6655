"""The order of the OpenAI realtime dialect's events: what the user says, and what is answered. No Ray, no sockets.

A conversation is a list of items. What the user says between two pauses is one, and what the model says in one run is
another; one response covers that run. A client takes `speech_started` for "stop playback", so it is told of the user's
voice only while the model is silent or once it has yielded; a back-channel's words become an item of their own.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from serve_apps.messages import SAMPLE_RATE_OUT
from serve_apps.openai_audio import spoken
from serve_apps.openai_items import ITEMS_KEPT, Answer, Frame, Items, Said, message, part
from serve_apps.openai_session import Fields, Settings

PATIENCE = 4
"""Units that a client's `response.create` waits for the model to say something."""


class Talk:
    """Tells of one conversation. Every method is a generator of frames, in their order."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.items = Items()
        self.said: Said | None = None  # that the user is saying
        self.answer: Answer | None = None
        self.item_of: dict[str, str] = {}  # by response
        self._awaiting: deque[Said] = deque()  # committed, and some of its words are still to come
        self._overheard: Said | None = None  # said while the model spoke
        self._fenced: int | None = None  # a turn of the model's that was cut short: nothing more of it is told
        self._base = secrets.token_hex(8)
        self._ids = 0
        self._tokens = [0, 0]

    def frame(self, kind: str, **fields: Any) -> Frame:
        return {"type": kind, "event_id": self.new_id("event"), **fields}

    def new_id(self, what: str) -> str:
        self._ids += 1
        return f"{what}_{self._base}_{self._ids}"

    @property
    def speaking(self) -> bool:
        return self.answer is not None and self.answer.turn is not None

    # -- the user ----------------------------------------------------------------------------------------------------

    def voice(self, active: bool, at_ms: int, unit: int) -> Iterator[Frame]:
        """The user's voice has come or gone."""
        if active and self.answer is not None and self.speaking:
            self.answer.talked_over = True
        elif active and self.said is None:
            yield from self._begin(at_ms, by_voice=True)
        elif not active and self.said is not None and self.settings.turn_detection is not None:
            yield from self.commit(at_ms, unit)

    def heard(self, unit: int, text: str, now_ms: int) -> Iterator[Frame]:
        """Words of the user's; they come up to a second and a half after they were said."""
        said = self.said or (self._awaiting[-1] if self._awaiting else None)
        if said is None and self.speaking:
            self._overheard = self._overheard or Said(self.new_id("item"), now_ms, by_voice=False)
            self._overheard.pieces.append(text)
            return
        if said is None:
            yield from self._begin(now_ms, by_voice=False)
            said = self.said
        assert said is not None
        yield self._delta(said, text)
        if said.due is not None and unit >= said.due and not said.prolonged:
            said.due, said.prolonged = unit + 1, True

    def commit(self, at_ms: int, unit: int, by_client: bool = False) -> Iterator[Frame]:
        """The user has said something: it becomes an item. Its last words come in `unit` or, by_client, the next."""
        if self.said is None:
            if not by_client or self.settings.turn_detection is not None:
                return
            yield from self._begin(at_ms, by_voice=True)
        said, self.said = self.said, None
        assert said is not None
        said.due = unit + by_client
        said.seconds = max(0, at_ms - said.started_ms) / 1000
        if self.settings.turn_detection is not None:
            yield self.frame("input_audio_buffer.speech_stopped", item_id=said.id, audio_end_ms=at_ms)
        yield self.frame("input_audio_buffer.committed", item_id=said.id, previous_item_id=self.items.last)
        yield from self.add(self._user_item(said))
        self._awaiting.append(said)

    def clear(self) -> Iterator[Frame]:
        self.said = None
        yield self.frame("input_audio_buffer.cleared")

    def _begin(self, at_ms: int, by_voice: bool, overheard: Said | None = None) -> Iterator[Frame]:
        yield from self._complete(all_of_them=True)
        self.said = said = overheard or Said(self.new_id("item"), at_ms, by_voice)
        if self.settings.turn_detection is not None:
            yield self.frame("input_audio_buffer.speech_started", item_id=said.id, audio_start_ms=at_ms)
        pieces, said.pieces = said.pieces, []
        for text in pieces:
            yield self._delta(said, text)

    def _delta(self, said: Said, text: str) -> Frame:
        delta = f" {text}" if said.pieces else text
        said.pieces.append(text)
        kind = "conversation.item.input_audio_transcription.delta"
        return self.frame(kind, item_id=said.id, content_index=0, delta=delta)

    def _complete(self, unit: int = 0, all_of_them: bool = False) -> Iterator[Frame]:
        while self._awaiting and (all_of_them or unit >= (self._awaiting[0].due or 0)):
            said = self._awaiting.popleft()
            if self.items.get(said.id) is not None:
                self.items.put(self._user_item(said))
            yield self.frame(
                "conversation.item.input_audio_transcription.completed",
                item_id=said.id,
                content_index=0,
                transcript=said.text,
                usage={"type": "duration", "seconds": said.seconds},
            )

    def _user_item(self, said: Said) -> Frame:
        return message(said.id, "user", [{"type": "input_audio", "transcript": said.text or None}])

    # -- the model ---------------------------------------------------------------------------------------------------

    def create(self, metadata: Fields | None, speaks: bool) -> Iterator[Frame]:
        """The client asks for a response; the model may begin it."""
        assert self.answer is None
        self.answer = Answer(self.new_id("resp"), self.new_id("item"), speaks, metadata)
        yield self.frame("response.created", response=self._response(self.answer, "in_progress"))

    def says(self, turn: int, text: str, at_ms: int, unit: int) -> Iterator[Frame]:
        if turn == self._fenced or not (text or self.speaking):
            return
        if self.said is not None:
            yield from self.commit(at_ms, unit + 1)
        if self.answer is None:
            yield from self.create(None, self.settings.speaks)
        answer = self.answer
        assert answer is not None
        place = {"response_id": answer.id, "item_id": answer.item, "output_index": 0}
        fresh, answer.turn = answer.turn is None, turn
        if fresh:
            self.item_of[answer.id] = answer.item
            while len(self.item_of) > ITEMS_KEPT:
                del self.item_of[next(iter(self.item_of))]
            yield self.frame("response.output_item.added", **place, item=self._item(answer, "in_progress", False))
            before = self.items.put(self._item(answer, "in_progress"))
            item = self._item(answer, "in_progress", False)
            yield self.frame("conversation.item.added", previous_item_id=before, item=item)
            yield self.frame("response.content_part.added", **place, content_index=0, part=part(answer, ""))
        if text:
            answer.text += text
            kind = "response.output_audio_transcript.delta" if answer.spoken else "response.output_text.delta"
            yield self.frame(kind, **place, content_index=0, delta=text)

    def sounds(self, turn: int, pcm_S: np.ndarray) -> Iterator[Frame]:
        answer = self.answer
        if answer is None or answer.turn != turn or not answer.spoken:
            return
        answer.samples += len(pcm_S)
        delta = spoken(self.settings.output["format"]["type"], pcm_S)
        place = {"response_id": answer.id, "item_id": answer.item, "output_index": 0, "content_index": 0}
        yield self.frame("response.output_audio.delta", **place, delta=delta)

    def falls_silent(
        self, turn: int, interrupted: bool, nothing_more: bool, voice: bool, at_ms: int
    ) -> Iterator[Frame]:
        """The turn has ended: the model had finished, or it yields to the user, who was heard meanwhile."""
        answer = self.answer
        if answer is None or answer.turn != turn:
            return
        yields = interrupted or (nothing_more and answer.talked_over)
        if yields or (voice and answer.talked_over):
            overheard, self._overheard = self._overheard, None
            yield from self._begin(at_ms, by_voice=voice, overheard=overheard)
        yield from self.finish("cancelled" if yields else "completed", "turn_detected" if yields else None)

    def cancel(self, voice: bool, at_ms: int) -> Iterator[Frame]:
        """By the client: what the model still says of this turn is not told."""
        if self.answer is None:
            return
        self._fenced = self.answer.turn
        overheard, self._overheard = self._overheard, None
        yield from self.finish("cancelled", "client_cancelled")
        if voice or overheard is not None:
            yield from self._begin(at_ms, by_voice=voice, overheard=overheard)

    def cut(self) -> Iterator[Frame]:
        """It has become too long."""
        if self.answer is not None:
            self._fenced = self.answer.turn
            yield from self.finish("incomplete", "max_output_tokens")

    def finish(self, status: str, reason: str | None = None) -> Iterator[Frame]:
        """The response's end, `.done` by `.done`."""
        answer, self.answer = self.answer, None
        assert answer is not None
        if answer.turn is not None:
            item = self._item(answer, "completed" if status == "completed" else "incomplete")
            place = {"response_id": answer.id, "item_id": answer.item, "output_index": 0}
            inside = {**place, "content_index": 0}
            if answer.spoken:
                yield self.frame("response.output_audio.done", **inside)
                yield self.frame("response.output_audio_transcript.done", **inside, transcript=answer.text)
            else:
                yield self.frame("response.output_text.done", **inside, text=answer.text)
            yield self.frame("response.content_part.done", **inside, part=part(answer, answer.text))
            yield self.frame("response.output_item.done", **place, item=item)
            before = self.items.put(item, 1000 * answer.samples / SAMPLE_RATE_OUT)
            yield self.frame("conversation.item.done", previous_item_id=before, item=item)
        yield self.frame("response.done", response=self._response(answer, status, reason))
        yield self.frame("rate_limits.updated", rate_limits=[])
        if (overheard := self._overheard) is not None:  # a back-channel: no reason to stop playback
            self._overheard, overheard.due = None, 0
            yield from self.add(self._user_item(overheard))
            self._awaiting.append(overheard)
            yield from self._complete(all_of_them=True)

    def unit_done(self, unit: int, tokens_in: int, tokens_out: int, voice: bool, words: bool) -> Iterator[Frame]:
        self._tokens = [self._tokens[0] + tokens_in, self._tokens[1] + tokens_out]
        yield from self._complete(unit)
        told = self.settings.turn_detection is not None
        if told and self.said is not None and not (self.said.by_voice or voice or words):
            yield from self.commit(1000 * (unit + 1), unit)  # words that no voice was heard of
        if (answer := self.answer) is None:
            return
        answer.units += 1
        if answer.turn is None and answer.units >= PATIENCE:
            yield from self.finish("completed")
        elif answer.turn is not None and answer.units > 1 and voice:
            answer.talked_over = True

    # -- items -------------------------------------------------------------------------------------------------------

    def add(self, item: Frame) -> Iterator[Frame]:
        before = self.items.put(item)
        yield self.frame("conversation.item.added", previous_item_id=before, item=item)
        yield self.frame("conversation.item.done", previous_item_id=before, item=item)

    def _item(self, answer: Answer, status: str, with_content: bool = True) -> Frame:
        words = {"transcript": answer.text} if answer.spoken else {"text": answer.text}
        content = [{"type": "output_audio" if answer.spoken else "output_text", **words}] if with_content else []
        return message(answer.item, "assistant", content, status)

    def _response(self, answer: Answer, status: str, reason: str | None = None) -> Frame:
        over = status != "in_progress"
        kind = "audio" if answer.spoken else "text"
        tokens = self._tokens
        usage: Fields | None = None
        if over:
            self._tokens = [0, 0]
            usage = {
                "total_tokens": sum(tokens),
                "input_tokens": tokens[0],
                "output_tokens": tokens[1],
                "input_token_details": {"audio_tokens": tokens[0], "text_tokens": 0, "cached_tokens": 0},
                "output_token_details": {"audio_tokens": 0, "text_tokens": tokens[1]},
            }
        output = [self._item(answer, "completed" if status == "completed" else "incomplete")]
        return {
            "object": "realtime.response",
            "id": answer.id,
            "status": status,
            "status_details": {"type": status, **({"reason": reason} if reason else {})} if over else None,
            "output": output if over and answer.turn is not None else [],
            "conversation_id": f"conv_{self._base}",
            "output_modalities": [kind],
            "max_output_tokens": "inf",
            "audio": {"output": {k: self.settings.output[k] for k in ("format", "voice")}},
            "usage": usage,
            "metadata": answer.metadata,
        }

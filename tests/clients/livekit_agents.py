"""A spoken conversation by LiveKit: an AgentSession with livekit-plugins-openai, its audio from here, no room."""

from __future__ import annotations

import asyncio
import time

import aiohttp
from livekit import rtc
from livekit.agents import Agent, AgentSession
from livekit.agents.voice.io import AudioInput, AudioOutput, AudioOutputCapabilities
from livekit.plugins import openai
from talk import RATE, arguments, pieces, saw


class Microphone(AudioInput):
    def __init__(self, sound: bytes):
        super().__init__(label="microphone")
        self._pieces = pieces(sound)
        self.over = asyncio.Event()

    async def __anext__(self) -> rtc.AudioFrame:
        try:
            piece = await anext(self._pieces)
        except StopAsyncIteration:
            self.over.set()
            raise
        return rtc.AudioFrame(piece, RATE, 1, len(piece) // 2)


class Loudspeaker(AudioOutput):
    """Plays in no time, unless it is cleared before."""

    def __init__(self) -> None:
        super().__init__(label="loudspeaker", capabilities=AudioOutputCapabilities(pause=False), sample_rate=RATE)
        self._held_s = 0.0

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        if not self._held_s:
            self.on_playback_started(created_at=time.time())
        self._held_s += frame.duration
        saw("audio", samples=frame.samples_per_channel)

    def flush(self) -> None:
        super().flush()
        self._end(interrupted=False)

    def clear_buffer(self) -> None:
        saw("interrupted")
        self._end(interrupted=True)

    def _end(self, interrupted: bool) -> None:
        if self._held_s:
            self.on_playback_finished(playback_position=self._held_s, interrupted=interrupted)
        self._held_s = 0.0


async def main() -> None:
    url, sound = arguments()
    base = url.replace("ws", "http", 1).removesuffix("/realtime")
    async with aiohttp.ClientSession() as http:
        model = openai.realtime.RealtimeModel(base_url=base, api_key="unused", http_session=http)
        session: AgentSession[None] = AgentSession(llm=model)
        microphone = Microphone(sound)
        session.input.audio, session.output.audio = microphone, Loudspeaker()

        @session.on("user_input_transcribed")
        def heard(event: object) -> None:
            saw("heard" if event.is_final else "hearing", text=event.transcript)  # type: ignore[attr-defined]

        @session.on("conversation_item_added")
        def added(event: object) -> None:
            item = event.item  # type: ignore[attr-defined]
            if getattr(item, "role", None) == "assistant":
                saw("said", text=item.text_content)
                saw("done", interrupted=item.interrupted)

        @session.on("error")
        def error(event: object) -> None:
            saw("error", message=str(event.error))  # type: ignore[attr-defined]

        await session.start(Agent(instructions="i am your helper"))
        await microphone.over.wait()
        await asyncio.sleep(1)
        await session.aclose()
    saw("end")


asyncio.run(main())

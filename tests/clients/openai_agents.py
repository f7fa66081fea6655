"""A spoken conversation by openai-agents: RealtimeRunner and its session."""

from __future__ import annotations

import asyncio

from agents import set_tracing_disabled
from agents.realtime import RealtimeAgent, RealtimeRunner, RealtimeSession
from talk import arguments, pieces, saw


async def look(session: RealtimeSession) -> None:
    async for event in session:
        match event.type:
            case "audio":
                saw("audio", samples=len(event.audio.data) // 2)
            case "audio_interrupted":
                saw("interrupted")
            case "error":
                saw("error", message=str(event.error))
            case "raw_model_event" if event.data.type == "transcript_delta":
                saw("said", text=event.data.delta)
            case "raw_model_event" if event.data.type == "input_audio_transcription_completed":
                saw("heard", text=event.data.transcript)
            case "raw_model_event" if event.data.type == "turn_ended":
                saw("done")


async def main() -> None:
    url, sound = arguments()
    set_tracing_disabled(True)
    agent = RealtimeAgent(name="helper", instructions="i am your helper")
    async with await RealtimeRunner(agent).run(model_config={"url": url, "api_key": "unused"}) as session:
        looking = asyncio.create_task(look(session))
        async for piece in pieces(sound):
            await session.send_audio(piece)
        await session.interrupt()  # nothing is being said: no harm
        await session.send_message("where is the key")
        await asyncio.sleep(2)
        looking.cancel()
    saw("end")


asyncio.run(main())

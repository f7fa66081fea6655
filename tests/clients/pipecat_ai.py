"""A spoken conversation by Pipecat: OpenAIRealtimeLLMService in a pipeline that is fed from here."""

from __future__ import annotations

import asyncio

from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    InterimTranscriptionFrame,
    LLMFullResponseEndFrame,
    ProposedUserStartedSpeakingFrame,
    TranscriptionFrame,
    TTSAudioRawFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.realtime import events
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner
from talk import RATE, arguments, pieces, saw


class Look(FrameProcessor):
    """Stands on either side of the service: what is heard goes up, what is said goes down."""

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        match frame:
            case TTSAudioRawFrame():
                saw("audio", samples=len(frame.audio) // 2)
            case TTSTextFrame():
                saw("said", text=frame.text)
            case LLMFullResponseEndFrame():
                saw("done")
            case InterimTranscriptionFrame():
                saw("hearing", text=frame.text)
            case TranscriptionFrame():
                saw("heard", text=frame.text)
            case ErrorFrame():
                saw("error", message=frame.error)
            case ProposedUserStartedSpeakingFrame() if direction is FrameDirection.DOWNSTREAM:
                saw("interrupted")
        await self.push_frame(frame, direction)


async def main() -> None:
    url, sound = arguments()
    turns, words = events.SemanticTurnDetection(), events.InputAudioTranscription()
    audio = events.AudioConfiguration(input=events.AudioInput(turn_detection=turns, transcription=words))
    properties = events.SessionProperties(instructions="i am your helper", audio=audio)
    settings = OpenAIRealtimeLLMService.Settings(session_properties=properties)
    service = OpenAIRealtimeLLMService(api_key="unused", base_url=url, settings=settings)
    params = PipelineParams(audio_in_sample_rate=RATE, audio_out_sample_rate=RATE)
    worker = PipelineWorker(Pipeline([Look(), service, Look()]), params=params)

    async def speak() -> None:
        async for piece in pieces(sound):
            await worker.queue_frame(InputAudioRawFrame(audio=piece, sample_rate=RATE, num_channels=1))
        await asyncio.sleep(1)
        await worker.queue_frame(EndFrame())

    speaking = asyncio.create_task(speak())
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    await runner.run()
    await speaking
    saw("end")


asyncio.run(main())

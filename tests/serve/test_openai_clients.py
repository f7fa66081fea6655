"""Stock clients, unmodified, each hold a spoken conversation with the embedded default over loopback, side by side.

A question, its answer; a request for a story, and "please stop" while it is told. Pipecat, LiveKit and openai-agents
live in a virtual environment of their own (`make clients`) and run as programs; the openai client runs here.
"""

from __future__ import annotations

import asyncio
import base64
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr
from openai import AsyncOpenAI
from openai.types.realtime import RealtimeServerEvent
from pydantic import TypeAdapter

from a2t.data.espeak import SAMPLE_RATE, Espeak
from serve_apps.engine_host import HostConfig
from tests.serve.endpoint import Endpoint, endpoint

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
PROGRAMS = {"openai-agents": "openai_agents.py", "livekit": "livekit_agents.py", "pipecat": "pipecat_ai.py"}
RATE = 24_000
SPOKEN = [("can you hear me", 0.8), ("tell me a story about a dog", 3.5), ("please stop", 4.5)]
"""Sentences, and the seconds of quiet before each."""
Saw = list[dict[str, Any]]


def sound() -> np.ndarray:
    """16-bit samples at 24 kHz."""
    engine = Espeak()
    parts = []
    for text, quiet_s in SPOKEN:
        parts += [np.zeros(int(quiet_s * RATE)), soxr.resample(engine.say(text).pcm_S, SAMPLE_RATE, RATE)]
    pcm_S = np.concatenate([*parts, np.zeros(3 * RATE)])
    pcm_S += 0.0005 * np.random.default_rng(0).standard_normal(len(pcm_S))
    return (np.clip(pcm_S, -1, 1) * 32767).astype("<i2")


async def by_program(name: str, at: Endpoint, wav: Path) -> Saw:
    url = f"{at.address.replace('http', 'ws')}/v1/realtime"
    program = ROOT / "tests" / "clients" / PROGRAMS[name]
    process = await asyncio.create_subprocess_exec(
        PYTHON, program, url, wav, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 240)
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
    lines = [json.loads(line) for line in out.decode().splitlines() if line.startswith('{"saw"')]
    assert lines and lines[-1]["saw"] == "end", f"{name} did not come to its end:\n{err.decode()[-4000:]}"
    return lines


async def by_openai(at: Endpoint, pcm_S: np.ndarray) -> Saw:
    schema: TypeAdapter[Any] = TypeAdapter(RealtimeServerEvent)
    saw: Saw = []

    async def look(connection: Any) -> None:
        async for event in connection:
            schema.validate_python(event.to_dict())
            match event.type:
                case "conversation.item.input_audio_transcription.delta":
                    saw.append({"saw": "hearing", "text": event.delta})
                case "conversation.item.input_audio_transcription.completed":
                    saw.append({"saw": "heard", "text": event.transcript})
                case "response.output_audio_transcript.delta":
                    saw.append({"saw": "said", "text": event.delta})
                case "response.output_audio.delta":
                    saw.append({"saw": "audio", "samples": len(base64.b64decode(event.delta)) // 2})
                case "input_audio_buffer.speech_started":
                    saw.append({"saw": "interrupted"})
                case "response.done":
                    saw.append({"saw": "done", "status": event.response.to_dict()["status_details"]})
                case "error":
                    saw.append({"saw": "error", "message": event.error.message})

    client = AsyncOpenAI(base_url=f"{at.address}/v1", api_key="unused")
    async with client.realtime.connect(model="gpt-realtime") as connection:
        looking = asyncio.create_task(look(connection))
        await connection.session.update(session={"type": "realtime", "instructions": "i am your helper"})
        for second_S in np.array_split(pcm_S, len(pcm_S) // (RATE // 10)):
            await connection.input_audio_buffer.append(audio=base64.b64encode(second_S.tobytes()).decode())
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        looking.cancel()
    return [*saw, {"saw": "end"}]


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saw]:
    pcm_S = sound()
    wav = tmp_path_factory.mktemp("spoken") / "spoken.wav"
    with wave.open(str(wav), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(pcm_S.tobytes())

    async def hold_all() -> dict[str, Saw]:
        names = list(PROGRAMS) if PYTHON.exists() else []
        async with endpoint(rows=4, model=HostConfig().model, capacity=2048) as at:
            held = await asyncio.gather(by_openai(at, pcm_S), *(by_program(name, at, wav) for name in names))
            await at.settled(0)
        return dict(zip(["openai", *names], held, strict=True))

    return asyncio.run(hold_all())


@pytest.fixture(params=["openai", *PROGRAMS])
def saw(request: pytest.FixtureRequest, talks: dict[str, Saw]) -> Saw:
    if request.param not in talks:
        pytest.skip(f"no {PYTHON.relative_to(ROOT)}: `make clients` installs {request.param}")
    return talks[request.param]


def test_make_clients_installs_each_of_them() -> None:
    pins = (ROOT / "tests" / "clients" / "requirements.txt").read_text().split()
    packages = {"openai-agents", "pipecat-ai", "livekit-agents", "livekit-plugins-openai"}
    assert packages <= {pin.partition("==")[0] for pin in pins}


def texts(saw: Saw, kind: str) -> str:
    return " ".join(s["text"] for s in saw if s["saw"] == kind)


def test_nothing_goes_wrong(saw: Saw) -> None:
    assert [s for s in saw if s["saw"] == "error"] == []


def test_what_was_said_is_written_down(saw: Saw) -> None:
    said = [w for sentence, _ in SPOKEN for w in sentence.split()]
    heard = texts(saw, "heard").split()
    assert len(set(said) & set(heard)) >= 0.6 * len(set(said)), heard


def test_it_is_answered_aloud(saw: Saw) -> None:
    assert texts(saw, "said").split()
    assert sum(s["samples"] for s in saw if s["saw"] == "audio") > RATE
    kinds = [s["saw"] for s in saw]
    assert kinds.index("audio") < kinds.index("done")


def test_a_voice_interrupts_it(saw: Saw) -> None:
    """The story is long; it is not told to its end, and the client was told to stop playback."""
    story = "once there was a small black dog he lived in an old house and every morning he found some bread there"
    assert texts(saw, "said").split()[-1] not in story.split()[-2:]
    assert [s for s in saw if s["saw"] == "interrupted"]

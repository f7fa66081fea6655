"""Talks to an endpoint (`serve run serve_apps.app:app`) with the stock `openai` client: a file is said to it at the
pace of speech, what it writes down and answers is printed, and its voice goes to a file.

    pip install openai
    python examples/realtime_client.py talk.wav --url http://127.0.0.1:8000 --out answer.wav
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import sys
from collections.abc import Sequence

import numpy as np
import soxr
from openai import AsyncOpenAI
from websockets.exceptions import InvalidStatus

from a2t.audio.files import read_audio, write_wav

RATE = 24_000  # of the dialect, both ways


async def talk(url: str, key: str, pcm_S: np.ndarray, wait_s: float) -> np.ndarray:
    """Says 16-bit samples at 24 kHz; returns what was answered, likewise."""
    answered = bytearray()

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key).realtime.connect(model="a2t-embedded") as connection:

        async def listen() -> None:
            async for event in connection:
                if event.type == "conversation.item.input_audio_transcription.completed":
                    print("heard:", event.transcript)
                elif event.type == "response.output_audio_transcript.done":
                    print("said: ", event.transcript)
                elif event.type == "response.output_audio.delta":
                    answered.extend(base64.b64decode(event.delta))
                elif event.type == "error":
                    print("error:", event.error.message)

        listening = asyncio.create_task(listen())
        quiet_S = np.zeros(int(wait_s * RATE), "<i2")
        for start in range(0, len(pcm_S) + len(quiet_S), RATE // 10):
            piece_S = np.append(pcm_S, quiet_S)[start : start + RATE // 10]
            await connection.input_audio_buffer.append(audio=base64.b64encode(piece_S.tobytes()).decode())
            await asyncio.sleep(0.1)
        listening.cancel()
    return np.frombuffer(bytes(answered), "<i2")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none-needed-here", help="one of the endpoint's A2T_API_KEYS")
    parser.add_argument("--wait", type=float, default=5.0, help="seconds of quiet after the file")
    parser.add_argument("--out", help="where the answers' sound goes")
    args = parser.parse_args(argv)

    pcm_S = soxr.resample(read_audio(args.file), 16_000, RATE)
    pcm_S = (np.clip(pcm_S, -1, 1) * 32767).astype("<i2")
    answer_S = asyncio.run(talk(args.url, args.key, pcm_S, args.wait))
    if args.out:
        write_wav(args.out, answer_S.astype(np.float32) / 32768, RATE)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(str(error))
    except (OSError, InvalidStatus) as error:  # nobody there; or the server is full, or the key is wrong
        sys.exit(f"the endpoint does not take the call ({error}); is one running? serve run serve_apps.app:app")

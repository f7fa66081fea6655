"""Many short conversations, and what they leave behind."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from jobs.demo.call import RATE, Trouble
from jobs.load.clients import KEY, connected

SETTLED_S = 60.0
SAMPLES = 40
"""How often memory is looked at."""


@dataclass
class Churn:
    sessions: int = 0
    seconds: float = 0.0
    troubles: list[str] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)  # all 0 where nothing was left behind
    memory: list[dict[str, Any]] = field(default_factory=list)  # {"sessions": so far, "bytes": {process: USS}}


async def churn(address: str, args: argparse.Namespace, pcm_S: np.ndarray, say: Callable[[str], None]) -> Churn:
    result = Churn()
    frame = pcm_S[:RATE].tobytes()
    every = max(1, args.churn // SAMPLES)
    numbers = iter(range(args.churn))
    start = time.perf_counter()

    async def caller() -> None:
        for n in numbers:
            try:
                async with connected(address, args.name, args.budget) as session:
                    if n % 2:  # every other one also says something
                        await session.send_audio(frame)
            except Trouble as trouble:
                result.troubles.append(str(trouble))
            result.sessions += 1
            if result.sessions % every == 0:
                result.memory.append({"sessions": result.sessions, "bytes": memory()})
                say(f"load: {result.sessions} of {args.churn} sessions, {_shown(result.memory[-1]['bytes'])}")

    await asyncio.gather(*(caller() for _ in range(args.clients)))
    result.seconds = time.perf_counter() - start
    result.left = await left(address)
    result.memory.append({"sessions": result.sessions, "bytes": memory()})
    return result


async def left(address: str) -> dict[str, int]:
    """What is still held, once it has settled: rows, and sessions that are not closed."""
    until = time.monotonic() + SETTLED_S
    async with httpx.AsyncClient(base_url=address, headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as http:
        while True:
            engines = (await http.get("/healthz")).json()["engines"]
            states = Counter(view["state"] for view in (await http.get("/v1/sessions")).json()["data"])
            states.pop("closed", None)
            held = {"rows": sum(e["rows"] - e["free"] for e in engines), "sessions": sum(states.values())}
            held["session_processes"] = sum("SessionActor" in name for name in memory())
            if not any(held.values()) or time.monotonic() > until:
                return held
            await asyncio.sleep(0.5)


def memory() -> dict[str, int]:
    """Bytes of their own (USS) of the endpoint's processes that this process started, by name."""
    parents, titles = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            titles[int(folder.name)] = (folder / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
        except (OSError, IndexError):  # ended meanwhile
            continue
    own: dict[str, int] = {}
    for pid, title in titles.items():
        if not title.startswith("ray::") or "IDLE" in title or not _descends(pid, parents):
            continue
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        name = title.removeprefix("ray::").split(".")[0]
        own[name] = own.get(name, 0) + 1024 * sum(int(x.split()[1]) for x in lines if x.startswith("Private_"))
    return own


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = parents.get(pid, 0)
    return False


def _shown(own: dict[str, int]) -> str:
    return ", ".join(f"{name} {size / 2**20:.0f} MB" for name, size in sorted(own.items()) if "Session" not in name)

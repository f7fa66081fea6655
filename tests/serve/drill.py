"""Kill -9, one at a time, under live conversations: an engine, a session actor, the gateway, a node.

Run as a process of its own, since it makes a cluster of several nodes: `python -m tests.serve.drill PORT FILE` writes
what happened as JSON; test_faults.py judges it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ray
from ray import serve
from ray.cluster_utils import Cluster
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

NAMESPACE = "a2t-drill"
RAY = {
    # A node's death is noticed by Ray's health check: where nobody answers at its port any more, after so many periods,
    # 2 s. (Ray's own: 3 s and 5, so 15 s.) One that is only slow has the time-out, that many times.
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    "health_check_timeout_ms": 20_000,
    "health_check_initial_delay_ms": 0,
    "prestart_worker_first_driver": False,  # this machine has better to do
}
NOTICED_S = RAY["health_check_period_ms"] * RAY["health_check_failure_threshold"] / 1000
PATIENCE_S = 240.0
PACE_S = 0.25
"""A second of audio is said in: long conversations in little time, and time to spare on a slow machine."""
STORE = 128 * 2**20


class Caller:
    """Speaks noise, two seconds ahead of what it has been told; takes its conversation up again when a socket goes."""

    def __init__(self, address: str, seed: int):
        self.address, self._rng = address, np.random.default_rng(seed)
        self.id = self.token = ""
        self.units: dict[int, dict[str, Any]] = {}
        self.repeated = self.sockets = 0
        self.errors: list[Any] = []
        self.trouble: list[str] = []
        self.last = ""
        self._stopped = False

    async def run(self) -> None:
        while not self._stopped:
            query = "mode=audio&model=random"
            if self.id:
                query += f"&session={self.id}&token={self.token}&after={max(self.units, default=-1)}"
            try:
                async with connect(f"{self.address.replace('http', 'ws')}/v1/realtime?{query}") as socket:
                    self.sockets += 1
                    await self._talk(socket)
            except (ConnectionClosed, InvalidHandshake, OSError, TimeoutError) as lost:
                self.trouble.append(f"{time.strftime('%X')} {lost!r}")
            await asyncio.sleep(0.1)

    async def _talk(self, socket: Any) -> None:
        speaking: asyncio.Task[None] | None = None
        try:
            async for frame in socket:
                event = json.loads(frame)
                self.last = f"{time.strftime('%X')} {event['type']}"
                if event["type"] == "session.queue_done":
                    config = {"max_kv_tokens": 300}
                    await socket.send(json.dumps({"type": "session.init", "payload": {"config": config}}))
                elif event["type"] == "session.created":
                    self.id, self.token = event["session_id"], event["resume_token"]
                    speaking = asyncio.create_task(self._speak(socket))
                elif event["type"] == "a2t.unit":
                    self.repeated += event["unit"] in self.units
                    self.units.setdefault(event["unit"], event | {"at": time.monotonic()})
                elif event["type"] == "error":
                    self.errors.append(event)
        finally:
            if speaking is not None:
                speaking.cancel()

    async def _speak(self, socket: Any) -> None:
        heard = int((await view(self))["input"]["seconds"])
        while True:
            if heard < len(self.units) + 2:
                pcm = (0.1 * self._rng.standard_normal(16_000)).astype("<f4").tobytes()
                event = {"type": "input.append", "input": {"audio": base64.b64encode(pcm).decode()}}
                await socket.send(json.dumps(event))
                heard += 1
            await asyncio.sleep(PACE_S)

    def stop(self) -> None:
        self._stopped = True


async def view(caller: Caller) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=caller.address, timeout=30) as http:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(httpx.TransportError):
                    answer = await http.get(f"/v1/sessions/{caller.id}")
                    if answer.status_code == 200 and "units" in answer.json():
                        found: dict[str, Any] = answer.json()
                        return found
                await asyncio.sleep(0.1)


async def further(callers: list[Caller], units: int = 3) -> None:
    """Until everybody has been told of so many more."""
    goals = [max(c.units, default=-1) + units for c in callers]
    try:
        async with asyncio.timeout(PATIENCE_S):
            while any(max(c.units, default=-1) < goal for c, goal in zip(callers, goals, strict=True)):
                await asyncio.sleep(0.05)
    except TimeoutError:
        for c, goal in zip(callers, goals, strict=True):
            print(c.id, max(c.units, default=-1), "of", goal, "sockets", c.sockets, c.trouble[-3:], file=sys.stderr)
            seen = {k: v for k, v in (await view(c)).items() if k != "transcript"}
            print(seen, [e["type"] for e in c.errors], c.last, file=sys.stderr)
        raise


def actors(prefix: str) -> list[tuple[str, Any]]:
    found = []
    for a in ray.util.list_named_actors(all_namespaces=True):
        if a["name"].startswith(prefix) or (prefix in a["name"] and a["name"].startswith("SERVE_REPLICA")):
            with suppress(ValueError):
                found.append((a["name"], ray.get_actor(a["name"], namespace=a["namespace"])))
    return found


def shoot(actor: Any) -> None:
    pid = ray.get(actor.__ray_call__.remote(lambda _self: os.getpid()), timeout=PATIENCE_S)
    os.kill(pid, signal.SIGKILL)


def shoot_node(node: str) -> None:
    """Its raylet; what belongs to the node ends with it."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            program, *options = (folder / "cmdline").read_bytes().decode().split("\0")
            if program.endswith("/raylet") and f"--node_id={node}" in options:
                os.kill(int(folder.name), signal.SIGKILL)
                return
    raise AssertionError(f"no raylet of node {node} runs here")


def where(actor: Any) -> str:
    return str(ray.get(actor.__ray_call__.remote(lambda _self: ray.get_runtime_context().get_node_id())))


async def engines_up(count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            up = 0
            for _, actor in actors("engine/"):
                with suppress(ray.exceptions.RayActorError, TimeoutError):
                    load = await asyncio.wait_for(asyncio.wrap_future(actor.load.remote().future()), 5.0)
                    up += not load.draining
            if up >= count:
                return
            await asyncio.sleep(0.2)


async def drill(address: str) -> dict[str, Any]:
    told: dict[str, Any] = {"noticed_s": NOTICED_S}
    callers: list[Caller] = []
    running: list[asyncio.Task[None]] = []

    async def call(count: int) -> None:
        for _ in range(count):
            callers.append(Caller(address, seed=len(callers)))
            running.append(asyncio.create_task(callers[-1].run()))
        await further(callers)

    await engines_up(2)
    await call(2)

    async def after(kind: str, kill: Any) -> None:
        """What each conversation was before and is after, and the longest time between two of its units."""
        await engines_up(2)
        await further(callers, 1)
        before = [await view(c) for c in callers]
        for c, b in zip(callers, before, strict=True):
            assert b["end"] is None, (b["end"], c.errors)
        sockets = [c.sockets for c in callers]
        start = time.monotonic()
        victim = await kill(before)
        await further(callers)
        now = [await view(c) for c in callers]
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        told[kind] = {"victim": victim, "seconds": time.monotonic() - start, "load": load, "callers": []}
        for c, b, n, s in zip(callers, before, now, sockets, strict=True):
            at = sorted(u["at"] for u in c.units.values() if u["at"] > start - 1)
            told[kind]["callers"].append(
                {
                    "engine": b["engine"],
                    "id": c.id,
                    "kept": all(n[what][: len(b[what])] == b[what] for what in ("transcript", "moves")),
                    "moves": n["moves"][len(b["moves"]) :],
                    "sockets": c.sockets - s,
                    "pause_s": max(np.diff(at), default=0.0),
                }
            )

    async def engine(before: list[dict[str, Any]]) -> str:
        name = before[0]["engine"]
        shoot(dict(actors("engine/"))[name])
        return str(name)

    async def session(before: list[dict[str, Any]]) -> str:
        """Of the one that has been rebuilt."""
        shoot(dict(actors("session/"))[f"session/{before[0]['id']}"])
        return str(before[0]["id"])

    async def gateway(before: list[dict[str, Any]]) -> str:
        ((name, actor),) = actors("#gateway#")
        shoot(actor)
        return name

    async def node(before: list[dict[str, Any]]) -> str:
        name = before[-1]["engine"]
        victim = ray.get(dict(actors("engine/"))[name].load.remote()).node
        ((_, at),) = actors("#gateway#")
        told["gateway_lost"] = where(at) == victim  # then everybody's socket goes with it
        shoot_node(victim)
        return str(name)

    await after("engine", engine)
    await after("session", session)
    await after("gateway", gateway)
    await call(1)  # gets the engine that has come for the one that died
    await after("node", node)
    for c, task in zip(callers, running, strict=True):
        c.stop()
        task.cancel()
        units = sorted(c.units)
        final = await view(c)
        lines = {t["unit"]: t["transcript"] for t in final["transcript"]}
        told.setdefault("conversations", []).append(
            {
                "complete": units == list(range(len(units))),
                "same": all(lines.get(u, "") == e["transcript"] for u, e in c.units.items()),
                "units": len(units),
                "errors": c.errors,
            }
        )
    await asyncio.gather(*running, return_exceptions=True)
    return told


def add_node(cluster: Cluster, **options: Any) -> Any:
    """Ray gives a node 30 s to start, which a busy machine may exceed."""
    for patience in (2, 1, 0):
        try:
            return cluster.add_node(object_store_memory=STORE, include_log_monitor=False, **options)
        except Exception as late:
            print(f"a node did not start in time: {late}", file=sys.stderr)
            if not patience:
                raise
    raise AssertionError


def main(port: int, out: Path) -> None:
    from serve_apps.app import AppArgs, app

    cluster = Cluster()
    # with num_cpus=0 Ray keeps no actor here that may also be elsewhere
    add_node(cluster, num_cpus=1, include_dashboard=False, _system_config=RAY)
    ray.init(address=cluster.address, log_to_driver=False, namespace="drill")  # to the head: it is not shot
    for _ in range(2):
        add_node(cluster, num_cpus=2)
    for patience in (2, 1, 0):  # Serve gives its proxy 60 s
        try:
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
            break
        except TimeoutError:
            if not patience:
                raise
    args = AppArgs(
        name="random",
        model="tests.serve.local:small_model",
        engines=2,
        rows=4,
        capacity=2048,
        max_load=1e6,
        num_cpus=2,  # more than the head has
        namespace=NAMESPACE,
    )
    serve.run(app(args), name="drill", route_prefix="/")
    try:
        out.write_text(json.dumps(asyncio.run(drill(f"http://127.0.0.1:{port}"))))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

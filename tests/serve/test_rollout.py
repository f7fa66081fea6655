"""Engines that come and go under live conversations, on Ray: from none to two and back to one, which hands its
conversations over, then another adapter, then none. Nobody hangs up, nothing is lost, and what each is told is bit for
bit what an engine says that was never left."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest
from openbmb_realtime import RealtimeClient, RealtimeConfig

from a2t.duplex.engine import Engine, EngineConfig
from jobs.demo.call import Tap
from serve_apps.messages import SessionOptions
from serve_apps.models import HostConfig, conversation_config
from tests.serve.conftest import MODEL, NAMESPACE, named
from tests.serve.local import adapted_model, small_model

ADAPTER = 7
LONGEST_S = 300  # of waiting: this machine may be busy with something else
PAUSE_S = 0.2  # between units, while something is waited for


def declared(adapter: int) -> dict[str, Any]:
    return {
        "name": NAMESPACE,
        "route_prefix": "/",
        "import_path": "serve_apps.app:app",
        "args": {
            "name": MODEL,
            "model": "tests.serve.local:adapted_model",
            "model_options": {"adapter": adapter},
            "engines": 0,
            "max_engines": 2,
            "scale_up_after_s": 1.0,
            "scale_down_after_s": 1.0,
            "drain_s": LONGEST_S,  # handed over as it is, however long the new engine takes to start
            "rows": 3,
            "capacity": 1024,
            "max_load": 1e6,
            "side_channel_budget_s": None,
            "namespace": NAMESPACE,
        },
    }


def deploy(application: dict[str, Any]) -> None:
    """As `serve deploy` does, which asks the dashboard to."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    client = _get_global_client()
    assert client is not None
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))


async def running() -> None:
    from ray import serve

    async with asyncio.timeout(LONGEST_S):
        while True:
            app = (await asyncio.to_thread(serve.status)).applications.get(NAMESPACE)
            assert app is None or app.status != "DEPLOY_FAILED", app
            if app is not None and app.status == "RUNNING":
                return
            await asyncio.sleep(0.2)


class Talker:
    """Speaks noise second by second and keeps what it is told of each unit."""

    def __init__(self, seed: int):
        self._noise = (0.1 * np.random.default_rng(seed).standard_normal((20, 16_000))).astype(np.float32)
        self.told = list[dict[str, Any]]()
        self.last: dict[str, Any] = {}

    async def open(self, address: str) -> None:
        """Waits in line where there is no engine."""
        tap = Tap(self._event)
        factory = tap.connect
        client = RealtimeClient(api_key="-", base_url=address, connect_timeout=LONGEST_S, websocket_factory=factory)
        self.session = await client.audio.connect(model=MODEL, config=RealtimeConfig(max_kv_tokens=60))
        self._reading = asyncio.create_task(self._read())

    async def say(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            n = len(self.told)
            await self.session.send_audio(self.second(n).tobytes())
            async with asyncio.timeout(LONGEST_S):
                while len(self.told) == n:
                    assert not self._reading.done(), self.last
                    await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.session.close()
        await asyncio.gather(self._reading, return_exceptions=True)

    def second(self, n: int) -> np.ndarray:
        return self._noise[n % len(self._noise)]

    def _event(self, event: dict[str, Any]) -> None:
        self.last = event
        if event["type"] == "a2t.unit":
            self.told.append(event)

    async def _read(self) -> None:
        async for _ in self.session:
            pass


@asynccontextmanager
async def speaking(*talkers: Talker) -> AsyncIterator[None]:
    """They go on while something happens, and for three seconds after it."""
    happened = asyncio.Event()

    async def go_on(talker: Talker) -> None:
        while not happened.is_set():
            await talker.say()
            await asyncio.sleep(PAUSE_S)
        await talker.say(3)

    tasks = [asyncio.create_task(go_on(t)) for t in talkers]
    try:
        yield
    finally:
        happened.set()
        await asyncio.gather(*tasks)


@dataclass
class Story:
    talkers: list[Talker]
    engines: list[list[str]] = field(default_factory=list)  # at each turn of it
    views: list[dict[str, Any]] = field(default_factory=list)  # of the two that stay to the end
    with_torch: set[str] = field(default_factory=set)  # what processes have imported it


async def tell(address: str, ray: Any) -> Story:
    story = Story([Talker(seed) for seed in range(4)])
    first, second, third, fourth = story.talkers

    async def engines(count: int, but: tuple[str, ...] = ()) -> tuple[str, ...]:
        """The names of so many that answer and are none of these, once they are all there are."""
        async with asyncio.timeout(LONGEST_S), httpx.AsyncClient(base_url=address, timeout=60) as http:
            while True:
                answer = await http.get("/healthz")
                up = [e["name"] for e in answer.json()["engines"]] if "engines" in answer.text else [""]
                if len(up) == count and not set(up) & set(but) and sorted(up) == named(ray, "engine/"):
                    story.engines.append(sorted(up))
                    return tuple(up)
                await asyncio.sleep(0.1)

    await running()
    await engines(0)
    await first.open(address)
    async with speaking(first):
        await second.open(address)
        await third.open(address)
        await engines(2)  # every row of the first is taken
        await fourth.open(address)
    async with speaking(first, fourth):  # on different engines
        await asyncio.gather(second.close(), third.close())
        await engines(1)
    old = tuple(story.engines[-1])
    deploy(declared(ADAPTER))
    async with speaking(first, fourth):
        await engines(1, but=old)
    for actor in ray.util.list_named_actors(all_namespaces=True):
        handle = ray.get_actor(actor["name"], namespace=actor["namespace"])
        if await handle.__ray_call__.remote(lambda _self: "torch" in sys.modules):
            story.with_torch.add(actor["name"].split("/")[0])
    async with httpx.AsyncClient(base_url=address, timeout=60) as http:
        for talker in (first, fourth):
            story.views.append((await http.get(f"/v1/sessions/{talker.session.id}")).json())
    await asyncio.gather(first.close(), fourth.close())
    await asyncio.gather(engines(0), running())  # the gateway that was replaced ends with its last socket
    return story


@pytest.fixture(scope="module")
def story(serve_port: int, ray_cluster: Any) -> Iterator[Story]:
    from ray import serve

    deploy(declared(adapter=0))
    yield asyncio.run(tell(f"http://127.0.0.1:{serve_port}", ray_cluster))
    serve.delete(NAMESPACE)


def test_as_many_engines_as_callers_need(story: Story) -> None:
    assert [len(names) for names in story.engines] == [0, 2, 1, 1, 0]
    two, one, adapted = story.engines[1:4]
    assert set(one) < set(two)
    assert set(one) != set(adapted)


def test_only_engines_have_torch(story: Story) -> None:
    """What else there is has to start quickly, and there are hundreds of session actors on a node."""
    assert story.with_torch == {"engine"}


def test_who_stays_is_handed_over(story: Story) -> None:
    two, (one,), (adapted,) = story.engines[1:4]
    (gone,) = set(two) - {one}
    moves = [[(m["from"], m["to"], m["exact"]) for m in view["moves"]] for view in story.views]
    assert sorted(moves, key=len) == [[(one, adapted, True)], [(gone, one, True), (one, adapted, True)]]


def test_what_is_told_is_bit_for_bit_what_an_unmoved_conversation_says(story: Story) -> None:
    """With the new weights from the unit on in which the adapter came."""
    for talker, view in zip((story.talkers[0], story.talkers[3]), story.views, strict=True):
        assert [u["unit"] for u in talker.told] == list(range(len(talker.told)))
        audio_S = np.concatenate([talker.second(n) for n in range(len(talker.told))])
        model = small_model()
        engine = Engine(model, rows=1, capacity=1024, config=EngineConfig(side_channel_budget_s=None))
        alone = engine.open(conversation_config(model, HostConfig(), SessionOptions(budget=60)))
        changed = view["moves"][-1]["unit"]
        assert 0 < changed < len(talker.told)
        engine.push(alone, audio_S[: changed * 16_000])
        expected = list(engine.run())
        model.modules.llm.lm_head.weight.data = adapted_model(ADAPTER).modules.llm.lm_head.weight.data
        engine.push(alone, audio_S[changed * 16_000 :])
        expected += engine.run()
        spoken = 0
        for told, (_, result, stats) in zip(talker.told, expected, strict=True):
            assert told["transcript"] == result.transcript_text.strip()
            assert told["response"].strip() == result.response_text.strip()
            assert told["listening"] == result.listening
            assert told["resident_total"] == stats.total_residents
            assert told["usage"]["output_tokens"] > spoken
            spoken = told["usage"]["output_tokens"]


def test_the_new_adapter_says_something_else(story: Story) -> None:
    """Else the test above could not tell."""
    talker, view = story.talkers[0], story.views[0]
    changed = view["moves"][-1]["unit"]
    engine = Engine(small_model(), rows=1, capacity=1024, config=EngineConfig(side_channel_budget_s=None))
    alone = engine.open(conversation_config(engine.model, HostConfig(), SessionOptions(budget=60)))
    engine.push(alone, np.concatenate([talker.second(n) for n in range(len(talker.told))]))
    unchanged = [result.response_text.strip() for _, result, _ in engine.run()]
    told = [u["response"].strip() for u in talker.told]
    assert told[:changed] == unchanged[:changed]
    assert told[changed:] != unchanged[changed:]

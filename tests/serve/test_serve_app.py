"""The application on Ray, called over loopback by the real openbmb-realtime and openai clients; and its page."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from openai import AsyncOpenAI
from openbmb_realtime import RealtimeClient
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve.schema import ServeDeploySchema
from websockets.exceptions import InvalidStatus

from jobs.demo.call import hold
from serve_apps.web import PAGE
from tests.serve.conftest import MODEL, named
from tests.serve.test_openai_endpoint import noise, until


async def test_two_callers_and_one_row(address: str, ray_cluster: Any) -> None:
    """The second waits in line until the first has closed; both leave a record and no actor behind."""
    audio = (0.1 * np.random.default_rng(1).standard_normal(6 * 16_000)).astype(np.float32)
    first = await RealtimeClient(api_key="unused", base_url=address, connect_timeout=60).audio.connect(model=MODEL)
    second = asyncio.create_task(hold(address, MODEL, audio, budget=60, prompt="w1 w2 w3"))
    async with httpx.AsyncClient(base_url=address, timeout=30) as http:
        async with asyncio.timeout(60):
            while "queued" not in [s["state"] for s in (await http.get("/v1/sessions")).json()["data"]]:
                await asyncio.sleep(0.1)
        assert not second.done()
        live = (await http.get(f"/v1/sessions/{first.id}")).json()
        assert (live["state"], live["units"]) == ("live", 0)
        await first.close()
        talk = await second
        assert [u["unit"] for u in talk.units] == list(range(6))
        assert sum(u["evicted"] for u in talk.units) > 0
        assert all(u["residents"]["prefix"] == 3 for u in talk.units)
        async with asyncio.timeout(30):
            while (await http.get("/healthz")).json()["engines"][0]["free"] != 1:
                await asyncio.sleep(0.1)
        for session, units in ((first.id, 0), (talk.session_id, 6)):
            view = (await http.get(f"/v1/sessions/{session}")).json()
            assert (view["state"], view["units"], view["end"]["reason"]) == ("closed", units, "user_stop")
    assert [name.split("/")[0] for name in named(ray_cluster)] == ["engine"]


def client(address: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{address}/v1", api_key="unused")


async def connected(address: str) -> Any:
    """Once there is a row: who has hung up gives his back a moment later."""
    async with asyncio.timeout(120):
        while True:
            try:
                return await client(address).realtime.connect(model="any").enter()
            except InvalidStatus as refused:
                if refused.response.status_code != 503:
                    raise
                await asyncio.sleep(0.2)


async def test_openai_s_client_and_a_full_house(address: str) -> None:
    first = await connected(address)
    await until(first, "session.created")
    await first.session.update(session={"type": "realtime", "instructions": "no such words here"})
    await until(first, "session.updated")
    await first.input_audio_buffer.append(audio=noise(2))
    await until(first, "input_audio_buffer.speech_started")
    with pytest.raises(InvalidStatus) as caught:
        await client(address).realtime.connect(model="any").enter()
    assert caught.value.response.status_code == 503
    await first.close()
    again = await connected(address)
    await until(again, "session.created")
    await again.close()


def test_it_gives_out_the_page(address: str) -> None:
    """Whatever the page asks for is there, and lets nothing else in."""
    page = httpx.get(address, timeout=60)
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name in {*re.findall(r'(?:src|href)="(page/[^"]+)"', page.text), "page/resampler.js"}:
        assert httpx.get(f"{address}/{name}", timeout=60).status_code == 200, name
    for name in PAGE.glob("*.js"):
        for wanted in re.findall(r'from "\./([^"]+)"', name.read_text()):
            assert (PAGE / wanted).is_file(), f"{name} imports {wanted}"
    assert httpx.get(f"{address}/page/../app.py", timeout=60).status_code == 404


def test_deploy_file_is_valid_and_names_what_exists() -> None:
    from serve_apps.app import AppArgs, app
    from serve_apps.models import embedded

    root = Path(__file__).parents[2]
    config = ServeDeploySchema.model_validate(yaml.safe_load((root / "serve_apps" / "app.yaml").read_text()))
    (application,) = config.applications
    assert application.import_path == f"{app.__module__}:{app.__name__}"
    args = AppArgs.model_validate(application.args)
    assert isinstance(call_user_app_builder_with_args_if_necessary(app, application.args), Application)
    assert args.model == f"{embedded.__module__}:{embedded.__name__}"

"""The application on Ray, called by the real openbmb-realtime client over loopback."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from openbmb_realtime import RealtimeClient
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve.schema import ServeDeploySchema

from jobs.demo.call import hold
from tests.serve.conftest import MODEL, named


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

"""What Prometheus sees of conversations and engines: the application on Ray, scraped by the real thing."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
from openbmb_realtime import ErrorEvent, UsageEvent

from jobs.load.clients import connected
from serve_apps.messages import EngineLoad, Failure
from serve_apps.metrics import ENGINE, SESSION, STATES, own_memory
from serve_apps.tally import Tally
from tests.serve.reports import report

SECONDS = 6
BUDGET = 60


async def test_a_real_prometheus_scrapes_what_each_session_and_engine_says(address: str, prometheus: Any) -> None:
    audio = (0.1 * np.random.default_rng(1).standard_normal(SECONDS * 16_000)).astype(np.float32)
    units: list[dict[str, Any]] = []

    def take(event: dict[str, Any]) -> None:
        if event["type"] == "a2t.unit":
            units.append(event)

    async def see(expression: str, until: Any = bool) -> list[dict[str, Any]]:
        samples: list[dict[str, Any]] = await asyncio.to_thread(prometheus.wait_for, expression, until, 120.0)
        return samples

    def value(expected: float) -> Any:
        return lambda samples: bool(samples) and float(samples[0]["value"][1]) == pytest.approx(expected)

    async with connected(address, "random", BUDGET, take) as session:
        await session.send_audio(audio.tobytes())
        async with asyncio.timeout(120):
            async for event in session:
                assert not isinstance(event, ErrorEvent)
                if isinstance(event, UsageEvent) and len(units) == SECONDS:
                    break
        mine, last = f'session="{session.id}"', units[-1]
        await see(f"ray_a2t_session_units{{{mine}}}", value(SECONDS))
        for metric in SESSION:
            assert await see(f"ray_a2t_session_{metric}{{{mine}}}"), metric
        for kind, count in last["residents"].items():
            await see(f'ray_a2t_session_residents{{{mine},kind="{kind}"}}', value(count))
        await see(f"sum(ray_a2t_session_residents{{{mine}}})", value(last["resident_total"]))
        await see(f"sum(ray_a2t_session_kv_bytes{{{mine}}})", value(last["kv_bytes"]))
        await see(f"ray_a2t_session_encoder_bytes{{{mine}}}", value(last["encoder_bytes"]))
        await see(f"ray_a2t_session_evicted{{{mine}}}", value(sum(u["evicted"] for u in units)))
        await see(f"ray_a2t_session_budget{{{mine}}}", value(BUDGET))
        await see(f"ray_a2t_session_deadline_misses{{{mine}}}", value(sum(u["missed"] for u in units)))
        await see(f'ray_a2t_session_state{{{mine},state="paused"}}', value(1))
        states = await see(f"ray_a2t_session_state{{{mine}}}")
        assert {s["metric"]["state"] for s in states} == set(STATES)
        assert sum(float(s["value"][1]) for s in states) == 1
        (uss,) = await see(f"ray_a2t_session_host_uss_bytes{{{mine}}}")
        async with httpx.AsyncClient(base_url=address, timeout=60) as http:
            shown = (await http.get(f"/v1/sessions/{session.id}")).json()["memory"]["host_uss_bytes"]
        assert float(uss["value"][1]) == pytest.approx(shown, rel=0.25)
        await see("ray_a2t_engine_rows_used", value(1))
        await see("ray_a2t_engine_rows_free", value(0))
        for metric in ENGINE:
            assert await asyncio.to_thread(prometheus.query, f"last_over_time(ray_a2t_engine_{metric}[5m])"), metric
        count = await see("ray_a2t_engine_unit_time_ms_count")
        assert float(count[0]["value"][1]) >= SECONDS
    await see("ray_a2t_engine_rows_used", value(0))


def test_a_tally_of_steps_and_units() -> None:
    now = [0.0]
    tally = Tally(clock=lambda: now[0])
    load = EngineLoad("e", "n", rows=4, sessions=("a", "b"), unit_ms=20.0)
    for _ in range(4):
        tally.unit(report(forwards=3))
    now[0] = 2.0
    values = tally.gauges(load, steps=6, busy_s=0.5)
    assert (values["rows"], values["rows_used"], values["rows_free"]) == (4, 2, 2)
    assert (values["batch_size"], values["forwards_per_unit"]) == (2.0, 3.0)
    assert values["step_ms"] == pytest.approx(500 / 6)
    assert values["busy_share"] == pytest.approx(0.25)
    now[0] = 3.0
    tally.restored(None)
    tally.restored(Failure("not_restored", "no room"))
    idle = tally.gauges(load, steps=6, busy_s=0.5)
    assert not {"batch_size", "forwards_per_unit", "step_ms"} & set(idle)
    assert (idle["busy_share"], idle["restores"], idle["failed_restores"]) == (0.0, 1.0, 1.0)
    assert set(values) | set(idle) | {"host_uss_bytes"} == set(ENGINE)


def test_own_memory_is_what_ending_would_give_back() -> None:
    before = own_memory()
    held = np.ones(2**22)  # 32 MB
    assert own_memory() - before >= held.nbytes // 2

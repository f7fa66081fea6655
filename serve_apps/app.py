"""The Serve application.

serve run serve_apps.app:app                              the embedded default
serve run serve_apps.app:app rows=8 threads=2             settings of `AppArgs`
serve deploy serve_apps/app.yaml                          on a running cluster

client --websocket--> gateway --> session actor (one a conversation) --> engine host (one a GPU)
                         |
                     placement (the waiting line)

Annotations are evaluated here (no `from __future__ import annotations`): Serve reads the builder's.
"""

import asyncio
import logging
import time
from typing import Any, Literal

import ray
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from serve_apps.access import Access
from serve_apps.call import GatewayConfig
from serve_apps.departure import GOING_AWAY, deleted
from serve_apps.engine_actor import EMBEDDED, MAX_LOAD, EngineActor, HostConfig
from serve_apps.fleet import ENGINE, GONE, SESSION, RayEngines
from serve_apps.gateway import Gateway
from serve_apps.messages import EngineLoad, Ticket, View
from serve_apps.placement import Fleet, Placement
from serve_apps.session_actor import Limits

log = logging.getLogger("ray.serve")
TICK_S = 0.25
WAKE_S = 10.0
"""How long a request that wakes the first engine is waited for before another is sent."""
HANDOVERS = 4
"""Conversations that an engine which goes hands over at a time: each is in memory once more meanwhile."""


class AppArgs(BaseModel):
    """What `serve run` and `app.yaml` may set."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    name: str = "a2t-embedded"  # what clients give as `model`
    model: str = EMBEDDED  # module:function that makes the model, with `model_options`
    model_options: dict[str, Any] = {}
    engines: int = Field(1, ge=0)
    max_engines: int | None = None  # given: as many as needed between `engines` (0 is allowed) and this
    scale_up_after_s: float = 5.0
    scale_down_after_s: float = 120.0
    rows: int = Field(4, ge=1)
    capacity: int = Field(16_384, ge=256)
    threads: int = 1
    max_load: float = Field(MAX_LOAD, gt=0)  # of each second, that an engine's conversations may take
    side_channel_budget_s: float | None = 0.8  # of a unit's second; None: what is written never depends on the machine
    text_tier: Literal["grow", "fold"] = "fold"  # where the text alone outgrows the budget
    idle_timeout_s: float = 300.0  # nothing was ever heard
    pause_timeout_s: float = 1800.0  # the longest pause
    length_limit_s: float | None = None  # the longest conversation
    drain_s: float = 20.0  # how long an engine that goes waits for room elsewhere, before conversations are parked
    gateways: int = Field(1, ge=1)  # processes that hold the sockets
    linger_s: float = 600.0  # how long sockets stay open at a gateway that an update has replaced
    num_cpus: float = 0
    num_gpus: float = 0
    namespace: str = "a2t"


@serve.deployment(
    name="engine",
    max_ongoing_requests=100,
    health_check_period_s=2,
    health_check_timeout_s=30,
    graceful_shutdown_wait_loop_s=0.2,
    ray_actor_options={"num_cpus": 0},
)
class EngineDeployment:
    """Starts one engine's actor and watches it; an engine that fails takes this replica with it, and Serve starts
    another. A replica that is to go hands its conversations over first."""

    def __init__(self, args: AppArgs):
        node, group = ray.get_runtime_context().get_node_id(), ray.util.get_current_placement_group()
        self.name = ENGINE + serve.get_replica_context().replica_tag
        self._args, self._engines = args, RayEngines(args.namespace)
        config = HostConfig(
            model=args.model,
            model_options=args.model_options,
            rows=args.rows,
            capacity=args.capacity,
            threads=args.threads,
            max_load=args.max_load,
            text_tier=args.text_tier,
            side_channel_budget_s=args.side_channel_budget_s,
        )
        self.host = (
            ray.remote(EngineActor)
            .options(
                name=self.name,
                namespace=args.namespace,
                num_cpus=args.num_cpus,
                num_gpus=args.num_gpus,
                max_concurrency=10_000,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0)
                if group
                else NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(self.name, node, config, metrics=True)
        )
        ray.get(self.host.health.remote())

    async def check_health(self) -> None:
        await self.host.health.remote()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return await self.host.stats.remote()

    async def wake(self) -> None:
        """Asked for when there is no engine: Serve starts one because a request waits."""

    async def __del__(self) -> None:
        try:
            await self._drain()
        except GONE:
            log.warning("%s went before its conversations had moved; they are rebuilt elsewhere", self.name)

    async def _drain(self) -> None:
        """Serve waits `graceful_shutdown_timeout_s` for this. While another engine has room, or comes into being,
        conversations move there; then they are parked with their session actors; an application that is deleted ends
        them."""
        started, at_once = time.monotonic(), asyncio.Semaphore(HANDOVERS)
        while left := await self.host.drain.remote():
            late = time.monotonic() - started > self._args.drain_s
            if await asyncio.to_thread(deleted):
                await asyncio.gather(*(self._tell(s, at_once, "finish", "going_away", GOING_AWAY) for s in left))
                return
            await asyncio.gather(*(self._tell(s, at_once, "move", self.name, late) for s in left))
            await asyncio.sleep(TICK_S)

    async def _tell(self, session: str, at_once: asyncio.Semaphore, method: str, *args: Any) -> None:
        async with at_once:
            actor = await self._engines.handle(SESSION + session)
            try:
                if actor is not None:
                    await getattr(actor, method).remote(*args)
                else:  # a promise that nobody has used yet
                    await self.host.close.remote(session)
            except GONE:
                log.warning("session %s is gone while %s hands it over", session, self.name)
            except Exception:  # the others are handed over all the same
                log.exception("session %s could not %s from %s", session, method, self.name)


@serve.deployment(
    name="placement",
    max_ongoing_requests=100_000,
    health_check_period_s=2,
    health_check_timeout_s=10,
    ray_actor_options={"num_cpus": 0},
)
class PlacementDeployment:
    """`Placement` over Ray. `engines`: the handle of the engine deployment."""

    def __init__(self, engines: Any, namespace: str, max_load: float):
        self._engines, self._fleet = engines, RayEngines(namespace, linger_s=1.0)
        self._placement = Placement(Fleet(self.loads, self._fleet.reserve, self._fleet.cancel), max_load)
        self._ticking: asyncio.Task[None] | None = None
        self._waking: Any = None
        self._woken = 0.0
        self._told = 0  # to the engines, of how many look for a row

    async def check_health(self) -> None:
        self._start()

    async def enter(self, session: str) -> Ticket:
        self._start()
        return await self._placement.enter(session)

    async def wait(self, session: str, seen: int, timeout: float) -> Ticket:
        self._start()
        return await self._placement.wait(session, seen, timeout)

    async def leave(self, session: str, record: View | None) -> None:
        await self._placement.leave(session, record)

    async def forget(self, session: str) -> None:
        await self._placement.forget(session)

    async def directory(self) -> dict[str, Any]:
        self._start()
        self._placement.note(await self.loads())
        return self._placement.directory()

    async def loads(self) -> list[EngineLoad]:
        """Every engine that answers."""
        self._told = self._placement.waiting + self._placement.unhoused
        return await self._fleet.loads(self._told)

    def _start(self) -> None:
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                if self._placement.waiting:
                    await self._placement.serve_line()
                    self._wake()
                elif self._placement.leased or self._told:
                    self._placement.note(await self.loads())
            except Exception:  # whatever it is, the line must be served again
                log.exception("the waiting line could not be served this time")

    def _wake(self) -> None:
        """With no engine at all, a request that waits for one makes Serve start it. Sent again after a while: the one
        before may have gone with a replica."""
        if self._placement.engines or (self._waking is not None and time.monotonic() - self._woken < WAKE_S):
            return
        if self._waking is not None:
            self._waking.cancel()
        self._waking, self._woken = self._engines.wake.remote(), time.monotonic()


def app(args: AppArgs) -> Application:
    """The builder that `serve run serve_apps.app:app` calls."""
    options: dict[str, Any] = {"graceful_shutdown_timeout_s": args.drain_s + 60.0}
    if args.max_engines is None:
        options["num_replicas"] = args.engines
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=args.engines,  # no `initial_replicas`: Serve would go back to it with every update
            max_replicas=args.max_engines,
            upscale_delay_s=args.scale_up_after_s,
            downscale_delay_s=args.scale_down_after_s,
            metrics_interval_s=1.0,
            look_back_period_s=2.0,
            policy=AutoscalingPolicy(
                policy_function="serve_apps.autoscaling:RowsAndHeadroom", policy_kwargs={"max_load": args.max_load}
            ),
        )
    if needs := {k: v for k, v in (("CPU", args.num_cpus), ("GPU", args.num_gpus)) if v}:
        options["placement_group_bundles"] = [needs]  # the replica goes where its engine has room
    limits = Limits(
        idle_timeout_s=args.idle_timeout_s, pause_timeout_s=args.pause_timeout_s, length_limit_s=args.length_limit_s
    )
    engines = EngineDeployment.options(**options).bind(args)
    placement = PlacementDeployment.bind(engines, args.namespace, args.max_load)
    config = GatewayConfig(models=(args.name,), access=Access.from_env())
    gateway = Gateway.options(num_replicas=args.gateways, graceful_shutdown_timeout_s=args.linger_s)
    return gateway.bind(placement, config, args.namespace, limits)

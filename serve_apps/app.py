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
from typing import Any

import ray
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve import Application
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serve_apps.access import Access
from serve_apps.call import GatewayConfig
from serve_apps.engine_host import EngineHost, HostConfig
from serve_apps.gateway import Gateway
from serve_apps.messages import EngineLoad, Ticket, View
from serve_apps.placement import BUSY_SHARE, Fleet, Placement
from serve_apps.session_actor import Limits

log = logging.getLogger("ray.serve")
ENGINE = "engine/"


class AppArgs(BaseModel):
    """What `serve run` and `app.yaml` may set."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    name: str = "a2t-embedded"  # what clients give as `model`
    model: str = "serve_apps.engine_host:embedded"  # module:function that makes the model, with `model_options`
    model_options: dict[str, Any] = {}
    engines: int = 1
    rows: int = 4
    capacity: int = 16_384
    threads: int = 1
    busy_share: float = BUSY_SHARE  # of each second, that an engine's conversations may take
    num_cpus: float = 0
    num_gpus: float = 0
    namespace: str = "a2t"


@serve.deployment(name="engine", max_ongoing_requests=100, health_check_period_s=2, ray_actor_options={"num_cpus": 0})
class EngineDeployment:
    """Starts one engine's actor and watches it; an engine that fails takes this replica with it, and Serve starts
    another."""

    def __init__(self, args: AppArgs):
        node = ray.get_runtime_context().get_node_id()
        name = ENGINE + serve.get_replica_context().replica_tag
        config = HostConfig(
            model=args.model,
            model_options=args.model_options,
            rows=args.rows,
            capacity=args.capacity,
            threads=args.threads,
        )
        self.host = (
            ray.remote(EngineHost)
            .options(
                name=name,
                namespace=args.namespace,
                num_cpus=args.num_cpus,
                num_gpus=args.num_gpus,
                max_concurrency=10_000,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(name, node, config)
        )
        ray.get(self.host.health.remote())

    async def check_health(self) -> None:
        await self.host.health.remote()


@serve.deployment(name="placement", max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0})
class PlacementDeployment:
    """`Placement` over Ray: engines are found by name among the actors of this application's namespace."""

    def __init__(self, engines: Any, namespace: str, busy_share: float):
        self._namespace = namespace
        self._placement = Placement(Fleet(self.loads, self._reserve, self._cancel), busy_share)
        self._ticking: asyncio.Task[None] | None = None

    async def enter(self, session: str) -> Ticket:
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
        return await self._placement.enter(session)

    async def wait(self, session: str, seen: int, timeout: float) -> Ticket:
        return await self._placement.wait(session, seen, timeout)

    async def leave(self, session: str, record: View | None) -> None:
        await self._placement.leave(session, record)

    async def directory(self) -> dict[str, Any]:
        return self._placement.directory()

    async def loads(self) -> list[EngineLoad]:
        """Every engine that answers."""
        hosts = await asyncio.to_thread(self._hosts)
        answers = await asyncio.gather(*(self._load(h) for h in hosts))
        return [a for a in answers if a is not None]

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            try:
                await self._placement.serve_line()
            except (RayActorError, RayTaskError):
                log.exception("the waiting line could not be served this time")

    def _hosts(self) -> list[Any]:
        actors = ray.util.list_named_actors(all_namespaces=True)
        names = [a["name"] for a in actors if a["namespace"] == self._namespace and a["name"].startswith(ENGINE)]
        return [h for n in names if (h := self._host(n)) is not None]

    def _host(self, name: str) -> Any:
        try:
            return ray.get_actor(name, namespace=self._namespace)
        except ValueError:  # gone since it was listed
            return None

    async def _load(self, host: Any) -> EngineLoad | None:
        try:
            return await asyncio.wait_for(host.load.remote(), 5.0)
        except (RayActorError, TimeoutError):
            return None

    async def _reserve(self, engine: str, session: str) -> bool:
        host = await asyncio.to_thread(self._host, engine)
        try:
            return host is not None and await host.reserve.remote(session)
        except RayActorError:
            return False

    async def _cancel(self, engine: str, session: str) -> None:
        host = await asyncio.to_thread(self._host, engine)
        try:
            if host is not None:
                await host.close.remote(session)
        except RayActorError:
            log.info("engine %s is gone, and session %s's row with it", engine, session)


def app(args: AppArgs) -> Application:
    """The builder that `serve run serve_apps.app:app` calls."""
    engines = EngineDeployment.options(num_replicas=args.engines).bind(args)
    placement = PlacementDeployment.bind(engines, args.namespace, args.busy_share)
    config = GatewayConfig(models=(args.name,), access=Access.from_env())
    return Gateway.bind(placement, config, args.namespace, Limits())

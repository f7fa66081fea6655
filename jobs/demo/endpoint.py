"""Ray and the Serve application on this machine, for as long as a block lasts."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from jobs.demo.call import Trouble


class Endpoint:
    """`with Endpoint(...) as address`. `model` is module:function, None for the embedded default."""

    def __init__(
        self, name: str, model: str | None = None, port: int | None = None, rows: int = 2, capacity: int = 16_384
    ):
        self.port = port
        self.settings: dict[str, Any] = {"name": name, "rows": rows, "capacity": capacity}
        if model is not None:
            self.settings["model"] = model

    def __enter__(self) -> str:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # 5 s are too few on a busy machine
        os.environ.pop("RAY_ADDRESS", None)  # this machine, whatever cluster is configured
        import ray
        from ray import serve

        from serve_apps.app import AppArgs, app

        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        port = free_port(self.port)
        try:
            ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(app(AppArgs(**self.settings)), name="a2t")
        except (RuntimeError, TimeoutError) as error:
            self.stop()
            logs = "/tmp/ray/session_latest/logs"
            raise Trouble(f"the endpoint did not come up; Ray's logs are in {logs}\n{error}") from error
        except BaseException:
            self.stop()
            raise
        return f"http://127.0.0.1:{port}"

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        import ray

        if ray.is_initialized():
            ray.shutdown()  # it started the cluster, so all that runs there ends with it


def free_port(wanted: int | None) -> int:
    """`wanted`, else 8000, else any that is free. OSError if the wanted one is taken."""
    for port in [wanted] if wanted is not None else [8000, 0]:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("127.0.0.1", port))
                return int(s.getsockname()[1])
            except OSError as error:
                if wanted is not None:
                    raise OSError(f"port {wanted}: {error.strerror}; choose another with --port") from error
    raise AssertionError("a free port is always found")

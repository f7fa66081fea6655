"""`python -m jobs.monitoring [--address auto] [--port 9090] [--out out/monitoring]`

Starts Prometheus on this machine over the Ray cluster that runs here, with the scrape settings and alert rules of
cluster/monitoring, until Ctrl-C.  Ray's dashboard lists the nodes to scrape in a file of its own; a cluster without a
dashboard (`make demo` starts one) has no such file, so the same list is written here and kept up to date.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

FOLDER = Path(__file__).resolve().parent.parent / "cluster" / "monitoring"
NEW_NODES_S = 5.0
STARTS_IN_S = 60.0

Sample = dict[str, Any]


class Prometheus:
    """`with Prometheus(...) as p`: a server of its own, of this machine alone. `targets` are host:port."""

    def __init__(self, folder: Path, port: int | None = None, scrape_s: float | None = None):
        self._folder = folder.resolve()
        self._port, self._scrape_s = port or free_port(), scrape_s
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"http://127.0.0.1:{self._port}"

    @staticmethod
    def program() -> str:
        """Raises ValueError if Prometheus is not installed."""
        path = shutil.which("prometheus")
        if path is None:
            raise ValueError("there is no `prometheus` on this machine; on Debian and Ubuntu: apt install prometheus")
        return path

    def __enter__(self) -> Prometheus:
        self._folder.mkdir(parents=True, exist_ok=True)
        self.scrape([])
        settings = self._folder / "prometheus.yml"
        settings.write_text(yaml.safe_dump(configuration(self._targets, self._scrape_s), sort_keys=False))
        command = [
            self.program(),
            f"--config.file={settings}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=self._folder)
        try:
            self._await_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    @property
    def _log(self) -> Path:
        return self._folder / "prometheus.log"

    @property
    def _targets(self) -> Path:
        return self._folder / "targets.json"

    def scrape(self, targets: Sequence[str]) -> None:
        """What to scrape from now on, in the format of Ray's own discovery file."""
        content = json.dumps([{"labels": {"job": "ray"}, "targets": list(targets)}])
        draft = self._targets.with_suffix(".tmp")
        draft.write_text(content)
        draft.replace(self._targets)  # Prometheus must never see half a file

    def query(self, expression: str) -> list[Sample]:
        """The instant vector of a PromQL expression now. Raises ValueError with Prometheus' own words."""
        answer = httpx.get(f"{self.address}/api/v1/query", params={"query": expression}, timeout=30).json()
        if answer["status"] != "success":
            raise ValueError(f"{expression}: {answer['error']}")
        return answer["data"]["result"]

    def wait_for(
        self, expression: str, until: Callable[[list[Sample]], bool] = bool, timeout: float = 90.0
    ) -> list[Sample]:
        """Asks until the answer satisfies `until` (any sample at all, by default). Raises TimeoutError."""
        end = time.monotonic() + timeout
        while not until(answer := self.query(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"{expression}: still {answer} after {timeout:.0f} s")
            time.sleep(0.25)
        return answer

    def outlives(self, seconds: float) -> None:
        """Sleeps. Raises ValueError if the server ends meanwhile."""
        assert self._process is not None
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return
        raise ValueError(f"Prometheus has ended; its log says:\n{self._log.read_text()[-2000:]}")

    def _await_ready(self) -> None:
        assert self._process is not None
        end = time.monotonic() + STARTS_IN_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if httpx.get(f"{self.address}/-/ready", timeout=5).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise ValueError(f"Prometheus did not come up; its log says:\n{self._log.read_text()[-2000:]}")


def configuration(targets: Path, scrape_s: float | None = None) -> dict[str, Any]:
    """cluster/monitoring/prometheus.yml with another discovery file, and another interval if one is given."""
    settings = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    settings["rule_files"] = [str(FOLDER / name) for name in settings["rule_files"]]
    (job,) = settings["scrape_configs"]
    job["file_sd_configs"] = [{"files": [str(targets)], "refresh_interval": "1s" if scrape_s else "5s"}]
    if scrape_s:
        every = f"{round(1000 * scrape_s)}ms"
        settings["global"] |= {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every}
    return settings


def metrics_addresses(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """Where the living nodes of `ray.nodes()` export their metrics."""
    return [f"{n['NodeManagerAddress']}:{n['MetricsExportPort']}" for n in nodes if n["Alive"]]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        watch(args)
    except (ValueError, OSError) as error:  # ray.init's ConnectionError is an OSError
        print(f"monitoring: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nmonitoring: ended", file=sys.stderr)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.monitoring", description="Prometheus over the Ray cluster that runs here."
    )
    parser.add_argument("--address", default="auto", help="of the Ray cluster (the one that runs on this machine)")
    parser.add_argument("--port", type=int, default=9090, help="of Prometheus (9090)")
    parser.add_argument("--out", type=Path, default=Path("out/monitoring"), help="its data (out/monitoring)")
    return parser.parse_args(argv)


def watch(args: argparse.Namespace) -> None:
    Prometheus.program()
    import ray

    ray.init(address=args.address, log_to_driver=False, logging_level="ERROR")
    with Prometheus(args.out, args.port) as prometheus:
        print(f"a2t: Prometheus is at {prometheus.address}, its data in {args.out}; Ctrl-C ends it", flush=True)
        while True:
            prometheus.scrape(metrics_addresses(ray.nodes()))
            prometheus.outlives(NEW_NODES_S)


if __name__ == "__main__":
    sys.exit(main())

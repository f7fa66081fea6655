"""Hub ids through the real client, against a hub of this machine: only the parts asked for are fetched."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from a2t.models.hub import is_hub_id

GOLDEN = Path(__file__).parent.parent / "data" / "minicpmo-duplex"
COMMIT = "0123456789" * 4


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """`someone/model` in shards, behind what the client asks of a hub; its address and the files that it has given."""
    files = tmp_path / "files"
    files.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (files / name).write_bytes((GOLDEN / name).read_bytes())
    weights = {"vpm.x": "vision.safetensors"}
    held = load_file(GOLDEN / "model.safetensors")
    for name, inside in (("a.safetensors", True), ("b.safetensors", False)):
        here = {key: tensor for key, tensor in held.items() if key.startswith("llm.") is inside}
        save_file(here, files / name)
        weights |= dict.fromkeys(here, name)
    (files / "vision.safetensors").write_bytes(b"not to be read")
    (files / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    given: list[str] = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            name = path.rpartition("/")[2]
            if path.startswith("/api/models/someone/model/"):
                listed = [{"rfilename": f.name} for f in sorted(files.iterdir())]
                siblings = {"id": "someone/model", "sha": COMMIT, "siblings": listed}
                tree = [{"type": "file", "path": f.name, "size": 1, "oid": "0"} for f in sorted(files.iterdir())]
                body = json.dumps(tree if "/tree/" in path else siblings).encode()
            elif path.startswith("/someone/model/resolve/") and (files / name).is_file():
                body = (files / name).read_bytes()
                if self.command == "GET":
                    given.append(name)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", given
    server.shutdown()
    server.server_close()


def test_only_the_parts_asked_for_are_fetched(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    address, given = hub
    code = (
        "from a2t.models.loading import load_model, locate\n"
        "model = load_model('someone/model')\n"
        "print(model.name, model.shape.layers)\n"
        "try: load_model('someone/else')\n"
        "except ValueError as error: print(error)\n"
    )
    environment = os.environ | {
        "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    model, refused = ran.stdout.splitlines()
    assert model == "model 3"
    assert refused.startswith("someone/else: there is no such folder here, and the hub did not give a model")
    assert sorted(given) == [
        "a.safetensors", "b.safetensors", "config.json", "model.safetensors.index.json", "tokenizer.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "hub"),
    [("openbmb/MiniCPM-o-4_5", True), ("/a/b", False), ("./b", False), ("~/b", False), ("a", False), ("a/b/c", False),
     ("a/", False), ("", False)],
)  # fmt: skip
def test_what_has_the_form_of_a_hub_id(name: str, hub: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id(name) is hub
    (tmp_path / "openbmb").mkdir()
    assert not is_hub_id(name)  # a folder of that name is here, so a path is meant

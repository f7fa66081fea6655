"""What holds for the repository as a whole: who may import whom, small files, nothing of the machine it was made on."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ["kv", "audio", "models", "duplex", "data", "distill", "pretrain", "eval"]
"""DESIGN's order: each imports only from itself and from those before it."""
COMMON = "a2t.duplex.protocol"
"""The names of the special tokens and the unit grammar: everybody's, since it stands on kv alone (tested)."""
LONGEST = 350


@cache
def tracked() -> list[Path]:
    """Files under version control; outside a checkout, all that belong to the source tree."""
    git = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if git.returncode == 0 and git.stdout:
        return [ROOT / name for name in git.stdout.decode().split("\0") if name and (ROOT / name).is_file()]
    rooms = ["a2t", "jobs", "serve_apps", "cluster", "tests"]
    return [p for room in rooms for p in (ROOT / room).rglob("*") if p.is_file() and "__pycache__" not in p.parts]


@cache
def texts() -> dict[Path, str]:
    """Every tracked text file but this one."""
    found = {}
    for path in tracked():
        try:
            found[path] = path.read_text()
        except UnicodeDecodeError:
            continue  # weights, pictures, sound
    found.pop(Path(__file__).resolve())
    return found


def sources(*rooms: str) -> list[Path]:
    return [p for p in tracked() if p.suffix == ".py" and p.relative_to(ROOT).parts[0] in rooms]


@cache
def imports(path: Path) -> list[tuple[str, int]]:
    """Modules that are imported when the code runs, and the line; what stands under TYPE_CHECKING is not."""

    def walk(node: ast.AST) -> Iterator[tuple[str, int]]:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
            case ast.Import():
                yield from ((alias.name, node.lineno) for alias in node.names)
            case ast.ImportFrom(level=0, module=str(module)):
                yield module, node.lineno
                yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
            case ast.ImportFrom():
                raise AssertionError(f"{path}:{node.lineno}: a relative import")
            case _:
                for child in ast.iter_child_nodes(node):
                    yield from walk(child)

    return list(walk(ast.parse(path.read_text())))


def test_the_library_knows_nothing_of_ray() -> None:
    banned = {"ray", "jobs", "serve_apps", "tests"}
    found = [f"{p}:{line}: {m}" for p in sources("a2t") for m, line in imports(p) if m.split(".")[0] in banned]
    assert not found


def test_rooms_stand_on_those_before_them() -> None:
    found = []
    for path in sources("a2t"):
        room = path.relative_to(ROOT / "a2t").parts[0]
        if room not in ROOMS:
            assert path.parent == ROOT / "a2t", f"{path}: a room that has no place in the order"
            continue
        allowed = ROOMS[: ROOMS.index(room) + 1]
        for module, line in imports(path):
            parts = module.split(".")
            common = module.startswith(COMMON)
            if parts[0] == "a2t" and len(parts) > 1 and parts[1] not in allowed and not common:
                found.append(f"{path}:{line}: a2t/{room} imports {module}")
    assert not found
    own = [module for module, _ in imports(ROOT / (COMMON.replace(".", "/") + ".py")) if module.startswith("a2t.")]
    assert own
    assert all(module.startswith("a2t.kv.kinds") for module in own)


def test_files_stay_small() -> None:
    lengths = {p: len(p.read_text().splitlines()) for p in sources("a2t", "jobs", "serve_apps", "tests")}
    assert not {str(p): n for p, n in lengths.items() if n > LONGEST}


def test_nothing_is_unpickled_and_no_remote_code_runs() -> None:
    pickles = r"^\s*(import|from) (pickle|cloudpickle|dill)\b|torch\.load\((?!.*weights_only=True)"
    banned = re.compile(pickles + r"|trust_remote_code\s*=\s*True", re.M)
    found = [f"{p}: {m.group()}" for p in sources("a2t", "jobs", "serve_apps") for m in banned.finditer(p.read_text())]
    assert not found


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?<![\w.])/(root|work|opt/wheels|opt/pypi)\b",
        r"(?<![\w.])/home/(?!ray\b)\w",  # /home/ray is the home of Ray's own container images
        r"pythonhosted\.org|pypi\.org/simple|find-links|extra-index-url",
        r"BEGIN (RSA |EC |OPENSSH )?PRIVATE KEY",
    ],
)
def test_nothing_of_the_machine_it_was_made_on(pattern: str) -> None:
    expression = re.compile(pattern)
    assert not [f"{path}: {m.group()}" for path, text in texts().items() for m in expression.finditer(text)]


def test_every_package_asked_for_is_pinned() -> None:
    pins: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        name, exactly, version = line.partition("==")
        assert exactly, f"constraints.txt: {line!r} is no exact version"
        assert re.fullmatch(r"[A-Za-z0-9.]+", version), f"constraints.txt: {line!r} names a local build or a place"
        pins[canonicalize_name(name)] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    for requirement in map(Requirement, asked):
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt has no {requirement.name}"
        assert requirement.specifier.contains(version), (
            f"constraints.txt: {requirement.name} {version} is not {requirement}"
        )
    assert pins["torch"] == "2.13.0"


def test_the_two_commands_of_the_readme_exist() -> None:
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([\w-]+)", readme)):
        assert re.search(rf"^{target}:", makefile, re.M), f"README names `make {target}`"
    assert {"make demo", "make test"} <= set(re.findall(r"make \w+", readme))
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_what_the_readme_links_to_is_there() -> None:
    readme = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", readme)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]

"""The rooms of the package and who may import whom.

An arrow that breaks this is a design error: `core` stays a pure judgement that replays, the guard stays small enough to
live in a router's container, and the sidecar does not drag the laboratory along.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"
PACKAGE = "enginewatch"

ROOMS: dict[str, frozenset[str]] = {
    # A room or a module and what of the package it may import besides itself.
    "engines": frozenset(),
    "core": frozenset({"engines"}),
    "client": frozenset({"engines", "core"}),
    "sidecar": frozenset({"engines", "core", "client"}),
    "worker": frozenset({"engines", "core", "client"}),
    "lab": frozenset({"engines", "core", "client"}),
    "guard": frozenset({"core.drift"}),
    "why": frozenset(),
}
EXCEPTIONS: dict[str, frozenset[str]] = {
    # Travels with the guard, so it may not even use its neighbours.
    "core.drift": frozenset(),
}
ENTRANCES = frozenset({"cli", "__main__"})
"""Modules at the top that tie the rooms together; each of their commands imports what it needs."""

STANDARD_LIBRARY_ONLY = frozenset({"engines", "core", "guard", "why"})
PYTHON_39 = frozenset({"guard", "core.drift"})
"""What runs inside a router's container, whose Python is not ours to choose."""

IMPURE = frozenset(
    {"time", "random", "secrets", "uuid"}
    | {"logging", "os", "pathlib", "io", "shutil", "tempfile", "socket", "selectors", "http", "urllib.request"}
    | {"asyncio", "threading", "multiprocessing", "subprocess", "signal"}
)
"""Clocks, chance, I/O and logging: what would make a replayed story end differently."""

IMPURE_CALLS = frozenset({"open", "print", "input", "exec", "eval", "__import__"})


@dataclass(frozen=True)
class Module:
    """One source file: its name below the package ("core.verdict") and its syntax tree."""

    name: str
    is_package: bool
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]


def modules(package_dir: Path) -> Iterator[Module]:
    for path in sorted(package_dir.rglob("*.py")):
        parts = list(path.relative_to(package_dir).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        yield Module(name, is_package, ast.parse(path.read_text(), filename=str(path)))


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """Every import of a file with its line: inside functions, under TYPE_CHECKING, relative ones, import_module("...").

    `from a import b` yields both `a.b` and, when b cannot be told from a name inside a, stands for `a` as well.
    """
    own = [PACKAGE, *(module.name.split(".") if module.name else [])]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = own if module.is_package else own[:-1]
                anchor = above[: len(above) - (node.level - 1)]
                base = ".".join([*anchor, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def below(name: str, tops: frozenset[str] | set[str]) -> bool:
    """Whether a dotted name is one of `tops` or lies inside one."""
    return any(name == top or name.startswith(f"{top}.") for top in tops)


def wrong_import(module: Module, target: str) -> str | None:
    """None, or why this module must not import that."""
    if not below(target, {PACKAGE}):
        if module.room in STANDARD_LIBRARY_ONLY and target.partition(".")[0] not in sys.stdlib_module_names:
            return f"{module.room} uses the standard library only"
        if module.room == "core" and below(target, IMPURE):
            return "core is pure: no I/O, no clock, no randomness, no logging"
        return None
    inner = target.removeprefix(PACKAGE).removeprefix(".")
    if module.name in EXCEPTIONS:
        allowed = EXCEPTIONS[module.name]
        if not below(inner, allowed):
            return f"{module.name} travels alone and may import nothing of the package but {sorted(allowed)}"
        return None
    if below(inner, ROOMS[module.room] | {module.room}):
        return None
    return f"{module.room} may import of the package only {sorted(ROOMS[module.room])} and itself"


def violations(package_dir: Path) -> list[str]:
    """Every broken rule, one sentence each."""
    found = []
    for module in modules(package_dir):
        if module.name in ("", "core") and module.is_package and module.tree.body:
            found.append(f"{PACKAGE}/{module.name}: __init__.py must be empty")
        if module.name in ENTRANCES or not module.name:
            continue
        if module.room not in ROOMS:
            found.append(f"{module.name}: in no room; add it to the rooms or move it")
            continue
        for line, target in imports(module):
            why = wrong_import(module, target)
            if why is not None:
                found.append(f"{module.name}:{line} imports {target}: {why}")
        if module.room == "core":
            found += [
                f"{module.name}:{node.lineno} calls {node.func.id}(): core is pure"
                for node in ast.walk(module.tree)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS
            ]
    return found


def too_new_for_python_39(package_dir: Path) -> list[str]:
    found = []
    for module in modules(package_dir):
        if not below(module.name, PYTHON_39):
            continue
        path = package_dir / Path(*module.name.split("."))
        source = (path / "__init__.py" if module.is_package else path.with_suffix(".py")).read_text()
        try:
            ast.parse(source, feature_version=(3, 9))
        except SyntaxError as error:
            found.append(f"{module.name}:{error.lineno} is not Python 3.9: {error.msg}")
        # Annotations such as `int | None` are only evaluated without this line.
        has_annotations = any(isinstance(node, ast.arg) and node.annotation for node in ast.walk(module.tree))
        postponed = any(isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in module.tree.body)
        if has_annotations and not postponed:
            found.append(f"{module.name} needs `from __future__ import annotations` to be imported by Python 3.9")
    return found


def test_every_import_keeps_to_the_rooms() -> None:
    assert violations(SRC / PACKAGE) == []


def test_what_runs_in_a_routers_container_is_written_for_python_39() -> None:
    assert too_new_for_python_39(SRC / PACKAGE) == []


def plant(package_dir: Path, files: dict[str, str]) -> Path:
    for name, source in {"__init__.py": "", "core/__init__.py": "", **files}.items():
        path = package_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return package_dir


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("engines/vllm.py", "from enginewatch.core import events"),
        ("engines/vllm.py", "import msgspec"),
        ("core/verdict.py", "from enginewatch.client import scrape"),
        ("core/verdict.py", "import msgspec"),
        ("core/verdict.py", "import time"),
        ("core/verdict.py", "from os import path"),
        ("core/verdict.py", "def f():\n    import random"),
        ("core/verdict.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from enginewatch.lab import sim"),
        ("core/verdict.py", "from ..sidecar import main"),
        ("core/verdict.py", "from .. import sidecar"),
        ("core/verdict.py", "def f():\n    print(1)"),
        ("core/drift.py", "from enginewatch.core import events"),
        ("core/drift.py", "from enginewatch.engines import profile"),
        ("core/deep/judge.py", "from ...worker import health"),
        ("client/scrape.py", "from enginewatch.sidecar import loop"),
        ("sidecar/loop.py", "import enginewatch.lab.sim"),
        ("sidecar/loop.py", "from enginewatch.worker import health"),
        ("sidecar/loop.py", "from enginewatch import cli"),
        ("worker/health.py", "from enginewatch.sidecar import loop"),
        ("lab/drill.py", "from enginewatch.sidecar import main"),
        ("lab/drill.py", "import importlib\nimportlib.import_module('enginewatch.sidecar.main')"),
        ("guard/live.py", "from enginewatch.core import verdict"),
        ("guard/live.py", "import aiohttp"),
        ("why.py", "from enginewatch.sidecar import board"),
        ("attic/old.py", "import this"),
        ("helpers.py", "import this"),
        ("__init__.py", "from enginewatch.core import events"),
        ("core/__init__.py", "import enum"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, source: str) -> None:
    assert len(violations(plant(tmp_path, {file: source}))) == 1


def test_what_the_rules_allow_is_not_reported(tmp_path: Path) -> None:
    allowed = {
        "engines/vllm.py": "import re\nfrom enginewatch.engines.profile import Profile",
        "core/verdict.py": "import math\nfrom .progress import Ledger\nfrom enginewatch.engines import profile",
        "core/drift.py": "from __future__ import annotations\nimport json",
        "client/scrape.py": "import asyncio\nimport aiohttp\nfrom enginewatch.core import events",
        "sidecar/loop.py": "from . import history\nfrom enginewatch.client import scrape",
        "guard/live.py": "import socket\nfrom enginewatch.core import drift\nfrom enginewatch.core.drift import keep",
        "cli.py": "def watch():\n    from enginewatch.sidecar import main\n    from enginewatch.lab import sim",
    }
    assert violations(plant(tmp_path, allowed)) == []


@pytest.mark.parametrize(
    "source",
    [
        "match 1:\n    case 1: pass",
        "def f(x: int | None): ...",
        "try: pass\nexcept* ValueError: pass",
    ],
)
def test_planted_new_syntax_in_the_guard_is_found(tmp_path: Path, source: str) -> None:
    assert len(too_new_for_python_39(plant(tmp_path, {"guard/live.py": source}))) == 1


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*(name for name in sys.modules if '.' not in name))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


HEAVY = {"cyclopts", "rich"}
"""Six MiB and a fifth of a second that the sidecar cannot spare."""


COMMAND = """
from enginewatch.cli import main
try:
    main([{name!r}, "--help"])
except SystemExit:
    pass
"""


@pytest.mark.parametrize("statement", ["import enginewatch.sidecar.main", COMMAND.format(name="watch")])
def test_the_sidecar_loads_nothing_made_for_terminals(statement: str) -> None:
    loaded = loaded_by(statement)
    assert "enginewatch" in loaded
    assert not loaded & HEAVY


def test_the_guard_loads_nothing_but_the_standard_library() -> None:
    loaded = loaded_by("from enginewatch.cli import main\nassert main(['guard', 'live']) == 0")
    assert "enginewatch" in loaded
    # What `site` loads for an editable install begins with an underscore.
    assert {name for name in loaded if name not in sys.stdlib_module_names and name[0] != "_"} == {"enginewatch"}


def test_a_command_that_loads_something_made_for_terminals_would_be_seen() -> None:
    assert loaded_by(COMMAND.format(name="why")) & HEAVY

"""The one-file guard: the same bytes from the same sources, in the wheel too, and a program that old Pythons run."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from enginewatch.guard import pack

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "enginewatch"
VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
BARE = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")}


def python_of(version: str) -> str | None:
    """An interpreter of that version, None where there is none."""
    candidates = [
        shutil.which(f"python{version}"),
        *Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python3"),
    ]
    for candidate in candidates:
        if candidate is None:
            continue
        asked = subprocess.run(
            [candidate, "-I", "-S", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if asked.stdout.strip() == version:
            return str(candidate)
    return None


def done(
    command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path = ROOT, umask: int = 0o022
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        env={**BARE, **(env or {})},
        cwd=cwd,
        umask=umask,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.fixture(scope="module")
def one_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make guard` makes, elsewhere than in this checkout's dist."""
    target = tmp_path_factory.mktemp("guard") / pack.FILE_NAME
    made = done([sys.executable, "-I", PACKAGE / "guard" / "pack.py", target])
    assert made.returncode == 0, made.stderr
    return target


def copied(tmp_path: Path) -> Path:
    """The sources as another checkout has them: other dates, other modes, what an editor left behind."""
    package = tmp_path / "somewhere else" / "src" / "enginewatch"
    for part in ("__init__.py", "core", "guard"):
        source = PACKAGE / part
        if source.is_dir():
            shutil.copytree(source, package / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            package.mkdir(parents=True)
            shutil.copy(source, package)
    shutil.copy(ROOT / "pyproject.toml", package.parents[1])
    for number, path in enumerate(sorted(package.rglob("*.py"))):
        path.chmod(0o600 if number % 2 else 0o755)
        os.utime(path, (number * 1e8, number * 1e8))
    (package / "guard" / "__pycache__").mkdir()
    (package / "guard" / "__pycache__" / "live.cpython-39.pyc").write_bytes(b"stale")
    (package / "guard" / "live.py~").write_text("an editor's copy")
    (package / "guard" / pack.FILE_NAME).write_bytes(b"an old one")
    return package


def test_make_guard_says_what_it_wrote(one_file: Path) -> None:
    planned = done(["make", "--dry-run", "guard"])
    assert planned.returncode == 0, planned.stderr
    script, target = planned.stdout.split()[-2:]
    assert (ROOT / script, target) == (PACKAGE / "guard" / "pack.py", f"dist/{pack.FILE_NAME}")
    again = done([sys.executable, "-I", ROOT / script, one_file])
    assert hashlib.sha256(one_file.read_bytes()).hexdigest() in again.stdout
    assert one_file.stat().st_mode & 0o777 == 0o755


def test_another_checkout_gives_the_same_bytes(one_file: Path, tmp_path: Path) -> None:
    package = copied(tmp_path)
    target = tmp_path / "out" / "guard.pyz"
    made = done(
        [sys.executable, "-I", package / "guard" / "pack.py", target],
        env={"TZ": "Pacific/Kiritimati", "LC_ALL": "C", "PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "1"},
        cwd=tmp_path,
        umask=0o077,
    )
    assert made.returncode == 0, made.stderr
    assert target.read_bytes() == one_file.read_bytes()
    assert target.stat().st_mode & 0o777 == 0o755


def test_another_source_gives_other_bytes(one_file: Path, tmp_path: Path) -> None:
    package = copied(tmp_path)
    with (package / "guard" / "live.py").open("a") as source:
        source.write("\n")
    assert pack.build(VERSION, package) != one_file.read_bytes()


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.12", "3.13"])
def test_another_python_gives_the_same_bytes(version: str, one_file: Path, tmp_path: Path) -> None:
    python = python_of(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    target = tmp_path / "guard.pyz"
    made = done([python, "-I", PACKAGE / "guard" / "pack.py", target])
    assert made.returncode == 0, made.stderr
    assert target.read_bytes() == one_file.read_bytes()


def test_it_holds_what_the_guard_imports_and_nothing_else(one_file: Path) -> None:
    with zipfile.ZipFile(one_file) as archive:
        entries = archive.infolist()
        names = [entry.filename for entry in entries]
        assert names == sorted(names)
        assert {entry.compress_type for entry in entries} == {zipfile.ZIP_STORED}
        assert {entry.date_time for entry in entries} == {(1980, 1, 1, 0, 0, 0)}
        assert {entry.external_attr >> 16 for entry in entries} == {0o100644}
        assert archive.read(pack.VERSION_ENTRY).decode() == VERSION
        for name in set(names) - {"__main__.py", pack.VERSION_ENTRY}:
            assert archive.read(name) == (PACKAGE.parent / name).read_bytes()
    guard = {f"enginewatch/guard/{path.name}" for path in (PACKAGE / "guard").glob("*.py")}
    above = {f"enginewatch/{name}" for name in ("__init__.py", "core/__init__.py", "core/drift.py")}
    assert set(names) == guard | above | {"__main__.py", pack.VERSION_ENTRY}
    assert one_file.read_bytes().startswith(b"#!/usr/bin/env python3\n")


def test_it_runs_by_itself_without_the_package_and_without_site(one_file: Path, tmp_path: Path) -> None:
    alone = tmp_path / "elsewhere"
    alone.mkdir()
    shutil.copy(one_file, alone)
    told = done([sys.executable, "-I", "-S", pack.FILE_NAME, "--help"], cwd=alone)
    assert (told.returncode, told.stderr) == (0, "")
    assert "guard boot -- COMMAND" in told.stdout
    assert done([sys.executable, "-I", "-S", pack.FILE_NAME], cwd=alone).returncode == 2
    kept = done([sys.executable, "-I", "-S", pack.FILE_NAME, "live"], cwd=alone)
    assert (kept.returncode, kept.stderr) == (0, "")
    assert kept.stdout.count("\n") == 1


def test_it_tells_its_version_and_its_own_digest(one_file: Path) -> None:
    told = done([sys.executable, "-I", "-S", one_file, "--version"])
    digest = hashlib.sha256(one_file.read_bytes()).hexdigest()
    assert told.stdout == f"enginewatch-guard {VERSION} (sha256 {digest})\n"
    # The same of the sources that it was made of.
    assert done([sys.executable, "-m", "enginewatch.guard", "--version"]).stdout == told.stdout
    assert done([sys.executable, "-m", "enginewatch", "guard", "--version"]).stdout == told.stdout


def test_the_version_is_read_as_tomllib_reads_it(tmp_path: Path) -> None:
    assert pack.version_in(ROOT / "pyproject.toml") == VERSION
    other = tmp_path / "pyproject.toml"
    other.write_text('[project]\nname = "x"\n# version = "9"\ndynamic = ["version"]\n')
    with pytest.raises(ValueError, match="no line version"):
        pack.version_in(other)


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file" / "guard.pyz", Path("/proc/guard.pyz")):
        told = done([sys.executable, "-I", PACKAGE / "guard" / "pack.py", target])
        assert told.returncode == 1
        assert told.stderr.count("\n") == 1
    assert done([sys.executable, "-I", PACKAGE / "guard" / "pack.py"]).returncode == 2


def built_wheel(directory: Path, source: Path = ROOT) -> Path:
    made = done([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", directory], cwd=source)
    assert made.returncode == 0, made.stdout + made.stderr
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory.mktemp("wheel"))


def in_wheel(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"enginewatch/guard/{pack.FILE_NAME}")


def test_the_wheel_holds_the_same_file(wheel: Path, one_file: Path) -> None:
    assert in_wheel(wheel) == one_file.read_bytes()
    assert not (PACKAGE / "guard" / pack.FILE_NAME).exists()  # nothing is left among the sources


def test_a_wheel_that_is_built_from_the_sdist_holds_the_same_file(one_file: Path, tmp_path: Path) -> None:
    made = done([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path])
    assert made.returncode == 0, made.stdout + made.stderr
    (sdist,) = tmp_path.glob("*.tar.gz")
    assert done(["tar", "-xf", sdist], cwd=tmp_path).returncode == 0
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert in_wheel(built_wheel(tmp_path / "wheel", unpacked)) == one_file.read_bytes()


def test_an_installed_wheel_exports_the_same_file(wheel: Path, one_file: Path, tmp_path: Path) -> None:
    # As in an image, but without the dependencies: `guard` must need none of them.
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check")
    installed = done([*pip, "--no-deps", "--no-index", wheel])
    assert installed.returncode == 0, installed.stderr
    volume = tmp_path / "volume"
    volume.mkdir()
    exported = done([tmp_path / "venv" / "bin" / "enginewatch", "guard", "export", volume], cwd=tmp_path)
    assert (exported.returncode, exported.stderr) == (0, "")
    assert (volume / pack.FILE_NAME).read_bytes() == one_file.read_bytes()
    told = done([python, "-I", "-m", "enginewatch", "guard", "--version"], cwd=tmp_path).stdout
    assert told == f"enginewatch-guard {VERSION} (sha256 {hashlib.sha256(one_file.read_bytes()).hexdigest()})\n"


# --- Python 3.9 -----------------------------------------------------------------------------------------------------

USED_NAMES = """
import importlib, json, sys
for module, names in json.load(sys.stdin).items():
    try:
        found = importlib.import_module(module)
    except ImportError:
        print(module)
        continue
    for name in names:
        if not hasattr(found, name):
            try:
                importlib.import_module(module + "." + name)
            except ImportError:
                print(module + "." + name)
"""


@pytest.fixture(scope="module")
def old_python() -> str:
    found = python_of("3.9")
    if found is None:
        pytest.skip("there is no Python 3.9 here (python3.9 on PATH, or ~/.pyenv/versions/3.9.*)")
    return found


def used_names(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Library modules that the sources import, each with the names that are taken from it."""
    used: dict[str, set[str]] = {}
    for source in sources.values():
        tree = ast.parse(source)
        modules: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules.update({(alias.asname or alias.name): alias.name for alias in node.names})
            elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("enginewatch"):
                used.setdefault(node.module, set()).update(alias.name for alias in node.names)
        for module in modules.values():
            used.setdefault(module, set())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in modules:
                used[modules[ast.unparse(node.value)]].add(node.attr)
    return {module: sorted(names) for module, names in used.items()}


def missing_in(python: str, sources: Mapping[str, str]) -> list[str]:
    asked = subprocess.run(
        [python, "-I", "-S", "-c", USED_NAMES],
        input=json.dumps(used_names(sources)),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return asked.stdout.split()


def guard_sources() -> dict[str, str]:
    paths = [PACKAGE / "core" / "drift.py", *(PACKAGE / "guard").glob("*.py")]
    return {path.name: path.read_text() for path in paths}


def test_python_39_has_every_name_of_the_library_that_the_guard_uses(old_python: str) -> None:
    names = used_names(guard_sources())
    assert "getaddrinfo" in names["socket"]
    # typing.Self and the like would be only in annotations, which nobody evaluates; they are not imported either.
    assert missing_in(old_python, guard_sources()) == []


@pytest.mark.parametrize(
    "source", ["import itertools\nitertools.pairwise([])", "import tomllib", "from types import NoneType"]
)
def test_a_planted_name_of_a_newer_library_is_found(old_python: str, source: str) -> None:
    assert len(missing_in(old_python, {"planted.py": source})) == 1


def test_python_39_runs_every_part_of_it(old_python: str, one_file: Path, tmp_path: Path) -> None:
    def guard(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        told = done([old_python, "-I", "-S", "-W", "error", one_file, *arguments], env=env)
        assert "Traceback" not in told.stderr
        return told

    for page in ((), ("boot",), ("live",), ("ready",), ("drain",), ("export",)):
        assert guard(*page, "--help").returncode == 0
    assert re.match(rf"enginewatch-guard {re.escape(VERSION)} \(sha256 ", guard("--version").stdout)

    # One engine that refuses, in a snapshot that boot writes: no query, so it starts at once.
    run_dir = tmp_path / "run"
    settings = {
        "GUARD_PREFILL": "127.0.0.1:9",
        "GUARD_DECODE": "127.0.0.1:9",
        "GUARD_PREFILL_WATCHER_PORT": "0",
        "GUARD_DECODE_WATCHER_PORT": "0",
        "GUARD_ROUTER": "vllm",
        "GUARD_ROUTER_PORT": "9",
        "GUARD_RUN_DIR": str(run_dir),
    }
    booted = guard("boot", "--", "/bin/echo", "router", **settings)
    assert booted.returncode == 0, booted.stderr
    assert booted.stdout == "router --prefill http://127.0.0.1:9 --decode http://127.0.0.1:9\n"
    assert (run_dir / "prefill-ips").read_text() == "127.0.0.1||\n"
    assert guard("live", **settings).returncode == 0
    assert guard("ready", **settings).returncode == 1
    drained = guard("drain", "--engine", "http://127.0.0.1:9", "--deadline-sec", "0.5")
    assert (drained.returncode, drained.stderr) == (0, "")
    assert drained.stdout.startswith("not drained within 0.5 s")
    exported = guard("export", str(tmp_path))
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / pack.FILE_NAME).read_bytes() == one_file.read_bytes()

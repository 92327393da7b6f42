"""What the project promises about its own files: locks that install the same everywhere, commands that exist."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))

OUTSIDE = re.compile(
    r"(?i)\b(?:https?|file|ssh|git\+\w+):|"  # an index or a file of the machine that made the lock
    r"^\s*(?:-i|-f|--(?:extra-)?index-url|--find-links|--trusted-host)\b|"
    r"(?:^|[\s@=])/[\w.-]+/|"  # an absolute path
    r"\b[\w-]+\.(?:org|com|net|io|dev)/",
    re.MULTILINE,
)
PINNED = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)")


def entries(lock: str) -> list[str]:
    """The requirements of a lock, each with its continuation lines joined, comments gone."""
    text = re.sub(r"^\s*#.*\n", "", lock, flags=re.MULTILINE).replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip()]


def loose(lock: str) -> list[str]:
    """The entries that pip could satisfy with something else than what was locked."""
    return [
        entry[:80]
        for entry in entries(lock)
        if not PINNED.match(entry) or not re.search(r"--hash=sha256:[0-9a-f]{64}(?![0-9a-f])", entry)
    ]


def pins(lock: str) -> dict[str, str]:
    found = (PINNED.match(entry) for entry in entries(lock))
    return {canonicalize_name(match["name"]): match["version"] for match in found if match}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_a_lock_names_no_index_host_and_no_path(path: Path) -> None:
    found = OUTSIDE.search(path.read_text())
    assert found is None, f"{path.name} names {found[0]!r}"


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_requirement_of_a_lock_is_pinned_by_hash(path: Path) -> None:
    assert len(pins(path.read_text())) >= 10
    assert loose(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        "--extra-index-url https://packages.example.org/simple",
        "    --find-links /srv/wheels",
        "torch @ file:///srv/wheels/torch.whl",
        "    # from packages.example.org/simple",
        "-f /srv/wheels",
        "    # via -r /home/me/requirements.in",
    ],
)
def test_a_planted_host_or_path_is_found(line: str) -> None:
    assert OUTSIDE.search(f"attrs==26.1.0 \\\n    --hash=sha256:00\n{line}\n")


@pytest.mark.parametrize(
    "entry", ["attrs", "attrs>=26", "attrs==26.1.0", "attrs==26.1.0 \\\n    --hash=md5:00", "-r x.txt"]
)
def test_a_planted_loose_requirement_is_found(entry: str) -> None:
    assert loose(f"idna==3.20 \\\n    --hash=sha256:{'0' * 64}\n{entry}\n") == [entry.replace("\\\n", " ")]


def test_the_locks_hold_what_pyproject_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    runtime = pins((ROOT / "requirements" / "runtime.txt").read_text())
    dev = pins((ROOT / "requirements" / "dev.txt").read_text())
    wanted = [(runtime, text) for text in project["dependencies"]]
    wanted += [(dev, text) for text in (*project["dependencies"], *project["optional-dependencies"]["dev"])]
    for lock, text in wanted:
        requirement = Requirement(text)
        version = lock.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is in no lock: run `make lock`"
        assert requirement.specifier.contains(version, prereleases=True), f"{text} and {version}: run `make lock`"


def test_users_run_the_versions_that_are_tested() -> None:
    runtime = pins((ROOT / "requirements" / "runtime.txt").read_text())
    dev = pins((ROOT / "requirements" / "dev.txt").read_text())
    assert runtime.items() <= dev.items()


@pytest.mark.parametrize("target", ["demo", "guard", "test", "test-real", "lint", "bench", "lock", "clean"])
def test_make_knows_the_target(target: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr


def test_an_old_python_is_refused_in_one_sentence(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    # Answers --version as an old interpreter would, and fails the question whether it is new enough.
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "--silent", "test", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode != 0
    sentence = done.stderr.splitlines()[0]
    assert "needs Python 3.11 or newer" in sentence
    assert "Python 3.9.2" in sentence
    assert "PYTHON=" in sentence
    assert not (tmp_path / "venv").exists()

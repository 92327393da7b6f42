"""docs/adding-an-engine.md shows the project's own code and names every field; and a file and a line do suffice."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from enginewatch.engines.profile import Profile

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "adding-an-engine.md").read_text()
ENGINES = ROOT / "src" / "enginewatch" / "engines"
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_there_is_something_to_check() -> None:
    assert len(SNIPPETS) >= 5
    assert TEXT.count("```") == 2 * len(SNIPPETS), "every piece of code is checked"


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda snippet: snippet.splitlines()[0].strip()[:40])
def test_the_code_shown_is_the_projects_own(snippet: str) -> None:
    files = (ENGINES / "llamacpp.py", ENGINES / "__init__.py")
    assert any(snippet in path.read_text() for path in files), f"not in {', '.join(path.name for path in files)}"


def test_every_field_of_a_profile_is_asked_about() -> None:
    missing = [field.name for field in dataclasses.fields(Profile) if f"`{field.name}`" not in TEXT]
    assert missing == []


def test_the_files_it_names_exist() -> None:
    named = re.findall(r"`((?:src|tests|docs|requirements|core|client|sidecar)/[\w./-]+)`", TEXT)
    assert named
    for name in named:
        path = ROOT / name if (ROOT / name).exists() else ROOT / "src" / "enginewatch" / name
        assert path.exists() or "KIND" in name, name
    for link in re.findall(r"\]\(([\w./-]+)", TEXT):
        assert (ROOT / "docs" / link).exists(), link


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a copy of the package that has one engine more: a file and a line."""
    copy = tmp_path_factory.mktemp("grown") / "src"
    shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
    engines = copy / "enginewatch" / "engines"
    (engines / "novel.py").write_text((engines / "llamacpp.py").read_text().replace("llamacpp", "novel"))
    register = engines / "__init__.py"
    # Wherever the last engine stands and however the line is broken: the next one must not break this test.
    text, imports = re.subn(r"(?<=import )(?=llamacpp,)", "novel, ", register.read_text())
    text, lines = re.subn(r"(?<=\.PROFILE)(?=,?\s*\)\s*\})", ", novel.PROFILE", text)
    assert (imports, lines) == (1, 1)
    register.write_text(text)
    return os.environ | {"PYTHONPATH": str(copy)}


def run(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)


def test_a_file_and_a_line_make_an_engine_known_everywhere(grown: dict[str, str]) -> None:
    asked = run(grown, "-m", "enginewatch", "doctor", "http://127.0.0.1:1", "--engine", "novel", "-o", "json")
    assert (asked.returncode, asked.stderr) == (3, ""), "nobody listens there; the name is not what it complains of"
    assert '"engine":"novel"' in asked.stdout
    wrong = run(grown, "-m", "enginewatch", "doctor", "http://127.0.0.1:1", "--engine", "navel")
    assert wrong.returncode == 2, "the control: a name that nobody registered"
    helped = run(grown, "-m", "enginewatch", "watch", "--help")
    assert "novel" in helped.stdout


def test_a_file_and_a_line_bring_the_tests_of_every_engine(grown: dict[str, str]) -> None:
    tests = ("tests/engines/test_profiles.py", "tests/engines/test_every_engine_is_judged.py")
    done = run(grown, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests, "-k", "novel")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 30

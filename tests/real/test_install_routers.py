"""The installer of the real routers: what excuses their absence, and what never does. Needs no network."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.real import install_routers
from tests.real.install_vllm import BROKEN, UNOBTAINABLE, InstallError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return tmp_path / "enginewatch"


@pytest.fixture
def pip_says(monkeypatch: pytest.MonkeyPatch) -> list[InstallError | None]:
    """What each run of pip ends with, first to last; None is a success. Nothing else of a build is real either."""
    script: list[InstallError | None] = []

    def run_pip(venv: Path, *_: object) -> None:
        (venv / "bin").mkdir()
        (venv / "bin" / "python").symlink_to(sys.executable)
        end = script.pop(0)
        if end is not None:
            raise end

    def make_venv(command: list[object], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0)

    monkeypatch.setattr(install_routers, "run_pip", run_pip)
    monkeypatch.setattr(install_routers, "check_platform", lambda: None)
    monkeypatch.setattr(install_routers, "check_starts", lambda venv: None)
    monkeypatch.setattr(subprocess, "run", make_venv)
    return script


def test_three_tries_then_the_tests_are_skipped_loudly(
    cache: Path, pip_says: list[InstallError | None], capsys: pytest.CaptureFixture[str]
) -> None:
    pip_says += [InstallError(UNOBTAINABLE, "no network")] * 3
    assert install_routers.main() == UNOBTAINABLE
    out, err = capsys.readouterr()
    assert out == ""
    assert "THE REAL routers CANNOT BE HAD HERE" in err
    assert pip_says == []
    assert list(cache.glob("routers-*")) == [], "a failed build leaves nothing behind"


def test_a_file_with_another_hash_fails_at_once(
    pip_says: list[InstallError | None], capsys: pytest.CaptureFixture[str]
) -> None:
    pip_says += [InstallError(BROKEN, "hashes differ"), None]
    assert install_routers.main() == BROKEN
    assert "CANNOT BE HAD" not in capsys.readouterr().err
    assert len(pip_says) == 1


def test_an_environment_that_was_made_is_found_again(
    cache: Path, pip_says: list[InstallError | None], capsys: pytest.CaptureFixture[str]
) -> None:
    pip_says += [InstallError(UNOBTAINABLE, "flaky"), None]
    assert install_routers.main() == 0
    assert install_routers.main() == 0
    assert capsys.readouterr().out.splitlines() == [str(install_routers.venv_dir())] * 2
    assert [path.name for path in cache.glob("routers-*/")] == [install_routers.venv_dir().name]


def test_a_router_that_does_not_start_is_broken(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(InstallError, match="does not start") as raised:
        install_routers.check_starts(tmp_path)
    assert raised.value.code == BROKEN


def test_another_platform_is_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(InstallError, match="Linux on x86_64") as raised:
        install_routers.check_platform()
    assert raised.value.code == UNOBTAINABLE

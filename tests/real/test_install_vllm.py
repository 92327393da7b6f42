"""The installer of the real engine: what excuses its absence, and what never does. Needs neither engine nor network."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.real import install_vllm
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

    monkeypatch.setattr(install_vllm, "run_pip", run_pip)
    monkeypatch.setattr(install_vllm, "base_python", lambda: sys.executable)
    monkeypatch.setattr(install_vllm, "add_vllm_metadata", lambda venv, version: None)
    monkeypatch.setattr(install_vllm, "check_import", lambda venv, version: None)
    monkeypatch.setattr(install_vllm, "usable", lambda venv: (venv / "complete").is_file())
    monkeypatch.setattr(subprocess, "run", make_venv)
    return script


@pytest.mark.parametrize(
    "output",
    [
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...)'",
        "pip._vendor.urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool: Read timed out.",
        "ERROR: Could not install packages due to an OSError: HTTPSConnectionPool: Max retries exceeded with url",
        "ERROR: HTTP error 503 while getting the file",
        "ERROR: 502 Server Error: Bad Gateway for url",
        "ERROR: No matching distribution found for torch==2.13.0+cpu",
    ],
)
def test_want_of_network_or_of_a_file_is_excused(output: str) -> None:
    assert install_vllm.code_for(output) == UNOBTAINABLE


@pytest.mark.parametrize(
    "output",
    [
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. (after a Read timed out)",
        "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
        "ERROR: In --require-hashes mode, all requirements must have their versions pinned with ==.",
        "ERROR: Invalid requirement: 'torch=='",
        "",
    ],
)
def test_a_wrong_lock_or_a_full_disk_is_not(output: str) -> None:
    assert install_vllm.code_for(output) == BROKEN


def test_three_tries_then_the_tests_are_skipped_loudly(
    cache: Path, pip_says: list[InstallError | None], capsys: pytest.CaptureFixture[str]
) -> None:
    pip_says += [InstallError(UNOBTAINABLE, "no network")] * 3
    assert install_vllm.main() == UNOBTAINABLE
    out, err = capsys.readouterr()
    assert out == ""
    assert "THE REAL vLLM CANNOT BE HAD HERE" in err
    assert pip_says == []
    assert list(cache.glob("vllm-*")) == [], "a failed build leaves nothing behind"


def test_a_broken_install_fails_at_once(
    pip_says: list[InstallError | None], capsys: pytest.CaptureFixture[str]
) -> None:
    pip_says += [InstallError(BROKEN, "hashes differ"), None]
    assert install_vllm.main() == BROKEN
    assert "CANNOT BE HAD" not in capsys.readouterr().err
    assert len(pip_says) == 1


def test_a_build_that_succeeds_is_found_again(
    cache: Path, pip_says: list[InstallError | None], capsys: pytest.CaptureFixture[str]
) -> None:
    pip_says += [InstallError(UNOBTAINABLE, "flaky"), None]
    assert install_vllm.main() == 0
    assert install_vllm.main() == 0
    assert capsys.readouterr().out.splitlines() == [str(install_vllm.venv_dir())] * 2
    assert [path.name for path in cache.glob("vllm-*/")] == [install_vllm.venv_dir().name]


def test_old_environments_go_and_those_in_use_stay(cache: Path, pip_says: list[InstallError | None]) -> None:
    month_old = time.time() - 31 * 86400
    for name, used in {"vllm-old": month_old, "vllm-other": time.time(), "vllm-half.building-x": None}.items():
        (cache / name).mkdir(parents=True)
        if used is not None:
            (cache / name / "complete").touch()
            os.utime(cache / name / "complete", (used, used))
    pip_says.append(None)
    install_vllm.ensure()
    assert {path.name for path in cache.glob("vllm-*/")} == {"vllm-other", install_vllm.venv_dir().name}


def test_another_platform_is_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(InstallError, match="Linux on x86_64") as raised:
        install_vllm.base_python()
    assert raised.value.code == UNOBTAINABLE


def test_a_dangling_interpreter_makes_an_environment_unusable(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "complete").touch()
    (tmp_path / "bin" / "python").symlink_to(tmp_path / "gone")
    assert not install_vllm.usable(tmp_path)
    (tmp_path / "bin" / "python").unlink()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert install_vllm.usable(tmp_path)

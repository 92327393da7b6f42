"""The real engine, started once for all tests that talk to it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.real import install_routers, install_vllm
from tests.real.engine import ONE_CORE, VllmProcess
from tests.real.routers import build_guard


@pytest.fixture(scope="session")
def vllm_venv() -> Path:
    """The real engine's environment; `make test-real` says where it is, or that it cannot be had."""
    said = os.environ.get("ENGINEWATCH_REAL_VLLM")
    if said == "unobtainable":
        pytest.skip("the real vLLM cannot be had here; the installer's report above says why")
    venv = Path(said) if said else install_vllm.venv_dir()
    if not install_vllm.usable(venv):
        pytest.fail(f"no real vLLM in {venv}: run `make test-real`, or first `python tests/real/install_vllm.py`")
    return venv


@pytest.fixture(scope="session")
def tiny_model(vllm_venv: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made anew for each run: five seconds, and no cache that could be out of date."""
    directory = tmp_path_factory.mktemp("model")
    script = Path(__file__).with_name("tiny_model.py")
    done = subprocess.run(
        [vllm_venv / "bin" / "python", script, directory], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"the tiny model was not made:\n{done.stderr[-3000:]}"
    return directory


@pytest.fixture(scope="session")
def vllm(vllm_venv: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    """One API server, one engine core, one worker; idle between tests."""
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with VllmProcess.start(vllm_venv, tiny_model, log, ONE_CORE) as engine:
        yield engine


@pytest.fixture(scope="session")
def routers_venv() -> Path:
    """The real routers' environment; `make test-real` says where it is, or that it cannot be had."""
    said = os.environ.get("ENGINEWATCH_REAL_ROUTERS")
    if said == "unobtainable":
        pytest.skip("the real routers cannot be had here; the installer's report above says why")
    venv = Path(said) if said else install_routers.venv_dir()
    if not install_vllm.usable(venv):
        pytest.fail(f"no real routers in {venv}: run `make test-real`, or first `python -m tests.real.install_routers`")
    return venv


@pytest.fixture(scope="session")
def guard_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guard as `make guard` makes it."""
    return build_guard(tmp_path_factory.mktemp("guard"))

"""The demo's stage: a simulated engine and a real sidecar in processes of their own, and an end without orphans."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from enginewatch.lab.demo_cast import Part
from enginewatch.lab.demo_clients import Clients
from enginewatch.lab.demo_eyes import Eyes
from enginewatch.lab.sim.process import SimError, SimProcess

_START_SEC = 30.0
_END_SEC = 5.0
_INHERITED = ("PATH", "HOME", "TMPDIR", "LANG", "VIRTUAL_ENV")
_INHERITED_PREFIXES = ("PYTHON", "LD_", "LC_")
# A demo that is killed leaves nothing behind: the parent-death signal outlives exec.
_TETHERED = (
    "import os, sys; from enginewatch.lab.sim.lineage import die_with_parent; "
    "die_with_parent(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
)
MODEL = "simulated-model"


class StageError(Exception):
    """The demo cannot be set up here; the message is one sentence."""


class Stage:
    """Everything the demo starts. An async context manager; leaving it ends all of it, stopped ranks too.

    Args:
        part: the engine's part in the story.
        hot_settings: the sidecar's configuration file, as JSON data.
    """

    def __init__(self, part: Part, hot_settings: Mapping[str, Any]) -> None:
        self.part = part
        self._hot_settings = hot_settings
        self._directory: Path | None = None
        self._sidecar: subprocess.Popen[bytes] | None = None
        self.sim = SimProcess(part.engine, model=MODEL, **part.options)
        self.sidecar_url = ""
        self.clients: Clients
        self.eyes: Eyes

    async def __aenter__(self) -> Stage:
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def sidecar_pid(self) -> int:
        """Process id of the sidecar."""
        assert self._sidecar is not None
        return self._sidecar.pid

    @property
    def config_file(self) -> Path:
        """The sidecar's configuration file, re-read when it changes."""
        assert self._directory is not None
        return self._directory / "config.json"

    @property
    def sidecar_log(self) -> Path:
        """What the sidecar logs."""
        assert self._directory is not None
        return self._directory / "watch.log"

    async def close(self) -> None:
        """End everything; may be called more than once."""
        for part in ("clients", "eyes"):
            if hasattr(self, part):
                await getattr(self, part).close()
        self.sim.close()
        if self._sidecar is not None:
            self._sidecar.terminate()
            try:
                self._sidecar.wait(_END_SEC)
            except subprocess.TimeoutExpired:
                self._sidecar.kill()
                self._sidecar.wait()
            self._sidecar = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    async def _start(self) -> None:
        try:
            self._directory = Path(tempfile.mkdtemp(prefix="enginewatch-demo-"))
            self.config_file.write_text(json.dumps(dict(self._hot_settings), indent=2) + "\n")
            self.sim.start(wait=False)
        except OSError as error:
            raise StageError(f"the demo cannot be set up: {error.strerror}: {error.filename}") from None
        try:
            await asyncio.to_thread(self.sim.wait_serving, 1, _START_SEC)
        except SimError as error:
            raise StageError(f"the demo cannot be set up: {error}") from None
        await self._start_sidecar()
        self.clients = Clients(self.sim.url, MODEL)
        self.eyes = Eyes(self.sidecar_url, self.sim.url, asks_engine=self.part.asks_engine)
        self.eyes.start()

    async def _start_sidecar(self) -> None:
        command = [sys.executable, "-c", _TETHERED, str(os.getpid())]
        command += [sys.executable, "-m", "enginewatch", "watch", "--engine-url", self.sim.url]
        command += ["--listen", "127.0.0.1:0", "--config-file", str(self.config_file)]
        with self.sidecar_log.open("wb") as log:
            try:
                self._sidecar = subprocess.Popen(  # noqa: ASYNC220  starting a process takes milliseconds
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    env={**_environment(), **self.part.environment},
                    start_new_session=True,  # Ctrl-C is for the demo, which ends things in order
                )
            except OSError as error:
                raise StageError(f"the sidecar cannot be started: {error.strerror}") from None
        deadline = time.monotonic() + _START_SEC
        while not self.sidecar_url:
            self.sidecar_url = _logged(self.sidecar_log, "url")
            if self.sidecar_url:
                return
            if self._sidecar.poll() is not None:
                said = self.sidecar_log.read_text(errors="replace").strip().splitlines()
                raise StageError(f"the sidecar ended at once: {said[-1] if said else 'it said nothing'}")
            if time.monotonic() > deadline:
                raise StageError(f"the sidecar did not say within {_START_SEC:g} s where it answers")
            await asyncio.sleep(0.05)


def _environment() -> dict[str, str]:
    """Without what is meant for another sidecar: STALL_SEC, LOG_FILE... of the shell must not change the story."""
    return {
        name: value for name, value in os.environ.items() if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
    }


def _logged(path: Path, key: str) -> str:
    """The first value of a key in a log of JSON lines, empty when there is none yet."""
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            body = json.loads(line)
            if isinstance(body, dict) and key in body:
                return str(body[key])
    return ""

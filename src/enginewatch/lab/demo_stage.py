"""The demo's stage: a simulated engine and a real sidecar in processes of their own, and an end without orphans."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from enginewatch.lab.demo_cast import Part
from enginewatch.lab.demo_clients import Clients
from enginewatch.lab.demo_eyes import Eyes
from enginewatch.lab.demo_pair import Pair, serving
from enginewatch.lab.demo_tether import Sidecar, StageError
from enginewatch.lab.sim.process import SimProcess

MODEL = "simulated-model"


class Stage:
    """Everything the demo starts. An async context manager; leaving it ends all of it, stopped ranks too.

    Args:
        part: the engine's part in the story.
        hot_settings: the sidecar's configuration file, as JSON data.
        poll_sec: poll interval of the second act's sidecars.
    """

    def __init__(self, part: Part, hot_settings: Mapping[str, Any], poll_sec: float) -> None:
        self.part = part
        self._hot_settings = hot_settings
        self._poll_sec = poll_sec
        self._directory: Path | None = None
        self._second_act: asyncio.Task[None] | None = None
        self.sim = SimProcess(part.engine, model=MODEL, **part.options)
        self.sidecar: Sidecar
        self.pair: Pair
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
    def sidecar_url(self) -> str:
        """Where the engine's sidecar answers."""
        return self.sidecar.url

    @property
    def config_file(self) -> Path:
        """The sidecar's configuration file, re-read when it changes."""
        assert self._directory is not None
        return self._directory / "config.json"

    def begin_second_act(self) -> None:
        """Set up the second act while the first one goes on: its router boots. Called again, it does nothing."""
        if self._second_act is None:
            self._second_act = asyncio.create_task(self._set_second_act())

    async def _set_second_act(self) -> None:
        await self.pair.start()
        self.pair.boot()

    async def second_act(self) -> None:
        """Wait until the second act is set up.

        Raises:
            StageError: it cannot be set up here.
        """
        self.begin_second_act()
        assert self._second_act is not None
        await self._second_act

    async def close(self) -> None:
        """End everything; may be called more than once."""
        if self._second_act is not None:
            self._second_act.cancel()
            await asyncio.gather(self._second_act, return_exceptions=True)
        for part in ("clients", "eyes", "pair"):
            if hasattr(self, part):
                await getattr(self, part).close()
        self.sim.close()
        if hasattr(self, "sidecar"):
            self.sidecar.end()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    async def _start(self) -> None:
        try:
            self._directory = Path(tempfile.mkdtemp(prefix="enginewatch-demo-"))
            self.config_file.write_text(json.dumps(dict(self._hot_settings), indent=2) + "\n")
            self.sim.start(wait=False)
            self.sidecar = Sidecar("the sidecar", self._directory / "watch.log")
            self.pair = Pair(MODEL, self._directory, self._poll_sec)
        except OSError as error:
            raise StageError(f"the demo cannot be set up: {error.strerror}: {error.filename}") from None
        await serving(self.sim)
        await self.sidecar.watch(self.sim.url, self.config_file, self.part.environment)
        self.clients = Clients(self.sim.url, MODEL)
        self.eyes = Eyes(self.sidecar_url, self.sim.url, asks_engine=self.part.asks_engine)
        self.eyes.start()

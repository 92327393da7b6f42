"""The demo's second act: a prefill/decode pair with sidecars, and a router's container with the guard in it.

All of it is on one address, as in a pod that holds prefill, decode and router. The engines are simulated vLLM with
Mooncake whatever engine the first act shows: that is where a router pins a process. What happens in the container is
what a pod's manifest says: `guard boot -- ROUTER` is its command, `guard live` and `guard ready` are its probes, and
the demo does what a kubelet does with their exit codes.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from enginewatch.lab.demo_tether import START_SEC, Sidecar, StageError, Tethered, inherited_environment
from enginewatch.lab.sim.process import SimError, SimProcess

_PROBE_SEC = 30.0
"""A probe has a deadline of its own; this one is for the machine."""
_DEADLINE_SEC = 15
_ASK_SEC = 2.0


@dataclass(frozen=True, slots=True)
class Probed:
    """How a probe of the router's container ended: its exit code, and the line that a kubelet puts into the event."""

    code: int
    line: str


@dataclass(frozen=True, slots=True)
class Answered:
    """How a request through the router ended: its status, None without an answer in time, and the seconds it took."""

    status: int | None
    took_sec: float


class Pair:
    """Two engines, their sidecars and the router's container.

    Args:
        model: the served model's name.
        directory: where logs and the guard's run directory are.
        poll_sec: poll interval of the sidecars.
    """

    def __init__(self, model: str, directory: Path, poll_sec: float) -> None:
        self.model = model
        self.router_port = free_port()
        self.prefill = SimProcess("vllm", model=model, role="prefill", bootstrap_port=0)
        self.decode = SimProcess("vllm", model=model, role="decode")
        self.prefill_sidecar = Sidecar("the prefill's sidecar", directory / "prefill-watch.log")
        self.decode_sidecar = Sidecar("the decode's sidecar", directory / "decode-watch.log")
        self.router = Tethered("the router's container", directory / "router.log")
        self.run_dir = directory / "pd-router"
        self._config_file = directory / "pair.json"
        self._poll_sec = poll_sec
        self._session: aiohttp.ClientSession | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engines and their sidecars.

        Raises:
            StageError: one of them did not start.
        """
        # An idle canary every few seconds is enough of this pair.
        settings = {"poll_interval_sec": self._poll_sec, "active_probe_idle_sec": 10 * self._poll_sec, "warmup_sec": 0}
        try:
            self._config_file.write_text(json.dumps(settings) + "\n")
            self.run_dir.mkdir()
            for engine in (self.prefill, self.decode):
                engine.start(wait=False)
        except OSError as error:
            raise StageError(f"the second act cannot be set up: {error.strerror}: {error.filename}") from None
        self._session = aiohttp.ClientSession()
        for sidecar, engine, role in (
            (self.prefill_sidecar, self.prefill, "prefill"),
            (self.decode_sidecar, self.decode, "decode"),
        ):
            await serving(engine)
            await sidecar.watch(engine.url, self._config_file, {"ENGINE_KIND": "vllm", "ENGINE_ROLE": role})

    async def close(self) -> None:
        """End everything; may be called more than once."""
        for process in (self.router, self.prefill_sidecar, self.decode_sidecar):
            process.end()
        self.prefill.close()
        self.decode.close()
        if self._session is not None:
            await self._session.close()

    # --- the container ----------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Where the router answers."""
        return f"http://127.0.0.1:{self.router_port}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the router's container: its command and its probes share it."""
        return {
            "GUARD_PREFILL": f"127.0.0.1:{self.prefill.port}",
            "GUARD_DECODE": f"127.0.0.1:{self.decode.port}",
            "GUARD_PREFILL_WATCHER_PORT": self.prefill_sidecar.url.rpartition(":")[2],
            "GUARD_DECODE_WATCHER_PORT": self.decode_sidecar.url.rpartition(":")[2],
            "GUARD_ROUTER": "vllm",
            "GUARD_ROUTER_PORT": str(self.router_port),
            "GUARD_BOOTSTRAP_PORT": str(self.prefill.bootstrap_port),
            "GUARD_RUN_DIR": str(self.run_dir),
            "GUARD_DEADLINE_SEC": str(_DEADLINE_SEC),  # more than in a pod: the machine may be busy with anything
        }

    def boot(self) -> None:
        """Start the container: `guard boot -- ROUTER`."""
        router = (sys.executable, "-m", "enginewatch.lab.demo_router", "--port", str(self.router_port))
        self.router.start(("guard", "boot", "--", *router), self.environment)

    async def restart_container(self) -> None:
        """End the router with SIGTERM and start its container again, with the same command, as a kubelet does."""
        await asyncio.to_thread(self.router.end)
        self.boot()

    async def probe(self, name: str) -> Probed:
        """Run `guard live` or `guard ready` in the container."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "enginewatch", "guard", name),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**inherited_environment(), **self.environment},
        )
        try:
            out, error = await asyncio.wait_for(process.communicate(), _PROBE_SEC)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return Probed(process.returncode, (out or error).decode(errors="replace").strip())

    async def until_ready(self, within_sec: float) -> Probed:
        """Ask `guard ready` until it passes; how it ended the last time.

        Raises:
            StageError: the container has ended.
        """
        deadline = time.monotonic() + within_sec
        while True:
            probed = await self.probe("ready")
            if probed.code == 0 or time.monotonic() > deadline:
                return probed
            self.router.check_alive()
            await asyncio.sleep(0.2)

    # --- looking ----------------------------------------------------------------------------------------------------

    def snapshot(self, role: str) -> str:
        """What the guard wrote down of a role at the router's start."""
        return (self.run_dir / f"{role}-ips").read_text().strip()

    async def prefill_engine(self) -> dict[str, Any]:
        """Body of the prefill's sidecar's /engine; empty while it names nobody."""
        status, body = await self._get(self.prefill_sidecar.url + "/engine")
        return dict(json.loads(body)) if status == 200 else {}

    async def health(self, url: str) -> int | None:
        """Status of GET /health, None without an answer."""
        return (await self._get(url + "/health"))[0]

    async def request(self, within_sec: float) -> Answered:
        """Send one completion through the router.

        Raises:
            aiohttp.ClientError: there is no router.
        """
        assert self._session is not None
        body = {"model": self.model, "prompt": "Is anybody there?", "max_tokens": 4}
        begun = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=within_sec)
        status: int | None = None
        try:
            async with self._session.post(self.url + "/v1/completions", json=body, timeout=timeout) as response:
                await response.read()
                status = response.status
        except TimeoutError:
            pass
        return Answered(status, time.monotonic() - begun)

    async def _get(self, url: str) -> tuple[int | None, str]:
        assert self._session is not None
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=_ASK_SEC)) as response:
                return response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return None, ""


async def serving(engine: SimProcess) -> None:
    """Wait until a simulated engine serves; raises StageError if it does not."""
    try:
        await asyncio.to_thread(engine.wait_serving, 1, START_SEC)
    except SimError as error:
        raise StageError(f"the demo cannot be set up: {error}") from None


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now: one that a router is told before it starts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

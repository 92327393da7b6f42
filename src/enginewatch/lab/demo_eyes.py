"""What the demo sees: the sidecar's published answers and the engine's own /health, several times a second.

The story is judged by these and by nothing the demo knows from having caused it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import aiohttp

LOOK_SEC = 0.15
ENGINE_HEALTH_SEC = 0.3
"""Time between two questions to the engine's /health."""
PATIENCE_SEC = 2.0
_KEPT = 5000
"""Looks remembered: a demo that is kept running for days must not grow."""
_PULSE_SEC = 0.1
_STILL_WAITING_SEC = 1.0
"""A /health without an answer for so long is shown as such."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the sidecar.

    Attributes:
        at: monotonic seconds at which its answers were there.
        status: of /healthz, None when it did not answer.
        text: body of /healthz, or why there is none.
        verdict: body of /verdict, empty when it did not answer.
        took_sec: how long the answers took.
    """

    at: float
    status: int | None
    text: str = ""
    verdict: dict[str, Any] = field(default_factory=dict)
    took_sec: float = 0.0

    @property
    def state(self) -> str:
        """The published state."""
        return str(self.verdict.get("state", ""))

    @property
    def cores(self) -> list[dict[str, Any]]:
        """The cores as /verdict shows them."""
        return list(self.verdict.get("cores", ()))

    @property
    def requests(self) -> float:
        """Running and waiting requests that the engine's page admits to, over all cores."""
        return sum((core["running"] or 0) + (core["waiting"] or 0) for core in self.cores)

    def __str__(self) -> str:
        if self.status is None:
            return f"no answer from the sidecar ({self.text})"
        return f"{self.state}, /healthz {self.status} {self.text}"


@dataclass(slots=True)
class Asked:
    """One question to the engine's /health. `says` is a status, "refused" or "no answer"; empty = still waiting."""

    at: float
    says: str = ""
    answered_at: float | None = None

    def says_at(self, now: float) -> str:
        """What is known at a moment; empty = nothing yet."""
        if self.answered_at is not None:
            return self.says
        return "no answer" if now - self.at > _STILL_WAITING_SEC else ""


class Eyes:
    """Looks until it is told to stop.

    Args:
        sidecar_url: base URL of the sidecar.
        engine_url: base URL of the engine.
        asks_engine: ask the engine's /health all the time. Where that would make it work, `ask_engine` asks once.
    """

    def __init__(self, sidecar_url: str, engine_url: str, *, asks_engine: bool) -> None:
        self.sidecar_url = sidecar_url
        self.engine_url = engine_url
        self.asks_engine = asks_engine
        self.looks: deque[Look] = deque(maxlen=_KEPT)
        self.asked: deque[Asked] = deque(maxlen=_KEPT)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_SEC))
        self._tasks: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self._late: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def start(self) -> None:
        """Begin to look."""
        self._begin(self._look_forever())
        self._begin(self._feel_pulse())
        if self.asks_engine:
            self._begin(self._ask_forever())

    async def close(self) -> None:
        """Stop looking."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    # --- what was seen ----------------------------------------------------------------------------------------------

    def since(self, moment: float) -> list[Look]:
        """Looks from a moment on, oldest first."""
        return [look for look in self.looks if look.at >= moment]

    def asked_since(self, moment: float) -> list[Asked]:
        """Questions to the engine's /health from a moment on."""
        return [asked for asked in self.asked if asked.at >= moment]

    async def wait(self, holds: Callable[[Look], bool], *, since: float, within_sec: float) -> Look | None:
        """The first look from `since` on for which `holds` is true; None when there was none in time."""
        deadline = time.monotonic() + within_sec
        checked = 0
        while True:
            looks = self.since(since)
            for look in looks[checked:]:
                if holds(look):
                    return look
            checked = len(looks)
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), left)
            except TimeoutError:
                pass

    def stood_still_sec(self, since: float) -> float:
        """For how long at most this machine gave the demo, the sidecar or the engine's front end no time."""
        late = [sec for at, sec in self._late if at >= since]
        slow = [look.took_sec for look in self.since(since)]
        if self.asks_engine:  # there /health is answered at once, whatever the ranks do
            slow += [one.answered_at - one.at for one in self.asked_since(since) if one.answered_at is not None]
        return max([0.0, *late, *slow])

    async def engine(self) -> dict[str, Any]:
        """Body of the sidecar's /engine; empty while the engine has not been identified."""
        try:
            async with self._session.get(self.sidecar_url + "/engine") as response:
                body = await response.json()
                return dict(body) if response.status == 200 else {}
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return {}

    async def history(self, since: float) -> list[dict[str, Any]]:
        """Lines of the sidecar's /history that are not older than a moment on the monotonic clock."""
        earliest = time.time() - (time.monotonic() - since) - 0.02  # the lines are rounded to hundredths
        try:
            async with self._session.get(self.sidecar_url + "/history") as response:
                lines = [json.loads(line) for line in (await response.text()).splitlines()]
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return []
        return [line for line in lines if datetime.fromisoformat(line["at"]).timestamp() >= earliest]

    def ask_engine(self) -> Asked:
        """Ask the engine's /health once, with all the time it wants."""
        asked = Asked(time.monotonic())
        self.asked.append(asked)
        self._begin(self._ask(asked, patience_sec=60.0))
        return asked

    # --- looking ----------------------------------------------------------------------------------------------------

    async def _look_forever(self) -> None:
        while True:
            begun = time.monotonic()
            self.looks.append(await self._look())
            self._news.set()
            await asyncio.sleep(max(0.02, begun + LOOK_SEC - time.monotonic()))

    async def _feel_pulse(self) -> None:
        while True:
            begun = time.monotonic()
            await asyncio.sleep(_PULSE_SEC)
            now = time.monotonic()
            self._late.append((now, now - begun - _PULSE_SEC))

    async def _look(self) -> Look:
        begun = time.monotonic()
        try:
            async with self._session.get(self.sidecar_url + "/healthz") as response:
                status, text = response.status, (await response.text()).strip()
            async with self._session.get(self.sidecar_url + "/verdict") as response:
                verdict = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            now = time.monotonic()
            return Look(now, None, type(error).__name__, took_sec=now - begun)
        now = time.monotonic()
        return Look(now, status, text, verdict, now - begun)

    async def _ask_forever(self) -> None:
        while True:
            asked = Asked(time.monotonic())
            self.asked.append(asked)
            await self._ask(asked, patience_sec=PATIENCE_SEC)
            await asyncio.sleep(max(0.02, asked.at + ENGINE_HEALTH_SEC - time.monotonic()))

    async def _ask(self, asked: Asked, *, patience_sec: float) -> None:
        timeout = aiohttp.ClientTimeout(total=patience_sec)
        try:
            async with self._session.get(self.engine_url + "/health", timeout=timeout) as response:
                await response.read()
                asked.says = str(response.status)
        except TimeoutError:
            asked.says = "no answer"
        except aiohttp.ClientError:
            asked.says = "refused"
        asked.answered_at = time.monotonic()

    def _begin(self, coroutine: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

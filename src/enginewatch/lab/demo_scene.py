"""What the steps of the demo share: what a step is, how it is played and judged, and how to look and wait.

A step is judged by what is published. Each has bounds of its own; one that fails says what was seen instead, and the
story goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn

from enginewatch.core.settings import Settings
from enginewatch.lab.demo_cast import Part
from enginewatch.lab.demo_eyes import LOOK_SEC, Look
from enginewatch.lab.demo_stage import Stage
from enginewatch.lab.sim.process import SimError

QUIET_STATES = frozenset({"stall-active-ok", "growing", "freeze-grace", "baseline"})
_SLACK_SEC = 1.0
"""What the bounds allow for a busy machine."""
START_SEC = 60.0
"""How long processes may take to start, a second on a machine that has it: no step is about that."""
_STOOD_STILL_SEC = 1.0
_SILENT_LOOKS = 2
"""So many looks in a row without an answer are a failure: one is a machine that is busy, as for a kubelet."""


class NotAsExpected(Exception):  # noqa: N818  it reads where it is raised
    """A step did not go as expected; the message says what was seen."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: what happens, what must be seen, and how it is played. `play` returns what was seen."""

    title: str
    expected: str
    play: Callable[[Scene], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Result:
    """How a step went."""

    step: Step
    passed: bool
    seen: str
    began_at: float
    took_sec: float


async def play(step: Step, scene: Scene) -> Result:
    """Play one step and judge it.

    A failure of the machinery is a failed step, not the end of the story. A step that failed while this machine stood
    still, so that its bounds mean nothing, is played once more.
    """
    began = time.monotonic()
    passed, seen = await _attempt(step, scene)
    if not passed:
        why = await scene.stood_still(began)
        if why:
            await scene.set_again()
            scene.is_repeat = True
            passed, seen = await _attempt(step, scene)
            scene.is_repeat = False
            seen = f"{seen} (second attempt: {why})"
    return Result(step, passed, seen, began, time.monotonic() - began)


async def _attempt(step: Step, scene: Scene) -> tuple[bool, str]:
    try:
        return True, await step.play(scene)
    except NotAsExpected as instead:
        return False, str(instead)
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"


class Scene:
    """What the steps share: the stage, the thresholds, and how to look and wait."""

    def __init__(self, stage: Stage, settings: Settings) -> None:
        self.stage = stage
        self.settings = settings
        self.stall_sec = settings.stall_sec
        self.poll_sec = settings.poll_interval_sec
        self.part = stage.part
        self.detect_sec = detect_sec(settings, self.part)
        self.recover_sec = recover_sec(settings, self.part)
        self.patience_sec = 10 + 4 * self.poll_sec + self.part.slower_sec
        """How long what is not the point of a step may take."""
        self.is_repeat = False
        """Whether a step is played for the second time, without what the one before it left."""

    async def stood_still(self, since: float) -> str:
        """None of the bounds hold on a machine that stands still: how it did since a moment, empty if it did not."""
        seconds = self.stage.eyes.stood_still_sec(since)
        if seconds > _STOOD_STILL_SEC:
            return f"this machine stood still for {seconds:.1f} s"
        if "observer-gap" in await self.states(since):
            return "this machine stood still, says the sidecar"
        return ""

    async def set_again(self) -> None:
        """Undo what a failed attempt may have left."""
        sim = self.stage.sim
        sim.cont()
        try:
            await self.resume()
            await asyncio.to_thread(lambda: sim.fault(answer=None, answer_count=None))
        except (SimError, OSError):
            pass  # it is away; the step waits for it anyway
        await self.stage.eyes.wait(lambda look: look.status == 200, since=time.monotonic(), within_sec=10)

    async def hang(self) -> None:
        """Hang the engine."""
        await asyncio.to_thread(self.part.hang, self.stage.sim)

    async def resume(self) -> None:
        """Free it."""
        await asyncio.to_thread(self.part.resume, self.stage.sim)

    async def until(self, holds: Callable[[Look], bool], what: str, *, since: float, within_sec: float) -> Look:
        """The first look for which `holds` is true.

        Raises:
            NotAsExpected: there was none in time.
        """
        look = await self.stage.eyes.wait(holds, since=since, within_sec=within_sec)
        if look is None:
            self.fail(f"not {what} within {within_sec:.1f} s")
        return look

    def fail(self, what: str) -> NoReturn:
        """Give the step up, saying what is published now."""
        looks = self.stage.eyes.looks
        raise NotAsExpected(f"{what}; now: {looks[-1]}" if looks else what)

    async def never_503(self, since: float, *, history: bool = True) -> None:
        """Check that /healthz was 200 all the time from a moment on, with its history between two looks as well."""
        silent = 0
        for look in self.stage.eyes.since(since):
            silent = silent + 1 if look.status is None else 0
            if silent == _SILENT_LOOKS or look.status not in (200, None):
                raise NotAsExpected(str(look))
        for line in await self.stage.eyes.history(since) if history else ():
            if line.get("kind") == "verdict" and line.get("acting"):
                raise NotAsExpected(f"/healthz was 503 for a moment: {line['state']}: {line['reason']}")

    async def states(self, since: float) -> set[str]:
        """Every state published from a moment on: looks see the everyday ones, the history the short ones."""
        seen = {look.state for look in self.stage.eyes.since(since)}
        lines = await self.stage.eyes.history(since)
        return seen | {line["state"] for line in lines if line.get("kind") == "verdict"}

    async def until_published(self, state: str, *, since: float, within_sec: float) -> None:
        """Wait for a state, however short it is.

        Raises:
            NotAsExpected: it was not published in time.
        """
        deadline = time.monotonic() + within_sec
        while state not in await self.states(since):
            if time.monotonic() > deadline:
                self.fail(f"not {state} within {within_sec:.1f} s")
            await asyncio.sleep(LOOK_SEC)

    async def under_load(self) -> None:
        """Have clients ask, and wait until the sidecar sees the engine work."""
        since = time.monotonic()
        self.stage.clients.start()
        await self.until(
            lambda look: look.status == 200 and look.state == "growing" and look.requests > 0,
            "growing under load",
            since=since,
            within_sec=self.patience_sec,
        )

    async def quiet(self) -> None:
        """Have all clients leave, and wait until the sidecar sees an engine without requests."""
        await self.stage.clients.stop()
        await self.until(
            lambda look: look.requests == 0 and look.state in QUIET_STATES,
            "idle",
            since=time.monotonic() + self.poll_sec,
            within_sec=self.patience_sec,
        )

    async def engine_id(self) -> str:
        """The id that /engine publishes, empty when there is none."""
        return str((await self.stage.eyes.engine()).get("engine_id", ""))


def detect_sec(settings: Settings, part: Part) -> float:
    """Longest time from the hang to the 503."""
    usual = settings.stall_sec + settings.poll_interval_sec + settings.active_probe_timeout_sec + _SLACK_SEC
    return usual + part.slower_sec


def recover_sec(settings: Settings, part: Part) -> float:
    """Longest time from the end of the hang to the 200."""
    return 2 * settings.poll_interval_sec + _SLACK_SEC + part.slower_sec

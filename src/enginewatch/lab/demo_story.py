"""The demo's story: what is done to the engine, what must be seen, and what was seen.

A step is judged by what the sidecar publishes. Each has bounds of its own; one that fails says what was seen instead,
and the story goes on.
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

_SLACK_SEC = 1.0
"""What the bounds allow for a busy machine."""
_HOLD_SEC = 1.5
"""How long what was reached must hold, and can be seen."""
_STOOD_STILL_SEC = 1.0
_SILENT_LOOKS = 2
"""So many looks in a row without an answer are a failure: one is a machine that is busy, as for a kubelet."""
_QUIET_STATES = frozenset({"stall-active-ok", "growing", "freeze-grace", "baseline"})


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
            lambda look: look.requests == 0 and look.state in _QUIET_STATES,
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


def story(part: Part, settings: Settings) -> tuple[Step, ...]:
    """The steps, in their order."""
    stall, detect, recover = settings.stall_sec, detect_sec(settings, part), recover_sec(settings, part)
    under_load = f"503 within {detect:g} s, {part.health_of_a_hang}"
    return (
        Step(f"{part.title} serves 4 clients", "growing, /healthz 200", _serves),
        Step("A prompt of a million tokens", part.prefill_says.format(stall=stall), _long_prefill),
        Step("One canary is lost", "probe-fail-grace, never 503", _lost_canary),
        Step(f"Hang under load: {part.hang_says}", under_load, _hang_under_load),
        Step(part.resume_says, f"200 within {recover:g} s", _resume),
        Step("The same hang while idle", f"503 within {detect:g} s: only the canary can see it", _hang_while_idle),
        Step(part.resume_says, f"200 within {recover:g} s", _resume),
        Step("Crash, and a slow reload", f"away for over {stall:g} s: restarting, replaced, never 503", _crash),
        Step("Restart in place", "/engine names another process, never 503", _restart),
    )


# --- steps ----------------------------------------------------------------------------------------------------------


async def _serves(scene: Scene) -> str:
    since = time.monotonic()
    if not scene.stage.eyes.asks_engine:
        scene.stage.eyes.ask_engine()
    await scene.under_load()
    await asyncio.sleep(1.0)
    await scene.never_503(since)
    now = time.monotonic()
    rate = scene.stage.clients.tokens(now - 1, now)
    return f"growing, 200, {rate} tokens/s, engine_id {await scene.engine_id() or 'unknown'}"


async def _long_prefill(scene: Scene) -> str:
    await scene.quiet()
    since = time.monotonic()
    seconds = 1.5 * scene.stall_sec + scene.poll_sec
    await asyncio.to_thread(scene.stage.sim.prefill, seconds)
    part = scene.part
    wanted = part.prefill_state
    await asyncio.sleep(seconds)
    await scene.never_503(since)
    looks = [look for look in scene.stage.eyes.since(since) if look.state == wanted]
    if not looks:
        states = ", ".join(sorted(await scene.states(since)))
        raise NotAsExpected(f"never {wanted}, but {states}")
    saw = _stood_still(scene, looks, since) if part.still_legs else _went_on(scene, looks)
    return f"{wanted}, {saw}, 200 all along"


def _stood_still(scene: Scene, looks: list[Look], since: float) -> str:
    """How long the legs that a prefill does not move stood still.

    Raises:
        NotAsExpected: not long enough to show anything.
    """
    flat = max(_flat_sec(look, scene.part.still_legs, since) for look in looks)
    if flat <= scene.stall_sec:
        raise NotAsExpected(f"{looks[-1].state}, but the counters were flat for {flat:.1f} s only")
    return f"{scene.part.still} flat for {flat:.1f} s"


def _went_on(scene: Scene, looks: list[Look]) -> str:
    """How long the prefill was seen to go on.

    Raises:
        NotAsExpected: not for as long as a hang takes.
    """
    seconds = looks[-1].at - looks[0].at
    if seconds <= scene.stall_sec:
        raise NotAsExpected(f"{looks[-1].state} for {seconds:.1f} s only")
    return f"something new at every look for {seconds:.1f} s"


def _flat_sec(look: Look, names: frozenset[str], since: float) -> float:
    """For how long none of these legs has moved, counted from `since` at most."""
    moved: list[float] = [
        leg["moved_ago_sec"]
        for core in look.cores
        for name, leg in core["legs"].items()
        if name in names and leg["moved_ago_sec"] is not None
    ]
    return min([look.at - since, *moved])


async def _lost_canary(scene: Scene) -> str:
    await scene.quiet()
    since = time.monotonic()
    await asyncio.to_thread(lambda: scene.stage.sim.fault(answer="hang", answer_count=1))
    patience = scene.patience_sec + scene.settings.active_probe_timeout_sec
    await scene.until_published("probe-fail-grace", since=since, within_sec=patience)
    failed = time.monotonic()
    back = await scene.until(lambda look: look.state in _QUIET_STATES, "well again", since=failed, within_sec=patience)
    await scene.never_503(since)
    return f"probe-fail-grace, then {back.state}; 200 all along"


async def _hang_under_load(scene: Scene) -> str:
    await scene.under_load()
    asked_from = time.monotonic()
    await scene.hang()
    look = await _declared(scene, asked_from)
    return f"{_when(look, asked_from)}; its /health: {_own_health(scene, asked_from)}; {look.text}"


async def _hang_while_idle(scene: Scene) -> str:
    await scene.quiet()
    stopped = time.monotonic()
    await scene.hang()
    look = await _declared(scene, stopped)
    if look.requests:
        raise NotAsExpected(f"503, but the engine's page admits to {look.requests:g} requests")
    if "canar" not in look.text:
        raise NotAsExpected(f"503, but not by canaries: {look.text}")
    return f"{_when(look, stopped)}; its page shows no request at all; {look.text}"


def _when(look: Look, stopped: float) -> str:
    return f"503 {look.at - stopped:.1f} s after the stop, {_frozen_sec(look):.1f} s after the last proof of life"


def _frozen_sec(look: Look) -> float:
    return max((float(core["stalled_for_sec"]) for core in look.cores), default=0.0)


async def _declared(scene: Scene, stopped: float) -> Look:
    """The look at which the hang was reported, neither late nor early."""
    if not scene.stage.eyes.asks_engine and scene.stage.clients.busy:
        scene.stage.eyes.ask_engine()
    look = await scene.until(
        lambda look: look.status == 503,
        "503",
        since=stopped,
        within_sec=scene.detect_sec + max(2.0, scene.poll_sec),
    )
    if look.at - stopped > scene.detect_sec:
        raise NotAsExpected(f"503 only after {look.at - stopped:.1f} s: {look.text}")
    if _frozen_sec(look) < scene.stall_sec:
        raise NotAsExpected(f"503 only {_frozen_sec(look):.1f} s after the last proof of life: {look.text}")
    await asyncio.sleep(_HOLD_SEC)
    for later in scene.stage.eyes.since(look.at):
        if later.status not in (503, None):
            raise NotAsExpected(f"503, and then: {later}")
    return look


def _own_health(scene: Scene, since: float) -> str:
    """What the engine's own /health said meanwhile.

    Raises:
        NotAsExpected: it noticed the hang (or, where it is asked all the time, did not answer).
    """
    asked = scene.stage.eyes.asked_since(since)
    answers = [one.says for one in asked if one.answered_at is not None]
    if not scene.stage.eyes.asks_engine:
        if answers:
            raise NotAsExpected(f"its /health: {', '.join(answers)}")
        return "no answer yet"
    wrong = [says for says in answers if says != "200"]
    if wrong or not answers:
        raise NotAsExpected(f"its /health: {', '.join(wrong) or 'never asked'}")
    return f"200, {len(answers)} times"


async def _resume(scene: Scene) -> str:
    if scene.is_repeat:
        await scene.hang()
        await _declared(scene, time.monotonic())
    looks = scene.stage.eyes.looks
    since = time.monotonic()
    await scene.resume()
    if not looks or looks[-1].status != 503:
        scene.fail("there was no 503 to recover from")
    look = await scene.until(lambda look: look.status == 200, "200", since=since, within_sec=scene.recover_sec)
    await asyncio.sleep(_HOLD_SEC)
    await scene.never_503(look.at, history=False)
    return f"200 after {look.at - since:.1f} s: {look.state}"


async def _crash(scene: Scene) -> str:
    await scene.under_load()
    before = await scene.stage.eyes.engine()
    since = time.monotonic()
    down, load = 1.0, 1.25 * scene.stall_sec
    await asyncio.to_thread(scene.stage.sim.crash, down, load)
    gone = await scene.until(
        lambda look: look.state == "restarting",
        "restarting",
        since=since,
        within_sec=3 + 2 * scene.poll_sec + scene.part.slower_sec,
    )
    back = await scene.until(
        lambda look: look.state not in ("restarting", ""),
        "back",
        since=gone.at,
        within_sec=down + load + 10 + 2 * scene.poll_sec,
    )
    await scene.until(
        lambda look: look.state == "growing", "growing again", since=back.at, within_sec=scene.patience_sec
    )
    await scene.never_503(since)
    away = back.at - gone.at
    if away <= scene.stall_sec:
        raise NotAsExpected(f"away for {away:.1f} s only")
    states = await scene.states(since)
    after = await scene.stage.eyes.engine()
    if "replaced" not in states:
        raise NotAsExpected(f"never replaced, but {', '.join(sorted(states))}")
    if after.get("restarts") != before.get("restarts", 0) + 1:
        raise NotAsExpected(f"restarts {before.get('restarts')} -> {after.get('restarts')}")
    return f"restarting for {away:.1f} s, then replaced, growing; 200 all along"


async def _restart(scene: Scene) -> str:
    await scene.under_load()
    before = await scene.engine_id()
    since = time.monotonic()
    await asyncio.to_thread(scene.stage.sim.restart)
    deadline = since + 15 + 4 * scene.poll_sec
    while (after := await scene.engine_id()) in (before, ""):
        if time.monotonic() > deadline:
            scene.fail(f"/engine still names {after or 'nobody'}")
        await asyncio.sleep(0.1)
    await scene.until(
        lambda look: look.state == "growing",
        "growing again",
        since=time.monotonic(),
        within_sec=scene.patience_sec,
    )
    await scene.never_503(since)
    return f"{before} -> {after}"

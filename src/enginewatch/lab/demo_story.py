"""The demo's story: what is done to the engine, what must be seen, and what was seen."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from enginewatch.core.settings import Settings
from enginewatch.lab.demo_cast import Part
from enginewatch.lab.demo_eyes import Look
from enginewatch.lab.demo_pair_story import pair_story
from enginewatch.lab.demo_scene import QUIET_STATES, START_SEC, NotAsExpected, Scene, Step, detect_sec, recover_sec

_HOLD_SEC = 1.2
"""How long what was reached must hold, and can be seen."""


def story(part: Part, settings: Settings) -> tuple[Step, ...]:
    """The steps, in their order."""
    stall, detect, recover = settings.stall_sec, detect_sec(settings, part), recover_sec(settings, part)
    in_place = f"away for over {stall:g} s: /engine names the old process, then another one; never 503"
    under_load = f"503 within {detect:g} s, {part.health_of_a_hang}"
    return (
        Step(f"{part.title} serves 4 clients", "growing, /healthz 200", _serves),
        Step("A prompt of a million tokens", part.prefill_says.format(stall=stall), _long_prefill),
        Step("One canary is lost", "probe-fail-grace, never 503", _lost_canary),
        Step(f"Hang under load: {part.hang_says}", under_load, _hang_under_load),
        Step(part.resume_says, f"200 within {recover:g} s", _resume),
        Step("The same hang while idle", f"503 within {detect:g} s: only the canary can see it", _hang_while_idle),
        Step(part.resume_says, f"200 within {recover:g} s", _resume),
        Step("kill -KILL, and a slow reload in place", in_place, _crash),
        *pair_story(),
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
    back = await scene.until(lambda look: look.state in QUIET_STATES, "well again", since=failed, within_sec=patience)
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
    scene.stage.begin_second_act()  # this step mostly waits
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
    after = await _another(scene, before, within_sec=down + load + START_SEC)
    back = await scene.until(
        lambda look: look.state not in ("restarting", ""), "back", since=gone.at, within_sec=scene.patience_sec
    )
    await scene.until(
        lambda look: look.state == "growing", "growing again", since=back.at, within_sec=scene.patience_sec
    )
    await scene.never_503(since)
    away = back.at - gone.at
    if away <= scene.stall_sec:
        raise NotAsExpected(f"away for {away:.1f} s only")
    states = await scene.states(since)
    if "replaced" not in states:
        raise NotAsExpected(f"never replaced, but {', '.join(sorted(states))}")
    changed = f"{before['engine_id']} while restarting for {away:.1f} s, then {after['engine_id']}"
    return f"{changed}, restarts {after['restarts']}; 200 all along"


async def _another(scene: Scene, before: dict[str, Any], *, within_sec: float) -> dict[str, Any]:
    """What /engine says once it names another process. Until then it must go on naming the one before.

    Raises:
        NotAsExpected: it names nobody meanwhile, or nobody else in time, or not the next one.
    """
    deadline = time.monotonic() + within_sec
    while (after := await scene.stage.eyes.engine()).get("engine_id") == before["engine_id"]:
        if time.monotonic() > deadline:
            scene.fail(f"/engine still names {before['engine_id']}")
        await asyncio.sleep(0.1)
    if not after:
        scene.fail("/engine named nobody while the new process loaded")
    if after["restarts"] != before["restarts"] + 1:
        raise NotAsExpected(f"restarts {before['restarts']} -> {after['restarts']}")
    return after

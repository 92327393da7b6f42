"""The demo's second act, step by step: an engine restarts in place, a router does not notice, and its guard does."""

from __future__ import annotations

import asyncio
import time

from enginewatch.lab.demo_pair import Pair
from enginewatch.lab.demo_scene import START_SEC, NotAsExpected, Scene, Step

_SOON_SEC = 30.0
"""A request that goes through takes a fraction of a second; a stuck one, 540 s."""
_STUCK_SEC = 1.5
_TICKS = 3


def pair_story() -> tuple[Step, ...]:
    """The steps, in their order."""
    return (
        Step("A P/D router boots under the guard", "both engines' identities known, requests go through", _boots),
        Step("Nothing changes", f"guard live exits 0, {_TICKS} times", _nothing_changes),
        Step(
            "Its prefill restarts in place",
            "same address, another identity, restarts 1; every /health 200, but no request goes through",
            _prefill_restarts,
        ),
        Step("The router's liveness probe", "guard live exits 1 and says why", _fires),
        Step("The router is started again", "guard live exits 0, requests go through", _again),
    )


async def _boots(scene: Scene) -> str:
    await scene.stage.second_act()
    pair = scene.stage.pair
    took = await _serves(scene)
    prefill, decode = (pair.snapshot(role).split("|")[-1] for role in ("prefill", "decode"))
    return f"prefill {prefill}, decode {decode}; a request took {took:.1f} s"


async def _nothing_changes(scene: Scene) -> str:
    lines = [await _kept(scene.stage.pair) for _ in range(_TICKS)]
    return f"exit 0: {lines[-1]}"


async def _prefill_restarts(scene: Scene) -> str:
    pair = scene.stage.pair
    before = await pair.prefill_engine()
    port = pair.prefill.port
    starts = pair.prefill.starts
    load = scene.poll_sec
    await asyncio.to_thread(pair.prefill.restart, load)
    probed = await pair.probe("live")
    if probed.code != 0 and pair.prefill.starts == starts:
        raise NotAsExpected(f"guard live exits {probed.code} while the prefill loads: {probed.line}")
    deadline = time.monotonic() + load + START_SEC
    while (after := await pair.prefill_engine()).get("engine_id") in (before["engine_id"], None):
        if time.monotonic() > deadline:
            raise NotAsExpected(f"/engine still names {after.get('engine_id', 'nobody')}")
        await asyncio.sleep(0.1)
    if pair.prefill.starts != starts + 1 or pair.prefill.port != port:
        raise NotAsExpected(f"{pair.prefill.starts - starts} starts, on port {pair.prefill.port} after {port}")
    restarts = before["restarts"], after["restarts"]
    if not scene.is_repeat and restarts != (0, 1):
        raise NotAsExpected(f"restarts {restarts[0]} -> {restarts[1]}")
    answered = await pair.request(_STUCK_SEC)
    if answered.status is not None:
        raise NotAsExpected(f"HTTP {answered.status} after {answered.took_sec:.1f} s, with a dead process pinned")
    healths = [await pair.health(url) for url in (pair.url, pair.prefill.url, pair.decode.url)]
    if healths != [200, 200, 200]:
        raise NotAsExpected(f"/health of router, prefill, decode: {healths}")
    changed = f"{before['engine_id']} -> {after['engine_id']}, restarts {after['restarts']}"
    return f"{changed}; every /health 200, no answer to a request in {_STUCK_SEC:g} s"


async def _fires(scene: Scene) -> str:
    pair = scene.stage.pair
    probed = await pair.probe("live")
    if probed.code != 1:
        raise NotAsExpected(f"guard live exits {probed.code}: {probed.line}")
    known = pair.snapshot("prefill").split("|")[-1]
    now = (await pair.prefill_engine()).get("engine_id", "nobody")
    missing = [what for what in ("prefill", "127.0.0.1", known, now) if what not in probed.line]
    if missing or known == now:
        raise NotAsExpected(f"exit 1, but the line does not name {', '.join(missing) or 'two'}: {probed.line}")
    return f"exit 1: {probed.line}"


async def _again(scene: Scene) -> str:
    pair = scene.stage.pair
    if (await pair.probe("live")).code != 1 and not scene.is_repeat:
        raise NotAsExpected("guard live did not ask for a restart")
    await pair.restart_container()
    took = await _serves(scene)
    line = await _kept(pair)
    return f"a request took {took:.1f} s; exit 0: {line}"


async def _serves(scene: Scene) -> float:
    """Wait until the router is ready, and send a request through it; the seconds that one took.

    Raises:
        NotAsExpected: it is not ready in time, or the request is not answered.
    """
    pair = scene.stage.pair
    probed = await pair.until_ready(START_SEC)
    if probed.code != 0:
        raise NotAsExpected(f"guard ready exits {probed.code}: {probed.line}")
    answered = await pair.request(_SOON_SEC)
    if answered.status != 200:
        said = "no answer" if answered.status is None else f"HTTP {answered.status}"
        raise NotAsExpected(f"{said} to a request after {answered.took_sec:.1f} s")
    return answered.took_sec


async def _kept(pair: Pair) -> str:
    """The line of a `guard live` that keeps the router.

    Raises:
        NotAsExpected: it does not.
    """
    probed = await pair.probe("live")
    if probed.code != 0:
        raise NotAsExpected(f"guard live exits {probed.code}: {probed.line}")
    return probed.line

"""The demo's second act: each of its steps fails when what it is to show does not happen."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from process_tree import assert_all_gone, descendants

from enginewatch.lab.demo_pair import Answered, Probed
from enginewatch.lab.demo_pair_story import pair_story
from enginewatch.lab.demo_scene import Result, Scene, play

KEPT = Probed(0, "keep: no drift among 2 engines")
READY = Probed(0, "ready")
FIRED = Probed(1, "restart the router: prefill 127.0.0.1 was pst-1.00 at boot and is pst-2.00 now (rule 2)")
THROUGH, STUCK = Answered(200, 0.1), Answered(None, 2.0)
Told = TypeVar("Told")
BEFORE, AFTER = {"engine_id": "pst-1.00", "restarts": 0}, {"engine_id": "pst-2.00", "restarts": 1}


def following(answers: list[Told]) -> Told:
    return answers.pop(0) if len(answers) > 1 else answers[0]


@dataclass
class Prefill:
    """A prefill engine that serves again at once."""

    starts: int = 1
    port: int = 8000
    url: str = "http://prefill"
    moves: bool = False

    def restart(self, load_sec: float) -> None:
        self.starts += 1
        self.port += self.moves


@dataclass
class PretendedPair:
    """What is seen of a pair and its router's container, one answer after the other; the last one stays."""

    live: list[Probed]
    ready: Probed = READY
    answers: list[Answered] = field(default_factory=lambda: [THROUGH])
    engines: list[dict[str, Any]] = field(default_factory=lambda: [BEFORE])
    healths: int = 200
    prefill: Prefill = field(default_factory=Prefill)
    decode: Any = field(default_factory=lambda: SimpleNamespace(url="http://decode"))
    url: str = "http://router"
    starts: int = 0

    def boot(self) -> None:
        self.starts += 1

    async def restart_container(self) -> None:
        self.boot()

    async def until_ready(self, within_sec: float) -> Probed:
        return self.ready

    async def probe(self, name: str) -> Probed:
        return following(self.live)

    async def request(self, within_sec: float) -> Answered:
        return following(self.answers)

    async def prefill_engine(self) -> dict[str, Any]:
        return following(self.engines)

    async def health(self, url: str) -> int:
        return self.healths

    def snapshot(self, role: str) -> str:
        return "127.0.0.1|0|2026-10-14T01:52:10.48Z|pst-1.00"


@dataclass
class PretendedScene:
    stage: Any
    poll_sec: float = 0.01
    is_repeat: bool = False

    async def stood_still(self, since: float) -> str:
        return ""


BOOTS, NOTHING, RESTARTS, FIRES, AGAIN = range(5)


async def played(number: int, pair: PretendedPair) -> Result:
    async def set_up() -> None:
        pair.boot()

    stage = SimpleNamespace(pair=pair, second_act=set_up)
    return await play(pair_story()[number], cast(Scene, PretendedScene(stage)))


def restarting(**changed: Any) -> PretendedPair:
    whole = PretendedPair(live=[KEPT], answers=[STUCK], engines=[BEFORE, BEFORE, AFTER])
    return replace(whole, **changed)


@pytest.mark.parametrize(
    ("number", "pair"),
    [
        (BOOTS, PretendedPair(live=[KEPT])),
        (NOTHING, PretendedPair(live=[KEPT])),
        (RESTARTS, restarting()),
        (FIRES, PretendedPair(live=[FIRED], engines=[AFTER])),
        (AGAIN, PretendedPair(live=[FIRED, KEPT])),
    ],
)
async def test_a_step_passes_when_it_is_as_it_should_be(number: int, pair: PretendedPair) -> None:
    result = await played(number, pair)
    assert result.passed, result.seen
    assert pair.starts == (number in (BOOTS, AGAIN))


@pytest.mark.parametrize(
    ("number", "pair", "seen"),
    [
        (BOOTS, PretendedPair(live=[KEPT], ready=Probed(1, "not ready: x")), "guard ready exits 1: not ready: x"),
        (BOOTS, PretendedPair(live=[KEPT], answers=[STUCK]), "no answer to a request"),
        (BOOTS, PretendedPair(live=[KEPT], answers=[Answered(502, 0.1)]), "HTTP 502 to a request"),
        (NOTHING, PretendedPair(live=[KEPT, KEPT, FIRED]), "guard live exits 1"),
        (RESTARTS, restarting(answers=[THROUGH]), "HTTP 200 after 0.1 s, with a dead process pinned"),
        (RESTARTS, restarting(answers=[Answered(500, 0.1)]), "HTTP 500 after 0.1 s, with a dead process pinned"),
        (RESTARTS, restarting(engines=[BEFORE, AFTER | {"restarts": 2}]), "restarts 0 -> 2"),
        (RESTARTS, restarting(prefill=Prefill(moves=True)), "1 starts, on port 8001 after 8000"),
        (RESTARTS, restarting(healths=503), "/health of router, prefill, decode: [503, 503, 503]"),
        (FIRES, PretendedPair(live=[KEPT], engines=[AFTER]), "guard live exits 0: keep"),
        (FIRES, PretendedPair(live=[Probed(1, "restart the router")], engines=[AFTER]), "does not name prefill"),
        (FIRES, PretendedPair(live=[FIRED], engines=[BEFORE]), "does not name two"),
        (AGAIN, PretendedPair(live=[KEPT]), "guard live did not ask for a restart"),
        (AGAIN, PretendedPair(live=[FIRED]), "guard live exits 1"),
        (AGAIN, PretendedPair(live=[FIRED, KEPT], answers=[STUCK]), "no answer to a request"),
    ],
)
async def test_a_step_fails_when_it_is_not_and_says_what_was_seen(number: int, pair: PretendedPair, seen: str) -> None:
    result = await played(number, pair)
    assert not result.passed
    assert seen in result.seen


async def test_a_guard_that_fires_while_the_engine_still_loads_fails_the_step() -> None:
    class NeverBack(Prefill):
        def restart(self, load_sec: float) -> None:
            pass

    result = await played(RESTARTS, restarting(live=[FIRED], prefill=NeverBack()))
    assert not result.passed
    assert "guard live exits 1 while the prefill loads" in result.seen


KILLED_IN_THE_SECOND_ACT = """
import asyncio, sys
from pathlib import Path
from enginewatch.lab.demo_pair import Pair

async def main():
    pair = Pair("simulated-model", Path(sys.argv[1]), 0.5)
    await pair.start()
    pair.boot()
    await pair.until_ready(60)
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_nothing_of_the_second_act_outlives_a_demo_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_IN_THE_SECOND_ACT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            started = descendants(process.pid)
        finally:
            process.kill()
    assert len(started) >= 9, "two engines of three processes each, two sidecars, a router"
    assert_all_gone(started)

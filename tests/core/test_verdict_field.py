"""Public reports of hangs and of false kills: what a watcher saw there, and what it must say.

The ids are the reports (repository#number). Each scene is the picture that the report describes, on an engine that
froze, or seemed to, at 100 s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from scripted_sglang import ScriptedSGLang
from virtual_shell import ScriptedCore, ScriptedEngine, VirtualShell

from enginewatch.core.events import Flags, Outcome
from enginewatch.core.settings import Settings
from enginewatch.engines.profile import Role

USUAL = Settings(warmup_sec=0)
CANARY_OFF = Settings(warmup_sec=0, active_probe_enabled=False)
DEFERRED = 'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"}'


@dataclass(frozen=True)
class Scene:
    """An engine, how it is watched, and until when."""

    engine: ScriptedEngine
    until: float = 400.0
    settings: Settings = USUAL
    role: Role = "agg"

    def play(self) -> VirtualShell:
        return VirtualShell(self.engine, self.settings, kind=self.engine.kind, role=self.role).run(self.until)


def freeze(*, running: float = 0.0, waiting: float = 0.0, sglang: bool = False) -> ScriptedEngine:
    """From 100 s on everything stands still, with the gauges at these values."""

    def change(engine: ScriptedEngine) -> None:
        engine.hang()
        for core in engine.cores.values():
            core.running, core.waiting = running, waiting

    return (ScriptedSGLang() if sglang else ScriptedEngine()).busy().at(100, change)


def long_step(seconds: float, *, sglang: bool = False) -> ScriptedEngine:
    """One step of this length, during which nothing moves and no canary is answered."""
    engine = ScriptedSGLang() if sglang else ScriptedEngine()
    return engine.busy().at(100, ScriptedEngine.hang).at(100 + seconds, ScriptedEngine.resume)


HUNG: dict[str, Callable[[], Scene]] = {
    "vllm#39863 waiting, none running": lambda: Scene(freeze(waiting=3)),
    "vllm#39863 the same, canaries off": lambda: Scene(freeze(waiting=3), settings=CANARY_OFF),
    "vllm#2731 35 running, 115 pending": lambda: Scene(freeze(running=35, waiting=115)),
    "vllm#2731 the same, canaries off": lambda: Scene(freeze(running=35, waiting=115), settings=CANARY_OFF),
    "vllm#47958 input thread stuck, nothing running or waiting": lambda: Scene(freeze()),
    "vllm#43423 tensor-parallel deadlock": lambda: Scene(freeze(running=8)),
    "vllm#27313 broadcast block for ever": lambda: Scene(freeze(running=2)),
    "vllm#11996 a worker died, /health 200": lambda: Scene(freeze()),
    "Fastllm-proxy#19 2 running, 0 tokens/s for 85 min": lambda: Scene(freeze(running=2), until=5100),
    "gonka#1421 deadlock of 5 min": lambda: Scene(long_step(300)),
    "vllm#17965 flat for 300 s before the engine's own watchdog": lambda: Scene(long_step(299)),
    "sglang#10856 detokenizer heartbeat old": lambda: Scene(freeze(sglang=True)),
    "sglang#6624 scheduler killed, health 200 for an hour": lambda: Scene(freeze(running=3, sglang=True), until=3700),
    "sglang#3752 before its own watchdog": lambda: Scene(freeze(running=3, sglang=True)),
    "TensorRT-LLM#4441 no legs, health 200": lambda: Scene(ScriptedEngine().fail("malformed").at(100, _hang)),
    "home-ops#13342 all threads asleep, 96 % utilisation": lambda: Scene(freeze(running=1), until=4300),
}


def _hang(engine: ScriptedEngine) -> None:
    engine.hang()


@pytest.mark.parametrize("report", list(HUNG))
def test_it_was_hung(report: str) -> None:
    shell = HUNG[report]().play()
    assert shell.acted(), shell.states
    assert shell.acted()[0] >= 100 + 30 - 5


def _sparkring() -> ScriptedEngine:
    engine = ScriptedEngine().busy().at(100, ScriptedEngine.prefill).at(100, lambda e: e.answer(Outcome.TIMEOUT))
    return engine.at(330, lambda e: e.answer(None)).at(330, ScriptedEngine.busy)


def _slow_front_end() -> ScriptedEngine:
    """Every request to the front end times out while the engine works on: metrics, canaries, all of it."""
    engine = ScriptedEngine().busy()
    for second in range(100, 1000, 60):
        engine.at(second, lambda e: e.fail("timeout").answer(Outcome.TIMEOUT))
        engine.at(second + 40, lambda e: e.fail(None).answer(None))
    return engine


def _stale_gauge() -> ScriptedEngine:
    engine = ScriptedSGLang().busy()
    engine.at(100, lambda e: setattr(e.idle().cores["0"], "running", 24.0))
    return engine.at(130, ScriptedEngine.idle)


def _weight_transfer() -> ScriptedEngine:
    engine = ScriptedEngine()
    engine.flags = Flags.CLEAR
    engine.busy().at(100, lambda e: setattr(e.hang(), "flags", Flags.PAUSED))
    return engine.at(300, lambda e: setattr(e.resume(), "flags", Flags.CLEAR))


def _api_key() -> ScriptedEngine:
    return ScriptedEngine().at(100, lambda e: e.answer(Outcome.MISCONFIGURED))


def _rescale() -> ScriptedEngine:
    """While an elastic rescale runs, a middleware answers 503 to every path; then the counters begin at zero."""
    engine = ScriptedEngine().busy().at(100, lambda e: e.fail("http_503").answer(Outcome.ERROR_ANSWER))
    return engine.at(340, lambda e: setattr(e.fail(None).answer(None).cores["0"], "tokens", 0.0))


def _saturated() -> ScriptedEngine:
    return ScriptedEngine().busy().at(100, lambda e: e.answer(Outcome.SATURATED))


def _engine_core_killed() -> ScriptedEngine:
    """SIGKILL of vLLM's core: /metrics 200 and flat for some seconds, then nobody listens, then a new process."""
    engine = ScriptedEngine().busy().at(100, ScriptedEngine.hang).at(105, lambda e: e.fail("refused"))
    return engine.at(1900, ScriptedEngine.restart)


def _sleep_and_wake() -> ScriptedEngine:
    awake = 'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"}'
    engine = ScriptedEngine().busy()
    engine.extra[awake] = 1.0
    engine.at(100, lambda e: e.hang().extra.update({awake: 0.0}))
    return engine.at(900, lambda e: e.resume().extra.update({awake: 1.0}))


HEALTHY: dict[str, Callable[[], Scene]] = {
    "sparkring#231 989k-token prefill": lambda: Scene(_sparkring()),
    "dynamo#14735 compile of 28 s on the first big prefill": lambda: Scene(long_step(28)),
    "dynamo#14735 compile of 70 s inside warm-up": lambda: Scene(long_step(70), settings=Settings()),
    "rllm#926 first request takes 108 s, inside warm-up": lambda: Scene(long_step(108), settings=Settings()),
    "vllm#38157 health takes 40 s under load": lambda: Scene(_slow_front_end(), until=1000),
    "gonka#1421 counters move, canaries time out": lambda: Scene(
        ScriptedEngine().busy().answer(Outcome.TIMEOUT), until=3600
    ),
    "kserve#5062 killed while downloading": lambda: Scene(ScriptedEngine().hang().fail("refused"), until=5000),
    "gpustack#3888 the broadcast line while loading": lambda: Scene(ScriptedEngine().hang().fail("timeout")),
    "sglang#26495 24 running for 30 s after the last request": lambda: Scene(_stale_gauge()),
    "sglang#26495 the same, canaries off": lambda: Scene(_stale_gauge(), settings=CANARY_OFF),
    "dynamo#14703 weight transfer": lambda: Scene(_weight_transfer()),
    "sglang#22511 canaries fail under load": lambda: Scene(ScriptedSGLang().busy().answer(Outcome.TIMEOUT)),
    "hang-watcher 129k-token chunk of 14.7 s": lambda: Scene(long_step(14.7, sglang=True)),
    "hang-watcher 401 on the canary": lambda: Scene(_api_key(), until=3600),
    "gonka#1421 soak at max_num_seqs": lambda: Scene(_saturated(), until=3600),
    "vllm elastic rescale": lambda: Scene(_rescale(), until=600),
    "vLLM core killed, reload of half an hour": lambda: Scene(_engine_core_killed(), until=2500),
    "vllm sleep for a quarter of an hour": lambda: Scene(_sleep_and_wake(), until=1200),
    "dynamo#8521 a canary that the role rejects": lambda: Scene(ScriptedEngine().answer(Outcome.ERROR_ANSWER)),
    "dynamo#8467 a stream of 60 s": lambda: Scene(ScriptedEngine().busy().answer(Outcome.FROZEN)),
}


@pytest.mark.parametrize("report", list(HEALTHY))
def test_it_was_not_hung(report: str) -> None:
    shell = HEALTHY[report]().play()
    assert shell.acted() == []


def _smg() -> Scene:
    """The prefill was restarted; the router keeps its old engine_id: requests hang for 480 s, both sides answer 200."""
    engine = ScriptedEngine().busy()
    engine.extra[DEFERRED] = 0.0

    def stuck(engine: ScriptedEngine) -> None:
        engine.idle()
        engine.extra[DEFERRED] = engine.cores["0"].waiting = 6.0

    return Scene(engine.at(100, stuck), role="decode")


def _bootstrapping() -> Scene:
    engine = ScriptedSGLang()
    engine.busy()
    engine.queues["num_prefill_bootstrap_queue_reqs"] = 0.0
    engine.at(100, ScriptedEngine.idle).at(100, lambda e: e.queues.update({"num_prefill_bootstrap_queue_reqs": 9.0}))
    return Scene(engine, role="prefill")


@pytest.mark.parametrize(
    "scene", [_smg, _bootstrapping], ids=["smg#2491 stale engine_id", "sglang#10110 bootstrapping for 300 s"]
)
def test_it_was_the_partner(scene: Callable[[], Scene]) -> None:
    shell = scene().play()
    assert shell.acted() == []
    assert shell.state == "peer-stall"


def test_stuck_at_starting_to_load_model_is_a_hang_past_the_budget() -> None:
    """vllm#20891: 3.5 h."""
    shell = VirtualShell(ScriptedEngine().hang().fail("refused")).run(3.5 * 3600)
    assert 5400 <= shell.acted()[0] <= 5406


def test_a_restart_in_place_of_an_idle_engine_is_an_event_not_health() -> None:
    """Smg PR#2376: the observed instance id changed."""
    engine = ScriptedEngine().at(100, ScriptedEngine.restart)
    engine.cores["0"] = ScriptedCore(tokens=0.0)
    shell = VirtualShell(engine).run(200)
    assert shell.watch.restarts == 1
    assert shell.acted() == []


def test_flapping_pages_never_bring_warm_up_back() -> None:
    engine = ScriptedEngine().busy()
    for second in range(540, 7200, 540):
        engine.at(second, lambda e: e.fail("reset")).at(second + 5, lambda e: e.fail(None))
    engine.at(7000, ScriptedEngine.hang)
    assert VirtualShell(engine, Settings()).run(7100).acted()

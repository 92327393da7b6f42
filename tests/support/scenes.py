"""One way into every public state, for tests that claim something of all of them."""

from __future__ import annotations

from collections.abc import Callable

from scripted_sglang import ScriptedSGLang
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Flags, Outcome
from enginewatch.core.settings import Settings
from enginewatch.engines.profile import Role

USUAL = Settings(warmup_sec=0)
CANARY_OFF = Settings(warmup_sec=0, active_probe_enabled=False)


def run(engine: ScriptedEngine, until: float, settings: Settings = USUAL, *, role: Role = "agg") -> VirtualShell:
    """Watch an engine until then."""
    return VirtualShell(engine, settings, kind=engine.kind, role=role).run(until)


def _gap() -> VirtualShell:
    shell = run(ScriptedEngine().busy(), 102)
    shell.freeze(100)
    return shell.run(203)


def _paused() -> VirtualShell:
    engine = ScriptedEngine()
    engine.flags = Flags.PAUSED
    return run(engine, 30)


def _log() -> VirtualShell:
    return run(ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(68, lambda e: setattr(e, "log_hits", 1)), 90)


def _peer() -> VirtualShell:
    engine = ScriptedSGLang()
    engine.queues["num_decode_transfer_queue_reqs"] = 2.0
    return run(engine, 100, role="decode")


def _regress() -> VirtualShell:
    return run(ScriptedEngine().busy().at(62, lambda e: setattr(e.cores["0"], "tokens", 0.0)), 66)


def _grown() -> VirtualShell:
    engine = ScriptedEngine().busy().at(62, ScriptedEngine.hang).at(79.5, ScriptedEngine.resume)
    return run(engine, 82, Settings(warmup_sec=0, active_probe_timeout_sec=4))


SCENES: dict[str, Callable[[], VirtualShell]] = {
    "startup": lambda: run(ScriptedEngine().fail("refused"), 20),
    "startup-hang": lambda: run(ScriptedEngine().fail("refused"), 100, Settings(startup_budget_sec=60)),
    "restarting": lambda: run(ScriptedEngine().busy().at(62, lambda e: e.fail("refused")), 70),
    "unreach-grace": lambda: run(ScriptedEngine().busy().at(62, lambda e: e.fail("timeout")), 80),
    "unreach-hang": lambda: run(ScriptedEngine().busy().at(62, lambda e: e.hang().fail("reset")), 180),
    "observer-gap": _gap,
    "replaced": lambda: run(ScriptedEngine().busy().at(62, ScriptedEngine.restart), 66),
    "paused": _paused,
    "canary-hang": lambda: run(ScriptedEngine().hang().fail("http_404"), 100),
    "no-legs": lambda: run(ScriptedEngine().fail("malformed"), 20),
    "baseline": lambda: run(ScriptedEngine(), 1),
    "regress": _regress,
    "probe-fail-but-growing": _grown,
    "growing": lambda: run(ScriptedEngine().busy(), 20),
    "stall-hang-log": _log,
    "kv-growing": lambda: run(ScriptedEngine().prefill(), 20),
    "stall-hang": lambda: run(ScriptedEngine().busy().at(62, ScriptedEngine.hang), 120),
    "probe-fail-grace": lambda: run(ScriptedEngine().busy().at(62, ScriptedEngine.hang), 82),
    "saturated": lambda: run(ScriptedEngine().answer(Outcome.SATURATED), 20),
    "misconfigured": lambda: run(ScriptedEngine().answer(Outcome.MISCONFIGURED), 20),
    "stall-active-ok": lambda: run(ScriptedEngine(), 12),
    "idle": lambda: run(ScriptedEngine(), 60, CANARY_OFF),
    "freeze-grace": lambda: run(ScriptedEngine(), 20, CANARY_OFF),
    "peer-stall": _peer,
}
"""For each public state one way into it."""

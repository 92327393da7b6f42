"""Two engines behind one address: a configuration error that must neither hide a hang for ever nor kill."""

from __future__ import annotations

from virtual_shell import ScriptedEngine, VirtualShell


def alternate(engine: ScriptedEngine, first: int, last: int, *, back: bool = True) -> ScriptedEngine:
    """From `first` on, every other second another process answers (with `back` the old one in between)."""

    def other(engine: ScriptedEngine) -> None:
        engine.start_time = 2000.0

    def this(engine: ScriptedEngine) -> None:
        engine.start_time = 1000.0

    for second in range(first, last, 10):
        engine.at(second + 2, other)
        if back:
            engine.at(second + 7, this)
    return engine


def test_a_process_that_comes_back_is_no_replacement() -> None:
    shell = VirtualShell(alternate(ScriptedEngine().busy(), 30, 300)).run(300)
    assert shell.watch.restarts == 1
    assert len([log for log in shell.logs if "two engine processes" in log.event]) == 1
    assert shell.acted() == []


def test_a_hang_behind_it_is_declared() -> None:
    engine = alternate(ScriptedEngine().busy(), 30, 400).at(200, ScriptedEngine.hang)
    assert VirtualShell(engine).run(300).state == "stall-hang"


def test_a_process_that_alone_goes_on_answering_is_the_engine_again() -> None:
    engine = ScriptedEngine().busy()
    engine.at(32, lambda e: setattr(e, "start_time", 2000.0)).at(62, lambda e: setattr(e, "start_time", 1000.0))
    shell = VirtualShell(engine).run(120)
    identity = shell.watch.identity
    assert identity is not None
    assert identity.engine_id == "pst-1000.00"
    assert shell.state == "growing"
    assert shell.run(121).watch.restarts == 2


def test_counters_that_go_to_and_fro_between_two_values_are_no_life() -> None:
    engine = ScriptedEngine().busy().at(60, ScriptedEngine.hang)

    def swap(engine: ScriptedEngine) -> None:
        core = engine.cores["0"]
        core.tokens = 50.0 if core.tokens > 60 else 70.0

    for second in range(62, 400, 5):
        engine.at(second, swap)
    shell = VirtualShell(engine).run(150)
    assert shell.state == "stall-hang"


def test_counters_that_fall_and_then_rise_to_ever_new_values_are() -> None:
    engine = ScriptedEngine().busy().at(60, lambda e: setattr(e.cores["0"], "tokens", 0.0))
    shell = VirtualShell(engine).run(300)
    assert "regress" in shell.states
    assert shell.state == "growing"
    assert shell.acted() == []

"""What is done to an engine while all programs watch it. Each function hands back a sample per program and round."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import probe_load
from beside import sample as names
from beside import told
from beside.engines import Engines, decoding
from beside.load import Page, asking
from beside.program import OUR_NAME, Program, Running, all_running
from beside.sample import Sample
from beside.setting import Setting
from engine_server import EngineServer

PER_SEC = 200
KUBELET_SEC = 10.0
HANGING_REQUESTS = 3
CONTROL = "control: a constant"
FROZEN_PAGE = "frozen, loses a series every other time"
LARGE_PAGE = "moving, padded to 8 MiB"
_MODEL = "measured"


@dataclass(frozen=True)
class Stage:
    """What every scenario needs."""

    setting: Setting
    programs: Sequence[Program]
    engines: Engines
    rounds: int
    say: Callable[[str], None]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share is at or below."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# --- an engine that stops -------------------------------------------------------------------------------------------


def frozen_under_load(stage: Stage) -> list[Sample]:
    """SIGSTOP of the only core while it decodes."""
    return _freezes(stage, names.FREEZE_LOAD, cores=1)


def frozen_while_idle(stage: Stage) -> list[Sample]:
    """SIGSTOP of the only core while nothing runs; requests come afterwards."""
    return _freezes(stage, names.FREEZE_IDLE, cores=1)


def one_core_of_two(stage: Stage) -> list[Sample]:
    """SIGSTOP of one of two data-parallel cores; both decode, and the other goes on."""
    return _freezes(stage, names.FREEZE_ONE_CORE, cores=2)


def _freezes(stage: Stage, scenario: str, *, cores: int) -> list[Sample]:
    setting, found = stage.setting, []
    limit_sec = setting.blind_limit_sec if cores > 1 else setting.freeze_limit_sec
    with (
        stage.engines.engine(cores) as engine,
        all_running(stage.programs, engine.url, setting.config(engine.model)) as running,
    ):
        for number in range(stage.rounds):
            core = number % cores
            with contextlib.ExitStack() as stack:
                if scenario == names.FREEZE_IDLE:
                    Page(engine.url).wait_idle()
                else:
                    stack.enter_context(decoding(engine, cores=cores))
                # Where between two polls the freeze falls decides how long it takes; rounds spread over one poll.
                time.sleep(setting.settle_sec + setting.poll_sec * number / stage.rounds)
                waited = [each.waited_sec() for each in running]
                frozen_at = time.time()
                engine.freeze(core)
                try:
                    if scenario == names.FREEZE_IDLE:
                        many, some = HANGING_REQUESTS, 8
                        stack.enter_context(asking(engine.url, engine.model, many, max_tokens=some, forever=False))
                    _wait(running, 503, frozen_at, limit_sec)
                finally:
                    engine.thaw(core)
                    thawed_at = time.time()
                waited = [each.waited_sec() - before for each, before in zip(running, waited, strict=True)]
                _wait(
                    [each for each in running if each.first(503, frozen_at)], 200, thawed_at, setting.recovery_limit_sec
                )
            for each, waited_sec in zip(running, waited, strict=True):
                found.append(_freeze_sample(stage, scenario, number, each, frozen_at, thawed_at, waited_sec))
            stage.say(f"{scenario}, round {number + 1}: {_told(found[-len(running) :])}")
            for line in told.timelines(found[-len(running) :]):
                stage.say(line)
    return found


def _freeze_sample(
    stage: Stage, scenario: str, number: int, program: Running, frozen_at: float, thawed_at: float, waited_sec: float
) -> Sample:
    before = [look for look in program.looks if look.at < frozen_at]
    detected = next(
        (look.at - frozen_at for look in program.looks if frozen_at <= look.at < thawed_at and look.status == 503), None
    )
    figures = {
        names.DETECTED: detected,
        # Who saw nothing has nothing to forgive.
        **({names.RECOVERED: program.first(200, thawed_at)} if detected is not None else {}),
        names.WAITED: waited_sec,
    }
    missed = program.name == OUR_NAME and (detected is None or detected > stage.setting.bound_sec)
    return Sample(
        scenario,
        program.name,
        number,
        figures,
        early=bool(before) and before[-1].status == 503,
        story=program.story(frozen_at),
        history=_history(program) if missed else [],
    )


# --- served pages ---------------------------------------------------------------------------------------------------


def loses_a_series(stage: Stage) -> list[Sample]:
    """A page of a vLLM that was captured while it hung, without one series every other time; no canary is answered."""

    def stop(engine: EngineServer) -> None:
        engine.canary("never")
        engine.serve(FROZEN_PAGE)

    return _served(stage, names.LOSES_A_SERIES, "moving", "ok", stop, wait_for_503=True)


def unauthorized(stage: Stage) -> list[Sample]:
    """A page of an idle vLLM, whose canaries are all answered with 401: an API key is missing, nothing hangs."""
    return _served(stage, names.UNAUTHORIZED, "idle", "401", lambda engine: None, wait_for_503=False)


def _served(
    stage: Stage,
    scenario: str,
    page: str,
    canary: str,
    change: Callable[[EngineServer], None],
    *,
    wait_for_503: bool,
) -> list[Sample]:
    """Each program has a served engine of its own, because what it serves depends on how often it was asked."""
    found = []
    for number in range(stage.rounds):
        with contextlib.ExitStack() as stack:
            running: list[Running] = []
            engines: list[EngineServer] = []
            for program in stage.programs:
                engine = stack.enter_context(EngineServer())
                engine.serve(page)
                engine.canary(canary)
                engines.append(engine)
                running.append(stack.enter_context(Running(program, engine.url, stage.setting.config(_MODEL))))
                running[-1].look()
            if wait_for_503:
                time.sleep(stage.setting.settle_sec + stage.setting.poll_sec * number / stage.rounds)
                changed_at = time.time()
                for engine in engines:
                    change(engine)
                _wait(running, 503, changed_at, stage.setting.blind_limit_sec)
            else:
                time.sleep(stage.setting.blind_limit_sec)
            for each in running:
                # Where it is so from the beginning, the time runs from each program's own start.
                began = changed_at if wait_for_503 else each.answered_at
                detected = each.first(503, began)
                wrong = (detected is None) is wait_for_503
                before = [look for look in each.looks if look.at < began]
                found.append(
                    Sample(
                        scenario,
                        each.name,
                        number,
                        {names.DETECTED: detected},
                        early=bool(before) and before[-1].status == 503,
                        story=each.story(began),
                        history=_history(each) if wrong and each.name == OUR_NAME else [],
                    )
                )
        stage.say(f"{scenario}, round {number + 1}: {_told(found[-len(stage.programs) :])}")
    return found


# --- what they cost -------------------------------------------------------------------------------------------------


def cost(stage: Stage) -> list[Sample]:
    """Memory and CPU time beside an engine at work and an idle one, asked as often as a kubelet asks."""
    setting, found = stage.setting, []
    with (
        stage.engines.engine(1) as engine,
        all_running(stage.programs, engine.url, setting.config(engine.model), look=False) as running,
    ):
        for number in range(stage.rounds):
            figures: dict[str, dict[str, float | None]] = {each.name: {} for each in running}
            for state in ("at work", "idle"):
                with decoding(engine) if state == "at work" else contextlib.nullcontext():
                    if state == "idle":
                        Page(engine.url).wait_idle()
                    time.sleep(setting.settle_sec)
                    for name, percent in _cpu_percent(running, setting.window_sec).items():
                        figures[name][f"CPU, engine {state}, % of a core"] = percent
            for each in running:
                now, highest = each.memory_mib()
                figures[each.name] |= {"resident, MiB": now, "resident at its highest, MiB": highest}
                found.append(Sample(names.COST, each.name, number, figures[each.name]))
            stage.say(f"{names.COST}, round {number + 1}: {_told(found[-len(running) :])}")
    return found


def _cpu_percent(running: Sequence[Running], seconds: float) -> dict[str, float]:
    before = [(each.cpu_sec(), time.perf_counter()) for each in running]
    left = seconds
    while left > 0:
        time.sleep(min(left, KUBELET_SEC))
        left -= KUBELET_SEC
        if left > 0:
            for each in running:
                with contextlib.suppress(OSError):
                    each.get("/healthz")
    return {
        each.name: 100 * (each.cpu_sec() - cpu) / (time.perf_counter() - at)
        for each, (cpu, at) in zip(running, before, strict=True)
    }


def latency(stage: Stage) -> list[Sample]:
    """/healthz at 200 requests a second beside an idle engine, one program after the other."""
    setting, found = stage.setting, []
    with (
        EngineServer() as constant,
        stage.engines.engine(1) as engine,
        all_running(stage.programs, engine.url, setting.config(engine.model), look=False) as running,
    ):
        Page(engine.url).wait_idle()
        time.sleep(setting.settle_sec)
        for number in range(stage.rounds):
            for name, port in [(CONTROL, constant.port), *((each.name, each.port) for each in running)]:
                took, problem = _asked(port, setting.load_sec)
                found.append(Sample(names.LATENCY, name, number, took, story=problem))
            stage.say(f"{names.LATENCY}, round {number + 1}: {_told(found[-len(running) - 1 :])}")
    return found


def _asked(port: int, seconds: float) -> tuple[dict[str, float | None], list[str]]:
    """Figures, and why there are none: a program that is gone is no reason to measure no other."""
    try:
        took = probe_load.result(probe_load.start(port, "/healthz", PER_SEC, seconds))
    except RuntimeError as error:
        return {}, [str(error)]
    return {"p50, ms": percentile(took, 0.5), "p99, ms": percentile(took, 0.99)}, []


def large_page(stage: Stage) -> list[Sample]:
    """A live page that moves, filled up to 8 MiB with foreign series and read once a second; one program at a time.

    CPU time per poll is taken while nobody asks, /healthz while the page is read as often.
    """
    found = []
    setting = replace(stage.setting, poll_sec=1)
    for number in range(stage.rounds):
        for program in stage.programs:
            with EngineServer() as engine:
                engine.serve(LARGE_PAGE)
                with Running(program, engine.url, setting.config(_MODEL)) as running:
                    time.sleep(setting.settle_sec)
                    polls, cpu = engine.scrapes(), running.cpu_sec()
                    time.sleep(setting.page_sec)
                    polls, cpu = engine.scrapes() - polls, running.cpu_sec() - cpu
                    took, problem = _asked(running.port, setting.load_sec)
                    figures: dict[str, float | None] = {
                        # A program that does not read the page has no such figure, whatever it does instead.
                        **({"CPU per poll, ms": 1000 * cpu / polls} if polls else {}),
                        **{f"/healthz {name}": value for name, value in took.items()},
                        "resident at its highest, MiB": running.memory_mib()[1],
                    }
                    found.append(Sample(names.LARGE_PAGE, program.name, number, figures, story=problem))
        stage.say(f"{names.LARGE_PAGE}, round {number + 1}: {_told(found[-len(stage.programs) :])}")
    return found


# --- details --------------------------------------------------------------------------------------------------------

RUN: dict[str, Callable[[Stage], list[Sample]]] = {
    names.FREEZE_LOAD: frozen_under_load,
    names.FREEZE_IDLE: frozen_while_idle,
    names.COST: cost,
    names.LATENCY: latency,
    names.FREEZE_ONE_CORE: one_core_of_two,
    names.LOSES_A_SERIES: loses_a_series,
    names.UNAUTHORIZED: unauthorized,
    names.LARGE_PAGE: large_page,
}


def _wait(running: Sequence[Running], status: int, moment: float, limit_sec: float) -> None:
    """Returns when all have had this status since a moment, or when the time is up."""
    while time.time() - moment < limit_sec:
        if all(each.first(status, moment) is not None for each in running):
            return
        time.sleep(0.05)


def _history(program: Running) -> list[str]:
    with contextlib.suppress(OSError):
        return program.get("/history", 30)[1].splitlines()
    return []


def _told(samples: Sequence[Sample]) -> str:
    def figures(sample: Sample) -> Iterator[str]:
        for name, value in sample.figures.items():
            yield f"{name.removesuffix(', s')} {'never' if value is None else f'{value:.3g}'}"

    return "; ".join(f"{sample.program}: {', '.join(figures(sample))}" for sample in samples)

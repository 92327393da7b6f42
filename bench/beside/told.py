"""What is told of a comparison: tables, bounds, who was right, and whether the controls did what controls must."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from beside import sample as names
from beside.program import OUR_NAME
from beside.sample import Sample
from beside.setting import Setting
from report import Figure, Table

HEALTH_ENDPOINT = "health-endpoint"
SUMMING = "summing"
_NEVER = math.inf

WHERE = {
    names.FREEZE_LOAD: "SIGSTOP of the only engine core while it decodes",
    names.FREEZE_IDLE: "SIGSTOP of the only engine core while nothing runs, then three requests",
    names.COST: "memory and CPU time beside an engine at work and an idle one, /healthz asked every 10 s",
    names.LATENCY: "/healthz at 200 requests a second over one connection, the engine idle",
    names.FREEZE_ONE_CORE: "data parallel 2: SIGSTOP of one engine core, both decode, the other goes on",
    names.LOSES_A_SERIES: (
        "served pages: a live vLLM's, frozen; the counter of generated tokens is missing every other time, no canary "
        "is answered"
    ),
    names.UNAUTHORIZED: "served pages: an idle vLLM's, every canary answered with 401; nothing hangs, so 503 is wrong",
    names.LARGE_PAGE: "served pages: a live vLLM's that moves, filled up to 8 MiB with foreign series, poll 1 s",
}
HANGS = (names.FREEZE_LOAD, names.FREEZE_IDLE, names.FREEZE_ONE_CORE, names.LOSES_A_SERIES)


def programs_of(samples: Iterable[Sample]) -> list[str]:
    """Their names, in the order in which they came."""
    return list(dict.fromkeys(sample.program for sample in samples))


def values(samples: Iterable[Sample], scenario: str, program: str, figure: str) -> list[float]:
    """One figure of all rounds that have it; what never happened is infinite."""
    return [
        _NEVER if (value := sample.figures[figure]) is None else value
        for sample in samples
        if (sample.scenario, sample.program) == (scenario, program) and figure in sample.figures
    ]


def tables(samples: Sequence[Sample], where: str) -> list[Table]:
    """One per scenario, and one that says who was right."""
    found = []
    scenarios = [name for name in names.SCENARIOS if any(sample.scenario == name for sample in samples)]
    for scenario in scenarios:
        of_it = [sample for sample in samples if sample.scenario == scenario]
        columns = ("what", "program", "rounds", "min", "median", "max", "times ours")
        title = WHERE[scenario] if scenario in names.SERVED else f"{WHERE[scenario]}; {where}"
        found.append(Table(f"{scenario[0].upper()}{scenario[1:]}: {title}", columns, list(_rows(of_it, scenario))))
    judged = [name for name in scenarios if name in (*HANGS, names.UNAUTHORIZED)]
    if judged:
        programs = programs_of(sample for sample in samples if sample.scenario in judged)
        rows = [(scenario, *(_right(samples, scenario, program) for program in programs)) for scenario in judged]
        found.append(Table("Rounds in which the 503 was right", ("scenario", *programs), rows))
    return found


def _rows(samples: Sequence[Sample], scenario: str) -> Iterable[tuple[str, ...]]:
    figures = list(dict.fromkeys(name for sample in samples for name in sample.figures))
    for figure in figures:
        ours = values(samples, scenario, OUR_NAME, figure)
        for program in programs_of(samples):
            found = values(samples, scenario, program, figure)
            if not found:
                continue
            middle = statistics.median(found)
            yield (
                figure,
                program,
                str(len(found)),
                *(_cell(value) for value in (min(found), middle, max(found))),
                "" if program == OUR_NAME or not ours else _ratio(middle, statistics.median(ours)),
            )


def _cell(value: float) -> str:
    if value == _NEVER:
        return "never"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _ratio(value: float, ours: float) -> str:
    if math.isinf(value) or math.isinf(ours) or ours <= 0:
        return ""
    return f"{value / ours:.2f}"


def is_right(sample: Sample) -> bool:
    """Whether a program said what was so: 503 in time and not before a hang, and never without one."""
    hung = sample.figures[names.DETECTED] is not None
    if sample.scenario == names.UNAUTHORIZED:
        return not hung and not sample.early
    return hung and not sample.early


def _right(samples: Iterable[Sample], scenario: str, program: str) -> str:
    of_it = [sample for sample in samples if (sample.scenario, sample.program) == (scenario, program)]
    return f"{sum(map(is_right, of_it))} of {len(of_it)}" if of_it else ""


def figures(samples: Sequence[Sample], setting: Setting) -> list[Figure]:
    """What ours is held to."""
    found = []
    for scenario in HANGS:
        detected = values(samples, scenario, OUR_NAME, names.DETECTED)
        # A page that comes and goes is no reason to be later, but no promise was made of it.
        if detected and scenario != names.LOSES_A_SERIES:
            found.append(Figure(f"{scenario}: to 503, latest", max(detected), setting.bound_sec, "s"))
        recovered = values(samples, scenario, OUR_NAME, names.RECOVERED)
        if recovered:
            found.append(Figure(f"{scenario}: SIGCONT to 200, latest", max(recovered), setting.recovery_bound_sec, "s"))
    for scenario in (*HANGS, names.UNAUTHORIZED):
        of_it = [sample for sample in samples if (sample.scenario, sample.program) == (scenario, OUR_NAME)]
        if of_it:
            wrong = sum(not is_right(sample) for sample in of_it)
            found.append(Figure(f"{scenario}: rounds in which the 503 was wrong", wrong, 0, "rounds"))
    return found


def broken_controls(samples: Iterable[Sample]) -> list[str]:
    """What a control did that a control must not do; then the comparison proves nothing.

    A stopped core leaves the engine's own /health as it was, and 401 is answered on other paths only. A sum over two
    cores moves as long as one does.
    """
    found = []
    for sample in samples:
        detected = sample.figures.get(names.DETECTED)
        where = f"{sample.scenario}, round {sample.round + 1}"
        if sample.program == HEALTH_ENDPOINT and names.DETECTED in sample.figures and (detected is not None):
            found.append(
                f"{where}: {HEALTH_ENDPOINT} said 503 after {detected:.1f} s, and /health should have been 200"
            )
        if sample.program != SUMMING:
            continue
        if sample.scenario in (names.FREEZE_LOAD, names.FREEZE_IDLE, names.UNAUTHORIZED) and detected is None:
            found.append(f"{where}: {SUMMING} never said 503, and its rule leads there")
        if sample.scenario in (names.FREEZE_ONE_CORE, names.LOSES_A_SERIES) and detected is not None:
            found.append(f"{where}: {SUMMING} said 503 after {detected:.1f} s, and a sum should have hidden the hang")
    return found


def timelines(samples: Iterable[Sample]) -> list[str]:
    """What ours said where it was late or wrong; its /history of that round is in the JSON."""
    return [
        f"{sample.scenario}, round {sample.round + 1}, what {OUR_NAME} said{_waited(sample)}: {'; '.join(sample.story)}"
        for sample in samples
        if sample.program == OUR_NAME and sample.history
    ]


def unanswered(samples: Iterable[Sample]) -> list[str]:
    """Programs of which there is no latency, and why."""
    return [
        f"{sample.scenario}, round {sample.round + 1}: {sample.program} was not measured: {'; '.join(sample.story)}"
        for sample in samples
        if sample.scenario in (names.LATENCY, names.LARGE_PAGE) and sample.story
    ]


def _waited(sample: Sample) -> str:
    waited_sec = sample.figures.get(names.WAITED)
    return "" if waited_sec is None else f", having waited {waited_sec:.1f} s for a CPU"

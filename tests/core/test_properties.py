"""Invariants of the judgement over generated histories.

The oracle here looks only at what went in (pages, canary results) and what came out; it shares no code with the
judgement beyond the event types.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, replace
from functools import partial

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from virtual_shell import ScriptedCore, ScriptedEngine, VirtualShell

from enginewatch.core.events import (
    AbandonCanary,
    CanaryDone,
    EngineDescribed,
    Flags,
    FlagsRead,
    KvBootstrapRead,
    LogChannelChanged,
    LogHits,
    Outcome,
    Publish,
    Rescrape,
    Scraped,
    ScrapeFailed,
    SettingsChanged,
    StartCanary,
    Tick,
)
from enginewatch.core.settings import Settings
from enginewatch.core.states import HUNG, all_names
from enginewatch.core.verdict import Watch
from enginewatch.engines import PROFILES

NOISE = 1e-6
"""What adding floating-point seconds may cost."""
FAILED = {Outcome.TIMEOUT, Outcome.FROZEN, Outcome.REFUSED, Outcome.ERROR_ANSWER}
slow = settings(
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "150")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


# --- histories ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segment:
    """A stretch of one core's life."""

    kind: str
    seconds: float


@st.composite
def judged_by(draw: st.DrawFn) -> Settings:
    poll = draw(st.sampled_from([1.0, 2.0, 5.0]))
    return Settings(
        poll_interval_sec=poll,
        stall_sec=draw(st.sampled_from([6.0, 10.0, 30.0])),
        metrics_timeout_sec=draw(st.sampled_from([2.0, 10.0])),
        warmup_sec=0.0,
        active_probe_timeout_sec=draw(st.sampled_from([1.0, 2.0, 5.0])),
        active_probe_min_failures=draw(st.sampled_from([1, 2, 3])),
        active_probe_enabled=draw(st.sampled_from([True, True, True, False])),
    )


HEALTHY = ("busy", "idle", "prefill", "saturated", "locked out", "losing canaries")
seconds = st.floats(0.5, 90).map(lambda value: round(value, 2))
healthy_life = st.lists(st.builds(Segment, st.sampled_from(HEALTHY), seconds), min_size=1, max_size=8)
any_life = st.lists(
    st.builds(Segment, st.sampled_from((*HEALTHY, "hung", "long step")), seconds), min_size=1, max_size=8
)


def live(engine: ScriptedEngine, name: str, life: list[Segment]) -> float:
    """Write a life into the engine's script; returns when it ends."""

    def begin(segment: Segment, engine: ScriptedEngine) -> None:
        core = engine.cores[name]
        kind = segment.kind
        fresh = ScriptedCore(tokens=core.tokens, kv=core.kv)
        fresh.hung = kind in ("hung", "long step")
        fresh.running = 0.0 if kind == "idle" else 2.0
        fresh.tokens_rate = 0.0 if kind in ("idle", "prefill") else 50.0
        fresh.kv_rate = 0.001 if kind == "prefill" else 0.0
        # A prefill of one long chunk after another answers no canary; nor does an engine that drops connections.
        outcomes = {"saturated": Outcome.SATURATED, "locked out": Outcome.MISCONFIGURED}
        fresh.canary = outcomes.get(kind, Outcome.TIMEOUT if kind in ("prefill", "losing canaries") else None)
        engine.cores[name] = fresh

    t = 0.0
    for segment in life:
        engine.at(t, partial(begin, segment))
        t += segment.seconds
    return t


def counter_moves(shell: VirtualShell, core: str, heard: int) -> list[float]:
    """When, among the first `heard` events, a page showed a counter of this core higher than the page before."""
    return _rises(shell, f'vllm:generation_tokens_total{{engine="{core}",model_name="m"}}', heard)


def leg_moves(shell: VirtualShell, core: str, heard: int) -> list[float]:
    gauge = _rises(shell, f'vllm:kv_cache_usage_perc{{engine="{core}",model_name="m"}}', heard)
    return sorted(counter_moves(shell, core, heard) + gauge)


def _rises(shell: VirtualShell, series: str, heard: int) -> list[float]:
    last: float | None = None
    moved = []
    for t, event in shell.events[:heard]:
        if isinstance(event, Scraped) and series in event.samples:
            value = event.samples[series]
            if last is not None and value > last:
                moved.append(t)
            last = value
    return moved


def hangs(shell: VirtualShell) -> list[tuple[float, str, int]]:
    """(when, core, events heard by then) of every time a core's hang became the verdict."""
    found = []
    before = ""
    for (t, verdict), heard in zip(shell.timeline, shell.heard, strict=True):
        if verdict.state == "stall-hang" and before != "stall-hang" and verdict.core is not None:
            found.append((t, verdict.core, heard))
        before = verdict.state
    return found


# --- no false kill --------------------------------------------------------------------------------------------------


@slow
@given(judged_by(), st.lists(healthy_life, min_size=1, max_size=3))
def test_an_engine_that_only_works_or_rests_is_never_hung(how: Settings, lives: list[list[Segment]]) -> None:
    engine = ScriptedEngine(len(lives))
    end = max(live(engine, str(number), life) for number, life in enumerate(lives))
    # Idle cores of several keep their last canary's proof only if the canary can go through: it can, version 0.32.
    shell = VirtualShell(engine, how).run(end)
    assert shell.acted() == []


@slow
@given(judged_by(), any_life)
def test_no_hang_verdict_while_a_counter_moved_within_the_threshold(how: Settings, life: list[Segment]) -> None:
    engine = ScriptedEngine()
    shell = VirtualShell(engine, how).run(live(engine, "0", life) + 60)
    for (t, verdict), heard in zip(shell.timeline, shell.heard, strict=True):
        if verdict.acting:
            assert not [moved for moved in counter_moves(shell, "0", heard) if moved > t - how.stall_sec + NOISE], (
                t,
                verdict,
            )


@slow
@given(judged_by(), st.lists(any_life, min_size=1, max_size=3))
def test_no_hang_verdict_without_the_evidence_the_rule_demands(how: Settings, lives: list[list[Segment]]) -> None:
    engine = ScriptedEngine(len(lives))
    end = max(live(engine, str(number), life) for number, life in enumerate(lives))
    shell = VirtualShell(engine, how).run(end + 60)
    for t, core, heard in hangs(shell):
        events = shell.events[:heard]
        answered = {event.token for _, event in events if isinstance(event, CanaryDone)}
        results = [
            (done, canary, outcome)
            for done, canary, outcome in shell.results
            if canary.token in answered and (canary.core == core or len(lives) == 1)
        ]
        proofs = leg_moves(shell, core, heard)
        proofs += [done for done, _, outcome in results if outcome is Outcome.OK]
        proof = max(proofs, default=0.0)
        assert t - proof >= how.stall_sec - NOISE
        begun = {canary.token: when for when, canary in shell.canaries}
        since = [
            (done, begun[canary.token], outcome) for done, canary, outcome in results if begun[canary.token] >= proof
        ]
        failures = [(done, start) for done, start, outcome in since if outcome in FAILED]
        pages = [event for _, event in events if isinstance(event, Scraped)]
        page_begun = max(page.started_at for page in pages)
        by_canaries = (
            len(failures) >= how.active_probe_min_failures
            and t - failures[0][1] >= how.stall_sec - how.poll_interval_sec - NOISE
            and page_begun >= failures[how.active_probe_min_failures - 1][0]
        )
        usable = how.active_probe_enabled and not (since and since[-1][2] not in FAILED)
        busy = pages[-1].samples[f'vllm:num_requests_running{{engine="{core}",model_name="m"}}'] > 0
        assert by_canaries or (not usable and busy), (t, core, failures, since)


# --- no false kill while everything around the engine is disturbed -------------------------------------------------

OUTAGES = ("timeout", "reset", "truncated", "http_500", "http_503", "refused")
DISTURBANCES = (
    *OUTAGES,
    *("malformed", "http_404", "unasked", "paused", "hidden", "every other page hidden"),
    *("gap", "reset counters", "replaced", "replaced after refusal", "log line"),
)


@dataclass(frozen=True)
class Disturbance:
    """Something that happens around the engine from `at` on, for `seconds`."""

    kind: str
    at: float
    seconds: float


disturbances = st.lists(
    st.builds(Disturbance, st.sampled_from(DISTURBANCES), st.floats(0, 300).map(round), st.floats(0.5, 40)), max_size=6
)


def disturb(shell: VirtualShell, one: Disturbance, *, longest: float) -> None:
    engine, kind, end = shell.engine, one.kind, one.at + min(one.seconds, longest)
    leg = "vllm:generation_tokens_total"

    def begin(engine: ScriptedEngine) -> None:
        if kind in (*OUTAGES, "malformed", "http_404", "unasked"):
            engine.failure = kind
        elif kind == "paused":
            engine.flags = Flags.PAUSED
        elif kind == "hidden":
            engine.hide = lambda series: series.startswith(leg)
        elif kind == "every other page hidden":
            pages = itertools.count()
            engine.hide = lambda series: series.startswith(leg) and next(pages) % 2 == 0
        elif kind == "gap":
            shell.freeze(one.seconds)
        elif kind == "reset counters":
            _zero(engine)
        elif kind.startswith("replaced"):
            _zero(engine)
            engine.start_time = (engine.start_time or 0) + 1
            engine.failure = "refused" if kind == "replaced after refusal" else engine.failure
        elif kind == "log line":
            engine.log_hits += 1

    def finish(engine: ScriptedEngine) -> None:
        engine.failure = None
        engine.flags = Flags.CLEAR
        engine.hide = lambda series: False

    engine.at(one.at, begin).at(end, finish)


def _zero(engine: ScriptedEngine) -> None:
    for core in engine.cores.values():
        core.tokens = 0.0


@slow
@given(judged_by(), healthy_life, disturbances)
def test_no_disturbance_makes_a_working_engine_hung(
    how: Settings, life: list[Segment], around: list[Disturbance]
) -> None:
    # An outage is told from a hang by its length where canaries are off: all six in a row stay below the limit.
    engine = ScriptedEngine()
    end = live(engine, "0", [s for s in life if s.kind not in ("prefill", "losing canaries")])
    shell = VirtualShell(engine, how)
    for one in around:
        disturb(shell, one, longest=how.stall_sec / 4)
    shell.run(end + 1)
    assert shell.acted() == [], (shell.timeline[-3:], shell.states)


@slow
@given(judged_by(), healthy_life, st.floats(6, 200), st.floats(0.5, 400))
def test_a_leg_that_goes_away_makes_no_working_engine_hung(
    how: Settings, life: list[Segment], away_at: float, seconds: float
) -> None:
    engine = ScriptedEngine()
    end = live(engine, "0", [s for s in life if s.kind not in ("prefill", "losing canaries")])
    shell = VirtualShell(engine, how)
    disturb(shell, Disturbance("hidden", round(away_at), seconds), longest=seconds)
    shell.run(end + 1)
    assert shell.acted() == [], (shell.timeline[-3:], shell.states)


@slow
@given(judged_by(), st.lists(st.builds(Segment, st.sampled_from(HEALTHY), seconds), max_size=4), disturbances)
def test_a_hang_is_declared_however_the_pages_flap(
    how: Settings, life: list[Segment], around: list[Disturbance]
) -> None:
    engine = ScriptedEngine()
    onset = live(engine, "0", life)

    def hang(engine: ScriptedEngine) -> None:
        engine.cores["0"] = ScriptedCore(tokens=engine.cores["0"].tokens, kv=engine.cores["0"].kv, hung=True, running=3)
        pages = itertools.count()
        engine.failure = None
        engine.flags = Flags.SILENT
        engine.hide = lambda series: series.startswith("vllm:generation") and next(pages) % 2 == 0

    engine.at(onset, hang)
    rounds = how.active_probe_min_failures + 2
    budget = how.stall_sec + 2 * how.poll_interval_sec + rounds * (how.active_probe_timeout_sec + how.poll_interval_sec)
    shell = VirtualShell(engine, how)
    for one in around:
        if one.at + 40 < onset:
            disturb(shell, one, longest=how.stall_sec)
    shell.run(onset + budget + 1)
    assert shell.watch.verdict.acting, (shell.watch.verdict, shell.states)


# --- pages that flicker for ever ------------------------------------------------------------------------------------

NO_PAGE = ("timeout", "reset", "http_503")
FLICKER = st.one_of(
    # Not both: a refusal and then an answer that is no page are another process, as far as anybody can tell.
    st.lists(st.sampled_from(["good", "legless", "gauge", "http_404", "malformed", *NO_PAGE]), max_size=7),
    st.lists(st.sampled_from(["good", "legless", "gauge", "refused", *NO_PAGE]), max_size=7),
).map(lambda polls: ["good", *polls])
"""What becomes of the polls, over and over; "gauge": the KV usage is one of three values in turn."""


def flicker(engine: ScriptedEngine, polls: list[str], *, since: float, poll: float, until: float) -> None:
    def begin(number: int, engine: ScriptedEngine) -> None:
        kind = polls[number % len(polls)]
        engine.failure = None if kind in ("good", "legless", "gauge") else kind
        engine.hide = lambda series: kind == "legless" and series.startswith("vllm:")
        if kind == "gauge":
            engine.cores["0"].kv = 0.1 + 0.1 * (number % 3)

    for number in range(int((until - since) / poll)):
        engine.at(since + (number - 0.2) * poll, partial(begin, number))


@slow
@given(FLICKER, st.sampled_from(["busy", "idle"]))
def test_a_hang_is_declared_however_the_pages_flicker_for_ever(polls: list[str], before: str) -> None:
    engine = ScriptedEngine()
    live(engine, "0", [Segment(before, 60)])
    flicker(engine, polls, since=60, poll=5.0, until=1200)
    shell = VirtualShell(engine.at(60.5, ScriptedEngine.hang)).run(1200)
    assert shell.acted(), shell.states[-8:]


@slow
@given(FLICKER, st.sampled_from(["busy", "idle", "locked out", "saturated"]), st.booleans(), st.booleans())
def test_and_none_where_there_is_none(polls: list[str], how: str, named: bool, canaries: bool) -> None:
    engine = ScriptedEngine(start_time=1000.0 if named else None)
    live(engine, "0", [Segment(how, 60)])
    # Without a usable canary an outage is told from a hang by its length.
    kinds = [kind if canaries and how in ("busy", "idle") else "good" if kind in NO_PAGE else kind for kind in polls]
    flicker(engine, kinds, since=60, poll=5.0, until=900)
    shell = VirtualShell(engine, Settings(warmup_sec=0, active_probe_enabled=canaries)).run(900)
    assert shell.acted() == [], (shell.timeline[-3:], shell.states[-8:])


# --- no missed hang -------------------------------------------------------------------------------------------------


@slow
@given(judged_by(), st.lists(healthy_life, min_size=1, max_size=4), st.data())
def test_every_hang_that_lasts_past_the_budget_is_declared_and_names_the_core(
    how: Settings, lives: list[list[Segment]], data: st.DataObject
) -> None:
    engine = ScriptedEngine(len(lives))
    ends = [live(engine, str(number), life) for number, life in enumerate(lives)]
    victim = str(data.draw(st.integers(0, len(lives) - 1)))
    onset = ends[int(victim)]

    def hang(engine: ScriptedEngine) -> None:
        core = engine.cores[victim]
        # Under load; an idle core can only be seen by canaries, so it needs them.
        running = core.running if how.active_probe_enabled else 2.0
        engine.cores[victim] = ScriptedCore(tokens=core.tokens, kv=core.kv, hung=True, running=running)

    engine.at(onset, hang)
    rounds = how.active_probe_min_failures + 1 + len(lives)
    budget = how.stall_sec + 2 * how.poll_interval_sec + rounds * (how.active_probe_timeout_sec + how.poll_interval_sec)
    shell = VirtualShell(engine, how).run(max(onset, *ends) + budget + 1)
    assert shell.watch.verdict.acting, shell.watch.verdict
    assert shell.watch.verdict.core == victim
    assert f"core {victim}" in shell.watch.verdict.reason


# --- independence, unity, determinism -------------------------------------------------------------------------------


@slow
@given(judged_by(), any_life, any_life, any_life)
def test_an_unrelated_core_never_changes_another_cores_verdict(
    how: Settings, life: list[Segment], sibling: list[Segment], other_sibling: list[Segment]
) -> None:
    # Without canaries: those are shared (one at a time), so that a sibling may delay them.
    how = replace(how, active_probe_enabled=False)

    def states(second: list[Segment]) -> list[tuple[float, str, float]]:
        engine = ScriptedEngine(2)
        end = live(engine, "0", life)
        live(engine, "1", second)
        shell = VirtualShell(engine, how)
        seen = []
        for step in range(int(end + 40)):
            shell.run(step + 0.5)
            view = next(core for core in shell.watch.explain(shell.now).cores if core.core == "0")
            seen.append((shell.now, view.state, view.stalled_for_sec))
        return seen

    assert states(sibling) == states(other_sibling)


def make_noise(value: float, engine: ScriptedEngine) -> None:
    """Near misses of a leg's name, another engine's series, requests that finished because their clients gave up."""
    labels = 'engine="0",model_name="m"'
    engine.extra = {
        f"vllm:generation_tokens_created{{{labels}}}": 1.79e9 + value,
        f"vllm:request_generation_tokens_sum{{{labels}}}": value,
        'sglang:realtime_tokens_total{mode="decode"}': value,
        'vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"}': value,
    }


@slow
@given(judged_by(), any_life, st.floats(0.0, 5.0))
def test_an_unrelated_series_never_changes_the_verdict(how: Settings, life: list[Segment], slope: float) -> None:
    def timeline(*, noise: bool) -> list[tuple[float, str]]:
        engine = ScriptedEngine()
        end = live(engine, "0", life)
        if noise:
            for second in range(int(end) + 40):
                engine.at(second, partial(make_noise, second * slope))
        shell = VirtualShell(engine, how).run(end + 40)
        return [(t, verdict.state) for t, verdict in shell.timeline]

    assert timeline(noise=True) == timeline(noise=False)


@slow
@given(judged_by(), st.lists(any_life, min_size=1, max_size=3))
def test_replaying_a_story_gives_the_same_verdicts(how: Settings, lives: list[list[Segment]]) -> None:
    engine = ScriptedEngine(len(lives))
    end = max(live(engine, str(number), life) for number, life in enumerate(lives))
    shell = VirtualShell(engine, how).run(min(end + 40, 60 * how.poll_interval_sec))
    story = shell.watch.story()
    again = Watch(how, profile=PROFILES["vllm"], now=0.0, log_channel=True)
    for entry in story:
        again.handle(entry.event, entry.now)
        assert again.verdict.state == entry.state
    assert again.story() == story
    assert again.verdict == shell.watch.verdict


# --- anything may come ----------------------------------------------------------------------------------------------

series = st.sampled_from(
    [
        "process_start_time_seconds",
        *(
            f'vllm:{name}{{engine="{core}",model_name="m"}}'
            for name in ("generation_tokens_total", "kv_cache_usage_perc", "num_requests_running")
            for core in ("0", "1", "")
        ),
        'vllm:generation_tokens_total{model_name="m"}',
        'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"}',
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"}',
        'sglang:realtime_tokens_total{mode="decode"}',
        'sglang:token_usage{dp_rank="1"}',
        "unrelated_total",
    ]
)
values = st.one_of(st.integers(0, 5).map(float), st.sampled_from([-1.0, 1e300, 0.5]))
failures = st.sampled_from(
    [
        "refused",
        "timeout",
        "reset",
        "truncated",
        "malformed",
        "http_404",
        "http_401",
        "http_500",
        "http_503",
        "unasked",
        "odd",
    ]
)
moments = st.floats(-50, 5).map(lambda back: round(back, 3))
happenings = st.one_of(
    st.builds(Scraped, moments, st.dictionaries(series, values, max_size=8), st.booleans()),
    st.builds(ScrapeFailed, moments, failures, st.just(""), st.booleans()),
    st.builds(CanaryDone, st.integers(-3, 0), st.sampled_from(list(Outcome))),
    st.builds(FlagsRead, st.sampled_from(list(Flags))),
    st.builds(
        KvBootstrapRead,
        moments,
        st.dictionaries(st.sampled_from("012"), st.sampled_from("abc"), max_size=3),
        st.sampled_from(["", "nobody listens"]),
    ),
    st.builds(
        EngineDescribed,
        st.sampled_from([None, "vllm", "sglang", "odd"]),
        st.sampled_from([None, "0.32.0", "x"]),
        role=st.sampled_from([None, "agg", "decode", "dynamic"]),
    ),
    st.builds(LogHits, st.integers(0, 3)),
    st.builds(LogChannelChanged, st.sampled_from([None, "gone"])),
    st.builds(SettingsChanged, judged_by()),
    st.just(Tick()),
)
steps = st.lists(
    st.tuples(st.sampled_from([0.0, 0.01, 0.5, 1.0, 5.0, 5.0, 10.0, 40.0, 4000.0]), happenings), max_size=60
)


@settings(max_examples=400, deadline=None)
@given(steps, judged_by(), st.sampled_from([None, "vllm", "sglang"]), st.sampled_from([None, "agg", "decode"]))
def test_whatever_happens_there_is_exactly_one_state_and_at_most_one_canary(
    history: list[tuple[float, object]], how: Settings, kind: str | None, role: str | None
) -> None:
    names = set(all_names())
    watch = Watch(how, profile=PROFILES[kind] if kind else None, role=role, now=0.0)  # type: ignore[arg-type]
    now, under_way, last_token = 0.0, None, 0
    for wait, event in history:
        now += wait
        if isinstance(event, Scraped | ScrapeFailed):
            event = replace(event, started_at=now + event.started_at)
        if isinstance(event, CanaryDone):  # the one under way, or one long gone
            event = replace(event, token=last_token + event.token)
            under_way = None if event.token == under_way else under_way
        published = watch.verdict
        for instruction in watch.handle(event, now):  # type: ignore[arg-type]
            match instruction:
                case StartCanary(token, _, deadline_sec):
                    assert under_way is None
                    assert token > last_token
                    assert deadline_sec > 0
                    under_way = last_token = token
                case AbandonCanary(token):
                    assert token == under_way
                    under_way = None
                case Rescrape(after_sec):
                    assert after_sec >= 0
                case Publish(verdict):
                    assert verdict != published
                    published = verdict
        verdict = watch.verdict
        assert verdict == published
        assert verdict.state in names
        plain = verdict.state.removeprefix("warmup-").removeprefix("shadow-")
        assert verdict.hung == (plain in HUNG)
        assert verdict.acting == (verdict.hung and plain == verdict.state)
        assert verdict.reason
        assert "\n" not in verdict.reason
        explanation = watch.explain(now)
        assert all(core.stalled_for_sec >= 0 for core in explanation.cores)
        assert explanation.would_flip


def test_a_story_is_bounded_whatever_the_pages_hold() -> None:
    watch = Watch(Settings(), profile=PROFILES["vllm"], now=0.0)
    names = itertools.count()
    for step in range(2000):
        page = {f'vllm:generation_tokens_total{{engine="{next(names)}"}}': 1.0 for _ in range(50)}
        watch.handle(Scraped(step * 5.0, page), step * 5.0)
    assert sum(len(e.event.samples) for e in watch.story() if isinstance(e.event, Scraped)) <= 20_000
    assert len(watch.explain(10_000.0).cores) <= 200

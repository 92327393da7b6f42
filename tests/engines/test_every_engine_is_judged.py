"""What is promised of every engine that has a profile, on pages made from it: a new one gets these for free."""

from __future__ import annotations

import pytest
from scripted_profile import ScriptedProfile
from virtual_shell import ScriptedEngine, VirtualShell

from enginewatch.core.events import Flags, Outcome
from enginewatch.core.settings import Settings
from enginewatch.engines import PROFILES, UNKNOWN
from enginewatch.engines.profile import Profile

SETTINGS = Settings(warmup_sec=0)
HUNG_AT = 302.0
LATE_SEC = SETTINGS.poll_interval_sec + SETTINGS.active_probe_timeout_sec + 5
"""How much later than the limit a hang may be told."""
ALIVE_IDLE = ("stall-active-ok", "growing")
"""What keeps an idle engine alive is its canaries, which may move its legs."""
NO_PAGE = ["http_401", "http_404", "http_501", "malformed"]

pytestmark = pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.kind)


def watch(engine: ScriptedEngine, until: float, kind: str = "auto") -> VirtualShell:
    return VirtualShell(engine, SETTINGS, kind=kind).run(until)


def test_it_is_recognised_by_its_page(profile: Profile) -> None:
    known = watch(ScriptedProfile(profile), 20).watch.profile
    assert known is not None
    assert known.kind == profile.kind
    assert known.legs == profile.legs
    assert known.metrics_path == UNKNOWN.metrics_path, "it stays where it was found"


def test_idle_it_is_healthy(profile: Profile) -> None:
    shell = watch(ScriptedProfile(profile), 1200)
    assert shell.acted() == []
    assert shell.state in ALIVE_IDLE


def test_at_work_it_is_healthy_also_when_its_canaries_wait(profile: Profile) -> None:
    shell = watch(ScriptedProfile(profile).busy().answer(Outcome.TIMEOUT), 1200)
    assert shell.acted() == []
    assert "growing" in shell.states


@pytest.mark.parametrize("load", ["busy", "idle"])
def test_a_hang_is_told_in_time_and_forgiven(profile: Profile, load: str) -> None:
    engine = ScriptedProfile(profile)
    if load == "busy":
        engine.busy()
    limit = engine.stall_limit_sec(SETTINGS)
    resumed_at = HUNG_AT + limit + 100
    engine.at(HUNG_AT, ScriptedEngine.hang).at(resumed_at, ScriptedEngine.resume)
    shell = watch(engine, resumed_at + 100)
    hung_at = shell.first("stall-hang")
    assert hung_at is not None
    # Where nothing moves for long, the last proof of life is a canary or the end of a request before the freeze.
    assert HUNG_AT + limit - 15 <= hung_at <= HUNG_AT + limit + LATE_SEC
    assert shell.acted()[0] == hung_at
    assert not shell.watch.verdict.acting


def test_a_step_as_long_as_the_profile_says_is_no_hang(profile: Profile) -> None:
    engine = ScriptedProfile(profile)
    pause = engine.stall_limit_sec(SETTINGS) - 15
    engine.busy().at(HUNG_AT, ScriptedEngine.hang).at(HUNG_AT + pause, ScriptedEngine.resume)
    shell = watch(engine, HUNG_AT + 1200)
    assert shell.acted() == []
    assert "probe-fail-grace" in shell.states, "or the freeze was not seen at all"


@pytest.mark.parametrize("outcome", [Outcome.MISCONFIGURED, Outcome.SATURATED])
def test_a_canary_that_is_refused_ends_no_idle_engine(profile: Profile, outcome: Outcome) -> None:
    shell = watch(ScriptedProfile(profile).answer(outcome), 1200)
    assert shell.acted() == []
    assert shell.state == outcome.value


@pytest.mark.parametrize("failure", NO_PAGE)
def test_without_a_page_canaries_alone_decide(profile: Profile, failure: str) -> None:
    deadline = max(SETTINGS.stall_sec, profile.longest_wait_sec)
    resumed_at = HUNG_AT + 3 * deadline + 100
    engine = ScriptedProfile(profile).fail(failure)
    engine.at(HUNG_AT, ScriptedEngine.hang).at(resumed_at, ScriptedEngine.resume)
    shell = watch(engine, resumed_at + 2 * deadline + 100)
    assert shell.watch.profile is profile, "known by its answers"
    hung_at = shell.first("canary-hang")
    assert hung_at is not None
    assert HUNG_AT + 2 * deadline - 15 <= hung_at <= HUNG_AT + 2 * deadline + 3 * SETTINGS.poll_interval_sec
    assert shell.acted()[0] == hung_at
    assert not shell.watch.verdict.acting


@pytest.mark.parametrize("failure", NO_PAGE)
def test_without_a_page_a_refused_canary_ends_nothing(profile: Profile, failure: str) -> None:
    for outcome in (Outcome.MISCONFIGURED, Outcome.SATURATED):
        shell = watch(ScriptedProfile(profile).fail(failure).answer(outcome), 3000)
        assert shell.acted() == []
        assert shell.state == "no-legs"


@pytest.mark.parametrize("failure", ["timeout", "reset", "truncated"])
def test_a_page_that_fails_is_a_hang_when_canaries_fail_too(profile: Profile, failure: str) -> None:
    limit = max(SETTINGS.unreach_after_sec, profile.longest_step_sec)
    engine = ScriptedProfile(profile).busy()
    engine.at(HUNG_AT, lambda engine: engine.hang().fail(failure))
    shell = watch(engine, HUNG_AT + limit + 100)
    hung_at = shell.first("unreach-hang")
    assert hung_at is not None
    assert HUNG_AT + limit <= hung_at <= HUNG_AT + limit + LATE_SEC
    assert shell.acted()[0] == hung_at


def test_a_page_that_fails_while_canaries_go_through_is_no_hang(profile: Profile) -> None:
    shell = watch(ScriptedProfile(profile).busy().at(HUNG_AT, lambda engine: engine.fail("timeout")), 1200)
    assert shell.acted() == []


def test_a_crash_and_a_long_reload_are_no_hang(profile: Profile) -> None:
    engine = ScriptedProfile(profile).busy()
    engine.at(HUNG_AT, lambda engine: engine.hang().fail("refused"))
    engine.at(HUNG_AT + 60, lambda engine: engine.fail("http_503"))
    engine.at(HUNG_AT + 1800, lambda engine: engine.restart())
    shell = watch(engine, HUNG_AT + 2000)
    assert shell.acted() == []
    assert "restarting" in shell.states
    assert shell.state in ALIVE_IDLE


def test_a_restart_between_two_polls_is_given_the_time_to_load(profile: Profile) -> None:
    if profile.loading_status is None:
        pytest.skip("nobody listens while it loads")
    engine = ScriptedProfile(profile).busy()
    engine.at(HUNG_AT, lambda engine: engine.hang().fail(f"http_{profile.loading_status}").answer(Outcome.ERROR_ANSWER))
    engine.at(HUNG_AT + 1800, lambda engine: engine.restart())
    shell = watch(engine, HUNG_AT + 2000)
    assert shell.acted() == []
    assert "restarting" in shell.states
    assert shell.state in ALIVE_IDLE
    assert shell.watch.restarts == 1


def test_another_error_of_the_page_is_an_outage(profile: Profile) -> None:
    """The negative of the one above: 500 is no loading."""
    engine = ScriptedProfile(profile).busy()
    engine.at(HUNG_AT, lambda engine: engine.hang().fail("http_500"))
    assert watch(engine, HUNG_AT + 400).first("unreach-hang") is not None


def test_a_rest_it_can_tell_of_is_left_alone(profile: Profile) -> None:
    if not profile.flags_for("99.0"):
        pytest.skip("it cannot tell")
    engine = ScriptedProfile(profile)
    engine.flags = Flags.CLEAR
    engine.at(HUNG_AT, ScriptedEngine.hang).at(HUNG_AT, lambda engine: setattr(engine, "flags", Flags.SLEEPING))
    shell = watch(engine, HUNG_AT + 1200)
    assert shell.acted() == []
    assert shell.state == "paused"

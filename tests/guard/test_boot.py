"""`guard boot`: how long it waits and for whom, on a clock of the test's; what it writes and what it becomes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from guard_settings import FLEET, guard_settings

from enginewatch.core.drift import Identity, Recorded
from enginewatch.guard import boot
from enginewatch.guard.files import CannotWrite, NoSnapshot, prepare, read_snapshot, write_all
from enginewatch.guard.rounds import Rounds
from enginewatch.guard.settings import UsageError
from enginewatch.guard.upstreams import Lookup, Who
from enginewatch.guard.waiting import Engine, Found, GiveUp, Round, Start

MORNING = "2026-10-14T01:52:10.48Z"
LOADS = Who(None, "HTTP 503")
REFUSED = Who(None, "connection refused")
OLD = Who(None, "its sidecar has no /engine (404)", is_old=True)
NONE = {"GUARD_PREFILL_WATCHER_PORT": "0", "GUARD_DECODE_WATCHER_PORT": "0"}


def named(engine_id: str = "pst-1.00") -> Who:
    return Who(Identity(engine_id, 0, MORNING, "process_start_time"))


class Story:
    """A fleet that changes over virtual time. Each round takes no time; the pauses do."""

    def __init__(self, **variables: str) -> None:
        self.settings = guard_settings(**variables)
        self.now = 1000.0
        self.lines: list[tuple[float, str]] = []
        self.rounds = 0
        self.fleet: dict[str, dict[str, tuple[Who, bool]]] = {
            "prefill": {"10.0.0.1": (named(), True), "10.0.0.2": (named("pst-2.00"), True)},
            "decode": {"10.0.1.1": (named("pst-3.00"), True)},
        }
        self.events: list[tuple[float, Callable[[], None]]] = []

    @property
    def waited(self) -> float:
        return self.now - 1000.0

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        self.events.append((seconds, event))

    def put(self, role: str, address: str, who: Who, *, serves: bool = True) -> None:
        self.fleet[role][address] = (who, serves)

    def take_away(self, role: str, address: str) -> None:
        del self.fleet[role][address]

    def ask(self, _: float) -> Mapping[str, Round]:
        self.rounds += 1
        for event in [event for event in self.events if event[0] <= self.waited]:
            self.events.remove(event)
            event[1]()
        return {
            role: Round(
                tuple(
                    Found(address, 8000, who, serves and (who.identity is not None or who.is_old))
                    for address, (who, serves) in engines.items()
                ),
                () if engines else (f"{role}.test: Name or service not known",),
            )
            for role, engines in self.fleet.items()
        }

    def sleep(self, seconds: float) -> None:
        assert 0 <= seconds <= 2
        self.now += seconds

    def run(self) -> Start:
        outcome = self.outcome()
        assert isinstance(outcome, Start), outcome
        return outcome

    def outcome(self) -> Start | GiveUp:
        return boot.wait_for_engines(
            self.settings,
            self.ask,
            now=lambda: self.now,
            sleep=self.sleep,
            say=lambda line: self.lines.append((self.waited, line)),
        )


def ids(start: Start) -> dict[str, str]:
    return {
        engine.recorded.address: engine.recorded.durable_id or ("-" if engine.recorded.is_sentinel else "observed")
        for engines in start.engines.values()
        for engine in engines
    }


# --- how long it waits ----------------------------------------------------------------------------------------------


def test_engines_that_are_all_known_are_not_waited_for() -> None:
    story = Story()
    assert ids(story.run()) == {"10.0.0.1": "pst-1.00", "10.0.0.2": "pst-2.00", "10.0.1.1": "pst-3.00"}
    assert (story.waited, story.rounds) == (0, 1)


def test_an_old_sidecar_is_not_waited_for() -> None:
    story = Story()
    story.put("prefill", "10.0.0.2", OLD)
    assert ids(story.run())["10.0.0.2"] == "-"
    assert story.waited == 0


def test_roles_without_sidecars_are_not_waited_for_whatever_their_engines_say() -> None:
    story = Story(**NONE)
    story.put("prefill", "10.0.0.2", REFUSED)
    assert set(ids(story.run()).values()) == {"-"}
    assert story.waited == 0


@pytest.mark.parametrize("silence", [LOADS, REFUSED, Who(None, "timed out"), Who(None, "its answer is no identity")])
def test_an_engine_that_serves_nowhere_yet_is_waited_for_until_the_budget_ends(silence: Who) -> None:
    story = Story()
    for role, engines in story.fleet.items():
        for address in engines:
            story.put(role, address, silence, serves=False)
    assert set(ids(story.run()).values()) == {"-"}
    assert 5400 <= story.waited < 5402
    assert story.rounds > 5000


def test_an_engine_that_loads_for_an_hour_is_in_the_snapshot() -> None:
    story = Story()
    story.put("decode", "10.0.1.1", LOADS, serves=False)
    story.at(3600, lambda: story.put("decode", "10.0.1.1", named("pst-9.00")))
    assert ids(story.run())["10.0.1.1"] == "pst-9.00"
    assert 3600 <= story.waited < 3602


def test_one_dead_engine_does_not_hold_the_router_for_longer_than_the_partial_time() -> None:
    story = Story()
    story.put("prefill", "10.0.0.2", REFUSED)
    assert ids(story.run()) == {"10.0.0.1": "pst-1.00", "10.0.0.2": "-", "10.0.1.1": "pst-3.00"}
    assert 120 <= story.waited < 122


def test_the_partial_time_begins_when_each_role_has_a_known_engine_that_serves() -> None:
    story = Story(GUARD_PARTIAL_SEC="50")
    story.put("prefill", "10.0.0.2", REFUSED)
    story.put("decode", "10.0.1.1", LOADS, serves=False)
    story.at(300, lambda: story.put("decode", "10.0.1.1", named(), serves=False))
    story.at(600, lambda: story.put("decode", "10.0.1.1", named(), serves=True))
    story.run()
    assert 650 <= story.waited < 652


def test_a_role_without_sidecars_has_no_part_in_the_partial_time() -> None:
    story = Story(GUARD_DECODE_WATCHER_PORT="0")
    story.put("prefill", "10.0.0.2", REFUSED)
    story.put("decode", "10.0.1.1", REFUSED, serves=False)
    story.run()
    assert 120 <= story.waited < 122


def test_a_role_of_old_sidecars_has_its_part_in_the_partial_time() -> None:
    story = Story()
    story.put("prefill", "10.0.0.2", REFUSED)
    story.put("decode", "10.0.1.1", OLD)
    story.run()
    assert 120 <= story.waited < 122


def test_a_partial_time_that_ends_while_a_role_has_nobody_waits_until_it_has() -> None:
    story = Story()
    story.put("prefill", "10.0.0.2", REFUSED)
    story.at(60, lambda: story.put("decode", "10.0.1.1", REFUSED))
    story.at(400, lambda: story.put("decode", "10.0.1.1", named("pst-9.00")))
    assert ids(story.run())["10.0.1.1"] == "pst-9.00"
    assert 400 <= story.waited < 402


def test_the_budget_ends_a_partial_time_that_is_longer() -> None:
    story = Story(GUARD_BUDGET_SEC="30")
    story.put("prefill", "10.0.0.2", REFUSED)
    story.run()
    assert 30 <= story.waited < 32


def test_an_engine_that_was_heard_and_is_silent_at_the_end_is_recorded_as_heard() -> None:
    story = Story()
    story.put("decode", "10.0.1.1", LOADS, serves=False)
    story.at(60, lambda: story.put("prefill", "10.0.0.2", Who(None, "timed out")))
    story.at(90, lambda: story.put("decode", "10.0.1.1", named()))
    assert ids(story.run())["10.0.0.2"] == "pst-2.00"
    assert 210 <= story.waited < 212


def test_an_engine_that_was_replaced_during_the_wait_is_recorded_as_the_new_one() -> None:
    story = Story()
    story.put("decode", "10.0.1.1", LOADS)
    story.at(60, lambda: story.put("prefill", "10.0.0.2", named("pst-9.00")))
    story.at(90, lambda: story.put("decode", "10.0.1.1", named()))
    assert ids(story.run())["10.0.0.2"] == "pst-9.00"


def test_an_address_that_comes_and_one_that_goes_during_the_wait_are_followed() -> None:
    story = Story()
    story.put("decode", "10.0.1.1", LOADS)
    story.at(60, lambda: story.put("prefill", "10.0.0.3", named("pst-9.00")))
    story.at(70, lambda: story.take_away("prefill", "10.0.0.1"))
    story.at(90, lambda: story.put("decode", "10.0.1.1", named()))
    assert set(ids(story.run())) == {"10.0.0.2", "10.0.0.3", "10.0.1.1"}


@pytest.mark.parametrize(
    ("watchers", "decode", "says"),
    [({}, named("pst-3.00"), True), ({}, OLD, False), (NONE, REFUSED, False)],
    ids=["all known", "one is old", "no sidecars"],
)
def test_only_engines_with_an_identity_are_called_known(watchers: dict[str, str], decode: Who, says: bool) -> None:
    story = Story(**watchers)
    if watchers:
        story.put("prefill", "10.0.0.1", REFUSED)
        story.put("prefill", "10.0.0.2", REFUSED)
    story.put("decode", "10.0.1.1", decode)
    outcome = story.outcome()
    assert isinstance(outcome, Start)
    assert ("every engine is known" in outcome.why) is says


def test_a_role_without_an_address_is_waited_for_although_the_other_is_known() -> None:
    story = Story()
    del story.fleet["decode"]["10.0.1.1"]
    story.at(700, lambda: story.put("decode", "10.0.1.1", named()))
    story.run()
    assert 700 <= story.waited < 702


@pytest.mark.parametrize("watchers", [{}, NONE])
def test_a_role_that_never_has_an_address_is_given_up_when_the_budget_ends(watchers: dict[str, str]) -> None:
    story = Story(GUARD_BUDGET_SEC="600", **watchers)
    story.fleet["decode"].clear()
    outcome = story.outcome()
    assert isinstance(outcome, GiveUp)
    assert "decode" in outcome.why
    assert "prefill" not in outcome.why
    assert 600 <= story.waited < 602


def test_no_budget_at_all_is_one_round() -> None:
    story = Story(GUARD_BUDGET_SEC="0")
    story.put("prefill", "10.0.0.2", REFUSED)
    assert ids(story.run())["10.0.0.2"] == "-"
    assert (story.waited, story.rounds) == (0, 1)


# --- what an operator reads -----------------------------------------------------------------------------------------


def test_the_lines_say_what_is_waited_for_and_what_happens_when() -> None:
    story = Story()
    story.put("prefill", "10.0.0.2", REFUSED)
    story.run()
    text = "\n".join(line for _, line in story.lines)
    for part in (
        "10.0.0.2 (connection refused)",
        "10.0.1.1",
        "5400 s",
        "120 s",
        "port 9090",
        "pst-1.00",
        "no identity",
    ):
        assert part in text


def test_what_does_not_change_is_said_once_a_minute_and_what_changes_at_once() -> None:
    story = Story()
    story.put("decode", "10.0.1.1", LOADS, serves=False)
    story.at(90, lambda: story.put("decode", "10.0.1.1", REFUSED, serves=False))
    story.at(100, lambda: story.put("decode", "10.0.1.1", LOADS, serves=False))
    story.at(1000, lambda: story.put("decode", "10.0.1.1", named()))
    story.run()
    loading = [when for when, line in story.lines if "10.0.1.1 (HTTP 503)" in line]
    refusing = [when for when, line in story.lines if "10.0.1.1 (connection refused)" in line]
    assert refusing == [90]
    assert loading[:3] == [0, 60, 100]
    assert len(loading) == 2 + len(range(100, 1000, 60))


# --- one round ------------------------------------------------------------------------------------------------------

NAMES = {"GUARD_PREFILL": "prefill.test:8000", "GUARD_DECODE": "10.0.1.1:8001"}
FAR = float("inf")


def test_a_round_asks_every_sidecar_and_the_health_of_those_that_are_known() -> None:
    healths = []

    def serves(address: str, port: int, _: float) -> str | None:
        healths.append((address, port))
        return None if address == "10.0.0.1" else "HTTP 503"

    rounds = Rounds(
        guard_settings(**NAMES),
        look_up=lambda _: Lookup(("10.0.0.2", "10.0.0.1", "10.0.0.3")),
        who=lambda address, port, _: LOADS if address == "10.0.0.3" else named(f"{address}:{port}"),
        serves=serves,
    )
    found = rounds.ask(FAR)
    assert {(one.address, one.port, one.who, one.serves) for one in found["prefill"].engines} == {
        ("10.0.0.1", 8000, named("10.0.0.1:9090"), True),
        ("10.0.0.2", 8000, named("10.0.0.2:9090"), False),
        ("10.0.0.3", 8000, LOADS, False),
    }
    assert sorted(healths) == [("10.0.0.1", 8000), ("10.0.0.2", 8000), ("10.0.1.1", 8001)]


def test_a_round_asks_nobody_of_a_role_without_sidecars() -> None:
    def nobody(*_: object) -> None:
        raise AssertionError("asked")

    rounds = Rounds(guard_settings(**NONE), who=nobody, serves=nobody)  # type: ignore[arg-type]
    assert [one.address for one in rounds.ask(FAR)["prefill"].engines] == ["10.0.0.1", "10.0.0.2"]


def test_a_name_with_both_families_stands_for_its_ipv4_addresses() -> None:
    answer = Lookup(("fd00::1", "10.0.0.1"))
    rounds = Rounds(guard_settings(**NAMES, **NONE), look_up=lambda _: answer)
    assert [one.address for one in rounds.ask(FAR)["prefill"].engines] == ["10.0.0.1"]
    answer = Lookup(("fd00::1",))
    assert [one.address for one in rounds.ask(FAR)["prefill"].engines] == ["fd00::1"]


def test_a_lookup_that_fails_keeps_the_addresses_and_one_that_finds_none_does_not() -> None:
    answer = Lookup(("10.0.0.1",))
    rounds = Rounds(guard_settings(**NAMES), look_up=lambda _: answer, who=lambda *_: named(), serves=lambda *_: None)
    first = rounds.ask(FAR)["prefill"]
    answer = Lookup((), "Temporary failure in name resolution", failed=True)
    second = rounds.ask(FAR)["prefill"]
    assert second.engines == first.engines
    assert second.troubles == ("prefill.test: Temporary failure in name resolution",)
    answer = Lookup((), "Name or service not known")
    assert rounds.ask(FAR)["prefill"].engines == ()


def test_a_lookup_that_hangs_keeps_the_addresses_unasked() -> None:
    answers, black_hole = threading.Event(), threading.Event()
    answers.set()

    def look_up(_: str) -> Lookup:
        if not answers.is_set():
            black_hole.wait()
        return Lookup(("10.0.0.1",))

    rounds = Rounds(guard_settings(**NAMES), look_up=look_up, who=lambda *_: named(), serves=lambda *_: None)
    assert rounds.ask(FAR)["prefill"].engines[0].has_spoken
    answers.clear()
    found = rounds.ask(0.0)["prefill"]
    black_hole.set()
    assert [(one.address, one.has_spoken) for one in found.engines] == [("10.0.0.1", False)]


def test_two_names_on_one_address_with_two_ports_are_refused() -> None:
    two = {"GUARD_PREFILL": "one.test:8000,two.test:8001", "GUARD_DECODE": "10.0.1.1:8001"}
    rounds = Rounds(guard_settings(**two), look_up=lambda _: Lookup(("10.0.0.1",)), who=lambda *_: LOADS)
    with pytest.raises(UsageError, match=r"8000.*8001|8001.*8000"):
        rounds.ask(FAR)


def test_two_names_on_one_address_with_one_port_are_one_engine() -> None:
    two = {"GUARD_PREFILL": "one.test:8000,two.test:8000", "GUARD_DECODE": "10.0.1.1:8001"}
    rounds = Rounds(guard_settings(**two), look_up=lambda _: Lookup(("10.0.0.1",)), who=lambda *_: LOADS)
    assert len(rounds.ask(FAR)["prefill"].engines) == 1


# --- what it becomes ------------------------------------------------------------------------------------------------


def started(*addresses: str) -> Start:
    prefill = tuple(Engine(Recorded(address), 8000, "") for address in addresses)
    return Start({"prefill": prefill, "decode": (Engine(Recorded("fd00::1"), 8001, ""),)}, "")


def test_the_flags_are_sorted_and_the_bootstrap_port_follows_each_prefill() -> None:
    flags = boot.router_flags(started("10.0.0.2", "10.0.0.1"), guard_settings(GUARD_BOOTSTRAP_PORT="8998"))
    assert flags == [
        *("--prefill", "http://10.0.0.1:8000", "8998"),
        *("--prefill", "http://10.0.0.2:8000", "8998"),
        *("--decode", "http://[fd00::1]:8001"),
    ]


def test_without_a_bootstrap_port_nothing_follows() -> None:
    assert boot.router_flags(started("10.0.0.1"), guard_settings())[:2] == ["--prefill", "http://10.0.0.1:8000"]


def test_only_what_stands_before_the_dashes_is_the_guards() -> None:
    split = boot.split(["--run-dir", "/x", "--", "router", "--", "--prefill"])
    assert split == (["--run-dir", "/x"], ["router", "--", "--prefill"])


@pytest.mark.parametrize("arguments", [[], ["--"], ["router"], ["--run-dir", "/x", "--"]])
def test_a_boot_without_a_command_is_refused(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match="no command"):
        boot.split(arguments)


# --- the run directory ----------------------------------------------------------------------------------------------


def test_a_boot_removes_the_snapshots_of_the_one_before(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "a" / "b")
    prepare(run_dir)
    write_all(run_dir, {"prefill": "10.0.0.1||\n", "decode": "10.0.1.1||\n"})
    assert read_snapshot(run_dir, "prefill") == {"10.0.0.1": Recorded("10.0.0.1")}
    prepare(run_dir)
    with pytest.raises(NoSnapshot, match="yet"):
        read_snapshot(run_dir, "prefill")
    assert os.listdir(run_dir) == []


def test_a_run_directory_that_is_none_is_found_before_the_wait(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match="file"):
        prepare(str(tmp_path / "file"))


def test_a_write_that_fails_leaves_the_old_content_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(str(tmp_path), {"prefill": "10.0.0.1||\n"})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CannotWrite, match="No space left"):
        write_all(str(tmp_path), {"prefill": "10.0.0.2||\n"})
    assert os.listdir(tmp_path) == ["prefill-ips"]
    assert read_snapshot(str(tmp_path), "prefill") == {"10.0.0.1": Recorded("10.0.0.1")}


# --- signals --------------------------------------------------------------------------------------------------------

HANGING = """
import socket, sys, time
sys.path.insert(0, {src!r})
socket.getaddrinfo = lambda *_, **__: time.sleep(600)
from enginewatch.guard.main import main
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("waits_for", ["an engine", "a lookup"])
def test_a_signal_ends_the_wait_at_once_also_while_a_lookup_hangs(
    tmp_path: Path, number: signal.Signals, code: int, waits_for: str
) -> None:
    environment = {**os.environ, **FLEET, "GUARD_RUN_DIR": str(tmp_path)}
    if waits_for == "a lookup":
        environment["GUARD_PREFILL"] = "prefill.test:8000"
    else:
        environment.update(GUARD_PREFILL="127.0.0.1:1", GUARD_DECODE="127.0.0.1:1", GUARD_PREFILL_WATCHER_PORT="1")
    src = str(Path(boot.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", HANGING.format(src=src), "boot", "--", sys.executable, "-V"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            if "waits until" in line:
                break
        process.send_signal(number)
        assert process.wait(60) == code
        assert number.name in process.stderr.read()

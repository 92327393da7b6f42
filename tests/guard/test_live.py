"""`guard live`: whom it asks, what it makes of the answers, and that nothing but drift ends a router.

The rules themselves are in tests/core/test_drift.py.
"""

from __future__ import annotations

import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from guard_settings import FLEET, guard_settings
from hypothesis import given, settings
from hypothesis import strategies as st

from enginewatch.core.drift import Identity, Recorded, record, write_snapshot
from enginewatch.guard import live, main
from enginewatch.guard.side_by_side import SideBySide
from enginewatch.guard.upstreams import Lookup, Who

MORNING = "2026-10-14T01:52:10.48Z"
FAILED = Lookup((), "Temporary failure in name resolution", True)
PREFILL, DECODE = "prefill.test", "decode.test"
NAMES = {"GUARD_PREFILL": f"{PREFILL}:8000", "GUARD_DECODE": f"{DECODE}:8001"}


def named(engine_id: str) -> Who:
    return Who(Identity(engine_id, 0, MORNING, "process_start_time"))


class World:
    """Engines, sidecars and names; counts who is asked what."""

    def __init__(self) -> None:
        self.names: dict[str, Lookup] = {PREFILL: Lookup(("10.0.0.1", "10.0.0.2")), DECODE: Lookup(("10.0.1.1",))}
        self.sidecars: dict[str, Who] = {address: named(f"pst-{address}") for address in self.addresses()}
        self.ill: dict[str, str] = {}
        self.asked: Counter[tuple[str, str, int]] = Counter()

    def addresses(self) -> list[str]:
        return [address for lookup in self.names.values() for address in lookup.addresses]

    def look_up(self, name: str, _: int) -> Lookup:
        self.asked["lookup", name, 0] += 1
        return self.names[name]

    def who(self, address: str, port: int, _: float) -> Who:
        self.asked["engine", address, port] += 1
        return self.sidecars.get(address, Who(None, "connection refused"))

    def serves(self, address: str, port: int, _: float) -> str | None:
        self.asked["health", address, port] += 1
        return self.ill.get(address)

    def snapshots(self) -> dict[str, dict[str, Recorded]]:
        return {
            role: {address: record(address, self.sidecars[address].identity) for address in self.names[name].addresses}
            for role, name in (("prefill", PREFILL), ("decode", DECODE))
        }

    def tick(self, snapshots: Mapping[str, Mapping[str, Recorded]], **variables: str) -> tuple[int, str]:
        asking: SideBySide[live.Answer] = SideBySide(time.monotonic() + 60)
        return live.judge(
            guard_settings(**{**NAMES, **variables}),
            snapshots,
            asking,
            look_up=self.look_up,
            who=self.who,
            serves=self.serves,
        )


@pytest.fixture
def world() -> World:
    return World()


def test_the_same_engines_keep_the_router_and_health_is_asked_of_nobody(world: World) -> None:
    code, line = world.tick(world.snapshots())
    assert (code, line) == (0, "keep: no drift among 3 engines")
    assert world.asked == {
        ("lookup", PREFILL, 0): 1,
        ("lookup", DECODE, 0): 1,
        ("engine", "10.0.0.1", 9090): 1,
        ("engine", "10.0.0.2", 9090): 1,
        ("engine", "10.0.1.1", 9090): 1,
    }


@pytest.mark.parametrize(("role", "address", "port"), [("prefill", "10.0.0.2", 8000), ("decode", "10.0.1.1", 8001)])
def test_another_identity_ends_the_router_once_that_engine_serves(
    world: World, role: str, address: str, port: int
) -> None:
    snapshots = world.snapshots()
    world.sidecars[address] = named("pst-9.00")
    world.ill[address] = "HTTP 503"
    code, line = world.tick(snapshots)
    assert code == 0
    assert "HTTP 503" in line
    assert world.asked["health", address, port] == 1
    del world.ill[address]
    code, line = world.tick(snapshots)
    assert code == 1
    for part in (role, address, f"pst-{address}", "pst-9.00", "rule 2"):
        assert part in line


def test_growth_ends_the_router_once_the_new_engine_serves_and_its_sidecar_is_not_asked(world: World) -> None:
    snapshots = world.snapshots()
    world.names[DECODE] = Lookup(("10.0.1.1", "10.0.1.2"))
    world.ill["10.0.1.2"] = "connection refused"
    assert world.tick(snapshots)[0] == 0
    del world.ill["10.0.1.2"]
    code, line = world.tick(snapshots)
    assert code == 1
    for part in ("decode", "10.0.1.2", "rule 1"):
        assert part in line
    assert world.asked["engine", "10.0.1.2", 9090] == 0


def test_a_late_identity_ends_the_router_once_that_engine_serves(world: World) -> None:
    identity = world.sidecars["10.0.0.1"]
    world.sidecars["10.0.0.1"] = Who(None, "HTTP 503")
    snapshots = world.snapshots()
    assert world.tick(snapshots)[0] == 0
    world.sidecars["10.0.0.1"] = identity
    world.ill["10.0.0.1"] = "timed out"
    assert world.tick(snapshots)[0] == 0
    del world.ill["10.0.0.1"]
    code, line = world.tick(snapshots)
    assert code == 1
    for part in ("prefill", "10.0.0.1", "pst-10.0.0.1", "rule 3"):
        assert part in line


def test_an_address_that_went_away_is_not_asked(world: World) -> None:
    snapshots = world.snapshots()
    world.names[PREFILL] = Lookup(("10.0.0.1",))
    world.sidecars["10.0.0.2"] = named("pst-9.00")
    assert world.tick(snapshots)[0] == 0
    assert world.asked["engine", "10.0.0.2", 9090] == 0
    world.names[PREFILL] = Lookup(("10.0.0.2", "10.0.0.1"))
    assert world.tick(snapshots)[0] == 1


@pytest.mark.parametrize("lookup", [FAILED, Lookup((), "no address"), Lookup((), "Name or service not known")])
def test_a_lookup_without_addresses_keeps_the_router_and_hides_nobody_else(world: World, lookup: Lookup) -> None:
    snapshots = world.snapshots()
    world.names[PREFILL] = lookup
    code, line = world.tick(snapshots)
    assert code == 0
    assert PREFILL in line
    assert lookup.trouble in line
    world.sidecars["10.0.1.1"] = named("pst-9.00")
    assert world.tick(snapshots)[0] == 1


def test_where_a_role_has_no_sidecars_not_one_query_is_sent_and_growth_is_seen(world: World) -> None:
    snapshots = {
        "prefill": {address: Recorded(address) for address in ("10.0.0.1", "10.0.0.2")},
        "decode": {"10.0.1.1": Recorded("10.0.1.1")},
    }
    none = {"GUARD_PREFILL_WATCHER_PORT": "0", "GUARD_DECODE_WATCHER_PORT": "0"}
    assert world.tick(snapshots, **none)[0] == 0
    assert {what for what, _, _ in world.asked} == {"lookup"}
    world.names[PREFILL] = Lookup(("10.0.0.1", "10.0.0.3"))
    assert world.tick(snapshots, **none)[0] == 1
    assert {what for what, _, _ in world.asked} == {"lookup", "health"}


def test_an_address_that_two_entries_give_is_asked_once(world: World) -> None:
    assert world.tick(world.snapshots(), GUARD_PREFILL=f"{PREFILL}:8000,10.0.0.1:8000")[0] == 0
    assert world.asked["engine", "10.0.0.1", 9090] == 1


@pytest.mark.parametrize(
    ("snapshot", "family"),
    [
        (["10.0.0.1", "10.0.0.2"], socket.AF_INET),
        (["fd00::1"], socket.AF_INET6),
        (["10.0.0.1", "fd00::1"], socket.AF_UNSPEC),
    ],
)
def test_only_the_families_of_the_snapshot_are_looked_up(snapshot: list[str], family: int) -> None:
    assert live.family_of(snapshot) == family


def test_a_lookup_that_has_only_the_other_family_left_is_no_growth(world: World) -> None:
    snapshots = world.snapshots()
    world.names[PREFILL] = Lookup(("fd00::1",))
    assert world.tick(snapshots)[0] == 0
    assert world.asked["health", "fd00::1", 8000] == 0
    world.names[PREFILL] = Lookup(("10.0.0.3", "fd00::1"))
    assert world.tick(snapshots)[0] == 1


def test_the_line_names_a_few_of_many_and_counts_the_rest(world: World) -> None:
    world.names[DECODE] = Lookup(tuple(f"10.0.1.{number}" for number in range(200)))
    world.sidecars.clear()
    snapshots = {
        role: {address: Recorded(address) for address in world.names[name].addresses}
        for role, name in (("prefill", PREFILL), ("decode", DECODE))
    }
    code, line = world.tick(snapshots)
    assert code == 0
    assert "no drift among 202 engines" in line
    assert "and 199 more" in line
    assert len(line) < 300


# --- whatever the outside does --------------------------------------------------------------------------------------

LOOKUPS = st.sampled_from(["whole", "reversed", "part", "none", "failed"])
ANSWERS = st.sampled_from([None, Who(None, "timed out"), Who(None, "HTTP 404", True), Who(None, "no identity")])


@settings(max_examples=60)
@given(LOOKUPS, LOOKUPS, st.lists(ANSWERS, min_size=3, max_size=3), st.booleans())
def test_a_router_whose_engines_are_the_same_is_kept_whatever_fails(
    prefill: str, decode: str, answers: list[Who | None], sentinel: bool
) -> None:
    world = World()
    addresses = world.addresses()
    if sentinel:
        world.sidecars[addresses[0]] = Who(None, "HTTP 404", True)
    snapshots = world.snapshots()
    for address, answer in zip(addresses, answers, strict=True):
        if answer is not None:
            world.sidecars[address] = answer
    for name, how in ((PREFILL, prefill), (DECODE, decode)):
        whole = world.names[name].addresses
        world.names[name] = {
            "whole": Lookup(whole),
            "reversed": Lookup(whole[::-1]),
            "part": Lookup(whole[:1]),
            "none": Lookup((), "no address"),
            "failed": FAILED,
        }[how]
    assert world.tick(snapshots)[0] == 0
    assert not any(what == "health" for what, _, _ in world.asked)


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["pst-1", "pst-2", ""]), min_size=3, max_size=3), st.booleans(), st.integers(0, 7))
def test_drift_ends_the_router_iff_an_engine_that_drifted_serves(now: list[str], grown: bool, serving: int) -> None:
    world = World()
    addresses = world.addresses()
    for address in addresses:
        world.sidecars[address] = named("pst-1")
    snapshots = world.snapshots()
    for address, engine_id in zip(addresses, now, strict=True):
        world.sidecars[address] = named(engine_id) if engine_id else Who(None, "timed out")
    if grown:
        world.names[DECODE] = Lookup(("10.0.1.1", "10.0.1.2"))
    drifted = {address for address, engine_id in zip(addresses, now, strict=True) if engine_id == "pst-2"}
    drifted |= {"10.0.1.2"} if grown else set()
    well = {address for number, address in enumerate([*addresses, "10.0.1.2"]) if serving >> (number % 3) & 1}
    world.ill = {address: "HTTP 503" for address in [*addresses, "10.0.1.2"] if address not in well}
    assert world.tick(snapshots)[0] == (1 if drifted & well else 0)


# --- the probe ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory with good snapshots, and an environment in which nobody needs to be asked."""
    environment = {**FLEET, "GUARD_RUN_DIR": str(tmp_path), "GUARD_DEADLINE_SEC": "20"}
    environment.update(GUARD_PREFILL_WATCHER_PORT="0", GUARD_DECODE_WATCHER_PORT="0")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for role, addresses in (("prefill", ("10.0.0.1", "10.0.0.2")), ("decode", ("10.0.1.1",))):
        (tmp_path / f"{role}-ips").write_text(write_snapshot(Recorded(address) for address in addresses))
    return tmp_path


def probe(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = main.run(["live", *flags])
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.count("\n") == 1
    return code, said.out


def test_the_probe_says_one_line(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe(capsys) == (0, "keep: no drift among 3 engines\n")


@pytest.mark.parametrize("content", [None, b"", b"garbage\n", b"\xff\xfe"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_snapshot_that_cannot_be_used_keeps_the_router(
    run_dir: Path, capsys: pytest.CaptureFixture[str], role: str, content: bytes | None
) -> None:
    path = run_dir / f"{role}-ips"
    path.unlink() if content is None else path.write_bytes(content)
    code, line = probe(capsys)
    assert code == 0
    assert line.startswith("keep: nothing can be judged: ")
    assert str(path) in line


@pytest.mark.parametrize(
    "flags", [("--no-such-flag",), ("--prefill", "nonsense"), ("--deadline-sec", "-1"), ("--decode",), ("word",)]
)
def test_settings_that_cannot_be_used_keep_the_router(
    run_dir: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    code, line = probe(capsys, *flags)
    assert code == 0
    assert "nothing can be judged" in line


@pytest.mark.parametrize("error", [ValueError("two\nlines"), KeyboardInterrupt(), SystemExit(3), MemoryError()])
def test_an_error_of_its_own_keeps_the_router(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def broken(*_: object, **__: object) -> tuple[int, str]:
        raise error

    monkeypatch.setattr(live, "judge", broken)
    code, line = probe(capsys)
    assert code == 0
    assert type(error).__name__ in line


def test_a_stdout_that_is_closed_or_knows_no_such_letters_changes_nothing(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "judge", lambda *_: (1, "restart the router: \u202eé\x1b[31m"))
    code, line = probe(capsys)
    assert (code, line) == (1, "restart the router: \\u202e\\xe9\\x1b[31m\n")
    monkeypatch.setattr(sys, "stdout", None)
    assert main.run(["live"]) == 1

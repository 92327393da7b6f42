"""`guard ready`: a router that accepts, and of each role one engine that serves."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from guard_settings import FLEET, guard_settings

from enginewatch.core.drift import Recorded, write_snapshot
from enginewatch.guard import main, ready
from enginewatch.guard.side_by_side import SideBySide

SNAPSHOTS = {"prefill": ["10.0.0.1", "10.0.0.2"], "decode": ["10.0.1.1"]}


def judge(
    ill: set[str], variables: Mapping[str, str] = MappingProxyType({}), *, accepts: bool = True
) -> tuple[int, str]:
    asking: SideBySide[ready.Answer] = SideBySide(time.monotonic() + 60)
    return ready.judge(
        guard_settings(**{"GUARD_ROUTER_PORT": "8080", **variables}),
        SNAPSHOTS,
        asking,
        serves=lambda address, port, _: "connection refused" if f"{address}:{port}" in ill else None,
        accepts=lambda _, port, __: None if accepts and port == 8080 else "connection refused",
    )


def test_a_router_with_all_its_engines_is_ready() -> None:
    code, line = judge(set())
    assert (code, line[:6]) == (0, "ready:")


def test_one_engine_of_a_role_is_enough() -> None:
    assert judge({"10.0.0.1:8000"})[0] == 0
    assert judge({"10.0.0.2:8000"})[0] == 0


@pytest.mark.parametrize(
    ("ill", "role"), [({"10.0.0.1:8000", "10.0.0.2:8000"}, "prefill"), ({"10.0.1.1:8001"}, "decode")]
)
def test_a_role_of_which_nobody_serves_is_not_ready_and_named(ill: set[str], role: str) -> None:
    code, line = judge(ill)
    assert code == 1
    assert f"no {role} engine" in line
    assert "connection refused" in line
    assert "router" not in line


def test_a_router_that_does_not_accept_is_not_ready() -> None:
    code, line = judge(set(), accepts=False)
    assert code == 1
    assert "8080" in line
    assert "engine" not in line


def test_an_engine_of_the_snapshot_is_asked_on_the_port_of_its_name_without_a_lookup() -> None:
    names = {"GUARD_PREFILL": "one.invalid:8000,two.invalid:8002", "GUARD_DECODE": "decode.invalid:8001"}
    assert judge(set(), names)[0] == 0
    assert judge({"10.0.0.1:8000", "10.0.0.2:8000"}, names)[0] == 0, "one of them may be on the other port"
    assert judge({f"10.0.0.{n}:{port}" for n in (1, 2) for port in (8000, 8002)}, names)[0] == 1


def test_an_engine_that_never_answers_does_not_hold_the_answer() -> None:
    asking: SideBySide[ready.Answer] = SideBySide(time.monotonic() + 600)
    black_hole = threading.Event()
    code, _ = ready.judge(
        guard_settings(GUARD_ROUTER_PORT="8080"),
        SNAPSHOTS,
        asking,
        serves=lambda address, *_: str(black_hole.wait()) if address == "10.0.0.1" else None,
        accepts=lambda *_: None,
    )
    assert code == 0
    assert asking.unanswered > 0
    black_hole.set()


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {**FLEET, "GUARD_RUN_DIR": str(tmp_path), "GUARD_ROUTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_a_boot_that_still_waits_is_not_ready(environment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["ready"]) == 1
    said = capsys.readouterr()
    assert "guard boot is still waiting" in said.out
    assert said.out.count("\n") == 1
    assert said.err == ""


@pytest.mark.parametrize("name", ["GUARD_ROUTER_PORT", "GUARD_PREFILL"])
def test_a_missing_setting_is_an_error_of_usage(
    environment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setenv(name, " ")
    assert main.run(["ready"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert name in said.err
    assert said.err.count("\n") == 1


def test_the_routers_port_is_really_connected_to(
    environment: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for role in ("prefill", "decode"):
        (environment / f"{role}-ips").write_text(write_snapshot([Recorded("127.0.0.1")]))
    with socket.create_server(("127.0.0.1", 0)) as router, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: refuses
        refusing = f"127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setenv("GUARD_PREFILL", refusing)
        monkeypatch.setenv("GUARD_DECODE", refusing)
        monkeypatch.setenv("GUARD_ROUTER_PORT", str(router.getsockname()[1]))
        assert main.run(["ready"]) == 1
        assert "router" not in capsys.readouterr().out
    assert main.run(["ready"]) == 1
    assert "the router does not accept" in capsys.readouterr().out

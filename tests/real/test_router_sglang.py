"""The real sglang-router, which keeps nothing of an engine's process: boot, live and ready, and what restarts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.real.routers import Guard, Router, Worker, eventually, workers

from enginewatch.lab.sim.process import SimProcess

pytestmark = [pytest.mark.real, pytest.mark.timeout(400, func_only=True)]

BOOTSTRAP_PORT = 8998
"""Only handed on: the router never connects to it."""


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A directory: of a model that is only a name the router would look for a tokenizer in the network."""
    (tmp_path / "model").mkdir()
    return str(tmp_path / "model")


@pytest.fixture
def pair(model: str) -> Iterator[tuple[Worker, Worker]]:
    """A prefill and a decode."""

    def engine(role: str) -> Callable[[], SimProcess]:
        return SimProcess("sglang", role=role, step_ms=5, restart=True, model=model).start

    with workers([engine("prefill"), engine("decode")]) as [prefill, decode]:
        yield prefill, decode


@pytest.fixture
def router(routers_venv: Path, model: str) -> Router:
    flags = "--pd-disaggregation"
    return Router(routers_venv, "sglang_router.launch_router", flags, model=model, bootstrap_port=BOOTSTRAP_PORT)


@pytest.fixture
def guard(router: Router, guard_file: Path, pair: tuple[Worker, Worker], tmp_path: Path) -> Guard:
    return Guard.of("sglang", guard_file, tmp_path / "run", router, [pair[0]], pair[1])


def routed(worker: Worker) -> list[dict[str, Any]]:
    """What came through the router; canaries go to a host of the engine's own."""
    return [each for each in worker.engine.requests() if each.get("bootstrap_host") == "127.0.0.1"]


def test_boot_ready_and_live_work_and_the_router_is_the_guards_process(
    router: Router, guard: Guard, pair: tuple[Worker, Worker]
) -> None:
    assert guard.ready()[0] == 1, "before boot"
    with guard.boot(router.command) as process:
        router.serving(process)
        assert (guard.ready()[0], guard.live()[0]) == (0, 0)
        assert router.held_by(process.process.pid)
        halves = [routed(worker)[-1] for worker in pair]
        assert [half["bootstrap_port"] for half in halves] == [BOOTSTRAP_PORT, BOOTSTRAP_PORT]
        assert halves[0]["bootstrap_room"] == halves[1]["bootstrap_room"]
        assert process.end() == 0
        assert guard.ready()[0] == 1


def test_a_restart_of_the_sidecars_alone_restarts_no_router_and_a_replaced_prefill_does(
    router: Router, guard: Guard, pair: tuple[Worker, Worker]
) -> None:
    prefill = pair[0]
    first = prefill.sidecar.known()
    assert first["source"] == "startup_fingerprint"
    with guard.boot(router.command) as process:
        router.serving(process)
        for worker in pair:
            worker.sidecar.restart()
        again = prefill.sidecar.known()
        assert again["watcher_started_at"] != first["watcher_started_at"]
        assert again["engine_id"] == first["engine_id"]
        assert guard.live()[0] == 0

        prefill.kill()
        eventually("the prefill serves again", lambda: guard.ready()[0] == 0)
        code, line = guard.live()
        assert code == 1
        assert all(fact in line for fact in ("prefill", first["engine_id"], prefill.sidecar.known()["engine_id"]))
        router.serving(process)  # nothing is pinned: the same router takes the new process
        assert process.end() == 0
    with guard.boot(router.command) as process:
        router.serving(process)
        assert guard.live()[0] == 0

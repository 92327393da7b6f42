"""`guard ready` against real sockets: one healthy engine of each role, and a router that accepts connections."""

from __future__ import annotations

import time

import pytest
from fleet import LOADING, NOT_FOUND, Answer, Fleet, Role, silent
from guard_run import Guard


class Pod:
    """A router that listens, in front of two prefills and two decodes."""

    def __init__(self, guard: Guard, fleet: Fleet) -> None:
        self.guard = guard
        self.prefill, self.decode = fleet.role("127.0.0.2", "127.0.0.3"), fleet.role("127.0.0.4", "127.0.0.5")
        self.router = fleet.role("127.0.0.1")["127.0.0.1"].engine
        guard.between(self.prefill, self.decode).recorded(self.prefill.lines(), self.decode.lines())
        guard.settings |= {"GUARD_ROUTER_PORT": str(self.router.port), "GUARD_DEADLINE_SEC": "1.5"}

    def role(self, name: str) -> Role:
        return {"prefill": self.prefill, "decode": self.decode}[name]


@pytest.fixture
def pod(guard: Guard, fleet: Fleet) -> Pod:
    return Pod(guard, fleet)


def test_a_router_before_healthy_engines_is_ready(pod: Pod) -> None:
    result = pod.guard.ready()
    assert (result.code, result.err) == (0, ""), result
    assert result.line
    assert pod.router.connections == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_healthy_engine_of_a_role_is_enough_and_none_is_not(pod: Pod, role: str) -> None:
    engines = list(pod.role(role).engines.values())
    engines[0].engine.black_hole()
    assert pod.guard.ready().code == 0
    engines[1].health(LOADING)
    result = pod.guard.ready()
    assert result.code == 1, result
    assert role in result.line


@pytest.mark.parametrize("door", ["refuse", "black_hole"])
def test_a_router_that_takes_no_connection_is_not_ready(pod: Pod, door: str) -> None:
    getattr(pod.router, door)()
    result = pod.guard.ready()
    assert result.code == 1, result
    assert str(pod.router.port) in result.line


UNHEALTHY: dict[str, Answer] = {"silent": silent, "without /health": NOT_FOUND, "an error": b"HTTP/1.1 500 Oh\r\n\r\n"}


@pytest.mark.parametrize("answer", UNHEALTHY.values(), ids=UNHEALTHY)
def test_engines_that_do_not_answer_are_not_ready_and_cost_no_more_than_the_deadline(pod: Pod, answer: Answer) -> None:
    for engine in pod.prefill.engines.values():
        engine.health(answer)
    begun = time.monotonic()
    result = pod.guard.ready()
    assert (result.code, result.err) == (1, ""), result
    assert "prefill" in result.line
    assert time.monotonic() - begun < 1.5 + 10


def test_a_pod_that_still_boots_is_not_ready_and_says_so(pod: Pod) -> None:
    for path in pod.guard.run_dir.iterdir():
        path.unlink()
    result = pod.guard.ready()
    assert result.code == 1
    assert "boot" in result.line
    assert pod.guard.live().code == 0


def test_an_engine_without_an_identity_counts_for_readiness(pod: Pod) -> None:
    pod.guard.recorded(["127.0.0.2||"], ["127.0.0.4||"])
    assert pod.guard.ready().code == 0
    pod.prefill["127.0.0.2"].health(LOADING)  # the other prefill is healthy, but the router was not started with it
    assert pod.guard.ready().code == 1


def test_readiness_does_not_depend_on_the_sidecars(pod: Pod) -> None:
    for role in (pod.prefill, pod.decode):
        for engine in role.engines.values():
            engine.sidecar.refuse()
    assert pod.guard.ready().code == 0

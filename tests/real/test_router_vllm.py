"""The real vllm-router, which keeps the engine ids of the prefills it booted with, and the guard that notices."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.real.routers import Child, Guard, Router, Worker, clean_environment, eventually, workers

from enginewatch.lab.sim.options import SimOptions
from enginewatch.lab.sim.process import SimProcess

pytestmark = [pytest.mark.real, pytest.mark.timeout(400, func_only=True)]

MODEL = SimOptions("vllm").model
MOONCAKE = ("--vllm-pd-disaggregation", "--kv-connector", "mooncake")
NIXL = ("--vllm-pd-disaggregation", "--kv-connector", "nixl")


def prefill(**options: Any) -> Callable[[], SimProcess]:
    """A simulated prefill with Mooncake unless told otherwise, which comes back in place when it is killed."""
    usual = {"role": "prefill", "bootstrap_port": 0, "step_ms": 5, "restart": True}
    return SimProcess("vllm", **(usual | options)).start


def decode(**options: Any) -> Callable[[], SimProcess]:
    return SimProcess("vllm", **({"role": "decode", "step_ms": 5, "restart": True} | options)).start


@pytest.fixture
def router(routers_venv: Path) -> Callable[..., Router]:
    """A router with Mooncake in front of this prefill, or with other arguments."""

    def make(prefiller: Worker, *arguments: str) -> Router:
        bootstrap_port = prefiller.engine.bootstrap_port
        flags = arguments or MOONCAKE
        return Router(routers_venv, "vllm_router.launch_router", *flags, model=MODEL, bootstrap_port=bootstrap_port)

    return make


@pytest.fixture
def guard(guard_file: Path, tmp_path: Path) -> Callable[..., Guard]:
    def make(router: Router, prefills: list[Worker], decoder: Worker) -> Guard:
        return Guard.of("vllm", guard_file, tmp_path / "run", router, prefills, decoder)

    return make


@pytest.fixture
def pair() -> Iterator[tuple[Worker, Worker]]:
    """A prefill with Mooncake and a decode."""
    with workers([prefill(), decode()]) as [first, second]:
        yield first, second


def kv_engine_id(worker: Worker, rank: int = 0) -> str:
    """The engine id of the prefill process that is there now."""
    return str(worker.engine.state()["kv_engine_ids"][rank])


def carried(worker: Worker) -> str:
    """The engine id that the router's last request to a decode carried."""
    return str(routed(worker)[-1]["kv_transfer_params"]["remote_engine_id"])


def routed(worker: Worker) -> list[dict[str, Any]]:
    """What came through a router: the sidecar's canaries name no partner."""
    return [each for each in worker.engine.requests() if "kv_transfer_params" in each]


def by_hand(router: Router, prefills: list[Worker], decoder: Worker) -> list[str | Path]:
    """The router's command with its engines written out: no guard."""
    urls: list[str] = []
    for worker in prefills:
        urls += ["--prefill", worker.engine.url, str(worker.engine.bootstrap_port)]
    return [*router.command, *urls, "--decode", decoder.engine.url]


def test_without_the_guard_a_replaced_prefill_is_addressed_by_its_dead_engine_id(
    router: Callable[..., Router], pair: tuple[Worker, Worker]
) -> None:
    prefiller, decoder = pair
    plain = router(prefiller)
    with Child(by_hand(plain, [prefiller], decoder), clean_environment()) as process:
        plain.serving(process)
        dead = kv_engine_id(prefiller)
        assert carried(decoder) == dead
        assert prefiller.engine.state()["bootstrap_queries"] == 2, "the router's question, and the decode's"
        prefiller.kill()
        assert kv_engine_id(prefiller) != dead
        # Answered with an error for as long as the router takes the prefill for dead, and then not at all.
        eventually("a request hangs", plain.hangs)
        time.sleep(5)  # several of the router's health checks
        assert plain.hangs()
        assert carried(decoder) == dead
        assert prefiller.engine.state()["bootstrap_queries"] == 0, "nobody has asked the new process who it is"
        assert routed(prefiller)[-1]["status"] == 200, "the new prefill does its half"


def test_the_guard_restarts_a_router_whose_prefill_was_replaced_and_no_other(
    router: Callable[..., Router], guard: Callable[..., Guard], pair: tuple[Worker, Worker]
) -> None:
    prefiller, decoder = pair
    guarded = router(prefiller)
    keeper = guard(guarded, [prefiller], decoder)
    first, dead = prefiller.sidecar.known(), kv_engine_id(prefiller)
    assert first["source"] == "process_start_time"
    with keeper.boot(guarded.command) as process:
        guarded.serving(process)
        assert carried(decoder) == dead
        assert keeper.ready()[0] == 0
        assert keeper.live()[0] == 0, "all is well"
        for worker in pair:
            worker.sidecar.restart()
        assert prefiller.sidecar.known()["watcher_started_at"] != first["watcher_started_at"]
        assert keeper.live()[0] == 0, "another sidecar, the same engine"

        prefiller.kill()
        second = prefiller.sidecar.known()
        eventually("a request hangs", guarded.hangs)
        assert carried(decoder) == dead
        code, line = keeper.live()
        assert code == 1
        for fact in ("prefill", "127.0.0.1", first["engine_id"], second["engine_id"]):
            assert fact in line
        assert keeper.live()[0] == 1, "until somebody obeys"

        assert process.end() == 0
    with keeper.boot(guarded.command) as process:
        guarded.serving(process)
        assert carried(decoder) == kv_engine_id(prefiller) != dead
        assert keeper.live()[0] == 0


def test_a_replaced_decode_is_noticed_as_well(
    router: Callable[..., Router], guard: Callable[..., Guard], pair: tuple[Worker, Worker]
) -> None:
    prefiller, decoder = pair
    guarded = router(prefiller)
    keeper = guard(guarded, [prefiller], decoder)
    with keeper.boot(guarded.command) as process:
        guarded.serving(process)
        before = decoder.sidecar.known()["engine_id"]
        assert keeper.live()[0] == 0
        decoder.kill()
        code, line = keeper.live()
        assert code == 1
        assert all(fact in line for fact in ("decode", before, decoder.sidecar.known()["engine_id"]))


def test_with_several_api_servers_the_bootstrap_server_gives_an_idle_prefill_away(
    router: Callable[..., Router], guard: Callable[..., Guard]
) -> None:
    started = [prefill(api_servers=2), decode(api_servers=2)]
    with workers(started, asks_bootstrap=True) as [prefiller, decoder]:
        guarded = router(prefiller)
        keeper = guard(guarded, [prefiller], decoder)
        assert prefiller.sidecar.known()["source"] == "observed"
        with keeper.boot(guarded.command) as process:
            guarded.serving(process)
            assert keeper.live()[0] == 0
            prefiller.kill()
            code, line = keeper.live()
            assert (code, "prefill 127.0.0.1" in line) == (1, True)


def test_one_of_two_prefills_on_one_port_is_told_apart_by_its_address(
    router: Callable[..., Router], guard: Callable[..., Guard]
) -> None:
    with contextlib.ExitStack() as stack:
        [one] = stack.enter_context(workers([prefill(host="127.0.0.2")]))
        same = {"port": one.engine.port, "bootstrap_port": one.engine.bootstrap_port}
        [other] = stack.enter_context(workers([prefill(host="127.0.0.3", **same)], one.sidecar.port))
        [decoder] = stack.enter_context(workers([decode()]))
        guarded = router(one)
        keeper = guard(guarded, [one, other], decoder)
        process = stack.enter_context(keeper.boot(guarded.command))
        guarded.serving(process)
        ids = {kv_engine_id(one), kv_engine_id(other)}
        eventually("both prefills are used", lambda: guarded.ask()[0] == 200 and ids == sent(decoder))
        assert keeper.live()[0] == 0
        other.kill()
        code, line = keeper.live()
        assert code == 1
        assert "127.0.0.3" in line
        assert "127.0.0.2" not in line
        process.end()
        stack.enter_context(keeper.boot(guarded.command))
        new = kv_engine_id(other)
        eventually("the new id is used", lambda: guarded.listens() and new in after_asking(guarded, decoder))


def test_with_nixl_nothing_is_pinned_and_the_guard_fires_all_the_same(
    router: Callable[..., Router], guard: Callable[..., Guard]
) -> None:
    with workers([prefill(bootstrap_port=-1), decode()]) as [prefiller, decoder]:
        guarded = router(prefiller, *NIXL)
        keeper = guard(guarded, [prefiller], decoder)
        with keeper.boot(guarded.command) as process:
            guarded.serving(process)
            before = kv_engine_id(prefiller)
            assert carried(decoder) == before
            assert (keeper.ready()[0], keeper.live()[0]) == (0, 0)
            prefiller.sidecar.restart()
            assert keeper.live()[0] == 0
            prefiller.kill()
            guarded.serving(process)
            assert carried(decoder) == kv_engine_id(prefiller) != before, "the same router, the new engine"
            assert keeper.live()[0] == 1, "which a router with NIXL does not need, and survives"


def test_the_router_is_ready_when_it_listens_and_takes_over_the_guards_process(
    router: Callable[..., Router], guard: Callable[..., Guard], pair: tuple[Worker, Worker]
) -> None:
    guarded = router(pair[0])
    keeper = guard(guarded, [pair[0]], pair[1])
    assert keeper.ready()[0] == 1, "before boot"
    with keeper.boot(["sh", "-c", "exec sleep 600"]) as process:
        eventually("the guard has become its command", lambda: any("becomes sh" in line for line in process.lines))
        code, line = keeper.ready()
        assert (code, str(guarded.port) in line) == (1, True), "the engines serve and no router listens"
        assert process.end() == -signal.SIGTERM
    with keeper.boot(guarded.command) as process:
        guarded.serving(process)
        assert keeper.ready()[0] == 0
        assert guarded.held_by(process.process.pid)
        assert process.end() == 0
        assert not guarded.listens()


def test_the_routers_exit_code_is_the_containers(
    router: Callable[..., Router], guard: Callable[..., Guard], pair: tuple[Worker, Worker]
) -> None:
    broken = router(pair[0], *MOONCAKE, "--no-such-flag")
    with Child(by_hand(broken, [pair[0]], pair[1]), clean_environment()) as plain:
        code = plain.process.wait(timeout=60)
    assert code not in (0, 1)
    with guard(broken, [pair[0]], pair[1]).boot(broken.command) as process:
        assert process.process.wait(timeout=60) == code


def sent(decoder: Worker) -> set[str]:
    """The engine ids in all requests to a decode."""
    return {each["kv_transfer_params"]["remote_engine_id"] for each in routed(decoder)}


def after_asking(router: Router, decoder: Worker) -> set[str]:
    """The same, after one more request through a router that may still be starting."""
    with contextlib.suppress(OSError):
        router.ask()
    return sent(decoder)

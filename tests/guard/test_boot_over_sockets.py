"""`guard boot` in front of real sockets: whom it waits for, how long, what it writes down and how the router starts."""

from __future__ import annotations

import time

import pytest
from fleet import LOADING, NOT_FOUND, NOT_YET, SEEN, Answer, Fleet, http, identity, silent
from guard_run import Guard, ended


def test_the_snapshot_is_sorted_and_holds_an_id_only_where_it_survives_the_sidecar(guard: Guard, fleet: Fleet) -> None:
    prefill, decode = fleet.role("127.0.0.10", "127.0.0.9", "127.0.0.2"), fleet.role("127.0.0.4")
    prefill["127.0.0.10"].says(identity("sfp-0123456789ab", source="startup_fingerprint", restarts=2))
    prefill["127.0.0.9"].says(identity("obs-1-2", source="observed", restarts=2))
    prefill["127.0.0.2"].says(NOT_FOUND)
    guard.between(prefill, decode).booted()
    assert guard.snapshot("prefill") == [
        f"127.0.0.10|2|{SEEN}|sfp-0123456789ab",
        "127.0.0.2||",
        f"127.0.0.9|2|{SEEN}",
    ]
    assert guard.snapshot("decode") == [f"127.0.0.4|0|{SEEN}|pst-1.00"]


@pytest.mark.parametrize("router", ["vllm", "sglang"])
@pytest.mark.parametrize("bootstrap", ["", "8998"])
def test_the_router_gets_a_flag_for_each_engine(guard: Guard, fleet: Fleet, router: str, bootstrap: str) -> None:
    prefill, decode = fleet.role("127.0.0.2", "127.0.0.3"), fleet.role("127.0.0.4")
    guard.between(prefill, decode)
    more = {"GUARD_ROUTER": router, "GUARD_BOOTSTRAP_PORT": bootstrap}
    result = guard.boot(str(guard.router), "--policy", "round robin", **more)
    assert result.code == 0, result
    port = [bootstrap] if bootstrap else []
    assert guard.flags() == [
        "--policy",
        "round robin",
        *("--prefill", f"http://127.0.0.2:{prefill.port}", *port),
        *("--prefill", f"http://127.0.0.3:{prefill.port}", *port),
        *("--decode", f"http://127.0.0.4:{decode.port}"),
    ]


def test_an_old_sidecar_without_the_endpoint_gets_the_sentinel_at_once(guard: Guard, fleet: Fleet) -> None:
    prefill, decode = fleet.role("127.0.0.2"), fleet.role("127.0.0.4")
    prefill["127.0.0.2"].says(NOT_FOUND)
    guard.between(prefill, decode).booted(GUARD_BUDGET_SEC="600", GUARD_PARTIAL_SEC="600")
    assert guard.snapshot("prefill") == ["127.0.0.2||"]
    assert prefill["127.0.0.2"].sidecar.asked["/engine"] == 1


def test_a_boot_without_the_routers_port_says_what_cannot_work(guard: Guard, fleet: Fleet) -> None:
    guard.between(fleet.role("127.0.0.2"), fleet.role("127.0.0.4"))
    result = guard.boot(GUARD_ROUTER_PORT="")
    assert result.code == 0, result
    assert result.err.splitlines()[0].startswith("guard: GUARD_ROUTER_PORT is not set: guard ready")
    assert "GUARD_ROUTER_PORT" not in guard.boot().err


UNDECIDED: dict[str, Answer | str] = {
    "not identified yet": NOT_YET,
    "refused": "refuse",
    "silent": silent,
    "black hole": "black_hole",
    "garbage": http("<html>it works</html>"),
    "an error": http("", status="500 Internal Server Error"),
    "elsewhere": http("", status="302 Found", headers="Location: http://127.0.0.4:1/engine\r\n"),
}


def test_engines_without_an_identity_are_asked_again_until_the_budget_ends(guard: Guard, fleet: Fleet) -> None:
    addresses = [f"127.0.1.{number}" for number in range(len(UNDECIDED))]
    prefill, decode = fleet.role(*addresses), fleet.role("127.0.0.4")
    for engine, answer in zip(prefill.engines.values(), UNDECIDED.values(), strict=True):
        if isinstance(answer, str):
            getattr(engine.sidecar, answer)()
        else:
            engine.says(answer)
    begun = time.monotonic()
    guard.between(prefill, decode).booted(GUARD_BUDGET_SEC="4", GUARD_DEADLINE_SEC="0.5")
    assert time.monotonic() - begun >= 4
    assert guard.snapshot("prefill") == [f"{address}||" for address in addresses]
    assert guard.snapshot("decode") == decode.lines()
    for name, engine in zip(UNDECIDED, prefill.engines.values(), strict=True):
        assert isinstance(UNDECIDED[name], str) or engine.sidecar.asked["/engine"] >= 2, name


@pytest.mark.parametrize("answer", [NOT_YET, "refuse", http("{")], ids=["not identified yet", "refused", "garbage"])
def test_an_engine_that_says_within_the_budget_who_it_is_is_written_down(
    guard: Guard, fleet: Fleet, answer: bytes | str
) -> None:
    prefill, decode = fleet.role("127.0.0.2"), fleet.role("127.0.0.4")
    late = decode["127.0.0.4"]
    if isinstance(answer, str):
        late.sidecar.refuse()
    else:
        late.says(answer)
    guard.between(prefill, decode)
    process = guard.start("boot", "--", str(guard.router), GUARD_BUDGET_SEC="600")
    asked = prefill["127.0.0.2"].sidecar
    until = time.monotonic() + 30
    while asked.connections < 2 and time.monotonic() < until:  # a whole round has gone by without an answer
        time.sleep(0.05)
    assert process.poll() is None
    assert not guard.calls.exists()
    late.sidecar.open()
    late.says(identity("pst-9.00"))
    assert ended(process).code == 0
    assert guard.snapshot("decode") == [f"127.0.0.4|0|{SEEN}|pst-9.00"]


def test_one_silent_engine_of_two_does_not_hold_the_router_and_fires_when_it_comes(guard: Guard, fleet: Fleet) -> None:
    prefill, decode = fleet.role("127.0.0.2", "127.0.0.3"), fleet.role("127.0.0.4")
    prefill["127.0.0.3"].says(NOT_YET)
    guard.between(prefill, decode)
    begun = time.monotonic()
    guard.booted(GUARD_BUDGET_SEC="600", GUARD_PARTIAL_SEC="2")
    assert time.monotonic() - begun >= 2
    assert guard.snapshot("prefill") == [f"127.0.0.2|0|{SEEN}|pst-1.00", "127.0.0.3||"]
    assert guard.live().code == 0
    prefill["127.0.0.3"].says(identity("pst-2.00"))
    result = guard.live()
    assert (result.code, "127.0.0.3" in result.line) == (1, True)


@pytest.mark.parametrize("lacking", ["health", "identity"])
def test_the_partial_start_waits_until_each_role_has_a_healthy_identified_engine(
    guard: Guard, fleet: Fleet, lacking: str
) -> None:
    prefill, decode = fleet.role("127.0.0.2", "127.0.0.3"), fleet.role("127.0.0.4")
    prefill["127.0.0.3"].says(NOT_YET)
    if lacking == "health":
        decode["127.0.0.4"].health(LOADING)
    else:
        decode["127.0.0.4"].says(NOT_YET)
    begun = time.monotonic()
    guard.between(prefill, decode).booted(GUARD_BUDGET_SEC="4", GUARD_PARTIAL_SEC="0.5")
    assert time.monotonic() - begun >= 4


def test_a_role_without_a_sidecar_does_not_stop_the_partial_clock_of_the_other(guard: Guard, fleet: Fleet) -> None:
    prefill, decode = fleet.role("127.0.0.2", "127.0.0.3"), fleet.role("127.0.0.4")
    prefill["127.0.0.3"].says(NOT_YET)
    guard.between(prefill, decode).booted(GUARD_DECODE_WATCHER_PORT="0", GUARD_BUDGET_SEC="600", GUARD_PARTIAL_SEC="1")
    assert guard.snapshot("decode") == ["127.0.0.4||"]
    assert guard.snapshot("prefill")[1] == "127.0.0.3||"


def test_watcher_port_zero_asks_nobody_anything_at_boot_nor_later(guard: Guard, fleet: Fleet) -> None:
    prefill, decode = fleet.role("127.0.0.2", "127.0.0.3"), fleet.role("127.0.0.4")
    guard.between(prefill, decode)
    everyone = [*prefill.engines.values(), *decode.engines.values()]
    none = {"GUARD_PREFILL_WATCHER_PORT": "0", "GUARD_DECODE_WATCHER_PORT": "0"}
    guard.booted(**none)
    assert guard.snapshot("prefill") == ["127.0.0.2||", "127.0.0.3||"]
    assert guard.snapshot("decode") == ["127.0.0.4||"]
    assert guard.live(**none).code == 0
    assert [one.sidecar.connections + one.engine.connections for one in everyone] == [0, 0, 0]
    guard.booted()
    assert guard.live().code == 0
    assert all(one.sidecar.connections == 2 for one in everyone)  # the count does count


def test_the_same_engine_named_twice_is_one(guard: Guard, fleet: Fleet) -> None:
    prefill, decode = fleet.role("127.0.0.2"), fleet.role("127.0.0.4")
    guard.between(prefill, decode).booted(GUARD_PREFILL=f"{prefill.upstreams()}, {prefill.upstreams()}")
    assert guard.snapshot("prefill") == [f"127.0.0.2|0|{SEEN}|pst-1.00"]
    assert guard.flags().count("--prefill") == 1


def test_one_address_with_two_ports_in_a_role_is_refused_at_boot(guard: Guard, fleet: Fleet) -> None:
    prefill, decode = fleet.role("127.0.0.2"), fleet.role("127.0.0.4")
    result = guard.between(prefill, decode).boot(GUARD_PREFILL="127.0.0.2:8000,127.0.0.2:8001")
    assert result.code == 2, result
    assert "127.0.0.2" in result.sentence
    assert not guard.calls.exists()


def test_a_router_that_starts_again_in_the_same_pod_takes_the_new_identity(guard: Guard, fleet: Fleet) -> None:
    prefill, decode = fleet.role("127.0.0.2"), fleet.role("127.0.0.4")
    guard.between(prefill, decode).booted()
    prefill["127.0.0.2"].says(identity("pst-9.00"))
    assert guard.live().code == 1
    guard.booted()
    assert guard.snapshot("prefill") == [f"127.0.0.2|0|{SEEN}|pst-9.00"]
    assert guard.live().code == 0


def test_the_routers_exit_code_is_the_containers(guard: Guard, fleet: Fleet) -> None:
    guard.between(fleet.role("127.0.0.2"), fleet.role("127.0.0.4"))
    assert guard.boot("/bin/sh", "-c", "exit 37").code == 37

"""`guard live` against engines on real sockets: what makes it fire, and beside each rule what must not."""

from __future__ import annotations

import pytest
from fleet import HEALTHY, LOADING, NOT_FOUND, NOT_YET, Answer, Engine, Fleet, Role, identity, silent
from guard_run import Ended, Guard

OLD, NEW = "pst-1.00", "pst-1791943999.00"
LATER = "2026-10-14T09:09:09.09Z"


class Pod:
    """A router that booted in front of two prefills and a decode."""

    def __init__(self, guard: Guard, fleet: Fleet) -> None:
        self.guard = guard
        self.prefill = fleet.role("127.0.0.2", "127.0.0.3")
        self.decode = fleet.role("127.0.0.4")
        guard.between(self.prefill, self.decode).recorded(self.prefill.lines(), self.decode.lines())

    def role(self, name: str) -> Role:
        return {"prefill": self.prefill, "decode": self.decode}[name]

    def first(self, name: str) -> Engine:
        return next(iter(self.role(name).engines.values()))


@pytest.fixture
def pod(guard: Guard, fleet: Fleet) -> Pod:
    return Pod(guard, fleet)


def stays(result: Ended) -> str:
    assert result.code == 0, result
    return result.line


def fires(result: Ended, *naming: str) -> str:
    assert result.code == 1, result
    for what in naming:
        assert what in result.line, result
    return result.line


NOT_HEALTHY: dict[str, Answer | str] = {
    "loading": LOADING,
    "silent": silent,
    "without /health": NOT_FOUND,
    "refused": "refuse",
    "black hole": "black_hole",
}

NOT_AN_IDENTITY: dict[str, Answer | str] = {
    "not identified yet": NOT_YET,
    "silent": silent,
    "without /engine": NOT_FOUND,
    "refused": "refuse",
    "black hole": "black_hole",
}

QUICKLY = {"GUARD_DEADLINE_SEC": "1"}


def test_a_router_whose_engines_are_who_they_were_is_left_alone(pod: Pod) -> None:
    stays(pod.guard.live())
    pod.guard.booted()
    stays(pod.guard.live())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_replaced_engine_fires_and_the_line_names_role_address_and_both_identities(pod: Pod, role: str) -> None:
    pod.first(role).says(identity(NEW))
    fires(pod.guard.live(), role, pod.first(role).address, OLD, NEW)


def test_replaced_engines_that_are_not_healthy_do_not_fire_until_one_is(guard: Guard, fleet: Fleet) -> None:
    prefill, decode = fleet.role(*(f"127.0.1.{number}" for number in range(len(NOT_HEALTHY)))), fleet.role("127.0.0.4")
    guard.between(prefill, decode).recorded(prefill.lines(), decode.lines())
    for engine, answer in zip(prefill.engines.values(), NOT_HEALTHY.values(), strict=True):
        engine.says(identity(NEW))
        if isinstance(answer, str):
            getattr(engine.engine, answer)()
        else:
            engine.health(answer)
    stays(guard.live(**QUICKLY))
    for address, engine in prefill.engines.items():
        engine.engine.open()
        engine.health(HEALTHY)
        fires(guard.live(), address, engine.engine_id, NEW)
        engine.says(identity(engine.engine_id))


def test_engines_that_no_longer_say_who_they_are_do_not_fire(guard: Guard, fleet: Fleet) -> None:
    addresses = [f"127.0.1.{number}" for number in range(len(NOT_AN_IDENTITY))]
    prefill, decode = fleet.role(*addresses), fleet.role("127.0.0.4")
    guard.between(prefill, decode).recorded(prefill.lines(), decode.lines())
    for engine, answer in zip(prefill.engines.values(), NOT_AN_IDENTITY.values(), strict=True):
        if isinstance(answer, str):
            getattr(engine.sidecar, answer)()
        else:
            engine.says(answer)
    line = stays(guard.live(**QUICKLY))
    assert "not judged" in line
    decode["127.0.0.4"].says(identity(NEW))
    fires(guard.live(**QUICKLY), "127.0.0.4")


def test_a_mute_engine_does_not_hide_a_replaced_one(pod: Pod) -> None:
    pod.prefill["127.0.0.2"].sidecar.black_hole()
    pod.decode["127.0.0.4"].says(silent)
    pod.prefill["127.0.0.3"].says(identity(NEW))
    fires(pod.guard.live(**QUICKLY), "127.0.0.3", "pst-2.00", NEW)


def test_a_replaced_engine_that_loads_does_not_hide_a_replaced_one_that_is_healthy(pod: Pod) -> None:
    for engine in (*pod.prefill.engines.values(), *pod.decode.engines.values()):
        engine.says(identity(NEW))
        engine.health(LOADING)
    stays(pod.guard.live())
    pod.prefill["127.0.0.3"].health(HEALTHY)
    fires(pod.guard.live(), "prefill", "127.0.0.3", "pst-2.00", NEW)


@pytest.mark.parametrize("source", ["process_start_time", "startup_fingerprint"])
def test_a_restart_of_the_sidecar_alone_does_not_fire_where_the_id_survives_it(pod: Pod, source: str) -> None:
    engine = pod.first("prefill")
    engine.says(identity(OLD, source=source, restarts=3))
    pod.guard.booted()
    engine.says(identity(OLD, source=source, restarts=0, watcher_started_at=LATER))
    stays(pod.guard.live())


def test_a_restart_of_the_sidecar_alone_fires_where_the_id_does_not_survive_it(pod: Pod) -> None:
    engine = pod.first("prefill")
    engine.says(identity("obs-1791942730480-0", source="observed"))
    pod.guard.booted()
    stays(pod.guard.live())
    engine.says(identity("obs-1791968949090-0", source="observed", watcher_started_at=LATER))
    fires(pod.guard.live(), engine.address, LATER)


def test_a_replacement_that_an_observing_sidecar_counted_fires(pod: Pod) -> None:
    engine = pod.first("prefill")
    engine.says(identity("obs-1791942730480-0", source="observed"))
    pod.guard.booted()
    engine.says(identity("obs-1791942730480-1", source="observed", restarts=1))
    fires(pod.guard.live(), engine.address)


def test_a_better_source_found_later_by_the_same_sidecar_is_no_replacement(pod: Pod) -> None:
    engine = pod.first("prefill")
    engine.says(identity("obs-1791942730480-0", source="observed"))
    pod.guard.booted()
    engine.says(identity("sfp-0123456789ab", source="startup_fingerprint"))
    stays(pod.guard.live())
    engine.says(identity("sfp-0123456789ab", source="startup_fingerprint", restarts=1))
    fires(pod.guard.live(), engine.address)


def test_an_engine_whose_identity_came_too_late_for_boot_fires_once_it_is_healthy(pod: Pod) -> None:
    late = pod.first("decode")
    late.says(NOT_FOUND)
    pod.guard.booted()
    assert pod.guard.snapshot("decode") == ["127.0.0.4||"]
    stays(pod.guard.live())
    late.says(identity(NEW))
    late.health(LOADING)
    stays(pod.guard.live())
    late.health(HEALTHY)
    fires(pod.guard.live(), "decode", "127.0.0.4", NEW)


def test_an_engine_that_was_silent_at_boot_and_is_silent_still_does_not_fire(pod: Pod) -> None:
    mute = pod.first("decode")
    mute.sidecar.refuse()
    pod.guard.booted(GUARD_BUDGET_SEC="1")
    assert pod.guard.snapshot("decode") == ["127.0.0.4||"]
    stays(pod.guard.live(**QUICKLY))
    mute.sidecar.open()
    mute.says(NOT_YET)
    stays(pod.guard.live(**QUICKLY))


def test_an_engine_that_was_not_there_at_boot_fires_once_it_is_healthy(pod: Pod) -> None:
    role, everyone = pod.prefill, pod.prefill.upstreams()
    pod.guard.recorded([role["127.0.0.2"].line], pod.decode.lines())
    stays(pod.guard.live(GUARD_PREFILL=f"127.0.0.2:{role.port}"))
    role["127.0.0.3"].health(LOADING)
    stays(pod.guard.live(GUARD_PREFILL=everyone))
    role["127.0.0.3"].engine.refuse()
    stays(pod.guard.live(GUARD_PREFILL=everyone))
    role["127.0.0.3"].engine.open()
    role["127.0.0.3"].health(HEALTHY)
    fires(pod.guard.live(GUARD_PREFILL=everyone), "prefill", "127.0.0.3")


def test_a_healthy_new_engine_fires_even_before_its_sidecar_knows_it(pod: Pod) -> None:
    role = pod.prefill
    pod.guard.recorded([role["127.0.0.2"].line], pod.decode.lines())
    role["127.0.0.3"].sidecar.refuse()
    fires(pod.guard.live(), "prefill", "127.0.0.3")


def test_an_address_that_went_away_does_not_fire_and_is_not_asked(pod: Pod) -> None:
    role = pod.prefill
    role["127.0.0.3"].says(identity(NEW))
    before = role["127.0.0.3"].sidecar.connections
    stays(pod.guard.live(GUARD_PREFILL=f"127.0.0.2:{role.port}"))
    assert role["127.0.0.3"].sidecar.connections == before
    fires(pod.guard.live(), "127.0.0.3", NEW)  # back under its address: recorded at boot, and another process now


def test_another_order_of_the_same_addresses_does_not_fire(pod: Pod) -> None:
    reordered = ",".join(reversed(pod.prefill.upstreams().split(",")))
    stays(pod.guard.live(GUARD_PREFILL=reordered))


def test_a_tick_asks_each_engine_once_and_health_only_of_suspects(pod: Pod) -> None:
    everyone = [*pod.prefill.engines.values(), *pod.decode.engines.values()]
    before = [(one.engine.connections, one.sidecar.connections) for one in everyone]
    stays(pod.guard.live())
    assert [(one.engine.connections, one.sidecar.connections) for one in everyone] == [
        (engine, sidecar + 1) for engine, sidecar in before
    ]
    pod.decode["127.0.0.4"].says(identity(NEW))
    fires(pod.guard.live())
    assert pod.decode["127.0.0.4"].engine.connections == before[2][0] + 1
    assert pod.prefill["127.0.0.2"].engine.connections == before[0][0]


def test_one_pod_with_both_engines_is_told_apart_by_its_ports(guard: Guard, fleet: Fleet) -> None:
    prefill, decode = fleet.role("127.0.0.1"), fleet.role("127.0.0.1")
    decode["127.0.0.1"].says(identity("pst-7.00"))
    guard.between(prefill, decode).booted()
    assert guard.snapshot("prefill")[0].endswith("|pst-1.00")
    assert guard.snapshot("decode")[0].endswith("|pst-7.00")
    stays(guard.live())
    decode["127.0.0.1"].says(identity(NEW))
    line = fires(guard.live(), "127.0.0.1", "pst-7.00", NEW)
    assert "decode" in line
    assert "prefill" not in line

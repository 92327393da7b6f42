"""When must a router start again? Each rule with what it must not mistake for itself, and what holds for all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginewatch.core.drift import (
    DURABLE_SOURCES,
    LARGEST_BODY_BYTES,
    LARGEST_RESTARTS,
    LARGEST_SNAPSHOT_BYTES,
    BadSnapshot,
    Identity,
    Recorded,
    of_known_families,
    parse_snapshot,
    read_identity,
    record,
    suspicion,
    write_snapshot,
)

ADDRESS = "10.0.0.1"
MORNING, NOON = "2026-10-14T01:52:10.48Z", "2026-10-14T12:00:00.00Z"


def durable(engine_id: str = "pst-1.00", restarts: int = 0, watcher_started_at: str = MORNING) -> Identity:
    return Identity(engine_id, restarts, watcher_started_at, "process_start_time")


def observed(engine_id: str = "obs-1-1", restarts: int = 0, watcher_started_at: str = MORNING) -> Identity:
    return Identity(engine_id, restarts, watcher_started_at, "observed")


def drift(at_boot: Identity | None, now: Identity | None) -> str | None:
    return suspicion(ADDRESS, record(ADDRESS, at_boot), now)


# --- rule 1: growth -------------------------------------------------------------------------------------------------


def test_an_address_that_was_not_there_at_boot_is_growth() -> None:
    reason = suspicion(ADDRESS, None, None)
    assert reason is not None
    assert ADDRESS in reason
    assert "rule 1" in reason


def test_an_address_that_was_there_at_boot_is_no_growth() -> None:
    assert suspicion(ADDRESS, Recorded(ADDRESS), None) is None


# --- rule 2: another identity ---------------------------------------------------------------------------------------


def test_another_durable_id_is_another_process_and_both_are_named() -> None:
    reason = drift(durable("pst-1.00"), durable("pst-2.00", restarts=1))
    assert reason is not None
    for part in (ADDRESS, "pst-1.00", "pst-2.00", "rule 2"):
        assert part in reason


@pytest.mark.parametrize("source", sorted(DURABLE_SOURCES))
def test_a_restart_of_the_sidecar_alone_is_no_other_process_where_the_id_survives_it(source: str) -> None:
    before = Identity("same", 3, MORNING, source)
    after = Identity("same", 0, NOON, source)
    assert drift(before, after) is None


def test_a_restart_of_the_sidecar_alone_cannot_be_told_from_a_replacement_where_the_id_does_not_survive_it() -> None:
    reason = drift(observed("obs-1-1"), observed("obs-2-1", watcher_started_at=NOON))
    assert reason is not None
    for part in (MORNING, NOON, "rule 2"):
        assert part in reason


def test_a_replacement_that_the_same_sidecar_counted_is_another_process() -> None:
    assert drift(observed("obs-1-1"), observed("obs-1-2", restarts=1)) is not None


def test_another_observed_id_with_the_same_count_of_the_same_sidecar_is_no_other_process() -> None:
    assert drift(observed("obs-1-1"), observed("obs-1-2")) is None


def test_a_durable_id_that_the_same_sidecar_found_later_is_no_other_process() -> None:
    assert drift(observed(), durable()) is None
    assert drift(observed(), durable(restarts=1)) is not None


def test_a_durable_id_that_the_same_sidecar_lost_is_no_other_process() -> None:
    assert drift(durable(), observed()) is None
    assert drift(durable(), observed(watcher_started_at=NOON)) is not None


def test_an_identity_and_then_silence_is_no_other_process() -> None:
    assert drift(durable(), None) is None


# --- rule 3: a late identity ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [durable(), observed()])
def test_an_identity_where_there_was_none_at_boot_is_a_late_one(late: Identity) -> None:
    reason = drift(None, late)
    assert reason is not None
    for part in (ADDRESS, late.engine_id, "rule 3"):
        assert part in reason


def test_silence_where_there_was_none_at_boot_is_nothing() -> None:
    assert drift(None, None) is None


# --- generated lives of sidecars and engines ------------------------------------------------------------------------

EVENTS = st.lists(st.sampled_from(["sidecar restarts", "engine is replaced", "silence"]), max_size=12)


@given(EVENTS, st.sampled_from(sorted(DURABLE_SOURCES)))
def test_with_a_durable_source_drift_is_seen_iff_the_engine_was_replaced(events: list[str], source: str) -> None:
    at_boot = now = Identity("process-0", 0, "start-0", source)
    process = sidecar = 0
    for event in events:
        if event == "sidecar restarts":
            sidecar += 1
            now = Identity(now.engine_id, 0, f"start-{sidecar}", source)
        elif event == "engine is replaced":
            process += 1
            now = Identity(f"process-{process}", now.restarts + 1, now.watcher_started_at, source)
        else:
            assert drift(at_boot, None) is None
        assert (drift(at_boot, now) is not None) == (process > 0)


# --- address families -----------------------------------------------------------------------------------------------


def snapshot_of(*addresses: str) -> dict[str, Recorded]:
    return {address: Recorded(address) for address in addresses}


@pytest.mark.parametrize(
    ("now", "at_boot", "compared"),
    [
        (["10.0.0.1", "10.0.0.2"], ["10.0.0.1"], ["10.0.0.1", "10.0.0.2"]),
        (["10.0.0.1", "fd00::1"], ["10.0.0.1"], ["10.0.0.1"]),
        (["fd00::1"], ["10.0.0.1"], []),
        (["fd00::1", "10.0.0.1"], ["fd00::1"], ["fd00::1"]),
        (["10.0.0.1"], ["fd00::1"], []),
        (["fd00::1", "fd00::2"], ["fd00::1"], ["fd00::1", "fd00::2"]),
        # One entry is known by IPv4 and another by IPv6: each keeps to its own.
        (["10.0.0.1", "10.0.0.2", "fd00::1"], ["10.0.0.1", "fd00::9"], ["10.0.0.1", "10.0.0.2"]),
        (["fd00::9", "fd00::8"], ["10.0.0.1", "fd00::9"], ["fd00::9", "fd00::8"]),
        (["10.0.0.2", "fd00::2"], ["10.0.0.1", "fd00::9"], ["10.0.0.2"]),
        (["fd00::2"], ["10.0.0.1", "fd00::9"], []),
        ([], ["10.0.0.1"], []),
    ],
)
def test_only_the_family_that_the_boot_knows_an_entry_by_is_compared(
    now: list[str], at_boot: list[str], compared: list[str]
) -> None:
    assert of_known_families(now, snapshot_of(*at_boot)) == compared


# --- answers of /engine ---------------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "engine_id": "pst-1791943641.29",
    "started_at": "2026-10-14T02:07:21.29Z",
    "source": "process_start_time",
    "restarts": 1,
    "watcher_started_at": MORNING,
}


def body(**changes: object) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def test_an_answer_is_read() -> None:
    assert read_identity(body()) == Identity("pst-1791943641.29", 1, MORNING, "process_start_time")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"null",
        b"[]",
        b'"pst-1.00"',
        b"<html>it works</html>",
        b"[" * 60_000,
        b"\xff",
        json.dumps(GOOD).encode("utf-16"),
        body()[:-1],
        body(engine_id=1),
        body(engine_id=""),
        body(engine_id="x" * 129),
        body(engine_id="pst-1|2"),
        body(engine_id="pst-1.00\n"),
        body(engine_id="pst-1.00 "),
        body(engine_id="pst-１"),
        body(restarts="1"),
        body(restarts=1.0),
        body(restarts=True),
        body(restarts=-1),
        body(restarts=LARGEST_RESTARTS + 1),
        body(restarts=None),
        body().replace(b": 1,", b": " + b"9" * 5000 + b","),
        body(watcher_started_at=1.5),
        body(watcher_started_at=""),
        body(watcher_started_at="2026|"),
        body(watcher_started_at="2026\n10.0.0.9||"),
        body(watcher_started_at="2026\u2028"),
        body(watcher_started_at="\ud800"),
        body(watcher_started_at="2" * 65),
        body(source=None),
        body(source=["observed"]),
        json.dumps({key: value for key, value in GOOD.items() if key != "restarts"}).encode(),
        body() + b" " * LARGEST_BODY_BYTES,
    ],
)
def test_what_is_not_an_identity_is_none(answer: bytes) -> None:
    assert read_identity(answer) is None


@pytest.mark.parametrize(
    "answer",
    [
        body(engine_id="x" * 128),
        body(engine_id="A.z_0:9-"),
        body(restarts=0),
        body(restarts=LARGEST_RESTARTS),
        body(watcher_started_at="2" * 64),
        body(source="a source of next year"),
        body(more={"keys": [1]}),
        body(started_at=None),
        body() + b" " * (LARGEST_BODY_BYTES - len(body())),
    ],
)
def test_what_is_at_the_limit_of_an_identity_is_one(answer: bytes) -> None:
    assert read_identity(answer) is not None


def test_an_id_is_kept_only_where_it_survives_a_restart_of_the_sidecar() -> None:
    assert record(ADDRESS, durable()).durable_id == "pst-1.00"
    assert record(ADDRESS, observed()).durable_id == ""
    assert record(ADDRESS, observed()).watcher_started_at == MORNING


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(GOOD)) | st.text(), inner),
    max_leaves=8,
)


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_answer_raises(answer: bytes) -> None:
    read_identity(answer)


# --- snapshots ------------------------------------------------------------------------------------------------------


def test_a_snapshot_has_one_sorted_line_per_engine() -> None:
    engines = [
        record("10.0.0.3", None),
        record("10.0.0.2", observed(restarts=2)),
        record("fd00::1", durable()),
        record("10.0.0.1", durable()),
    ]
    assert write_snapshot(engines) == (
        f"10.0.0.1|0|{MORNING}|pst-1.00\n10.0.0.2|2|{MORNING}\n10.0.0.3||\nfd00::1|0|{MORNING}|pst-1.00\n"
    )


LINE = f"10.0.0.1|0|{MORNING}|pst-1.00\n".encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        LINE[:-1],
        LINE + b"10.0.0.2|0|2026",
        LINE + b"\n",
        LINE + LINE,
        LINE + b"10.0.0.2\n",
        LINE + b"10.0.0.2|\n",
        LINE + b"10.0.0.2|||\n",
        LINE + b"10.0.0.2|0|\n",
        LINE + b"10.0.0.2||2026\n",
        LINE + b"10.0.0.2|x|2026\n",
        LINE + b"10.0.0.2|-1|2026\n",
        LINE + b"10.0.0.2|" + b"9" * 5000 + b"|2026\n",
        LINE + b"10.0.0.2|9999999999999999999|2026\n",
        LINE + b"10.0.0.2|0|2026|\n",
        LINE + b"10.0.0.2|0|2026|pst 1\n",
        LINE + b"10.0.0.2|0|2026|pst-1|\n",
        LINE + b"prefill-0||\n",
        LINE.replace(b"\n", b"\r\n"),
        b"\xff" + LINE,
        LINE + b"\0" * 100,
        b"10.0.0.1||\n" + b" " * LARGEST_SNAPSHOT_BYTES,
    ],
)
def test_a_snapshot_that_the_boot_cannot_have_written_is_refused_as_a_whole(content: bytes) -> None:
    with pytest.raises(BadSnapshot):
        parse_snapshot(content)


def test_the_line_that_the_refused_ones_contain_is_read() -> None:
    assert parse_snapshot(LINE) == {"10.0.0.1": Recorded("10.0.0.1", 0, MORNING, "pst-1.00")}


ADDRESSES = st.ip_addresses().map(str)
PRINTABLE = st.characters(categories=("L", "N", "P", "S"), exclude_characters="|")
TIMES = st.just(MORNING) | st.text(PRINTABLE, min_size=1, max_size=12)
IDS = st.text("ABCxyz019._:-", min_size=1, max_size=12)
IDENTITIES = st.builds(
    Identity, IDS, st.integers(0, LARGEST_RESTARTS), TIMES, st.sampled_from(["observed", *sorted(DURABLE_SOURCES)])
)


@given(st.dictionaries(ADDRESSES, st.none() | IDENTITIES, min_size=1, max_size=6))
def test_what_is_written_is_read_back(fleet: dict[str, Identity | None]) -> None:
    engines = {address: record(address, identity) for address, identity in fleet.items()}
    text = write_snapshot(engines.values())
    assert parse_snapshot(text.encode()) == engines
    assert text.splitlines() == sorted(text.splitlines())


@given(st.dictionaries(ADDRESSES, st.none() | IDENTITIES, min_size=1, max_size=6))
def test_an_identity_that_is_the_one_of_the_boot_is_never_drift(fleet: dict[str, Identity | None]) -> None:
    snapshot = parse_snapshot(write_snapshot(record(*engine) for engine in fleet.items()).encode())
    for address, identity in fleet.items():
        assert suspicion(address, snapshot[address], identity) is None


@given(st.binary() | st.text("0123456789.:|abc-\n").map(str.encode))
def test_no_content_of_a_snapshot_raises_anything_else(content: bytes) -> None:
    try:
        parse_snapshot(content)
    except BadSnapshot:
        pass

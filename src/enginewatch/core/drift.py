"""Does a router still talk to the engines that it started with?

The boot of a router records, per role, which engines it was started with: the snapshot. Later the sidecars of the same
addresses are asked again, and the router must start again iff one of three rules holds and the engine behind it answers
its /health with 200 (a router never restarts into an engine that still loads):

1. growth: an address that was not there at boot.
2. other identity: an engine known at boot is another process. Its engine_id decides where both sides have one that
   survives a restart of the sidecar; otherwise its restarts together with watcher_started_at.
3. late identity: the boot found nobody to ask (the sentinel), and now there is an identity.

Nothing else counts: not an address that went away, not a lookup that failed, not an answer that is no identity, not the
order of anything. Each rule is a function that returns None or the reason.

This file travels to router images with the guard: standard library only, Python 3.9.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, Optional

DURABLE_SOURCES: Final = frozenset({"process_start_time", "startup_fingerprint"})
"""The sources whose ids survive a restart of the sidecar."""
LARGEST_BODY_BYTES: Final = 64 * 1024
LARGEST_SNAPSHOT_BYTES: Final = 1024 * 1024
LONGEST_TIME: Final = 64
LARGEST_RESTARTS: Final = 2**63 - 1

ENGINE_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
ADDRESS: Final = re.compile(r"[0-9A-Fa-f.:]{2,45}(%[A-Za-z0-9._-]{1,15})?")
COUNT: Final = re.compile(r"[0-9]{1,19}")


class Identity(NamedTuple):
    """What a sidecar's /engine says: which process answers behind its address.

    Attributes:
        engine_id: the sidecar's name for the process.
        restarts: the replacements that the sidecar has seen.
        watcher_started_at: when the sidecar started, as it writes it.
        source: what the id is taken from.
    """

    engine_id: str
    restarts: int
    watcher_started_at: str
    source: str

    @property
    def durable_id(self) -> str:
        """The id if a restarted sidecar gives the same again, else an empty string."""
        return self.engine_id if self.source in DURABLE_SOURCES else ""


class Recorded(NamedTuple):
    """One engine of a snapshot.

    Attributes:
        address: its IP, IPv6 without brackets.
        restarts: None where the boot found no identity: the sentinel.
        watcher_started_at: empty in a sentinel.
        durable_id: empty where the id would not survive a restart of the sidecar.
    """

    address: str
    restarts: Optional[int] = None  # noqa: UP045 - evaluated by Python 3.9
    watcher_started_at: str = ""
    durable_id: str = ""

    @property
    def is_sentinel(self) -> bool:
        """Whether the boot found nobody who said which process this is."""
        return self.restarts is None


# --- the rules ------------------------------------------------------------------------------------------------------


def suspicion(address: str, recorded: Recorded | None, live: Identity | None) -> str | None:
    """Why the router must start again once this engine's /health is 200, or None.

    Args:
        address: an address that the role has now.
        recorded: what the boot recorded of it, None if it was not there.
        live: what its sidecar says now, None if it was not asked or gave no identity.
    """
    if recorded is None:
        return growth(address)
    if live is None:
        return None
    return late_identity(recorded, live) or other_identity(recorded, live)


def growth(address: str) -> str:
    """Rule 1, of an address that was not there at boot."""
    return f"{address} was not there at boot (rule 1: growth)"


def other_identity(recorded: Recorded, live: Identity) -> str | None:
    """Rule 2: None, or why an engine known at boot is another process now."""
    if recorded.is_sentinel:
        return None
    if recorded.durable_id and live.durable_id:
        if recorded.durable_id == live.durable_id:
            return None
        was, now = recorded.durable_id, live.durable_id
    else:
        if (recorded.restarts, recorded.watcher_started_at) == (live.restarts, live.watcher_started_at):
            return None
        was, now = _watched(recorded.durable_id, recorded.restarts, recorded.watcher_started_at), _described(live)
    return f"{recorded.address} was {was} at boot and is {now} now (rule 2: other identity)"


def late_identity(recorded: Recorded, live: Identity) -> str | None:
    """Rule 3: None, or that an engine without an identity at boot has one now."""
    if not recorded.is_sentinel:
        return None
    return f"{recorded.address} had no identity at boot and is {_described(live)} now (rule 3: late identity)"


def _described(live: Identity) -> str:
    return live.durable_id or _watched(live.engine_id, live.restarts, live.watcher_started_at)


def _watched(engine_id: str, restarts: int | None, watcher_started_at: str) -> str:
    named = f"{engine_id}, " if engine_id else ""
    return f"{named}restart {restarts} of the watcher started at {watcher_started_at}"


def of_known_families(addresses: Iterable[str], snapshot: Mapping[str, Recorded]) -> list[str]:
    """What of one entry's addresses now may be compared with a role's snapshot.

    A pod with an IPv4 and an IPv6 address is one engine, which the boot recorded once; and a lookup may lose one of
    the families for a while. So only the family that the boot knows the entry by is looked at. Where that cannot be
    told (the snapshot has both, and none of these addresses), IPv6 addresses are left out: doubt restarts no router.

    Args:
        addresses: the addresses of one entry (one name, or one address).
        snapshot: the role's engines at boot, by address.
    """
    found = list(dict.fromkeys(addresses))
    known = {_is_ipv6(address) for address in found if address in snapshot}
    if not known:
        known = {_is_ipv6(address) for address in snapshot}
    is_ipv6 = known == {True}
    return [address for address in found if _is_ipv6(address) == is_ipv6]


def _is_ipv6(address: str) -> bool:
    return ":" in address


# --- an answer of /engine -------------------------------------------------------------------------------------------


def read_identity(body: bytes) -> Identity | None:
    """The identity in the body of a 200 answer of /engine, or None for whatever else it holds."""
    if len(body) > LARGEST_BODY_BYTES:
        return None
    try:
        said = json.loads(body.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    engine_id, restarts = said.get("engine_id"), said.get("restarts")
    watcher_started_at, source = said.get("watcher_started_at"), said.get("source")
    if not isinstance(engine_id, str) or not ENGINE_ID.fullmatch(engine_id):
        return None
    if not isinstance(restarts, int) or isinstance(restarts, bool) or not 0 <= restarts <= LARGEST_RESTARTS:
        return None
    if not isinstance(watcher_started_at, str) or not _is_time(watcher_started_at) or not isinstance(source, str):
        return None
    return Identity(engine_id, restarts, watcher_started_at, source)


def _is_time(text: str) -> bool:
    """Whether a snapshot can carry it: the time itself is only ever compared, never read."""
    return 0 < len(text) <= LONGEST_TIME and text.isprintable() and "|" not in text


def record(address: str, identity: Identity | None) -> Recorded:
    """What the boot writes down of an engine; None as identity: the sentinel."""
    if identity is None:
        return Recorded(address)
    return Recorded(address, identity.restarts, identity.watcher_started_at, identity.durable_id)


# --- the snapshot ---------------------------------------------------------------------------------------------------


class BadSnapshot(ValueError):  # noqa: N818
    """A snapshot that the boot cannot have written; the text says what is wrong with it."""


def write_snapshot(engines: Iterable[Recorded]) -> str:
    """A snapshot: one sorted line per engine, `<ip>|<restarts>|<watcher_started_at>` and `|<engine_id>` if durable."""
    return "".join(sorted(_line(engine) + "\n" for engine in engines))


def _line(engine: Recorded) -> str:
    if engine.is_sentinel:
        return f"{engine.address}||"
    fields = [engine.address, str(engine.restarts), engine.watcher_started_at]
    return "|".join([*fields, engine.durable_id] if engine.durable_id else fields)


def parse_snapshot(content: bytes) -> dict[str, Recorded]:
    """The engines of a snapshot by address.

    Raises:
        BadSnapshot: it is empty, or one of its lines is not as `write_snapshot` writes it. A part is not taken for the
            whole: an engine lost from it would look like growth.
    """
    if not content:
        raise BadSnapshot("is empty")
    if len(content) > LARGEST_SNAPSHOT_BYTES:
        raise BadSnapshot(f"has more than {LARGEST_SNAPSHOT_BYTES} bytes")
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise BadSnapshot("is not text") from None
    if not text.endswith("\n"):
        raise BadSnapshot("breaks off in its last line")
    engines: dict[str, Recorded] = {}
    for number, line in enumerate(text[:-1].split("\n"), start=1):
        engine = _engine_of(line)
        if engine is None or engine.address in engines:
            raise BadSnapshot(f"is corrupt in line {number}")
        engines[engine.address] = engine
    return engines


def _engine_of(line: str) -> Recorded | None:
    address, *rest = line.split("|")
    if not ADDRESS.fullmatch(address):
        return None
    if rest == ["", ""]:
        return Recorded(address)
    if len(rest) not in (2, 3):
        return None
    restarts, watcher_started_at, durable_id = rest[0], rest[1], rest[2] if len(rest) == 3 else ""
    if not COUNT.fullmatch(restarts) or int(restarts) > LARGEST_RESTARTS or not _is_time(watcher_started_at):
        return None
    if len(rest) == 3 and not ENGINE_ID.fullmatch(durable_id):
        return None
    return Recorded(address, int(restarts), watcher_started_at, durable_id)

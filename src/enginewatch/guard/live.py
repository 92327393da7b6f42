"""`guard live`, the router's livenessProbe: does the router still talk to the engines that it started with?

The rules are in core/drift.py. Here everybody is asked, all of them side by side: what a name resolves to, then who the
engines are, then whether a suspect serves. The first reason that holds decides; silence never does.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple, Optional, Union

from enginewatch.core.drift import Recorded, of_known_families, suspicion
from enginewatch.guard import upstreams
from enginewatch.guard.files import NoSnapshot, read_snapshot
from enginewatch.guard.settings import Role, Settings, Upstream, UsageError, read_settings
from enginewatch.guard.side_by_side import SideBySide

KEEP: Final = 0
RESTART: Final = 1

NEEDS: Final = ("GUARD_PREFILL", "GUARD_DECODE")
USES: Final = (
    *NEEDS,
    "GUARD_PREFILL_WATCHER_PORT",
    "GUARD_DECODE_WATCHER_PORT",
    "GUARD_RUN_DIR",
    "GUARD_DEADLINE_SEC",
)
MOST_NAMED: Final = 3
"""So many engines that could not be judged are named in the line."""


class Resolved(NamedTuple):
    """What one entry resolves to now."""

    role: Role
    upstream: Upstream
    lookup: upstreams.Lookup


class Judged(NamedTuple):
    """One engine, asked.

    Attributes:
        drift: why the router must start again, or None.
        unjudged: what could not be said of it, or an empty string.
    """

    drift: Optional[str]  # noqa: UP045 - evaluated by Python 3.9
    unjudged: str


Answer = Union[Resolved, Judged]


def run(flags: Sequence[str], started: float) -> tuple[int, str]:
    """One tick: the exit code, and the line for the kubelet's event.

    Args:
        flags: of the command line.
        started: when the tick began, on the monotonic clock.
    """
    try:
        settings = read_settings(flags, os.environ, uses=USES, needs=NEEDS)
        snapshots = {role.name: read_snapshot(settings.run_dir, role.name) for role in settings.roles}
    except (UsageError, NoSnapshot) as error:
        return KEEP, f"keep: nothing can be judged: {error}"
    return judge(settings, snapshots, SideBySide(started + settings.deadline_sec))


def judge(
    settings: Settings,
    snapshots: Mapping[str, Mapping[str, Recorded]],
    asking: SideBySide[Answer],
    *,
    look_up: Callable[[str, int], upstreams.Lookup] = upstreams.look_up,
    who: Callable[[str, int, float], upstreams.Who] = upstreams.who,
    serves: Callable[[str, int, float], str | None] = upstreams.serves,
) -> tuple[int, str]:
    """Compare what is there now with the snapshots.

    Args:
        settings: whom to ask.
        snapshots: by role, what the boot recorded by address.
        asking: what the questions run on.
        look_up: resolves a name to addresses of one family, or of both.
        who: asks a sidecar who its engine is.
        serves: asks an engine's /health.
    """
    seen: set[tuple[str, str]] = set()
    unjudged: list[str] = []

    def resolve(role: Role, upstream: Upstream) -> None:
        family = family_of(snapshots[role.name])
        asking.start(lambda: Resolved(role, upstream, look_up(upstream.host, family)))

    def examine(role: Role, address: str, port: int) -> None:
        recorded = snapshots[role.name].get(address)
        asking.start(lambda: _judged(role, address, port, recorded), first=recorded is not None)

    def _judged(role: Role, address: str, port: int, recorded: Recorded | None) -> Judged:
        found = upstreams.Who(None)
        if recorded is not None:
            if not role.watcher_port:
                return Judged(None, "")
            found = who(address, role.watcher_port, asking.answer_by)
        reason = suspicion(address, recorded, found.identity)
        if reason is None:
            return Judged(None, "" if found.identity else f"{role.name} {address} ({found.trouble})")
        not_serving = serves(address, port, asking.answer_by)
        if not_serving is None:
            return Judged(f"{role.name} {reason}", "")
        return Judged(None, f"{role.name} {reason}, but its /health: {not_serving}")

    def take(role: Role, addresses: Sequence[str], port: int) -> None:
        for address in of_known_families(addresses, snapshots[role.name]):
            if (role.name, address) not in seen:
                seen.add((role.name, address))
                examine(role, address, port)

    for role in settings.roles:
        for upstream in role.upstreams:
            if upstream.is_address:
                take(role, [upstream.host], upstream.port)
            else:
                resolve(role, upstream)
    for answer in asking.answers():
        if isinstance(answer, Resolved):
            take(answer.role, answer.lookup.addresses, answer.upstream.port)
            if answer.lookup.trouble:
                unjudged.append(f"{answer.role.name} {answer.upstream.host} ({answer.lookup.trouble})")
        elif answer.drift:
            return RESTART, f"restart the router: {answer.drift}"
        elif answer.unjudged:
            unjudged.append(answer.unjudged)
    return KEEP, _kept(len(seen), unjudged, asking.unanswered)


def family_of(snapshot: Collection[str]) -> int:
    """The one family that all addresses of a snapshot have, or AF_UNSPEC.

    Only known families count, and libc waits for the answers of both before it gives one: a resolver that loses the
    questions for IPv6 would keep every lookup beyond the deadline, and the guard blind.
    """
    families = {socket.AF_INET6 if ":" in address else socket.AF_INET for address in snapshot}
    return families.pop() if len(families) == 1 else socket.AF_UNSPEC


def _kept(engines: int, unjudged: Sequence[str], unanswered: int) -> str:
    line = f"keep: no drift among {engines} engine{'' if engines == 1 else 's'}"
    if unjudged:
        more = f" and {len(unjudged) - MOST_NAMED} more" if len(unjudged) > MOST_NAMED else ""
        line += f"; not judged: {'; '.join(unjudged[:MOST_NAMED])}{more}"
    if unanswered:
        line += f"; {unanswered} of the questions had no answer by the deadline"
    return line

"""`guard ready`, the router's readiness and startup probe: can it serve, with at least one engine of each role?"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple, Optional

from enginewatch.guard import upstreams
from enginewatch.guard.files import NoSnapshot, read_snapshot
from enginewatch.guard.settings import Role, Settings, UsageError, read_settings
from enginewatch.guard.side_by_side import SideBySide

READY: Final = 0
NOT_READY: Final = 1
USAGE: Final = 2

NEEDS: Final = ("GUARD_PREFILL", "GUARD_DECODE", "GUARD_ROUTER_PORT")
USES: Final = (*NEEDS, "GUARD_RUN_DIR", "GUARD_DEADLINE_SEC")
ROUTER_HOST: Final = "127.0.0.1"
MOST_NAMED: Final = 3


class Answer(NamedTuple):
    """What one of them said.

    Attributes:
        whose: the role, or "router".
        where: the address.
        trouble: None if it serves.
    """

    whose: str
    where: str
    trouble: Optional[str]  # noqa: UP045 - evaluated by Python 3.9


def run(flags: Sequence[str], started: float) -> tuple[int, str]:
    """One tick: the exit code, and the line for the kubelet's event.

    Args:
        flags: of the command line.
        started: when the tick began, on the monotonic clock.

    Raises:
        UsageError: a setting cannot be used.
    """
    settings = read_settings(flags, os.environ, uses=USES, needs=NEEDS)
    try:
        snapshots = {role.name: read_snapshot(settings.run_dir, role.name) for role in settings.roles}
    except NoSnapshot as error:
        return NOT_READY, f"not ready: {error}"
    return judge(settings, snapshots, SideBySide(started + settings.deadline_sec))


def judge(
    settings: Settings,
    snapshots: Mapping[str, Collection[str]],
    asking: SideBySide[Answer],
    *,
    serves: Callable[[str, int, float], str | None] = upstreams.serves,
    accepts: Callable[[str, int, float], str | None] = upstreams.accepts,
) -> tuple[int, str]:
    """Ask the router's port and the engines that it was started with.

    Args:
        settings: the ports.
        snapshots: by role, the addresses of the engines.
        asking: what the questions run on.
        serves: asks an engine's /health.
        accepts: connects to the router.
    """
    router_port = settings.router_port
    if router_port is None:
        raise UsageError("GUARD_ROUTER_PORT is missing")
    asking.start(lambda: Answer("router", ROUTER_HOST, accepts(ROUTER_HOST, router_port, asking.answer_by)))

    def ask(role: Role, address: str, port: int) -> None:
        asking.start(lambda: Answer(role.name, address, serves(address, port, asking.answer_by)))

    for role in settings.roles:
        for address in snapshots[role.name]:
            for port in ports_of(role, address):
                ask(role, address, port)
    missing = {"router", *(role.name for role in settings.roles)}
    troubles: dict[str, list[str]] = {whose: [] for whose in missing}
    for answer in asking.answers():
        if answer.trouble is None:
            missing.discard(answer.whose)
            if not missing:
                return READY, "ready: the router accepts connections and each role has an engine that serves"
        else:
            troubles[answer.whose].append(f"{answer.where}: {answer.trouble}")
    reasons = [
        f"no {role.name} engine of {len(snapshots[role.name])} answers /health with 200{_named(troubles[role.name])}"
        for role in settings.roles
        if role.name in missing
    ]
    if "router" in missing:
        reasons.insert(0, f"the router does not accept connections on port {router_port}{_named(troubles['router'])}")
    return NOT_READY, f"not ready: {'; '.join(reasons)}"


def ports_of(role: Role, address: str) -> list[int]:
    """Where an engine of the snapshot may listen: without a lookup, so that a resolver's bad hour unreadies nobody."""
    own = [upstream.port for upstream in role.upstreams if upstream.is_address and upstream.host == address]
    return own or list(dict.fromkeys(upstream.port for upstream in role.upstreams if not upstream.is_address))


def _named(troubles: Sequence[str]) -> str:
    more = ", ..." if len(troubles) > MOST_NAMED else ""
    return f" ({', '.join(troubles[:MOST_NAMED])}{more})" if troubles else ""

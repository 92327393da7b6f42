"""One round of the boot: look everything up anew, ask every sidecar, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Union

from enginewatch.guard import upstreams
from enginewatch.guard.settings import Role, Settings, Upstream, UsageError
from enginewatch.guard.side_by_side import SideBySide
from enginewatch.guard.waiting import Found, Round

LOOKUP_SEC: Final = 15.0
"""A resolver whose first server is dead answers after five seconds or ten; a probe cannot wait for that, a boot can."""
LEAST_SEC: Final = 1.0


class Resolved(NamedTuple):
    """What one entry resolves to now."""

    role: Role
    upstream: Upstream
    lookup: upstreams.Lookup


class Asked(NamedTuple):
    """What one engine and its sidecar said."""

    role: Role
    engine: Found


Answer = Union[Resolved, Asked]


class Rounds:
    """The rounds of one boot.

    A lookup that fails changes nothing: the addresses found last stay until a lookup says otherwise.

    Args:
        settings: whom to ask.
        look_up: resolves a name.
        who: asks a sidecar who its engine is.
        serves: asks an engine's /health.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        look_up: Callable[[str], upstreams.Lookup] = upstreams.look_up,
        who: Callable[[str, int, float], upstreams.Who] = upstreams.who,
        serves: Callable[[str, int, float], str | None] = upstreams.serves,
    ) -> None:
        self._settings = settings
        self._look_up = look_up
        self._who = who
        self._serves = serves
        self._last: dict[Upstream, tuple[str, ...]] = {}

    def ask(self, ends_at: float) -> dict[str, Round]:
        """One round, by role.

        Args:
            ends_at: when the boot's budget ends, on the monotonic clock; a round that begins late is short.

        Raises:
            UsageError: two engines of one role are on one address.
        """
        now = time.monotonic()
        longest = LOOKUP_SEC + self._settings.deadline_sec
        asking: SideBySide[Answer] = SideBySide(min(now + longest, max(ends_at, now + LEAST_SEC)))
        engines: dict[str, dict[str, Found]] = {role.name: {} for role in self._settings.roles}
        unresolved: dict[tuple[str, Upstream], str] = {}

        def resolve(role: Role, upstream: Upstream) -> None:
            unresolved[role.name, upstream] = "no answer to the lookup yet"
            asking.start(lambda: Resolved(role, upstream, self._look_up(upstream.host)))

        def ask(role: Role, engine: Found) -> None:
            asking.start(lambda: Asked(role, self._asked(role, engine, asking.answer_by)))

        def take(role: Role, upstream: Upstream, addresses: Sequence[str]) -> None:
            known = engines[role.name]
            for address in addresses:
                if address not in known:
                    known[address] = Found(address, upstream.port, upstreams.Who(None, "no answer yet"))
                    if role.watcher_port:
                        ask(role, known[address])
                elif known[address].port != upstream.port:
                    raise UsageError(
                        f"the {role.name} engines on the ports {known[address].port} and {upstream.port} are both on"
                        f" {address}; two engines of one role on one address could not be told apart"
                    )

        for role in self._settings.roles:
            for upstream in role.upstreams:
                if upstream.is_address:
                    take(role, upstream, [upstream.host])
                else:
                    resolve(role, upstream)
        for answer in asking.answers():
            if isinstance(answer, Asked):
                engines[answer.role.name][answer.engine.address] = answer.engine
                continue
            role, upstream, lookup = answer
            unresolved.pop((role.name, upstream))
            if lookup.trouble:
                unresolved[role.name, upstream] = lookup.trouble
            if not lookup.failed:
                self._last[upstream] = upstreams.one_family(lookup.addresses)
            take(role, upstream, self._last.get(upstream, ()))
        for role in self._settings.roles:
            for upstream in role.upstreams:
                if (role.name, upstream) in unresolved:
                    for address in self._last.get(upstream, ()):
                        found = Found(address, upstream.port, upstreams.Who(None, "the lookup of its name hangs"))
                        engines[role.name].setdefault(address, found)
        return {
            role.name: Round(
                tuple(engines[role.name].values()),
                tuple(f"{u.host}: {trouble}" for (name, u), trouble in unresolved.items() if name == role.name),
            )
            for role in self._settings.roles
        }

    def _asked(self, role: Role, engine: Found, answer_by: float) -> Found:
        deadline = min(time.monotonic() + self._settings.deadline_sec, answer_by)
        asked = engine._replace(who=self._who(engine.address, role.watcher_port, deadline))
        if not asked.has_spoken:
            return asked
        return asked._replace(serves=self._serves(engine.address, engine.port, deadline) is None)

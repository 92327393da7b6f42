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
        self.settings = settings
        self.look_up = look_up
        self.who = who
        self.serves = serves
        self.last: dict[Upstream, tuple[str, ...]] = {}

    def ask(self, ends_at: float) -> dict[str, Round]:
        """One round, by role.

        Args:
            ends_at: when the boot's budget ends, on the monotonic clock; a round that begins late is short.

        Raises:
            UsageError: two engines of one role are on one address.
        """
        now = time.monotonic()
        longest = LOOKUP_SEC + self.settings.deadline_sec
        return _OneRound(self, SideBySide(min(now + longest, max(ends_at, now + LEAST_SEC)))).run()


class _OneRound:
    """What is found as the answers of one round come in."""

    def __init__(self, rounds: Rounds, asking: SideBySide[Answer]) -> None:
        self._rounds = rounds
        self._roles = rounds.settings.roles
        self._asking = asking
        self._engines: dict[str, dict[str, Found]] = {role.name: {} for role in self._roles}
        self._unresolved: dict[tuple[str, Upstream], str] = {}

    def run(self) -> dict[str, Round]:
        """Ask, and wait for the answers."""
        for role in self._roles:
            for upstream in role.upstreams:
                if upstream.is_address:
                    self._take(role, upstream, [upstream.host])
                else:
                    self._resolve(role, upstream)
        for answer in self._asking.answers():
            if isinstance(answer, Asked):
                self._engines[answer.role.name][answer.engine.address] = answer.engine
            else:
                self._resolved(*answer)
        self._take_where_a_lookup_hangs()
        return {role.name: self._round(role.name) for role in self._roles}

    def _resolve(self, role: Role, upstream: Upstream) -> None:
        self._unresolved[role.name, upstream] = "no answer to the lookup yet"
        self._asking.start(lambda: Resolved(role, upstream, self._rounds.look_up(upstream.host)))

    def _resolved(self, role: Role, upstream: Upstream, lookup: upstreams.Lookup) -> None:
        del self._unresolved[role.name, upstream]
        if lookup.trouble:
            self._unresolved[role.name, upstream] = lookup.trouble
        if not lookup.failed:
            self._rounds.last[upstream] = upstreams.one_family(lookup.addresses)
        self._take(role, upstream, self._rounds.last.get(upstream, ()))

    def _take(self, role: Role, upstream: Upstream, addresses: Sequence[str]) -> None:
        known = self._engines[role.name]
        for address in addresses:
            if address not in known:
                known[address] = Found(address, upstream.port, upstreams.Who(None, "no answer yet"))
                if role.watcher_port:
                    self._ask(role, known[address])
            elif known[address].port != upstream.port:
                raise UsageError(
                    f"the {role.name} engines on the ports {known[address].port} and {upstream.port} are both on"
                    f" {address}; two engines of one role on one address could not be told apart"
                )

    def _ask(self, role: Role, engine: Found) -> None:
        self._asking.start(lambda: Asked(role, self._asked(role, engine)))

    def _asked(self, role: Role, engine: Found) -> Found:
        rounds = self._rounds
        deadline = min(time.monotonic() + rounds.settings.deadline_sec, self._asking.answer_by)
        asked = engine._replace(who=rounds.who(engine.address, role.watcher_port, deadline))
        if not asked.has_spoken:
            return asked
        return asked._replace(serves=rounds.serves(engine.address, engine.port, deadline) is None)

    def _take_where_a_lookup_hangs(self) -> None:
        for role, upstream in self._unresolved:
            for address in self._rounds.last.get(upstream, ()):
                found = Found(address, upstream.port, upstreams.Who(None, "the lookup of its name hangs"))
                self._engines[role].setdefault(address, found)

    def _round(self, role: str) -> Round:
        troubles = [f"{upstream.host}: {why}" for (name, upstream), why in self._unresolved.items() if name == role]
        return Round(tuple(self._engines[role].values()), tuple(troubles))

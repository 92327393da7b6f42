"""When has the boot of a router waited long enough? No I/O and no clock of its own.

1. While a role has no address, it waits; when the budget ends, it gives up: a router without addresses is none.
2. When every engine has said who it is, the router starts. An old sidecar (404) has said all that it can, and where a
   role has no sidecars nobody is waited for.
3. Once each role with sidecars has an engine that has said so and serves, the silent ones have `partial_sec` left. Then
   the router starts without their identities, in a round in which that holds still.
4. When the budget ends, the router starts with what is known: silence must not keep a service down.

An identity, once heard, is recorded even if its engine is silent when the wait ends: it is the same process, or the
router must start again anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Optional, Union

from enginewatch.core.drift import Identity, Recorded, record
from enginewatch.guard.settings import Role
from enginewatch.guard.upstreams import Who


class Found(NamedTuple):
    """One engine in one round.

    Attributes:
        address: its IP.
        port: its port.
        who: what its sidecar said; of a role without sidecars nobody asks.
        serves: whether its /health is 200; asked only of engines that have said who they are.
    """

    address: str
    port: int
    who: Who = Who(None, "not asked")
    serves: bool = False

    @property
    def has_spoken(self) -> bool:
        """Whether its sidecar has said all that it can."""
        return self.who.identity is not None or self.who.is_old


class Round(NamedTuple):
    """What one round found of one role.

    Attributes:
        engines: at its addresses.
        troubles: what could not be looked up, and why.
    """

    engines: tuple[Found, ...]
    troubles: tuple[str, ...] = ()


class Engine(NamedTuple):
    """An engine that the router starts with.

    Attributes:
        recorded: its line in the snapshot.
        port: its port.
        trouble: why it has no identity, else empty.
    """

    recorded: Recorded
    port: int
    trouble: str


class Start(NamedTuple):
    """Start the router.

    Attributes:
        engines: by role.
        why: what ended the wait.
    """

    engines: Mapping[str, tuple[Engine, ...]]
    why: str


class GiveUp(NamedTuple):
    """There is nothing to start a router with.

    Attributes:
        why: a sentence.
    """

    why: str


Outcome = Union[Start, GiveUp]


class Wait:
    """The wait of one boot.

    Args:
        roles: whose engines are waited for.
        budget_sec: how long at most.
        partial_sec: how long for the silent ones.
        started: when it began, on the caller's monotonic clock.

    Attributes:
        partial_since: when rule 3 began to hold, None before.
    """

    def __init__(self, roles: tuple[Role, ...], budget_sec: float, partial_sec: float, started: float) -> None:
        self._roles = roles
        self._budget_sec = budget_sec
        self._partial_sec = partial_sec
        self._started = started
        self._heard: dict[tuple[str, str], Identity] = {}
        self.partial_since: Optional[float] = None  # noqa: UP045

    @property
    def ends_at(self) -> float:
        """When the budget ends."""
        return self._started + self._budget_sec

    def step(self, rounds: Mapping[str, Round], now: float) -> Outcome | None:
        """Take a round, by role; None: wait on."""
        self._remember(rounds)
        waited = f"{now - self._started:.0f} s"
        without = [role.name for role in self._roles if not rounds[role.name].engines]
        if without:
            if now < self.ends_at:
                return None
            return GiveUp(f"no address of {' and '.join(without)} after {waited}")
        watched = [rounds[role.name] for role in self._roles if role.watcher_port]
        if all(engine.has_spoken for found in watched for engine in found.engines):
            return self._start(rounds, f"{self._nothing_to_wait_for(rounds)} after {waited}")
        if all(any(engine.has_spoken and engine.serves for engine in found.engines) for found in watched):
            if self.partial_since is None:
                self.partial_since = now
            if now - self.partial_since >= self._partial_sec:
                return self._start(
                    rounds, f"each role has an engine that serves, and the others are silent for {waited}"
                )
        if now >= self.ends_at:
            return self._start(rounds, f"the budget is over after {waited}")
        return None

    def _nothing_to_wait_for(self, rounds: Mapping[str, Round]) -> str:
        heard = all((name, engine.address) in self._heard for name, found in rounds.items() for engine in found.engines)
        return "every engine is known" if heard else "nobody is left who could say who it is,"

    def _remember(self, rounds: Mapping[str, Round]) -> None:
        for role, found in rounds.items():
            for engine in found.engines:
                if engine.who.identity is not None:
                    self._heard[role, engine.address] = engine.who.identity
                elif engine.who.is_old:
                    self._heard.pop((role, engine.address), None)

    def _start(self, rounds: Mapping[str, Round], why: str) -> Start:
        engines = {}
        for role in self._roles:
            known = []
            for found in sorted(rounds[role.name].engines, key=lambda engine: engine.address):
                identity = self._heard.get((role.name, found.address)) if role.watcher_port else None
                trouble = found.who.trouble if role.watcher_port else "no sidecar"
                known.append(Engine(record(found.address, identity), found.port, "" if identity else trouble))
            engines[role.name] = tuple(known)
        return Start(engines, why)

"""`guard boot`: wait for the engines, write down who they are, become the router.

What can be checked is checked before the wait. Signals have handlers from the start: as the first process of a
container the guard would otherwise ignore them. The router takes over the guard's process.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from enginewatch.core.drift import write_snapshot
from enginewatch.guard import signals
from enginewatch.guard.files import CannotWrite, prepare, write_all
from enginewatch.guard.main import complain
from enginewatch.guard.rounds import Rounds
from enginewatch.guard.settings import DEFAULTS, Settings, UsageError, read_settings
from enginewatch.guard.waiting import GiveUp, Outcome, Round, Start, Wait

CANNOT_WORK: Final = 2
NO_ADDRESS: Final = 1
NEEDS: Final = ("GUARD_PREFILL", "GUARD_DECODE", "GUARD_ROUTER")
PAUSE_SEC: Final = 1.0
REPEAT_SEC: Final = 60.0
MOST_NAMED: Final = 4


def run(arguments: Sequence[str]) -> int:
    """Wait, then become the router; returns only if that is impossible.

    Raises:
        UsageError: a setting or the command cannot be used.
    """
    flags, command = split(arguments)
    settings = read_settings(flags, os.environ, uses=tuple(DEFAULTS), needs=NEEDS)
    check_command(command)
    if settings.router_port is None:
        complain("GUARD_ROUTER_PORT is not set: guard ready, the startup and readiness probe, cannot work without it")
    try:
        prepare(settings.run_dir)
        outcome = wait_for_engines(settings, Rounds(settings).ask)
        if isinstance(outcome, GiveUp):
            complain(f"{outcome.why}; a router cannot start without; exits, to be started again")
            return NO_ADDRESS
        write_all(
            settings.run_dir,
            {role: write_snapshot(engine.recorded for engine in engines) for role, engines in outcome.engines.items()},
        )
    except CannotWrite as error:
        complain(str(error))
        return CANNOT_WORK
    added = router_flags(outcome, settings)
    complain(f"becomes {command[0]} with {' '.join(added)}")
    return become([*command, *added])


def split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The guard's own flags, and the router's command after `--`."""
    if "--" not in arguments or not arguments[arguments.index("--") + 1 :]:
        raise UsageError(
            "there is no command to become; write it after --, such as: guard boot -- vllm-router --port 80"
        )
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def check_command(command: Sequence[str]) -> None:
    """See that the command is there to be run.

    Raises:
        UsageError: it is not.
    """
    if shutil.which(command[0]) is None:
        problem = "is not executable" if os.path.exists(command[0]) else "is not found"
        raise UsageError(f"the command {command[0]!r} {problem}")


def wait_for_engines(
    settings: Settings,
    ask: Callable[[float], Mapping[str, Round]],
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    say: Callable[[str], None] | None = None,
) -> Outcome:
    """Ask round after round until there is an outcome.

    Args:
        settings: whom to wait for, and for how long.
        ask: one round; takes when the budget ends.
        now: the monotonic clock.
        sleep: between the rounds.
        say: prints a line; by default on stderr.
    """
    progress = Progress(settings, say or complain)
    wait = Wait(settings.roles, settings.budget_sec, settings.partial_sec, now())
    progress.begin()
    while True:
        rounds = ask(wait.ends_at)
        outcome = wait.step(rounds, now())
        if outcome is not None:
            progress.end(outcome)
            return outcome
        progress.waiting(rounds, wait, now())
        sleep(max(0.0, min(PAUSE_SEC, wait.ends_at - now())))


class Progress:
    """What an operator reads: what is waited for and for how long, once a minute or when it changes."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._said: tuple[str, ...] = ()
        self._said_at = 0.0

    def begin(self) -> None:
        """What the wait is for."""
        for role in self._settings.roles:
            entries = ", ".join(f"{upstream.host} port {upstream.port}" for upstream in role.upstreams)
            sidecars = (
                f"sidecars on port {role.watcher_port}" if role.watcher_port else "no sidecars, so nobody is asked"
            )
            self._say(f"{role.name}: {entries}; {sidecars}")
        self._say(
            f"waits until every engine has said who it is; once each role has one that serves,"
            f" {self._settings.partial_sec:g} s for the others; at most {self._settings.budget_sec:g} s in all"
        )

    def waiting(self, rounds: Mapping[str, Round], wait: Wait, now: float) -> None:
        """What a round without an outcome found."""
        facts = tuple(
            self._fact(role.name, bool(role.watcher_port), rounds[role.name]) for role in self._settings.roles
        )
        if wait.partial_since is not None:
            facts = (*facts, "each role has an engine that serves")
        if facts == self._said and now - self._said_at < REPEAT_SEC:
            return
        for fact in facts:
            if fact not in self._said or facts == self._said:
                self._say(fact)
        left = wait.ends_at - now
        if wait.partial_since is not None:
            left = min(left, wait.partial_since + self._settings.partial_sec - now)
        then = "starts with what it knows" if all(rounds[role].engines for role in rounds) else "gives up"
        self._say(f"waits; {then} in {max(left, 0.0):.0f} s")
        self._said, self._said_at = facts, now

    @staticmethod
    def _fact(role: str, has_sidecars: bool, found: Round) -> str:
        unresolved = f"; not resolved: {_some(found.troubles)}" if found.troubles else ""
        if not found.engines:
            return f"{role}: no address yet{unresolved}"
        count = f"{role}: {len(found.engines)} address{'' if len(found.engines) == 1 else 'es'}"
        if not has_sidecars:
            return count + unresolved
        silent = [f"{engine.address} ({engine.who.trouble})" for engine in found.engines if not engine.has_spoken]
        known = f"{count}, {len(found.engines) - len(silent)} known"
        return f"{known}{f', silent: {_some(silent)}' if silent else ''}{unresolved}"

    def end(self, outcome: Outcome) -> None:
        """What ended the wait, and what is recorded."""
        if not isinstance(outcome, Start):
            return
        self._say(outcome.why)
        for role, engines in outcome.engines.items():
            for engine in engines:
                identity = engine.recorded.durable_id or (
                    f"no identity ({engine.trouble})"
                    if engine.recorded.is_sentinel
                    else f"restart {engine.recorded.restarts} of its watcher"
                )
                self._say(f"{role} {engine.recorded.address} port {engine.port}: {identity}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def router_flags(start: Start, settings: Settings) -> list[str]:
    """The addresses as the router's flags; vllm-router and sglang-router read the same ones."""
    bootstrap = [] if settings.bootstrap_port is None else [str(settings.bootstrap_port)]
    flags = []
    for role, follows in (("prefill", bootstrap), ("decode", [])):
        for url in sorted(_url(engine.recorded.address, engine.port) for engine in start.engines[role]):
            flags += [f"--{role}", url, *follows]
    return flags


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def become(command: Sequence[str]) -> int:
    """Replace this process; returns only if that fails."""
    signals.as_inherited()
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        complain(f"the command {command[0]!r} cannot be run: {error.strerror}")
    return CANNOT_WORK

"""What the guard is told: environment variables, and flags of the same names that win over them.

The router's command and its probes run in one container and read the same environment, so they agree. Each subcommand
reads only the settings that it uses.
"""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, Optional

DEFAULTS: Final = {
    "GUARD_PREFILL": "",
    "GUARD_DECODE": "",
    "GUARD_PREFILL_WATCHER_PORT": "9090",
    "GUARD_DECODE_WATCHER_PORT": "9090",
    "GUARD_ROUTER_PORT": "",
    "GUARD_RUN_DIR": "/run/pd-router",
    "GUARD_BUDGET_SEC": "5400",
    "GUARD_PARTIAL_SEC": "120",
    "GUARD_ROUTER": "",
    "GUARD_BOOTSTRAP_PORT": "",
    "GUARD_DEADLINE_SEC": "4",
}
"""Every setting, with what it is when nobody says; empty: there is none."""

ROUTERS: Final = ("vllm", "sglang")
ROLES: Final = ("prefill", "decode")

LONGEST_NAME: Final = 253
LONGEST_LABEL: Final = 63
MOST_SHOWN: Final = 80
"""Characters of a bad value that are shown."""
LABEL: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?")
NUMBERS: Final = re.compile(r"[0-9.]+")
PORT: Final = re.compile(r"[0-9]{1,5}")
NUMBER: Final = re.compile(r"[0-9]*\.?[0-9]+|[0-9]+\.")
LONGEST_SEC: Final = 1e7


class UsageError(Exception):
    """A setting that cannot be used; the text is one sentence that says which and what to change."""


class Upstream(NamedTuple):
    """One entry of GUARD_PREFILL or GUARD_DECODE.

    Attributes:
        host: a name, or an IP as the system writes it (IPv6 without brackets).
        port: the engine's port.
        is_address: whether `host` is an IP, which nobody needs to look up.
    """

    host: str
    port: int
    is_address: bool


class Role(NamedTuple):
    """The engines of one role.

    Attributes:
        name: prefill or decode.
        upstreams: its entries, each once.
        watcher_port: the port of the sidecars; 0: the role has none.
    """

    name: str
    upstreams: tuple[Upstream, ...]
    watcher_port: int


class Settings(NamedTuple):
    """All of it; what the subcommand does not use has its default.

    Attributes:
        prefill: who prefills.
        decode: who decodes.
        router_port: the router's own port.
        run_dir: where the snapshots are.
        budget_sec: how long the boot waits for addresses and identities.
        partial_sec: how long it waits for the silent ones once each role has an identified engine that serves.
        router: whose flags the boot writes; empty where it is not used.
        bootstrap_port: what follows each --prefill URL; None: nothing.
        deadline_sec: the whole of one tick of live or ready.
    """

    prefill: Role
    decode: Role
    router_port: Optional[int]  # noqa: UP045 - evaluated by Python 3.9
    run_dir: str
    budget_sec: float
    partial_sec: float
    router: str
    bootstrap_port: Optional[int]  # noqa: UP045
    deadline_sec: float

    @property
    def roles(self) -> tuple[Role, Role]:
        """Both, prefill first."""
        return self.prefill, self.decode


def flag_of(name: str) -> str:
    """GUARD_RUN_DIR -> --run-dir."""
    return "--" + name[len("GUARD_") :].lower().replace("_", "-")


def read_settings(
    flags: Sequence[str], environment: Mapping[str, str], *, uses: Collection[str], needs: Collection[str]
) -> Settings:
    """The settings of one subcommand.

    Args:
        flags: its arguments; every setting's flag is allowed, whether the subcommand uses it or not.
        environment: the variables; an empty or blank value is a missing one.
        uses: the settings that are read; the others keep their defaults unread.
        needs: those of them that must be there.

    Raises:
        UsageError: an unknown flag, a missing setting or one that cannot be used.
    """
    given = {name: environment.get(name, "").strip() for name in uses}
    shown = {name: name for name in uses}
    if flags:  # not before: a probe has none, and argparse takes its time to load
        for name, text in _read_flags(flags).items():
            if name in given and text.strip():
                given[name], shown[name] = text.strip(), flag_of(name)
    for name in DEFAULTS:
        if name in needs and not given[name]:
            raise UsageError(f"{name} (or {flag_of(name)}) is missing; {MEANINGS[name]}")

    def value(name: str) -> str:
        return given.get(name) or DEFAULTS[name]

    def shown_as(name: str) -> str:
        return shown.get(name, name)

    def role(name: str) -> Role:
        entries, watcher_port = f"GUARD_{name.upper()}", f"GUARD_{name.upper()}_WATCHER_PORT"
        return Role(
            name,
            _upstreams(shown_as(entries), value(entries)),
            _port(shown_as(watcher_port), value(watcher_port), least=0),
        )

    def own_port(name: str) -> int | None:
        return _port(shown_as(name), value(name), least=1) if value(name) else None

    def seconds(name: str, *, may_be_zero: bool = False) -> float:
        return _seconds(shown_as(name), value(name), may_be_zero=may_be_zero)

    router = value("GUARD_ROUTER")
    if router and router not in ROUTERS:
        raise UsageError(f"{shown_as('GUARD_ROUTER')} is {_cut(router)}; {MEANINGS['GUARD_ROUTER']}")
    return Settings(
        prefill=role("prefill"),
        decode=role("decode"),
        router_port=own_port("GUARD_ROUTER_PORT"),
        run_dir=value("GUARD_RUN_DIR"),
        budget_sec=seconds("GUARD_BUDGET_SEC", may_be_zero=True),
        partial_sec=seconds("GUARD_PARTIAL_SEC", may_be_zero=True),
        router=router,
        bootstrap_port=own_port("GUARD_BOOTSTRAP_PORT"),
        deadline_sec=seconds("GUARD_DEADLINE_SEC"),
    )


MEANINGS: Final = {
    "GUARD_PREFILL": "it names the prefill engines, such as prefill.default.svc:8000",
    "GUARD_DECODE": "it names the decode engines, such as decode.default.svc:8000",
    "GUARD_ROUTER_PORT": "it is the port that the router listens on, such as 8080",
    "GUARD_ROUTER": f"it says which router this is: {' or '.join(ROUTERS)}",
}
"""What to say of a setting that is missing or is not one of a few words."""


def _read_flags(flags: Sequence[str]) -> dict[str, str]:
    from argparse import ArgumentParser
    from typing import NoReturn

    class Parser(ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(message)

    parser = Parser(add_help=False, allow_abbrev=False)
    for name in DEFAULTS:
        parser.add_argument(flag_of(name), dest=name, default="")
    said: dict[str, str] = vars(parser.parse_args(list(flags)))
    return said


def _port(shown: str, text: str, *, least: int) -> int:
    if not PORT.fullmatch(text) or not least <= int(text) <= 65535:
        raise UsageError(f"{shown} is {_cut(text)}; expected a port from {least} to 65535")
    return int(text)


def _seconds(shown: str, text: str, *, may_be_zero: bool) -> float:
    number = float(text) if NUMBER.fullmatch(text) else math.nan
    if not (0 <= number <= LONGEST_SEC) or (number == 0 and not may_be_zero):
        raise UsageError(f"{shown} is {_cut(text)}; expected seconds, such as 4 or 2.5")
    return number


def _upstreams(shown: str, text: str) -> tuple[Upstream, ...]:
    """The entries of a list, each once, in order.

    Raises:
        UsageError: an entry is not HOST:PORT, or one address has two ports.
    """
    found: dict[Upstream, None] = {}
    ports: dict[str, int] = {}
    for entry in text.split(",") if text else ():
        upstream = _upstream(shown, entry.strip())
        if upstream.is_address and ports.setdefault(upstream.host, upstream.port) != upstream.port:
            raise UsageError(
                f"{shown} names {upstream.host} with the ports {ports[upstream.host]} and {upstream.port};"
                " two engines of one role on one address could not be told apart"
            )
        found[upstream] = None
    return tuple(found)


def _upstream(shown: str, entry: str) -> Upstream:
    host, colon, port = entry.rpartition(":")
    said = _cut(entry)
    if "/" in entry:
        raise UsageError(f"{shown}: {said} is not HOST:PORT; leave out the scheme and the path")
    if not colon or not host or (entry.startswith("[") and entry.endswith("]")):
        raise UsageError(f"{shown}: {said} is not HOST:PORT, such as prefill.default.svc:8000 or [::1]:8000")
    number = _port(f"{shown}: the port of {said}", port, least=1)
    if host.startswith("[") and host.endswith("]"):
        address = _as_ip(socket.AF_INET6, host[1:-1])
        if not address:
            raise UsageError(f"{shown}: {said} has no IPv6 address between its brackets")
        return Upstream(address, number, True)
    if ":" in host:
        raise UsageError(f"{shown}: {said} is not HOST:PORT; an IPv6 address stands in brackets, such as [::1]:8000")
    address = _as_ip(socket.AF_INET, host)
    if address:
        return Upstream(address, number, True)
    if not _is_name(host):
        raise UsageError(f"{shown}: {_cut(host)} is neither a host's name nor an IP address")
    return Upstream(host.lower(), number, False)


def _is_name(text: str) -> bool:
    labels = text[:-1].split(".") if text.endswith(".") else text.split(".")
    if len(text) > LONGEST_NAME or NUMBERS.fullmatch(text):
        return False
    return all(len(label) <= LONGEST_LABEL and LABEL.fullmatch(label) for label in labels)


def _cut(text: str) -> str:
    return repr(text) if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]!r}..."


def _as_ip(family: socket.AddressFamily, text: str) -> str:
    """The address as the system writes it, or an empty string if it is none."""
    try:
        return socket.inet_ntop(family, socket.inet_pton(family, text))
    except (OSError, ValueError):
        return ""

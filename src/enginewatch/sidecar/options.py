"""What `watch` is told once, at its start: flags over environment over defaults.

A bad flag ends `watch` with one sentence, because somebody is looking. A bad variable does not: a sidecar that exits
takes the engine with it, so it is named in the log and the default applies. The exceptions are `ENGINE_URL`, without
which there is nothing to watch (the sidecar stays up, healthy, and says so), and a listen address, without which
nobody could ask.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from enginewatch.engines import KINDS
from enginewatch.engines.profile import ROLES, Role
from enginewatch.sidecar.config import ENVIRONMENT, Problem
from enginewatch.sidecar.lean import load_http_client

DEFAULT_ENGINE_URL = "http://127.0.0.1:8000"
DEFAULT_LISTEN = ":9090"
DEFAULT_CONFIG_FILE = "/etc/hang-watcher/config.json"

_SHOWN_CHARS = 80
_REASON_CHARS = 300


class BadOptionError(Exception):
    """An option that cannot be used; the message says what was given and what was expected."""


class StartError(Exception):
    """`watch` cannot start. The message is one sentence for stderr, `exit_code` is its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. An empty host means every address of every family; port 0 means any free one."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Options:
    """Static options, checked. An empty string means: not given.

    Attributes:
        engine_url: the engine's base URL; None where what was given cannot be one, `problems` then says why.
        problems: variables that cannot be used.
    """

    engine_url: str | None
    listen: Address
    config_file: str
    engine_kind: str
    engine_role: Role | Literal[""]
    log_file: str
    log_hang_pattern: str
    engine_api_key_file: str
    engine_ca_file: str
    identity_kv_bootstrap_url: str
    metrics_path: str
    trtllm_json_stats: bool
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class _Option:
    name: str
    default: str
    help: str
    check: Callable[[str], object]
    metavar: str
    value_if_bare: str | None = None
    """What the flag means without a value; None: it needs one."""

    @property
    def variable(self) -> str:
        return self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def by_default(self) -> object:
        return self.check(self.default) if self.default else ""


def parse_engine_url(text: str) -> str:
    """The engine's base URL, without a trailing slash.

    Raises:
        BadOptionError: it cannot be one, or carries a user name, which must not be in logs.
    """
    # Imported here so that --help does not load an HTTP client.
    load_http_client(text)
    from enginewatch.client.target import BadTarget, Target

    if "@" in text:
        raise BadOptionError("holds a user name or password: put the API key into a file (ENGINE_API_KEY_FILE)")
    try:
        return Target.parse(text).url
    except BadTarget as bad:
        raise BadOptionError(str(bad)) from None


def parse_bootstrap_url(text: str) -> str:
    """Base URL of a Mooncake bootstrap server; `/query`, which is asked there, may be part of it.

    Raises:
        BadOptionError: it cannot be one.
    """
    try:
        return parse_engine_url(text).removesuffix("/query")
    except BadOptionError:
        raise BadOptionError(f"{_shown(text)} is not a URL such as http://127.0.0.1:8998") from None


def parse_listen(text: str) -> Address:
    """`:9090`, `0.0.0.0:9090`, `[::]:9090`, `name:9090` or `9090`.

    Raises:
        BadOptionError: it is none of these.
    """
    bad = BadOptionError(f"{_shown(text)} is not an address such as :9090, 127.0.0.1:9090 or [::]:9090")
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]") and len(host) > 2:
        host = host[1:-1]
    elif any(char in host for char in ":[]"):
        raise bad
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise bad
    if not host.isprintable() or any(char in host for char in " /@"):
        raise bad
    return Address(host, int(port))


def parse_path(text: str) -> str:
    """A path on the engine.

    Raises:
        BadOptionError: it does not begin with a slash, or holds blanks.
    """
    if not text.startswith("/") or not text.isprintable() or " " in text:
        raise BadOptionError(f"{_shown(text)} is not a path that begins with /")
    return text


def parse_pattern(text: str) -> str:
    """An RE2 pattern.

    Raises:
        BadOptionError: RE2 does not take it.
    """
    from enginewatch.sidecar.signatures import PatternError, Signatures

    try:
        Signatures((text,))
    except PatternError as error:
        raise BadOptionError(f"not a pattern that RE2 takes: {error}") from None
    return text


def parse_kind(text: str) -> str:
    """An engine kind.

    Raises:
        BadOptionError: not one of `KINDS`.
    """
    if text.lower() not in KINDS:
        raise BadOptionError(f"{_shown(text)} is not one of {', '.join(KINDS)}")
    return text.lower()


def parse_role(text: str) -> str:
    """A worker's role.

    Raises:
        BadOptionError: not one of `ROLES`.
    """
    if text.lower() not in ROLES:
        raise BadOptionError(f"{_shown(text)} is not one of {', '.join(ROLES)}")
    return text.lower()


def parse_switch(text: str) -> bool:
    """A switch.

    Raises:
        BadOptionError: neither on nor off.
    """
    if text.lower() not in _SWITCH:
        raise BadOptionError(f"{_shown(text)} is not one of 1, true, yes, on, 0, false, no, off")
    return _SWITCH[text.lower()]


_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

_OPTIONS = (
    _Option("engine_url", DEFAULT_ENGINE_URL, "base URL of the engine", parse_engine_url, "URL"),
    _Option("listen", DEFAULT_LISTEN, "address to answer on; port 0 takes any free one", parse_listen, "ADDRESS"),
    _Option("config_file", DEFAULT_CONFIG_FILE, "JSON file of hot settings, read again when it changes", str, "PATH"),
    _Option("engine_kind", "auto", f"{' | '.join(KINDS)}; auto reads it from the page", parse_kind, "KIND"),
    _Option("engine_role", "", f"{' | '.join(ROLES)}; unless given what the engine says, else agg", parse_role, "ROLE"),
    _Option("log_file", "", "the engine's log, a path or a glob (newest match); off unless given", str, "PATH"),
    _Option("log_hang_pattern", "", "RE2 pattern that replaces the engine's own log signatures", parse_pattern, "RE2"),
    _Option("engine_api_key_file", "", "file that holds the engine's API key, read before each use", str, "PATH"),
    _Option("engine_ca_file", "", "CA certificates for an https engine, read before each use", str, "PATH"),
    _Option(
        "identity_kv_bootstrap_url",
        "",
        "Mooncake bootstrap server of this engine, asked beside each poll for its KV engine ids",
        parse_bootstrap_url,
        "URL",
    ),
    _Option("metrics_path", "", "path of the engine's metrics page, if not the usual one", parse_path, "PATH"),
    _Option(
        "trtllm_json_stats",
        "0",
        "read TensorRT-LLM's JSON statistics in place of its page; other readers of /metrics lose them",
        parse_switch,
        "0|1",
        value_if_bare="1",
    ),
)
VARIABLES: tuple[str, ...] = tuple(option.variable for option in _OPTIONS)
"""Names of the static variables."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise StartError(f"enginewatch watch: {message}; see enginewatch watch --help", 2)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Options:
    """The options in force.

    Raises:
        StartError: a flag that cannot be used (exit code 2), or a LISTEN that cannot be one (1).
        SystemExit: `--help` was given.
    """
    flags = vars(_parser().parse_args(list(argv)))
    given: dict[str, object] = {}
    problems: list[Problem] = []
    for option in _OPTIONS:
        flag_text = flags[option.name] or ""
        text = flag_text if flag_text.strip() else environ.get(option.variable, "")
        if option.name != "log_hang_pattern":  # blanks at a pattern's ends are part of it
            text = text.strip()
        if not text.strip():
            given[option.name] = option.by_default()
            continue
        try:
            given[option.name] = option.check(text)
        except BadOptionError as bad:
            if flag_text.strip():
                raise StartError(f"enginewatch watch: {option.flag}: {bad}", 2) from None
            if option.name == "listen":
                raise StartError(f"enginewatch watch: LISTEN: {bad}", 1) from None
            problems.append(Problem(option.variable, ENVIRONMENT, str(bad)[:_REASON_CHARS]))
            given[option.name] = None if option.name == "engine_url" else option.by_default()
    return Options(**given, problems=tuple(problems))  # type: ignore[arg-type]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="enginewatch watch",
        description="Watches one LLM inference engine and answers GET /healthz: 200 while it lives, 503 once it hangs.",
        epilog="Each flag may also be given as the variable behind it; the flag wins. The hot settings (stall_sec, "
        "poll_interval_sec, ...) come from the configuration file, else from variables in upper case (STALL_SEC=20).",
        allow_abbrev=False,
    )
    for option in _OPTIONS:
        default = f", default {option.default}" if option.default else ""
        parser.add_argument(
            option.flag,
            metavar=option.metavar,
            dest=option.name,
            nargs=None if option.value_if_bare is None else "?",
            const=option.value_if_bare,
            help=f"{option.help} ({option.variable}{default})",
        )
    return parser


def _shown(text: str) -> str:
    shown = ascii(text[:_SHOWN_CHARS]) + ("..." if len(text) > _SHOWN_CHARS else "")
    return "(not shown)" if "@" in text else shown


def complain(error: StartError) -> int:
    """Prints the sentence to stderr; returns the exit code."""
    print(error, file=sys.stderr)
    return error.exit_code

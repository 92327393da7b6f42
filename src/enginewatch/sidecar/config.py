"""The hot settings: what a ConfigMap or the environment says -> `Settings`, and what is wrong with it.

Rules:
    - The file wins over the environment (the same keys in upper case), the environment over the defaults.
    - Zero, null, empty or missing means "not given". Only `warmup_sec: 0` is a value: no warm-up.
    - One bad value rejects the whole file: half a configuration is one that nobody wrote. In the environment, where
      nothing was in force before, it costs that key alone.
    - Unknown keys are named and the others apply; keys that begin with `_` are comments. A key given twice counts as
      it was written last, and is named.
    - 0 and 1 are false and true where a switch is meant: templates render them so. 0 is a value there, as false is.
    - A reason never repeats a value: it ends up in logs and metrics.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from enginewatch.core.settings import Settings

MAX_SEC = 1e9
"""Upper bound of every number: 31 years. What is larger is a slip, and would break timers."""
MIN_PACE_SEC = 0.01
"""Least poll interval and timeout; below that the watcher would only watch itself."""
MAX_NAMED_KEYS = 20
"""So many problems are named at once; a hostile file must not fill the log."""
MAX_KEY_CHARS = 64
"""Longest key that is repeated in a log line or a metric."""

ENVIRONMENT = "environment"
"""Where a problem is, if not in the file."""

Seconds = Annotated[float, Meta(ge=0, le=MAX_SEC)]
Pace = Annotated[float, Meta(ge=0, le=MAX_SEC, description=f"0 or at least {MIN_PACE_SEC:g}")]
Text = Annotated[str, Meta(max_length=65536)]


class ConfigFile(msgspec.Struct, forbid_unknown_fields=True):
    """The configuration file. Every key is optional and read anew while the sidecar runs; times are in seconds."""

    poll_interval_sec: Annotated[Pace | None, Meta(description="Scrape period, measured start to start (5).")] = None
    stall_sec: Annotated[
        Seconds | None, Meta(description="How long progress may be frozen before a hang may be declared (30).")
    ] = None
    metrics_timeout_sec: Annotated[Pace | None, Meta(description="Deadline of one scrape (10).")] = None
    warmup_sec: Annotated[
        Seconds | None,
        Meta(description="After the first good scrape of a process hangs are shown, not acted on (600); 0 = none."),
    ] = None
    active_probe_enabled: Annotated[
        bool | Literal[0, 1] | None, Meta(description="Canary on stalled polls (true); 1 and 0 are true and false.")
    ] = None
    active_probe_path: Annotated[
        Text | None, Meta(description="Path of the canary request; empty = the engine's canary for its role.")
    ] = None
    active_probe_method: Annotated[Text | None, Meta(description="HTTP method of the canary request.")] = None
    active_probe_body: Annotated[Text | None, Meta(description="Body of the canary request, as a string.")] = None
    active_probe_timeout_sec: Annotated[
        Pace | None, Meta(description="Deadline of one canary, from send to last byte (5).")
    ] = None
    active_probe_min_failures: Annotated[
        Seconds | None, Meta(description="Consecutive failed canaries needed besides stall_sec (2).")
    ] = None
    active_probe_idle_sec: Annotated[
        Seconds | None,
        Meta(description="Least time between canaries on an idle core whose last one was ok (0 = every stalled poll)."),
    ] = None
    unreach_sec: Annotated[Seconds | None, Meta(description="How long /metrics may fail (twice stall_sec).")] = None
    startup_budget_sec: Annotated[Seconds | None, Meta(description="Longest load or reload (5400).")] = None
    peer_stall_sec: Annotated[
        Seconds | None, Meta(description="How long a prefill/decode queue may stand still (60).")
    ] = None
    log_stall_sec: Annotated[
        Seconds | None, Meta(description="Shorter stall that suffices when the log agrees (15).")
    ] = None
    log_window_sec: Annotated[Seconds | None, Meta(description="How recent a log signature must be (120).")] = None
    mode: Annotated[
        Literal["enforce", "shadow", ""] | None,
        Meta(description="shadow: verdicts are computed and shown, /healthz stays 200 (enforce)."),
    ] = None


_TYPES: Mapping[str, Any] = get_type_hints(ConfigFile, include_extras=True)
HOT_KEYS: tuple[str, ...] = tuple(_TYPES)
"""Every hot key, in the order of the documentation."""

_BOOLS = frozenset({"active_probe_enabled"})
_TEXTS = frozenset({"active_probe_path", "active_probe_method", "active_probe_body", "mode"})
_PACES = frozenset({"poll_interval_sec", "metrics_timeout_sec", "active_probe_timeout_sec"})
_ZERO_COUNTS = frozenset({"warmup_sec"})

_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_METHOD = re.compile(r"[A-Za-z]{1,20}")
_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}

Value = float | bool | str


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, for the log and `config_problem`.

    Attributes:
        key: the key concerned, empty where it is the file as a whole.
        where: the file's path, or `environment`.
        reason: a sentence fragment for people; never repeats a value.
    """

    key: str
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key + ': ' if self.key else ''}{self.reason} ({self.where})"


@dataclass(frozen=True, slots=True)
class Layer:
    """What one source gives.

    Attributes:
        values: the keys it really sets.
        rejected: values that cannot be used.
        unknown: keys that nobody reads.
        repeated: keys given more than once.
    """

    values: Mapping[str, Value]
    rejected: tuple[Problem, ...] = ()
    unknown: tuple[Problem, ...] = ()
    repeated: tuple[Problem, ...] = ()


EMPTY = Layer({})


def config_schema() -> dict[str, Any]:
    """JSON Schema of the configuration file, for editors, charts and the documentation."""
    schema = msgspec.json.schema(ConfigFile)
    definition: dict[str, Any] = schema["$defs"]["ConfigFile"]
    definition["patternProperties"] = {"^_": {"description": "A comment."}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **definition,
        "title": "enginewatch configuration",
    }


def settings_from(environment: Layer, file: Layer) -> Settings:
    """The effective settings: defaults, under the environment, under the file."""
    given: dict[str, Any] = {**environment.values, **file.values}
    if "active_probe_min_failures" in given:
        given["active_probe_min_failures"] = math.ceil(given["active_probe_min_failures"])
    return Settings(**given)


def read_environment(environ: Mapping[str, str]) -> Layer:
    """The hot keys among the environment's variables."""
    values: dict[str, Value] = {}
    rejected = []
    for key in HOT_KEYS:
        text = environ.get(key.upper(), "")
        if not text.strip():
            continue
        value = _from_text(key, text)
        reason = value.reason if isinstance(value, _UnreadableError) else _reason_against(key, value)
        if reason is not None:
            rejected.append(Problem(key.upper(), ENVIRONMENT, reason))
        elif not isinstance(value, _UnreadableError) and _is_given(key, value):
            values[key] = value
    return Layer(values, rejected=tuple(rejected))


def read_document(raw: bytes, where: str) -> Layer:
    """The keys of a configuration file's content; `rejected` is not empty where it must not be applied."""
    repeated: list[str] = []
    try:
        document = json.loads(
            raw.decode("utf-8-sig"),
            object_pairs_hook=lambda pairs: _last_of_each(pairs, repeated),
            parse_constant=_refuse_constant,
        )
    except _UnreadableError as unusable:
        return Layer({}, rejected=(Problem("", where, unusable.reason),))
    except UnicodeDecodeError:
        return Layer({}, rejected=(Problem("", where, "not JSON: not UTF-8 text"),))
    except json.JSONDecodeError as error:
        return Layer({}, rejected=(Problem("", where, _not_json(raw, error)),))
    except (ValueError, RecursionError):  # a number of thousands of digits; brackets nested thousands deep
        return Layer({}, rejected=(Problem("", where, "not JSON that anyone would write"),))
    if not isinstance(document, dict):
        return Layer({}, rejected=(Problem("", where, f"expected a JSON object, got {_type_name(document)}"),))

    values: dict[str, Value] = {}
    rejected: list[Problem] = []
    unknown: list[Problem] = []
    for key, value in document.items():
        if key.startswith("_"):
            continue
        if key not in _TYPES:
            if len(unknown) < MAX_NAMED_KEYS:  # what is not named need not be compared with every key there is
                unknown.append(Problem(_shown(key), where, _unknown_reason(key)))
        elif (reason := _reason_against(key, value)) is not None:
            rejected.append(Problem(key, where, reason))
        elif _is_given(key, value):
            values[key] = bool(value) if key in _BOOLS else value
    named_twice = [
        Problem(_shown(key), where, "given more than once, the last one counts")
        for key in dict.fromkeys(repeated)
        if not key.startswith("_")
    ]
    return Layer(values, _first(rejected), tuple(unknown), _first(named_twice))


def public_settings(settings: Settings) -> dict[str, Any]:
    """The settings as they may be served: without the canary's body and without the query of its path."""
    shown = {field.name: getattr(settings, field.name) for field in fields(settings)}
    if settings.active_probe_body:
        shown["active_probe_body"] = f"<{len(settings.active_probe_body.encode())} bytes, not shown>"
    path, mark, _ = settings.active_probe_path.partition("?")
    shown["active_probe_path"] = path + ("?<not shown>" if mark else "")
    shown["unreach_sec"] = settings.unreach_after_sec
    return shown


class _UnreadableError(Exception):
    """A value that cannot be read at all; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _from_text(key: str, text: str) -> Value | _UnreadableError:
    if key in _TEXTS:
        return text if key == "active_probe_body" else text.strip()
    word = text.strip().lower()
    if key in _BOOLS:
        return _WORDS[word] if word in _WORDS else _UnreadableError("expected true, false, 1, 0, yes or no")
    return float(word) if _NUMBER.fullmatch(word) else _UnreadableError("expected a number such as 30 or 2.5")


def _reason_against(key: str, value: object) -> str | None:
    """Why `value` cannot be the value of `key`; None where it can."""
    if value is None:
        return None
    try:
        msgspec.convert(value, _TYPES[key])
    except (msgspec.ValidationError, OverflowError):
        return _wrong(key, value)
    if key in _PACES and isinstance(value, int | float) and 0 < value < MIN_PACE_SEC:
        return f"must be at least {MIN_PACE_SEC:g}"
    if isinstance(value, str) and not _is_unicode(value):
        return "holds half a surrogate pair, which is not text"
    if key == "active_probe_path" and value and not _is_path(str(value)):
        return "expected a path that begins with / and holds no blanks"
    if key == "active_probe_method" and value and not _METHOD.fullmatch(str(value)):
        return "expected an HTTP method such as GET or POST"
    return None


def _wrong(key: str, value: object) -> str:
    if key == "mode":
        return 'expected "enforce" or "shadow"'
    if key in _TEXTS:
        return (
            "longer than 65536 characters" if isinstance(value, str) else f"expected a string, got {_type_name(value)}"
        )
    if key in _BOOLS:
        return f"expected true, false, 1 or 0, got {_type_name(value)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"expected a number, got {_type_name(value)}"
    return "must not be negative" if value < 0 else f"must not be above {MAX_SEC:g}"


def _is_given(key: str, value: object) -> bool:
    if value is None or value == "":
        return False
    return bool(value) or key in _BOOLS or key in _ZERO_COUNTS


def _is_path(text: str) -> bool:
    return text.startswith("/") and text.isprintable() and " " not in text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _last_of_each(pairs: list[tuple[str, Any]], repeated: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and len(repeated) < MAX_NAMED_KEYS:
            repeated.append(key)
        found[key] = value
    return found


def _refuse_constant(name: str) -> None:
    raise _UnreadableError(f"not JSON: {name} is not a number")


def _not_json(raw: bytes, error: json.JSONDecodeError) -> str:
    if not raw.strip():
        return "not JSON: the file is empty"
    return f"not JSON: {error.msg} at line {error.lineno}, column {error.colno}"


def _unknown_reason(key: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", key.lower())
    meant = next((known for known in HOT_KEYS if known.replace("_", "") == plain), None)
    return f"unknown key, not read; did you mean {meant}?" if meant else "unknown key, not read"


def _type_name(value: object) -> str:
    names = {bool: "true or false", str: "a string", list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(key: str) -> str:
    printable = "".join(char if char.isprintable() else "?" for char in key[:MAX_KEY_CHARS])
    return printable + ("..." if len(key) > MAX_KEY_CHARS else "")


def _first(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    return tuple(problems)[:MAX_NAMED_KEYS]

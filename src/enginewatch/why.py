"""`enginewatch why URL`: a sidecar's verdict in words. Standard library only."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

TIMEOUT_SEC = 5.0
MAX_ANSWER_BYTES = 4 * 1024 * 1024
_SHOWN_SETTINGS = ("mode", "stall_sec", "poll_interval_sec", "warmup_sec", "active_probe_enabled")
_ENDPOINTS = ("/verdict", "/healthz", "/engine", "/metrics", "/history")


class NoAnswerError(Exception):
    """There is no verdict to explain; the message is one sentence that says why and what to change."""


def explain_verdict(verdict_json: Mapping[str, Any]) -> str:
    """The body of /verdict as text for people. The first line is what /healthz answers.

    Everything but `state`, `acting` and `reason` may be missing.
    """
    return "\n".join(_lines(verdict_json)) + "\n"


def run_why(url: str, output: str = "text") -> int:
    """Asks the sidecar at `url` and prints its verdict as `text` or `json`.

    Returns:
        0 when there was an answer, whatever it says; 1 when there was none; 2 for a URL that cannot be one.
    """
    try:
        address = verdict_url(url)
    except NoAnswerError as error:
        print(f"enginewatch why: {error}", file=sys.stderr)
        return 2
    try:
        verdict = fetch_verdict(address)
    except NoAnswerError as error:
        print(f"enginewatch why: {error}", file=sys.stderr)
        return 1
    if output == "json":
        print(json.dumps(verdict, indent=2))
    else:
        print(explain_verdict(verdict), end="")
    return 0


def verdict_url(url: str) -> str:
    """The address of /verdict from what a person types: `host:9090`, a base URL, or one of the sidecar's pages.

    Raises:
        NoAnswerError: it is none of these.
    """
    text = url.strip()
    bad = NoAnswerError(f"{text[:80]!r} is not the address of a sidecar; give one like http://10.0.0.7:9090")
    if "://" not in text:
        text = f"http://{text}"
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        raise bad from None
    if not usable or not text.isprintable() or " " in text:
        raise bad
    base = parts.path.rstrip("/")
    for endpoint in _ENDPOINTS:
        base = base.removesuffix(endpoint)
    return f"{parts.scheme}://{parts.netloc}{base}/verdict"


def fetch_verdict(address: str) -> dict[str, Any]:
    """The body of /verdict.

    Raises:
        NoAnswerError: nobody answers, or what answers is not a sidecar.
    """
    from http.client import HTTPException
    from urllib.request import ProxyHandler, build_opener

    stranger = NoAnswerError(
        f"what answers at {address} is not an enginewatch sidecar; give the sidecar's port (LISTEN, 9090 unless "
        "changed), not the engine's"
    )
    try:
        # Without the environment's proxy: a sidecar is next door.
        with build_opener(ProxyHandler({})).open(address, timeout=TIMEOUT_SEC) as answer:
            raw = answer.read(MAX_ANSWER_BYTES)
    except HTTPError as refusal:
        refusal.close()
        raise stranger from None
    except (HTTPException, UnicodeError):
        raise stranger from None
    except (URLError, OSError) as error:
        raise NoAnswerError(
            f"nobody answers at {address} ({_phrase(error)}); is the sidecar running, and is that its address?"
        ) from None
    try:
        verdict = json.loads(raw)
    except (ValueError, RecursionError):
        raise stranger from None
    wanted = {"state": str, "reason": str, "acting": bool}
    if not isinstance(verdict, dict) or any(not isinstance(verdict.get(key), kind) for key, kind in wanted.items()):
        raise stranger
    return verdict


def _lines(verdict: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'hung' if verdict.get('acting') else 'ok'}: {_text(verdict.get('reason'))}"
    standing = f"state {_text(verdict.get('state'))}"
    if verdict.get("hung") and not verdict.get("acting"):
        standing += ", a hang that is shown and not acted on"
    if verdict.get("since"):
        standing += f", {'hung' if verdict.get('hung') else 'not hung'} since {_text(verdict['since'])}"
    yield standing

    for core in _objects(verdict, "cores"):
        yield ""
        yield (
            f"core {_text(core.get('core'))}: no proof of life for {_number(core.get('stalled_for_sec'))} s, "
            f"{_load(core.get('running'))} running, {_load(core.get('waiting'))} waiting"
        )
        legs = core.get("legs")
        yield from _table(
            (_text(name), _number(leg.get("value")), _moved(leg.get("moved_ago_sec")))
            for name, leg in (legs.items() if isinstance(legs, dict) else ())
            if isinstance(leg, dict)
        )
    yield from _section(
        "witnesses",
        _table(
            (_text(found.get("name")), _text(found.get("says")), _age(found.get("age_sec")), _text(found.get("detail")))
            for found in _objects(verdict, "witnesses")
        ),
    )
    flips = verdict.get("would_flip")
    sentences = flips if isinstance(flips, list) else ()
    yield from _section("what would change the verdict", (f"  - {_text(sentence)}" for sentence in sentences))
    settings = verdict.get("settings")
    if isinstance(settings, dict):
        yield ""
        yield "settings: " + ", ".join(f"{key} {_setting(settings[key])}" for key in _SHOWN_SETTINGS if key in settings)


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    first = next(lines, None)
    if first is not None:
        yield from ("", title, first)
        yield from lines


def _table(rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    table = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    for row in table:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _objects(verdict: Mapping[str, Any], key: str) -> Iterator[dict[str, Any]]:
    value = verdict.get(key)
    return (item for item in value if isinstance(item, dict)) if isinstance(value, list) else iter(())


def _text(value: Any) -> str:
    # What comes over the network goes to a terminal: no control sequences.
    return "".join(char if char.isprintable() else " " for char in str(value))


def _number(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, int | float) else "?"


def _load(value: Any) -> str:
    return _number(value) if value is not None else "unknown"


def _setting(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else _number(value)
        if not isinstance(value, str)
        else _text(value)
    )


def _moved(value: Any) -> str:
    return f"moved {_number(value)} s ago" if value is not None else "not seen to move"


def _age(value: Any) -> str:
    return f"{_number(value)} s ago" if value is not None else ""


def _phrase(error: Exception) -> str:
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, TimeoutError):
        return f"no answer within {TIMEOUT_SEC:g} s"
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror.lower()
    return "no connection"

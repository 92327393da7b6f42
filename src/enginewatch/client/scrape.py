"""Reading the metrics page: once, within one deadline, never held whole.

A redirect within the origin (an unpatched mount answers 307 to `/metrics/`) is followed once, without the API key; one
that leaves the origin is not followed at all. Either way the key is seen by nobody but the address it was given for.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote

from enginewatch.client.exchange import Fault, Feed, Head, Line, Question, Trouble
from enginewatch.core.exposition import NotMetrics, canonical_series, parse_series

_HEADERS = {"Accept": "text/plain;version=0.0.4, */*;q=0.1"}
_CONTENT_TYPE_CHARS = 200
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_WORDS = {
    Fault.SETUP: "unasked",
    Fault.UNSENDABLE: "malformed",
    Fault.REFUSED: "refused",
    Fault.TIMEOUT: "timeout",
    Fault.RESET: "reset",
    Fault.TRUNCATED: "truncated",
    Fault.GARBLED: "malformed",
}
"""`unasked` is a name that does not resolve, a certificate that is not trusted, a watcher out of file descriptors: it
says nothing about the engine and must not restart one. A METRICS_PATH that no URL can hold is like one where there is
no page: the canary, which has its own path, can still tell."""


@dataclass(frozen=True, slots=True)
class ScrapeFailure:
    """A scrape that gave no metrics page; the words are those of `events.ScrapeFailed`."""

    failure: str
    detail: str


@dataclass(frozen=True, slots=True)
class Page:
    """One look at the metrics page.

    Attributes:
        result: canonical series -> value, or why there are none.
        duration_sec: from the question to the last byte, or to the failure.
        size_bytes: of the body, decompressed, as far as it was read.
        redirected_to: path of the page the engine redirected to, within its origin.
        status: of the last answer, None without one.
        content_type: of the last answer.
        fault: what was wrong with the exchange, where that is why there is no page.
        is_json_list: whether the body began like one.
    """

    result: dict[str, float] | ScrapeFailure
    duration_sec: float
    size_bytes: int
    redirected_to: str | None
    status: int | None
    content_type: str
    fault: Fault | None
    is_json_list: bool = False


class Reader(Protocol):
    """What makes samples of a body: `exposition.PageReader`, `statistics.StatisticsReader`."""

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes; raises NotMetrics."""

    def finish(self) -> dict[str, float]:
        """The samples of a body that came to its end; raises NotMetrics."""


async def read_page(line: Line, path: str, reader: Reader, *, until: float, marks_its_end: bool = False) -> Page:
    """Read the page at `path` with `reader`.

    Args:
        line: where the engine is.
        path: of the page.
        reader: makes samples of the body.
        until: deadline on the running loop's clock, to the last byte.
        marks_its_end: whether a body that is cut off cannot be taken for a whole one.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    taker = _Taker(reader, marks_its_end=marks_its_end)
    redirected_to: str | None = None
    fault: Fault | None = None
    result: dict[str, float] | ScrapeFailure
    try:
        head = await line.ask(Question(path, headers=_HEADERS), until=until, on_head=taker.begin)
        if head.status in _REDIRECTS and head.location:
            redirected_to = line.same_origin(head.location, path)
            if redirected_to is not None:
                question = Question(redirected_to, headers=_HEADERS, with_key=False)
                head = await line.ask(question, until=until, on_head=taker.begin)
        result = taker.finish() if _is_success(head) else _refusal(line, head, redirected_to)
        if isinstance(result, dict):
            result = _redacted(line, result)
    except NotMetrics as problem:
        result = ScrapeFailure("malformed", problem.reason)
    except Trouble as trouble:
        fault = trouble.fault
        result = ScrapeFailure(_WORDS[fault], trouble.detail)
    return Page(
        result=result,
        duration_sec=loop.time() - began,
        size_bytes=taker.size_bytes,
        redirected_to=_redacted_path(line, redirected_to) if redirected_to is not None else None,
        status=taker.head.status if taker.head else None,
        content_type=shown_content_type(line, taker.head) if taker.head else "",
        fault=fault,
        is_json_list=taker.first == b"[",
    )


def _redacted(line: Line, samples: dict[str, float]) -> dict[str, float]:
    """The samples, their labels without the API key; the same dict where they hold none."""
    clean = {_redacted_series(line, series): value for series, value in samples.items()}
    return samples if clean.keys() == samples.keys() else clean


def _redacted_series(line: Line, series: str) -> str:
    if line.redacted(series) == series:
        return series
    # Label by label, so that it stays the text of a series wherever the key stands. The name is one of those that were
    # asked for, and no echo, even where a key is a part of it.
    name, labels = parse_series(series)
    return canonical_series(name, {line.redacted(label): line.redacted(value) for label, value in labels.items()})


def _redacted_path(line: Line, path: str) -> str:
    """A path for people, without the API key, however it is quoted there."""
    plain = unquote(path)
    return line.redacted(path if line.redacted(plain) == plain else plain)


def shown_content_type(line: Line, head: Head) -> str:
    """The header's value for people, without the API key; shortened only then, or a part of the key would be left."""
    return line.redacted(head.content_type)[:_CONTENT_TYPE_CHARS]


def no_page(trouble: Trouble, *, duration_sec: float) -> Page:
    """The page of an engine that could not even be asked another question."""
    return Page(ScrapeFailure(_WORDS[trouble.fault], trouble.detail), duration_sec, 0, None, None, "", trouble.fault)


class _Taker:
    """Feeds one body to a page reader."""

    def __init__(self, reader: Reader, *, marks_its_end: bool) -> None:
        self._reader = reader
        self._marks_its_end = marks_its_end
        self._last = b"\n"
        self.first = b""
        """The first byte of the body that is no blank."""
        self.head: Head | None = None
        self.size_bytes = 0

    def begin(self, head: Head) -> Feed | None:
        self.head = head
        return self._take if _is_success(head) else None

    def _take(self, piece: bytes) -> None:
        self.size_bytes += len(piece)
        self._last = piece[-1:]
        self.first = self.first or piece.lstrip()[:1]
        self._reader.feed(piece)

    def finish(self) -> dict[str, float] | ScrapeFailure:
        """The samples; raises NotMetrics."""
        if self.head is not None and not self.head.sized and not self._marks_its_end and self._last != b"\n":
            # Only the end of the connection says that the page is over, and it is over inside a line: half a number
            # would read as a counter that fell.
            return ScrapeFailure("truncated", "the page ended inside a line")
        return self._reader.finish()


def _is_success(head: Head) -> bool:
    return 200 <= head.status < 300


def _refusal(line: Line, head: Head, redirected_to: str | None) -> ScrapeFailure:
    detail = f"answered {head.status}"
    if head.status in _REDIRECTS:
        detail += ", a second redirect" if redirected_to else ", a redirect that leaves this address: not followed"
    elif head.status in (401, 403):
        detail += " after a redirect, where no API key is sent" if redirected_to else f": {line.key_advice()}"
    return ScrapeFailure(f"http_{head.status}", detail)

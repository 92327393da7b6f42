"""From the bytes of a JSON list of statistics to the samples that the judgement reads.

TensorRT-LLM answers GET /metrics with a list of objects, one per iteration since somebody last asked, and forgets them.
Only the number of the last iteration is progress, and only the load that stood beside it is current.

Rules:
    - The list is never held whole: each object is read and dropped as soon as its end is in.
    - The highest number in the list is the counter's value. The gauges are taken from the objects that carry it, the
      largest where there are several (with attention data parallelism there may be one object per rank).
    - A list without a number (empty, or of objects of another shape) is no news: the counter keeps the value that it
      had on the list before (`StatisticsMemory`), and the gauges are absent, which is not busy.
    - Values that are no finite numbers are dropped one by one; `true` is no number.
What makes the whole body "not metrics":
    anything but one list of objects in JSON and UTF-8, an object over the caps, more objects than the cap, more bytes
    than the cap, an end before the list's.
What a hostile list may cost:
    an object whose end is not in yet is tried again only when what is held has doubled, so each byte is parsed at most
    a few times; what is held is capped.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from typing import Final

from enginewatch.core.exposition import NotMetrics
from enginewatch.engines.profile import JsonStatistics

NOT_READ: Final = "JSON statistics, which reading would remove: not read"
"""Why there is no page where such a list was left alone."""
MAX_BYTES: Final = 8 * 1024 * 1024
MAX_OBJECTS: Final = 16_384
"""Most objects in one list. The engine keeps 1,000 unless it is told otherwise (iter_stats_max_iterations)."""
MAX_OBJECT_CHARS: Final = 64 * 1024
"""Longest object. Usual are 1 to 2 kB, and some hundred bytes more per request with enable_iter_req_stats. One made of
empty lists takes 1.5 MB in memory and 5 ms while it is looked at."""

_BLANKS = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder(parse_int=float)  # an integer of a million digits would take seconds
_NOT_A_LIST = "not a JSON list of objects"
_TOO_LONG = f"an object of more than {MAX_OBJECT_CHARS} characters, or of broken JSON"
_AFTER_SIGN = {("list", "["): "first", ("first", "]"): "end", ("comma", ","): "object", ("comma", "]"): "end"}
"""What comes next after a sign, by what was expected. `first` is an object or the end of an empty list."""


class StatisticsMemory:
    """What the lists of one engine told last. One per engine, handed to each `StatisticsReader`."""

    __slots__ = ("counter",)

    def __init__(self) -> None:
        self.counter: float | None = None
        """The highest number on the last list that had one."""

    def forget(self) -> None:
        """Another process answers, or will."""
        self.counter = None


class StatisticsReader:
    """Reads one list, fed in chunks cut anywhere.

    Args:
        statistics: which keys mean what.
        memory: what earlier lists of this engine told.
    """

    def __init__(self, statistics: JsonStatistics, memory: StatisticsMemory) -> None:
        self._statistics = statistics
        self._memory = memory
        self._decode = codecs.getincrementaldecoder("utf-8")()
        self._held = ""
        self._try_at = 0  # how much must be held before an object is tried again
        self._expects = "list"
        self._bytes = 0
        self._objects = 0
        self._counter: float | None = None
        self._gauges: dict[str, float] = {}

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the body.

        Raises:
            NotMetrics: the body cannot be such a list, whatever follows.
        """
        self._bytes += len(chunk)
        if self._bytes > MAX_BYTES:
            raise NotMetrics(f"more than {MAX_BYTES} bytes")
        self._take(chunk, final=False)

    def finish(self) -> dict[str, float]:
        """The samples of a body that came to its end: series -> value.

        Raises:
            NotMetrics: the body is not such a list, or not all of one.
        """
        self._try_at = 0
        self._take(b"", final=True)
        if self._expects != "end":
            raise NotMetrics(_NOT_A_LIST)
        memory = self._memory
        if self._counter is not None:
            memory.counter = self._counter
        if memory.counter is None:
            return {}
        found = self._statistics
        return {found.series(found.counter): memory.counter, **self._gauges}

    def _take(self, chunk: bytes, *, final: bool) -> None:
        try:
            self._held += self._decode.decode(chunk, final)
        except UnicodeDecodeError:
            raise NotMetrics(_NOT_A_LIST) from None
        at = self._read_from(0)
        self._held = self._held[at:]
        if len(self._held) > MAX_OBJECT_CHARS:
            raise NotMetrics(_TOO_LONG)

    def _read_from(self, at: int) -> int:
        """Read all that is whole in what is held; where the rest begins."""
        held = self._held
        while True:
            at = _end_of_blanks(held, at)
            if at == len(held):
                return at
            sign = held[at]
            if sign == "{" and self._expects in ("first", "object"):
                end = self._read_object(at)
                if end is None:
                    return at
                at = end
                self._expects = "comma"
                continue
            expects = _AFTER_SIGN.get((self._expects, sign))
            if expects is None:
                raise NotMetrics(_NOT_A_LIST)
            self._expects = expects
            at += 1

    def _read_object(self, at: int) -> int | None:
        """Read the object that begins there; returns where it ends, None while its end is not in."""
        size = len(self._held) - at
        if size < self._try_at:
            return None
        try:
            found, end = _DECODER.raw_decode(self._held, at)
        except RecursionError:
            raise NotMetrics("JSON nested too deeply") from None
        except ValueError:
            self._try_at = min(2 * size, MAX_OBJECT_CHARS)
            return None
        if end - at > MAX_OBJECT_CHARS:
            raise NotMetrics(_TOO_LONG)
        self._try_at = 0
        self._objects += 1
        if self._objects > MAX_OBJECTS:
            raise NotMetrics(f"more than {MAX_OBJECTS} objects")
        self._note(found)
        return end

    def _note(self, entry: dict[str, object]) -> None:
        statistics = self._statistics
        counter = _number(entry.get(statistics.counter))
        if counter is None or (self._counter is not None and counter < self._counter):
            return
        if counter != self._counter:
            self._counter = counter
            self._gauges.clear()
        for key in (statistics.running, statistics.waiting):
            value = _number(entry.get(key))
            if value is not None:
                series = statistics.series(key)
                self._gauges[series] = max(value, self._gauges.get(series, value))


def _number(value: object) -> float | None:
    return value if isinstance(value, float) and math.isfinite(value) else None


def _end_of_blanks(text: str, at: int) -> int:
    found = _BLANKS.match(text, at)
    return found.end() if found is not None else at

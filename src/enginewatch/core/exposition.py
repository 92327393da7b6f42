"""From the bytes of a metrics page to the samples that an engine profile asks for.

The page is never held whole. Each chunk is searched by one regular expression for lines that begin with a wanted name;
only those are looked at further, and only their series and values are kept. In steady state a surviving line costs one
dictionary look-up, because the text of a series does not change between pages (`SeriesCache`).

What is read:
    Prometheus text format 0.0.4 and 1.0.0 (also with the metric name quoted inside the braces) and OpenMetrics 1.0:
    any label order, blanks around braces, escapes, `{}`, timestamps, exemplars, `\\r\\n`, a last line without newline.
What is dropped, line by line:
    values that are not finite (`NaN` would compare false with everything), values the format does not know although
    Python does (`1_0`, `0x1p3`), invalid UTF-8, a label twice, anything after the value that is neither a timestamp
    nor an exemplar. A torn line must not become a number, and one bad line must not cost the others.
What makes the whole body "not metrics":
    a beginning that is JSON, HTML or binary, a NUL byte anywhere, no line that could be a comment or a sample, more
    than the caps allow. An empty body and a page of comments are metrics: an empty registry answers so, for example
    SGLang before its first request. A body that begins with a brace is taken for JSON; no exporter begins with a
    sample whose name is quoted, a TYPE line comes first.
What a hostile page may cost:
    each byte is looked at once or twice, an unfinished line is held only while it may become a wanted one and is
    shorter than MAX_LINE_BYTES, and what is kept is bounded by the caps, in the cache too. bench/page.py measures it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, takewhile

MAX_LINE_BYTES = 4 * 1024
"""Longest line that is read; a longer one is malformed. Wanted ones stay below 1 kB, and each kept is held for long."""
MAX_NUMBER_BYTES = 256
"""Longest text of one number; a longer one is malformed."""

_WINDOW_BYTES = 64 * 1024
_SHAPE_BYTES = 64 * 1024  # a whole line within so many bytes shows that the body is a page
_AROUND_NAME_BYTES = 32  # more than may stand before a name, and the byte after it

_NUMBER = rb"[+-]?(?:[0-9]++(?:\.[0-9]*+)?+|\.[0-9]++)(?:[eE][+-]?[0-9]++)?+"
_QUOTED = rb'"[^"\\\n]*+(?:\\[^\n][^"\\\n]*+)*+"'
_IN_BRACES = rb'[^"}\n]*+(?:' + _QUOTED + rb'[^"}\n]*+)*+\}'
_LABELS = rb"\{" + _IN_BRACES
_INDENT = rb"[ \t]{0,16}+"
# A timestamp, an exemplar, the line's end.
_REST = rb"(?:[ \t]++" + _NUMBER + rb")?+(?:[ \t]++#[ \t]*+\{[^\n]*+)?+[ \t]*+\r?+(?=\n)"

_BLANK_LINES = re.compile(rb"\n{2,}")
_SHAPE = re.compile(
    rb"\n" + _INDENT + rb"(?:#|(?:[a-zA-Z_:][a-zA-Z0-9_:]*+(?=[ \t{])(?:[ \t]*+" + _LABELS + rb")?+|" + _LABELS + rb")"
    rb"[ \t]*+(?:" + _NUMBER + rb"|[+-]?(?i:inf|nan))[ \t\r\n])"
)
_TEXT = r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"'
_LABEL = re.compile(rf"[ \t]*+(?:([a-zA-Z_][a-zA-Z0-9_]*+)|{_TEXT})[ \t]*+=[ \t]*+{_TEXT}[ \t]*+(?:,|\Z)", re.DOTALL)
_QUOTED_NAME = re.compile(rf"[ \t]*+{_TEXT}[ \t]*+(?:,|\Z)", re.DOTALL)
_PAIR = rb'([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+("[^"\\]*+(?:\\[\\"n][^"\\]*+)*+")'
_PAIRS = re.compile(_PAIR)
_USUAL_SERIES = re.compile(
    rb"([a-zA-Z_:][a-zA-Z0-9_:]*+)[ \t]*+\{((?:[ \t]*+" + _PAIR + rb"[ \t]*+(?:,|(?=\})))*+)[ \t]*+\}"
)
_PLAIN_PAIR = r'([a-zA-Z_][a-zA-Z0-9_]*+)="([^"\\]*+)"(?:,|(?=\}))'
_PLAIN_PAIRS = re.compile(_PLAIN_PAIR)
_PLAIN_SERIES = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*+)\{((?:" + _PLAIN_PAIR + r")*+)\}")
_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*+")
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*+")
_ESCAPE = re.compile(r'[\\"\n]')
_ESCAPED = re.compile(r'\\([\\"n])')


class NotMetrics(Exception):  # noqa: N818 - a finding about the body, and so it reads where it is caught
    """The body is not a metrics page; `reason` is a short phrase for people and holds nothing from the body."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SeriesCache:
    """Canonical texts of the series on the last page that was read to its end.

    One per engine, handed to each `PageReader`. It never holds more than one page may: a page of new series replaces
    the old ones, a page over the caps leaves the cache as it was.
    """

    __slots__ = ("canonical",)

    def __init__(self) -> None:
        self.canonical: dict[bytes, str] = {}
        """Series as it stands on the page -> canonical text, empty for a malformed one."""


class PageReader:
    """Reads one metrics page, fed in chunks cut anywhere.

    Args:
        names: full sample names that are wanted.
        max_bytes: longest body, after decompression.
        max_lines: most lines with a wanted name.
        max_kept_bytes: most bytes in lines with a wanted name.
        cache: what earlier pages of this engine taught; without it every series is parsed anew.
    """

    def __init__(
        self,
        names: frozenset[str],
        *,
        max_bytes: int = 8 * 1024 * 1024,
        max_lines: int = 4096,
        max_kept_bytes: int = 512 * 1024,
        cache: SeriesCache | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_lines = max_lines
        self._max_kept_bytes = max_kept_bytes
        self._cache = SeriesCache() if cache is None else cache
        self._search = _search_for(names)
        self._samples: dict[str, float] = {}
        self._series: dict[bytes, str] = {}
        self._pending: list[bytes] = []  # the unfinished last line, if it may still become a wanted one
        self._pending_bytes = 0
        self._skipping = False  # the unfinished last line is of no interest, nothing of it is held
        self._lines = 0
        self._kept_bytes = 0
        self._begun = False
        self._shaped = False
        self._offset = 0  # in the body, of what comes next

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the body.

        Raises:
            NotMetrics: the body cannot be a metrics page, whatever follows.
        """
        if self._offset + len(chunk) > self._max_bytes:
            raise NotMetrics(f"more than {self._max_bytes} bytes")
        if b"\0" in chunk:
            raise NotMetrics("binary data, not a metrics page")
        if not self._begun:
            self._begin(chunk)
        for start in range(0, len(chunk), _WINDOW_BYTES):
            self._take(chunk[start : start + _WINDOW_BYTES])

    def finish(self) -> dict[str, float]:
        """The samples of a body that came to its end: canonical series -> value.

        Only for bodies known to be whole: a last line without newline counts.

        Raises:
            NotMetrics: nothing in the body looks like a metrics page.
        """
        if self._skipping:
            self._skipping = False
        else:
            self._read_lines(b"\n" + b"".join(self._pending) + b"\n", self._offset + 1)
        if self._begun and not self._shaped:
            raise NotMetrics("no line looks like a metric")
        self._cache.canonical = self._series
        return self._samples

    def _begin(self, chunk: bytes) -> None:
        head = chunk.lstrip()[:1]
        if not head:
            return
        self._begun = True
        if head in b"[{":
            raise NotMetrics("JSON, not a metrics page")
        if head == b"<":
            raise NotMetrics("HTML or XML, not a metrics page")
        if head < b" " or head > b"~":
            raise NotMetrics("binary data, not a metrics page")

    def _take(self, chunk: bytes) -> None:
        end = chunk.rfind(b"\n") + 1
        end_offset = self._offset + end
        self._offset += len(chunk)
        if end:
            if self._skipping:
                start = chunk.find(b"\n")
                self._skipping = False
                self._read_lines(chunk[start:end], end_offset)
            else:
                self._read_lines(b"".join((b"\n", *self._pending, chunk[:end])), end_offset)
                self._pending.clear()
                self._pending_bytes = 0
            chunk = chunk[end:]
        if not chunk or self._skipping:
            return
        decided = self._pending_bytes > self._search.decided_bytes
        self._pending.append(chunk)
        self._pending_bytes += len(chunk)
        if not decided and self._pending_bytes > self._search.decided_bytes:
            beginning = b"".join(self._pending)
            self._shaped = self._shaped or beginning.lstrip(b" \t").startswith(b"#")
            # Until something looked like a metric, a line of no interest is still wanted whole: it may be the one.
            self._skipping = self._shaped and not self._search.beginning.match(beginning)
        if self._skipping or self._pending_bytes > MAX_LINE_BYTES:
            self._skipping = True
            self._pending.clear()
            self._pending_bytes = 0

    def _read_lines(self, lines: bytes, end_offset: int) -> None:
        """Read whole lines that end at `end_offset` in the body.

        `lines` begins with the newline before the first of them and ends with that of the last.
        """
        if not self._shaped:
            self._check_shape(lines, end_offset)
        if b"\n\n\n" in lines:  # the search begins anew at each newline, 64 Ki of them would take 2 ms
            lines = _BLANK_LINES.sub(b"\n", lines)
        known, series, samples = self._cache.canonical, self._series, self._samples
        for line, raw, number in self._search.lines.findall(lines):
            if not number or len(number) > MAX_NUMBER_BYTES or len(line) > MAX_LINE_BYTES:
                continue
            self._lines += 1
            self._kept_bytes += len(line)
            if self._lines > self._max_lines:
                raise NotMetrics(f"more than {self._max_lines} lines of wanted metrics")
            if self._kept_bytes > self._max_kept_bytes:
                raise NotMetrics(f"more than {self._max_kept_bytes} bytes of wanted metrics")
            canonical = series.get(raw)
            if canonical is None:
                canonical = known.get(raw)
                if canonical is None:
                    canonical = _canonical_of(raw)
                series[raw] = canonical
            if not canonical:
                continue
            value = float(number)
            if math.isinf(value):
                continue
            before = samples.get(canonical)
            if before is None or value > before:
                samples[canonical] = value

    def _check_shape(self, lines: bytes, end_offset: int) -> None:
        beyond = end_offset - _SHAPE_BYTES
        if beyond > 0:
            lines = lines[: max(0, len(lines) - beyond)]
            lines = lines[: lines.rfind(b"\n") + 1]
        if _SHAPE.search(lines):
            self._shaped = True
        elif beyond > 0 and self._begun:
            raise NotMetrics("no line looks like a metric")


def canonical_series(name: str, labels: Mapping[str, str]) -> str:
    """The one spelling of a series: `name`, or `name{a="x",b="y"}` with labels sorted and values escaped.

    Names outside the classic character set are quoted as in text format 1.0.0: `{"na.me",a="x","b.c"="y"}`.
    """
    pairs = [
        f'{label if _LABEL_NAME.fullmatch(label) else _quote(label)}="{_escape(labels[label])}"'
        for label in sorted(labels)
    ]
    if not _METRIC_NAME.fullmatch(name):
        return "{" + ",".join((_quote(name), *pairs)) + "}"
    return f"{name}{{{','.join(pairs)}}}" if pairs else name


def parse_series(text: str) -> tuple[str, dict[str, str]]:
    """Name and labels of a series as it stands on a page or in canonical form.

    Raises:
        ValueError: it is not the text of a series.
    """
    plain = _PLAIN_SERIES.fullmatch(text)
    if plain is not None:  # nearly all: half of the time of what follows
        pairs = _PLAIN_PAIRS.findall(text, plain.end(1))
        labels = dict(pairs)
        if len(labels) < len(pairs):
            raise ValueError("a label stands there twice")
        return plain[1], labels
    brace = text.find("{")
    if brace < 0:
        name, inner = text.strip(" \t"), ""
    elif text.endswith("}"):
        name, inner = text[:brace].strip(" \t"), text[brace + 1 : -1]
    else:
        raise ValueError("a series with labels ends in a brace")
    at = 0
    if not name:
        quoted = _QUOTED_NAME.match(inner)
        if quoted is None:
            raise ValueError("a series without a name")
        name, at = _unescape(quoted[1]), quoted.end()
    elif not _METRIC_NAME.fullmatch(name):
        raise ValueError("not a metric name")
    labels = {}
    inner = inner.rstrip(" \t")
    while at < len(inner):
        pair = _LABEL.match(inner, at)
        if pair is None:
            raise ValueError("labels are not pairs of name and quoted value")
        label = pair[1] if pair[1] is not None else _unescape(pair[2])
        if label in labels:
            raise ValueError("a label stands there twice")
        labels[label] = _unescape(pair[3])
        at = pair.end()
    return name, labels


def _canonical_of(raw: bytes) -> str:
    """Canonical text of a series as it stands on the page; empty if it is malformed."""
    try:
        usual = _USUAL_SERIES.fullmatch(raw)
        if usual is None:
            return canonical_series(*parse_series(raw.decode()))
        # The values are escaped the canonical way already: a quarter of the time.
        pairs = _PAIRS.findall(usual[2])
        if len(dict(pairs)) < len(pairs):
            return ""
        labels = b",".join([name + b"=" + value for name, value in sorted(pairs)])
        return (usual[1] + b"{" + labels + b"}" if labels else usual[1]).decode()
    except ValueError:
        return ""


def _quote(text: str) -> str:
    return f'"{_escape(text)}"'


def _escape(text: str) -> str:
    return _ESCAPE.sub(lambda found: "\\n" if found[0] == "\n" else "\\" + found[0], text)


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    return _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], text)


@dataclass(frozen=True, slots=True)
class _Search:
    """What finds the wanted lines in whole lines, and in the beginning of an unfinished one."""

    lines: re.Pattern[bytes]
    """Groups: the line up to its end, its series, its number. Number is empty where the line is malformed."""
    beginning: re.Pattern[bytes]
    decided_bytes: int
    """A line this long either matches `beginning` or is of no interest."""


@lru_cache(maxsize=16)
def _search_for(names: frozenset[str]) -> _Search:
    name = _any_of(sorted(name.encode() for name in names)) if names else rb"(?!)"
    unquoted = name + rb"(?=[ \t{])"
    quoted = rb'\{[ \t]{0,8}+"' + name + rb'"(?=[ \t,}])'
    series = rb"(?:" + unquoted + rb"(?:[ \t]*+" + _LABELS + rb")?+|" + quoted + _IN_BRACES + rb")"
    sample = rb"(" + _INDENT + rb"(" + series + rb")(?:[ \t]*+(" + _NUMBER + rb")" + _REST + rb")?+)"
    return _Search(
        lines=re.compile(rb"\n" + sample),
        beginning=re.compile(_INDENT + rb"(?:" + unquoted + rb"|" + quoted + rb")"),
        decided_bytes=max((len(name.encode()) for name in names), default=0) + _AROUND_NAME_BYTES,
    )


def _any_of(words: list[bytes]) -> bytes:
    """A pattern for exactly these words (sorted, all different) that looks at each byte once."""
    branches = []
    for _, group in groupby(words, key=lambda word: word[:1]):
        members = list(group)
        stem = _common_beginning(members[0], members[-1])
        rests = [word[len(stem) :] for word in members]
        branches.append(re.escape(stem) + (_any_of(rests) if len(rests) > 1 else b""))
    return b"(?:" + b"|".join(reversed(branches)) + b")"


def _common_beginning(one: bytes, other: bytes) -> bytes:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return bytes(byte for byte, _ in same)

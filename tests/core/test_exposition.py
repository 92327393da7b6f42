"""What of a metrics page becomes a number, what is dropped line by line, and what makes a body no page at all."""

import random
import tracemalloc
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginewatch.core.exposition import (
    MAX_LINE_BYTES,
    NotMetrics,
    PageReader,
    SeriesCache,
    canonical_series,
    parse_series,
)

NAMES = frozenset({"vllm:num_requests_running", "vllm:generation_tokens_total", "process_start_time_seconds", "m"})
RUNNING = "vllm:num_requests_running"
TOKENS = "vllm:generation_tokens_total"


def read(page: bytes | str, names: frozenset[str] = NAMES, cut: int = 1 << 16, **caps: Any) -> dict[str, float]:
    body = page.encode() if isinstance(page, str) else page
    reader = PageReader(names, **caps)
    for start in range(0, len(body), cut):
        reader.feed(body[start : start + cut])
    return reader.finish()


# --- samples --------------------------------------------------------------------------------------------------------


def test_only_the_wanted_names_are_kept() -> None:
    page = f'# HELP {RUNNING} 7\n# TYPE {RUNNING} gauge\n{RUNNING}{{engine="0"}} 2.0\nother 3\nm 4\n'
    assert read(page) == {f'{RUNNING}{{engine="0"}}': 2.0, "m": 4.0}


@pytest.mark.parametrize(
    "line",
    [
        "vllm:generation_tokens_created 1.79e9",
        "vllm:generation_tokens_total_x 1",
        "vllm:generation_tokens 1",
        "vllm:request_generation_tokens_total 1",
        "Xvllm:generation_tokens_total 1",
        'vllm:num_requests_running_by_reason{reason="capacity"} 1',
        "VLLM:GENERATION_TOKENS_TOTAL 1",
        "m_bucket 1",
        "x m 1",
        'x{a="m 1"} 1',
        '{"mm"} 1',
    ],
)
def test_a_name_is_matched_whole(line: str) -> None:
    assert read(f"# c\n{line}\nm 1\n") == {"m": 1.0}


def test_names_that_begin_alike_are_told_apart() -> None:
    names = frozenset({"a", "ab", "abc", "abd", "b:x_total", "b:x"})
    page = "".join(
        f"{name} {number}\n" for number, name in enumerate(["a", "ab", "abc", "abd", "abe", "b:x", "b:x_total"])
    )
    assert read(page, names) == {"a": 0, "ab": 1, "abc": 2, "abd": 3, "b:x": 5, "b:x_total": 6}


def test_nothing_is_wanted_and_nothing_kept() -> None:
    assert read("m 1\n", frozenset()) == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5.0),
        ("5.0", 5.0),
        ("5.", 5.0),
        (".5", 0.5),
        ("-1.0", -1.0),
        ("+1", 1.0),
        ("1.79597629383e+09", 1795976293.83),
        ("1.1701968896e+010", 11701968896.0),
        ("6.634254336e+09", 6634254336.0),
        ("1E3", 1000.0),
        ("1e-400", 0.0),
        ("00012", 12.0),
        ("9007199254740993", 9007199254740992.0),
    ],
)
def test_numbers_as_engines_write_them(text: str, value: float) -> None:
    assert read(f"m {text}\n") == {"m": value}


@pytest.mark.parametrize("text", ["NaN", "nan", "+Inf", "-Inf", "Inf", "inf", "1e999", "-1e999"])
def test_a_number_that_is_not_finite_costs_only_its_own_series(text: str) -> None:
    assert read(f'm{{a="1"}} {text}\nm{{a="2"}} 3\n') == {'m{a="2"}': 3.0}


@pytest.mark.parametrize(
    "text",
    [
        *(
            "1_0",
            "infinity",
            "0x1p3",
            "0x10",
            "1e",
            "e5",
            ".",
            "-",
            "+-1",
            "--5",
            "1.2.3",
            "1e5.0",
            "1,5",
            "½",
            "\u0661",
        ),
        *("5 6 7", "5 x", "5#", "5 # x", "5# {} 1", "{count:1,sum:2}", '"5"', "5}", "True", "9" * 300),
    ],
)
def test_what_the_format_does_not_know_never_becomes_a_number(text: str) -> None:
    assert read(f'm {text}\nm{{b="1"}} 1\n') == {'m{b="1"}': 1.0}


def test_python_would_have_taken_some_of_them() -> None:
    assert [float(text) for text in ("1_0", "\u0661")] == [10.0, 1.0], "control"


@pytest.mark.parametrize(
    "line",
    [
        "m 5 1795976777560",
        "m 5 -1",
        "m 5 1795976777.560",
        "m 5\t1795976777",
        "m\t5",
        "m   5   ",
        "  m 5",
        "\tm 5",
        "m{} 5",
        "m{ } 5",
        "m {} 5",
        "m{}5",
        "m 5\r",
        "m 5 \r",
        'm 5 # {trace_id="abc"} 1.0 1795976777.56',
        'm 5 1795976777.0 # {trace_id="a # b",span="}"} 1.0',
        'm 5 # {trace_id="1"} 1 # {trace_id="2"} 2',
        '{"m"} 5',
        '{ "m" , } 5',
    ],
)
def test_one_sample_in_its_many_spellings(line: str) -> None:
    assert read(f"# c\n{line}\n") == {"m": 5.0}
    assert read(f"# c\n{line}") == {"m": 5.0}


LABELS = {
    'm{b="2",a="1"} 5': {"a": "1", "b": "2"},
    'm{a="1",b="2",} 5': {"a": "1", "b": "2"},
    'm { a = "1" , b = "2" } 5': {"a": "1", "b": "2"},
    'm{\ta="1"\t,b="2"\t}\t5': {"a": "1", "b": "2"},
    '{"m",b="2",a="1"} 5': {"a": "1", "b": "2"},
    'm{"a"="1","b.c"="2"} 5': {"a": "1", "b.c": "2"},
    r'm{a="\\",b="\"",c="\n"} 5': {"a": "\\", "b": '"', "c": "\n"},
    r'm{a="C:\DIR\\new",b="\\n"} 5': {"a": r"C:\DIR\new", "b": r"\n"},
    'm{a="} 1",b="{",c=","} 5': {"a": "} 1", "b": "{", "c": ","},
    'm{a="# HELP",b="a=\'b\'"} 5': {"a": "# HELP", "b": "a='b'"},
    'm{le="+Inf",engine="0"} 5': {"engine": "0", "le": "+Inf"},
    'm{priority=""} 5': {"priority": ""},
    'm{model="Qwen/Qwen3-8B",x="[None, 1]"} 5': {"model": "Qwen/Qwen3-8B", "x": "[None, 1]"},
    'm{a="模型 é 🚀\u2028\x85"} 5': {"a": "模型 é 🚀\u2028\x85"},
    'm{a="x\ry"} 5': {"a": "x\ry"},
}


@pytest.mark.parametrize("line", LABELS)
def test_labels_in_their_many_spellings(line: str) -> None:
    (series,) = read(f"# c\n{line}\n")
    assert series == canonical_series("m", LABELS[line])
    assert parse_series(series) == ("m", LABELS[line])


@pytest.mark.parametrize(
    "line",
    [
        'm{a="1" 5',
        'm{a="1 5',
        "m{a=1} 5",
        'm{="1"} 5',
        "m{a} 5",
        'm{1a="1"} 5',
        'm{a:b="1"} 5',
        'm{a="1"b="2"} 5',
        'm{a="1",,b="2"} 5',
        'm{,a="1"} 5',
        "m{,} 5",
        'm{a="1",a="2"} 5',
        'm{a="1",a="1"} 5',
        'm{"n",a="1"} 5',
        'm{a="1"}{b="2"} 5',
        'm{a="1"} {} 5',
        'm{a="\\"} 5',
        'm{a="1"}',
        "m",
        "m ",
        "m{}",
        '{"m"',
        '{"m"=a} 5',
        '{"m" a="1"} 5',
        b'm{a="\xff"} 5',
        b'm{a="\xe4\xb8"} 5',
        b'm{a="\\\xff"} 5',
        'm{a="' + "x" * MAX_LINE_BYTES + '"} 5',
        "m" + " " * MAX_LINE_BYTES + "5",
        " " * 17 + "m 5",
    ],
    ids=lambda line: repr(line[:24]),
)
def test_a_torn_line_is_dropped_and_the_others_are_kept(line: str | bytes) -> None:
    body = line.encode() if isinstance(line, str) else line
    for cut in (1, 7, 1 << 16):
        assert read(b"# c\n" + body + b'\nm{ok="1"} 1\n', cut=cut) == {'m{ok="1"}': 1.0}


def test_two_samples_torn_into_one_line_are_neither() -> None:
    assert read('m{a="1"} 12m{a="2"} 13\nm{a="3"} 1\n') == {'m{a="3"}': 1.0}


def test_a_series_that_stands_there_twice_counts_with_its_maximum() -> None:
    assert read('m{a="1",b="2"} 5\nm{b="2",a="1"} 7\nm{a="1",b="2"} NaN\nm{b="2", a="1"} 6\n') == {
        'm{a="1",b="2"}': 7.0
    }
    assert read("m -5\nm -7\n") == {"m": -5.0}


def test_the_last_line_of_a_whole_body_needs_no_newline() -> None:
    assert read("m 1\nm{} 12") == {"m": 12.0}
    assert read("m 1\nprocess_start_time_seconds 12 ") == {"m": 1.0, "process_start_time_seconds": 12.0}


def test_a_line_is_not_a_number_before_it_is_over() -> None:
    """The client tells a cut body from a whole one; it must find no half number when it gives up."""
    reader = PageReader(NAMES)
    reader.feed(b"m 1\nm 12")
    assert reader._samples == {"m": 1.0}
    reader.feed(b"345\n")
    assert reader._samples == {"m": 12345.0}


def test_blank_lines_comments_and_openmetrics_furniture_are_skipped() -> None:
    page = '\n\n\n# anything\n#m 9\n # m 9\n# TYPE m gauge\n# UNIT m seconds\n\nm 1\n\n\n\n\nm{a="1"} 2\n# EOF\n'
    assert read(page) == {"m": 1.0, 'm{a="1"}': 2.0}


# --- not metrics ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'[{"iter": 1, "numActiveRequests": 2}]', "JSON"),
        (b"[]", "JSON"),
        (b'{"detail": "Not Found"}', "JSON"),
        (b' \n {"detail": "Not Found"}', "JSON"),
        (b"<!doctype html><html><body>m 1\nm 2</body></html>", "HTML"),
        (b"\n<?xml version='1.0'?>", "HTML"),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "binary"),
        (b"\x89PNG\r\n\x1a\n", "binary"),
        (b"\xff\xfem 1\n", "binary"),
        (b"m 1\n\x00\n", "binary"),
        (b"m 1\n" + b"x" * 100_000 + b"\x00", "binary"),
        (b"Not Found", "no line"),
        (b"404 page not found\n", "no line"),
        (b"Unauthorized\nplease log in\n", "no line"),
        (b"m\n", "no line"),
        (b"m=1\n", "no line"),
        (b"x" * 100_000, "no line"),
        (b"hello world\n" * 10_000 + b"m 1\n", "no line"),
    ],
    ids=lambda part: repr(part[:24]),
)
@pytest.mark.parametrize("cut", [1, 1000, 1 << 20])
def test_a_body_that_is_no_page_is_not_metrics(body: bytes, reason: str, cut: int) -> None:
    with pytest.raises(NotMetrics, match=reason) as caught:
        read(body, cut=cut)
    assert caught.value.reason == str(caught.value)
    assert len(caught.value.reason) < 60


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\n",
        b" \n\n",
        b"# HELP x y\n# TYPE x counter\n",
        b"# EOF\n",
        b"#",
        b"other 1\n",
        b"other 1",
        b'other{a="1"} NaN\n',
        b"other +Inf",
        b"some words first\nother 1\n",
        b"# " + b"x" * 100_000,
    ],
    ids=lambda body: repr(body[:24]),
)
@pytest.mark.parametrize("cut", [1, 1000, 1 << 20])
def test_a_page_without_anything_wanted_is_metrics(body: bytes, cut: int) -> None:
    """An empty registry answers with an empty body: SGLang before its first request does."""
    assert read(body, cut=cut) == {}


def test_the_caps() -> None:
    lines = [f'm{{a="{number:03}"}} 1\n' for number in range(100)]
    page = "# c\n" + "".join(lines)
    assert len(read(page, max_bytes=len(page), max_lines=100, max_kept_bytes=len(lines[0]) * 100)) == 100
    with pytest.raises(NotMetrics, match="bytes"):
        read(page, max_bytes=len(page) - 1)
    with pytest.raises(NotMetrics, match="lines of wanted"):
        read(page, max_lines=99)
    with pytest.raises(NotMetrics, match="bytes of wanted"):
        read(page, max_kept_bytes=(len(lines[0]) - 1) * 100 - 1)


def test_lines_that_nobody_asked_for_count_against_no_cap_but_the_bodys() -> None:
    assert read("other 1\n" * 5000 + "m 1\n", max_lines=1, max_kept_bytes=10) == {"m": 1.0}


# --- memory ---------------------------------------------------------------------------------------------------------

BODY = 8 * 1024 * 1024


def _hostile() -> dict[str, Iterator[bytes]]:
    def cut(line: bytes, size: int = BODY) -> Iterator[bytes]:
        chunk = line * (65536 // len(line) + 1)
        for _ in range(size // len(chunk)):
            yield chunk

    def counted() -> Iterator[bytes]:
        for block in range(BODY // 65536):
            yield b"".join(b'm{b="%d",a="%d"} 1\n' % (block, number) for number in range(2800))

    def begin(head: bytes, chunks: Iterable[bytes]) -> Iterator[bytes]:
        yield head
        yield from chunks

    return {
        "one giant line with a wanted name": begin(b'# c\nm{a="', cut(b"x")),
        "one giant line without": begin(b"# c\n", cut(b"x")),
        "one giant comment": begin(b"#", cut(b"x")),
        "blanks": begin(b"# c\nm", cut(b" ")),
        "newlines": begin(b"# c", cut(b"\n")),
        "tiny lines": begin(b"# c\n", cut(b"a 1\n")),
        "tiny wanted lines": begin(b"# c\n", cut(b"m 1\n")),
        "new series for ever": begin(b"# c\n", counted()),
        "torn wanted lines": begin(b"# c\n", cut(b'm{a="\n')),
        "escapes": begin(b'# c\nm{a="', cut(b"\\\\")),
    }


@pytest.mark.parametrize("name", _hostile())
def test_a_hostile_page_is_not_held(name: str) -> None:
    chunks, held = _hostile()[name], 0
    cache = SeriesCache()
    reader = PageReader(NAMES, cache=cache)
    reader.feed(next(chunks))
    tracemalloc.start()
    try:
        for chunk in chunks:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            reader.feed(chunk)
            held = max(held, tracemalloc.get_traced_memory()[1] - before)
        assert len(reader.finish()) <= 1
    except NotMetrics:
        pass
    finally:
        held = max(held, tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert held < 3 * 1024 * 1024
    assert len(cache.canonical) <= 4096


# --- the cache ------------------------------------------------------------------------------------------------------


def page_of(*series: str) -> bytes:
    return "".join(f"{text} 1\n" for text in series).encode()


def read_with(cache: SeriesCache, page: bytes, **caps: Any) -> dict[str, float]:
    reader = PageReader(NAMES, cache=cache, **caps)
    reader.feed(page)
    return reader.finish()


def test_the_cache_changes_nothing_but_the_time() -> None:
    cache = SeriesCache()
    page = page_of('m{b="1",a="2"}', 'm{a="1",a="1"}', 'm { c = "\\\\" }', "m")
    first = read_with(cache, page)
    assert read_with(cache, page) == first == read(page)
    assert set(first) == {'m{a="2",b="1"}', 'm{c="\\\\"}', "m"}
    assert all(one is other for one, other in zip(first, read_with(cache, page), strict=True)), "the very same texts"


def test_the_cache_holds_what_the_last_page_had() -> None:
    cache = SeriesCache()
    read_with(cache, page_of('m{a="1"}', 'm{a="2"}'))
    read_with(cache, page_of('m{a="2"}', 'm{a="3"}'))
    assert set(cache.canonical) == {b'm{a="2"}', b'm{a="3"}'}


def test_a_page_over_the_caps_leaves_the_cache_as_it_was() -> None:
    cache = SeriesCache()
    read_with(cache, page_of("m"))
    with pytest.raises(NotMetrics):
        read_with(cache, page_of(*(f'm{{a="{number}"}}' for number in range(10))), max_lines=9)
    assert set(cache.canonical) == {b"m"}


def test_two_pages_may_be_read_at_once_with_one_cache() -> None:
    cache = SeriesCache()
    one, other = PageReader(NAMES, cache=cache), PageReader(NAMES, cache=cache)
    one.feed(b'm{b="1",a="1"} 1\n')
    other.feed(b'm{b="1",a="1"} 2\n')
    assert one.finish() == {'m{a="1",b="1"}': 1.0}
    assert other.finish() == {'m{a="1",b="1"}': 2.0}


# --- canonical text -------------------------------------------------------------------------------------------------

label_sets = st.dictionaries(st.text(min_size=1), st.text(), max_size=5)
metric_names = st.text(min_size=1) | st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]*", fullmatch=True)


@given(metric_names, label_sets)
def test_parsing_undoes_the_canonical_text(name: str, labels: dict[str, str]) -> None:
    text = canonical_series(name, labels)
    assert parse_series(text) == (name, labels)
    assert "\n" not in text
    assert canonical_series(*parse_series(text)) == text


@given(label_sets, st.randoms())
def test_the_order_of_labels_is_nothing(labels: dict[str, str], shuffler: random.Random) -> None:
    pairs = list(labels.items())
    shuffler.shuffle(pairs)
    assert canonical_series("m", dict(pairs)) == canonical_series("m", labels)


def test_the_canonical_text_is_what_engines_write_for_sorted_labels() -> None:
    assert canonical_series("m", {}) == "m"
    assert canonical_series("m", {"model_name": "tiny", "engine": "0"}) == 'm{engine="0",model_name="tiny"}'
    assert canonical_series("m", {"a": '\\ " \n'}) == 'm{a="\\\\ \\" \\n"}'
    assert canonical_series("na.me", {"b.c": "1", "a": "2"}) == '{"na.me",a="2","b.c"="1"}'


@pytest.mark.parametrize(
    "text", ["", " ", "{", "}", "{}", "a b", "1a", 'm{a="1"', 'm{a="1"} 5', "m{a}", 'm{a="1\\"}', "é"]
)
def test_what_is_no_series_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"^(a|not a|labels) "):
        parse_series(text)


# --- chunks ---------------------------------------------------------------------------------------------------------

pieces = [
    *(b"m", b"mm", b" ", b"  ", b"\t", b"\n", b"\r\n", b"{", b"}", b'{"m"', b'a="1"', b'b="', b'"', b"\\", b",", b"="),
    *(
        b"# ",
        b"#",
        b" 5",
        b"12",
        b".5",
        b"e9",
        b" NaN",
        b"x",
        b"\xff",
        b"\xc3\xa9",
        b'# {t="1"} 1',
        b"0" * 40,
        b" " * 20,
    ),
    *(b"process_start_time_seconds 7", b'm{a="1"} 3\n', b"vllm:num_requests_running 4\n"),
]
fragments = st.lists(st.sampled_from(pieces)).map(b"".join)


@given(fragments, st.lists(st.integers(1, 40)))
def test_where_a_page_is_cut_into_chunks_does_not_matter(body: bytes, sizes: list[int]) -> None:
    def outcome(chunks: list[bytes]) -> dict[str, float] | str:
        reader = PageReader(NAMES, max_lines=4, max_kept_bytes=60)
        try:
            for chunk in chunks:
                reader.feed(chunk)
            return reader.finish()
        except NotMetrics as problem:
            return problem.reason

    chunks, rest = [], body
    for size in sizes:
        chunks.append(rest[:size])
        rest = rest[size:]
    expected = outcome([body])
    assert outcome([*chunks, rest]) == expected
    assert outcome([body[at : at + 1] for at in range(len(body))]) == expected


@given(st.lists(st.binary(max_size=200)))
def test_no_bytes_raise_anything_but_not_metrics(chunks: list[bytes]) -> None:
    reader = PageReader(NAMES)
    try:
        for chunk in chunks:
            reader.feed(chunk)
        samples = reader.finish()
    except NotMetrics:
        return
    for series in samples:
        assert parse_series(series)[0] in NAMES

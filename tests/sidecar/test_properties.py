"""What must hold for any file, any log and any way it arrives in pieces."""

from __future__ import annotations

import json
import math
from dataclasses import fields

from hypothesis import given, settings
from hypothesis import strategies as st

from enginewatch.core.settings import Settings
from enginewatch.sidecar.config import EMPTY, HOT_KEYS, MAX_SEC, read_document, read_environment, settings_from
from enginewatch.sidecar.lines import MAX_LINE_BYTES, LineReader

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
DOCUMENTS = st.dictionaries(st.one_of(st.sampled_from(HOT_KEYS), st.text(max_size=12)), VALUES, max_size=8)


def usable(effective: Settings) -> bool:
    numbers = [value for field in fields(effective) if isinstance(value := getattr(effective, field.name), int | float)]
    return (
        all(math.isfinite(number) and 0 <= number <= MAX_SEC for number in numbers)
        and effective.poll_interval_sec > 0
        and effective.metrics_timeout_sec > 0
        and effective.active_probe_min_failures >= 1
        and effective.mode in ("enforce", "shadow")
    )


@given(st.binary(max_size=200))
def test_no_bytes_can_break_the_reading_of_a_file(raw: bytes) -> None:
    layer = read_document(raw, "file")
    assert layer.rejected or usable(settings_from(EMPTY, layer))


@settings(max_examples=300)
@given(DOCUMENTS)
def test_any_json_object_gives_usable_settings_or_says_what_is_wrong(document: dict[str, object]) -> None:
    layer = read_document(json.dumps(document).encode(), "file")
    if not layer.rejected:
        assert usable(settings_from(EMPTY, layer))
    assert all(problem.reason and problem.where == "file" for problem in layer.rejected)


@given(st.dictionaries(st.sampled_from([key.upper() for key in HOT_KEYS]), st.text(max_size=12), max_size=6))
def test_any_environment_gives_usable_settings(environ: dict[str, str]) -> None:
    assert usable(settings_from(read_environment(environ), EMPTY))


@given(
    st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=12),
    st.lists(st.integers(min_value=1, max_value=40), min_size=1, max_size=20),
)
def test_lines_are_the_same_however_the_file_arrives(lines: list[bytes], sizes: list[int]) -> None:
    raw = b"".join(line + b"\n" for line in lines)
    whole = list(LineReader().feed(raw))
    in_pieces: list[bytes] = []
    reader, at = LineReader(), 0
    while at < len(raw):
        size = sizes[at % len(sizes)]
        in_pieces += reader.feed(raw[at : at + size])
        at += size
    assert in_pieces == whole
    assert len(whole) <= len(lines)


@given(st.lists(st.binary(max_size=200_000), max_size=4))
def test_no_log_can_make_the_reader_hold_more_than_a_line(pieces: list[bytes]) -> None:
    reader = LineReader()
    for piece in pieces:
        for line in reader.feed(piece):
            assert len(line) <= MAX_LINE_BYTES
    assert len(reader._rest) <= MAX_LINE_BYTES
    assert all(len(part) <= MAX_LINE_BYTES for part in reader._parts.values())

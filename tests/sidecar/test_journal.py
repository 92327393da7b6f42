"""Log lines: structured, few, and never in the way."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from enginewatch.sidecar.faults import Faults
from enginewatch.sidecar.journal import MAX_LINE_BYTES, Journal


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 8192)
    os.set_blocking(reader, False)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_a_line_is_one_json_object_with_time_level_and_sentence_first(pipe: tuple[int, int]) -> None:
    Journal(descriptor=pipe[1], terminal=False).write("warning", "a\nb", **{"from": "x", "n": 1, "odd": object()})
    (line,) = os.read(pipe[0], 4096).splitlines()
    assert list(json.loads(line)) == ["timestamp", "level", "event", "from", "n", "odd"]


def test_a_terminal_gets_key_value_pairs(pipe: tuple[int, int]) -> None:
    Journal(descriptor=pipe[1], terminal=True).write("info", "two words", n=1)
    line = os.read(pipe[0], 4096).decode()
    assert 'level=info event="two words" n=1\n' in line


def test_a_reader_that_stopped_reading_costs_lines_and_not_the_watch(pipe: tuple[int, int]) -> None:
    journal = Journal(descriptor=pipe[1], terminal=False)
    for _ in range(1000):
        journal.write("info", "x" * 100)
    os.read(pipe[0], 65536)
    journal.write("info", "back")
    last = os.read(pipe[0], 65536).splitlines()[-1]
    assert json.loads(last)["lost_lines"] > 900


def test_a_closed_stderr_is_survived() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    journal = Journal(descriptor=writer, terminal=False)
    journal.write("info", "nobody reads this")
    os.close(writer)
    journal.write("info", "nor this")


def test_a_monstrous_line_is_cut(pipe: tuple[int, int]) -> None:
    Journal(descriptor=pipe[1], terminal=False).write("info", "x" * 1_000_000)
    assert len(os.read(pipe[0], 65536)) <= MAX_LINE_BYTES


def test_a_field_that_cannot_be_rendered_costs_the_fields_and_not_the_line(pipe: tuple[int, int]) -> None:
    class Odd:
        def __str__(self) -> str:
            raise ValueError("a bug")

        __repr__ = __str__

    Journal(descriptor=pipe[1], terminal=False).write("info", "a sentence", odd=Odd())
    assert json.loads(os.read(pipe[0], 4096))["event"] == "a sentence"


def test_an_internal_error_is_logged_once_per_kind_and_without_its_message(pipe: tuple[int, int]) -> None:
    counted: list[str] = []
    faults = Faults(Journal(descriptor=pipe[1], terminal=False))
    faults.count = counted.append
    for _ in range(3):
        try:
            int("hunter2")
        except ValueError as error:
            faults.note("scrape", error)
    assert counted == ["scrape"] * 3
    (line,) = os.read(pipe[0], 4096).splitlines()
    assert b"hunter2" not in line
    assert json.loads(line)["error"] == "ValueError"
    assert "test_journal.py" in json.loads(line)["at"]


def test_structlog_is_loaded_without_rich() -> None:
    script = "import sys; from enginewatch.sidecar.journal import Journal; Journal(); print('rich' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"

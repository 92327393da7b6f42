"""docs/routers.md: the notes are there and used, and the tests that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "routers.md").read_text()
NOTES = dict(re.findall(r"^\[\^([a-z0-9-]+)\]: (.*)$", TEXT, re.MULTILINE))
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_note_is_there_and_used() -> None:
    assert set(re.findall(r"\[\^([a-z0-9-]+)\](?!:)", TEXT)) == set(NOTES)


def test_every_list_item_ends_in_a_note() -> None:
    body = TEXT.partition("[^query]: ")[0]
    items = re.findall(r"^- (.*(?:\n  .*)*)", body, re.MULTILINE)
    assert len(items) > 8, "the page was not understood"
    assert [item for item in items if not item.endswith("]")] == []


def test_a_note_names_a_test_that_exists_or_a_version() -> None:
    named = {name: TEST.findall(note) for name, note in NOTES.items()}
    assert [name for name, tests in named.items() if not tests and not re.search(r"\d+\.\d+\.\d+", NOTES[name])] == []
    for path, test in (one for tests in named.values() for one in tests):
        assert f"def {test}(" in (ROOT / path).read_text(), f"{path} has no {test}"


def test_the_pinned_versions_are_the_ones_that_were_measured() -> None:
    lock = (ROOT / "requirements" / "real-routers.in").read_text()
    for name, version in re.findall(r"^(\S+)==(\S+)$", lock, re.MULTILINE):
        assert f"{name} {version}" in TEXT

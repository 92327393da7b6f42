"""docs/engines.md: its tables are the profiles', and every other statement names a test that exists or a source."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from engine_tables import PAGE, PARTS, table_of, tables_on, without_tables

from enginewatch.engines import PROFILES, STRANGERS

ROOT = Path(__file__).parent.parent
TEXT = PAGE.read_text()
NOTE = re.compile(r"\[\^([a-z0-9-]+)\](?!:)")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
TITLES = "|".join(map(re.escape, [one.title for one in PROFILES.values()] + [one.title for one in STRANGERS]))
SOURCE = re.compile(rf"[\w.-]+/[\w.-]+#\d+|source of (?:{TITLES}) (?:at [0-9a-f]{{7,40}}|\d[\w.]*)")
UNTESTED_HEADINGS = ("# Engines", "## How to read this page", "## At a glance")
"""Under these the page speaks of itself."""

NAMES = ("at-a-glance", *(f"{kind}/{part}" for kind in PROFILES for part in sorted(PARTS)))


def notes() -> dict[str, str]:
    """The notes at the end of the page, by name."""
    found = re.findall(r"^\[\^([a-z0-9-]+)\]: (.*)$", TEXT, re.MULTILINE)
    assert len(found) == len(dict(found)), "a note is defined twice"
    return dict(found)


def statements(text: str) -> list[str]:
    """Everything the page says of engines outside the profiles' tables: paragraphs, list items, rows of tables."""
    found: list[str] = []
    heading = ""
    for block in re.split(r"\n\s*\n", without_tables(text)):
        lines = block.strip().splitlines()
        if not lines or lines[0].startswith("[^"):
            continue
        if lines[0].startswith("#"):
            if not lines[0].startswith("###"):
                heading = lines[0]
            lines = lines[1:]
        if heading in UNTESTED_HEADINGS:
            continue
        for line in lines:
            if line.startswith("|"):
                if not set(line) <= set("|- ") and not line.startswith("| version |"):
                    found.append(line)
            elif line.startswith("- ") or not found or line is lines[0]:
                found.append(line)
            else:
                found[-1] += f" {line.strip()}"
    return [one for one in found if one not in ("From the profile:", "From the profiles:")]


@cache
def named_tests(path: str) -> frozenset[str]:
    """The names of the tests in a file."""
    tree = ast.parse((ROOT / path).read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(function.name for function in functions if function.name.startswith("test_"))


@pytest.mark.parametrize("name", NAMES)
def test_a_table_from_the_profiles_is_what_they_say_now(name: str) -> None:
    assert tables_on(TEXT).get(name) == table_of(name), "run: python tests/support/engine_tables.py"


def test_there_is_no_other_table_that_says_so() -> None:
    assert sorted(tables_on(TEXT)) == sorted(NAMES)
    assert TEXT.count("<!-- from the profiles: ") == len(NAMES)


def test_every_engine_has_its_chapter() -> None:
    chapters = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
    assert [title for title in chapters if title in {profile.title for profile in PROFILES.values()}] == [
        profile.title for profile in PROFILES.values()
    ]


def test_every_statement_has_a_note() -> None:
    said = statements(TEXT)
    assert len(said) > 80, "the page was not understood"
    assert [one for one in said if not NOTE.search(one)] == []


@pytest.mark.parametrize("added", ["- It is always right.", "It is always right.", "| 9.9 | nothing | none |"])
def test_a_statement_without_one_is_found(added: str) -> None:
    """The control of the test above."""
    before, after = TEXT.split("### What is not seen of vLLM\n", 1)
    text = f"{before}{added}\n\n### What is not seen of vLLM\n{after}"
    assert [one for one in statements(text) if not NOTE.search(one)] == [added]


def test_every_note_is_there_and_used() -> None:
    assert set(NOTE.findall(TEXT)) == set(notes())


@pytest.mark.parametrize(("name", "note"), notes().items(), ids=list(notes()))
def test_a_note_names_tests_that_exist_or_a_source(name: str, note: str) -> None:
    tests = TEST.findall(note)
    rest = re.sub(r"[ ,]| and ", "", SOURCE.sub("", re.sub(r"( and \d[\w.]*)", "", TEST.sub("", note))))
    assert rest == "", f"{name} says something that is neither"
    assert tests or SOURCE.search(note)
    for path, test in tests:
        assert (ROOT / path).is_file(), f"{name} names {path}, which is not there"
        assert test in named_tests(path), f"{name} names {test}, which is not in {path}"


def test_the_readme_leads_to_it() -> None:
    assert "(docs/engines.md)" in (ROOT / "README.md").read_text()

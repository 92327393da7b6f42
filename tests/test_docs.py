"""What the documentation says of states and settings is what the code has."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from enginewatch.core.settings import Settings
from enginewatch.core.states import CORE_STATES, ENGINE_STATES, EVERYDAY, WORST_FIRST
from enginewatch.engines import KINDS

DOCS = Path(__file__).parent.parent / "docs"


def rows(text: str) -> list[list[str]]:
    """The body cells of every table row that begins with a name in code font."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]


def test_the_table_of_states_is_the_one_in_the_code() -> None:
    documented = [(row[0].strip("`"), row[1], row[2]) for row in rows((DOCS / "states.md").read_text())]
    assert documented == [
        (state.name, "yes" if state.hung else "no", state.when) for state in (*ENGINE_STATES, *CORE_STATES)
    ]


def test_the_order_of_cores_and_the_everyday_states_are_the_ones_in_the_code() -> None:
    text = " ".join((DOCS / "states.md").read_text().split())
    order = re.search(r"in this order: (.*?)\. Every core", text)
    assert order is not None
    assert tuple(re.findall(r"`(.*?)`", order[1])) == WORST_FIRST
    everyday = re.search(r"## Everyday states (.*?) are what", text)
    assert everyday is not None
    assert set(re.findall(r"`(.*?)`", everyday[1])) == EVERYDAY


def test_every_hot_setting_stands_in_the_documentation_with_its_default() -> None:
    table = {row[0].strip("`"): row[1] for row in rows((DOCS / "configuration.md").read_text())}
    for field in dataclasses.fields(Settings):
        assert field.name in table, f"docs/configuration.md does not name {field.name}"
        if isinstance(field.default, bool):
            assert table[field.name] == str(field.default).lower()
        elif isinstance(field.default, int | float) and field.default:
            assert float(table[field.name]) == field.default


def test_every_engine_kind_stands_in_the_documentation() -> None:
    line = next(row for row in rows((DOCS / "configuration.md").read_text()) if row[0] == "`ENGINE_KIND`")
    assert tuple(re.findall(r"`(\w+)`", line[2].partition(";")[0])) == KINDS


def test_decisions_are_numbered_one_by_one() -> None:
    titles = {path.name[:4]: path.read_text().splitlines()[0] for path in sorted((DOCS / "adr").glob("*.md"))}
    assert len(titles) == len(list((DOCS / "adr").glob("*.md"))), "two decisions have one number"
    assert list(titles) == [f"{number:04}" for number in range(1, len(titles) + 1)]
    assert all(title.startswith(f"# {int(number)}. ") for number, title in titles.items())

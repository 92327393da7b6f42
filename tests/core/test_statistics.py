"""Iteration statistics: read piece by piece, the same as if the whole had been parsed at once."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginewatch.core.exposition import NotMetrics
from enginewatch.core.statistics import (
    MAX_BYTES,
    MAX_OBJECT_CHARS,
    MAX_OBJECTS,
    StatisticsMemory,
    StatisticsReader,
)
from enginewatch.engines.trtllm import PROFILE

DATA = Path(__file__).parents[1] / "data"
assert PROFILE.json_statistics is not None
STATISTICS = PROFILE.json_statistics
ITER, RUNNING, WAITING = (STATISTICS.series(key) for key in STATISTICS.keys)


def read(body: bytes | str, *, piece: int = 1 << 30, memory: StatisticsMemory | None = None) -> dict[str, float]:
    raw = body.encode() if isinstance(body, str) else body
    reader = StatisticsReader(STATISTICS, memory or StatisticsMemory())
    for at in range(0, len(raw), piece):
        reader.feed(raw[at : at + piece])
    return reader.finish()


def entry(iteration: int, running: int = 1, waiting: int = 0, **more: Any) -> dict[str, Any]:
    return {"iter": iteration, "numActiveRequests": running, "numQueuedRequests": waiting, **more}


def test_the_last_iteration_counts_and_the_load_beside_it() -> None:
    page = read(json.dumps([entry(7, 3, 2), entry(8, 4, 1), entry(9, 2, 0)]))
    assert page == {ITER: 9.0, RUNNING: 2.0, WAITING: 0.0}


def test_an_entry_that_somebody_reported_is_read() -> None:
    assert read((DATA / "trtllm-1.0.0rc4-iteration.json").read_bytes()) == {ITER: 60.0, RUNNING: 1.0, WAITING: 0.0}


def test_of_several_ranks_in_one_iteration_the_largest_load_is_taken() -> None:
    ranks = [entry(9, 0, 5, attentionDpRank=0), {"iter": 9, "numActiveRequests": 4, "attentionDpRank": 1}]
    assert read(json.dumps(ranks)) == {ITER: 9.0, RUNNING: 4.0, WAITING: 5.0}


def test_an_empty_list_keeps_the_count_and_says_nothing_of_the_load() -> None:
    memory = StatisticsMemory()
    read(json.dumps([entry(9, 2, 1)]), memory=memory)
    assert read("[]", memory=memory) == {ITER: 9.0}
    assert read(" [ \n ] ", memory=memory) == {ITER: 9.0}


def test_a_list_that_was_always_empty_has_nothing_to_go_by() -> None:
    memory = StatisticsMemory()
    assert read("[]", memory=memory) == {}
    assert read(json.dumps([{"requests": 3}, {"iter": "7"}, {"iter": True}]), memory=memory) == {}


def test_a_lower_count_is_handed_on_because_it_is_another_process() -> None:
    memory = StatisticsMemory()
    read(json.dumps([entry(900)]), memory=memory)
    assert read(json.dumps([entry(3), entry(4)]), memory=memory)[ITER] == 4.0


def test_a_process_that_is_gone_is_forgotten() -> None:
    memory = StatisticsMemory()
    read(json.dumps([entry(900)]), memory=memory)
    memory.forget()
    assert read("[]", memory=memory) == {}


def test_a_broken_list_leaves_the_memory_as_it_was() -> None:
    memory = StatisticsMemory()
    read(json.dumps([entry(5)]), memory=memory)
    with pytest.raises(NotMetrics):
        read('[{"iter": 6}, {"iter": 7}', memory=memory)
    assert read("[]", memory=memory) == {ITER: 5.0}


def test_values_that_are_no_numbers_cost_only_themselves() -> None:
    text = '[{"iter": 4, "numActiveRequests": NaN, "numQueuedRequests": "2"}, {"iter": Infinity}, {"iter": null}]'
    assert read(text) == {ITER: 4.0}


HOSTILE: dict[str, bytes | str] = {
    "nothing": "",
    "blanks": "  \n",
    "a page": "# TYPE a counter\na_total 1\n",
    "an object": '{"detail": "Not Found"}',
    "HTML": "<html></html>",
    "a number": "[1]",
    "text": '["a"]',
    "a list in the list": "[[]]",
    "no comma": '[{"iter": 1} {"iter": 2}]',
    "two commas": '[{"iter": 1},,{"iter": 2}]',
    "a comma at the end": '[{"iter": 1},]',
    "no end": '[{"iter": 1}',
    "no end of an object": '[{"iter": 1',
    "something after the end": "[] x",
    "two lists": "[][]",
    "broken JSON": '[{"iter": }]',
    "a byte that is no UTF-8": b'[{"a": "\xff"}]',
    "half a character": b'[{"a": "x"}]\xc3',
    "binary": b"\x00\x01\x02",
    "nested deeply": '[{"a": ' + "[" * 100_000 + "]" * 100_000 + "}]",
    "an object that never ends": '[{"a": [' + "1," * MAX_OBJECT_CHARS,
    "an object that is too long": '[{"a": "' + "x" * MAX_OBJECT_CHARS + '"}]',
    "too many objects": "[" + "{}," * (MAX_OBJECTS + 1) + "{}]",
    "too many bytes": "[" + " " * MAX_BYTES + "]",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("piece", [1 << 30, 16 * 1024, 1000])
def test_whatever_is_no_such_list_is_refused_with_one_reason(name: str, piece: int) -> None:
    with pytest.raises(NotMetrics) as caught:
        read(HOSTILE[name], piece=piece)
    assert caught.value.reason
    assert "\n" not in caught.value.reason
    assert len(caught.value.reason) < 100


def test_no_more_is_held_than_one_object_may_have() -> None:
    reader = StatisticsReader(STATISTICS, StatisticsMemory())
    reader.feed(b"[")
    body = json.dumps(entry(1, kvCacheStats={"usedNumBlocks": 3} | {str(n): n for n in range(100)})).encode() + b", "
    for _ in range(1000):
        reader.feed(body)
        assert len(reader._held) <= len(body)
    long = [b'{"a": "', *[b"x" * 1000] * (1 + MAX_OBJECT_CHARS // 1000)]
    for piece in long[:-1]:
        reader.feed(piece)
    with pytest.raises(NotMetrics):
        reader.feed(long[-1])


def test_a_number_of_very_many_digits_costs_nothing() -> None:
    assert read('[{"iter": 3}, {"iter": ' + "9" * 50_000 + "}]") == {ITER: 3.0}


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
NUMBERS = st.integers(-3, 10) | st.floats() | VALUES
ENTRIES = st.dictionaries(st.text(max_size=4), VALUES, max_size=3).flatmap(
    lambda rest: st.fixed_dictionaries(
        {}, optional={"iter": NUMBERS, "numActiveRequests": NUMBERS, "numQueuedRequests": NUMBERS}
    ).map(lambda known: {**rest, **known})
)


def by_parsing_the_whole(text: str) -> dict[str, float]:
    def number(value: object) -> float | None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(float(value))
        return float(value) if is_number else None  # type: ignore[arg-type]

    entries = json.loads(text)
    counts = [count for found in entries if (count := number(found.get("iter"))) is not None]
    if not counts:
        return {}
    last = [found for found in entries if number(found.get("iter")) == max(counts)]
    page = {ITER: max(counts)}
    for key in ("numActiveRequests", "numQueuedRequests"):
        values = [value for found in last if (value := number(found.get(key))) is not None]
        if values:
            page[STATISTICS.series(key)] = max(values)
    return page


@given(entries=st.lists(ENTRIES, max_size=6), indent=st.sampled_from([None, 0, 2]), ascii=st.booleans(), data=st.data())
def test_read_in_pieces_it_is_the_same_as_parsed_at_once(
    entries: list[dict[str, Any]], indent: int | None, ascii: bool, data: st.DataObject
) -> None:
    text = json.dumps(entries, indent=indent, ensure_ascii=ascii)
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        return  # half a surrogate pair, which no server sends unescaped
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    reader = StatisticsReader(STATISTICS, StatisticsMemory())
    for start, end in pairwise([0, *cuts, len(raw)]):
        reader.feed(raw[start:end])
    assert reader.finish() == by_parsing_the_whole(text)


@given(raw=st.binary(max_size=200) | st.text(alphabet='[]{}",:1 \\e"iter', max_size=60).map(str.encode))
def test_any_bytes_give_samples_or_one_reason(raw: bytes) -> None:
    try:
        page = read(raw, piece=7)
    except NotMetrics:
        return
    parsed = json.loads(raw)
    assert isinstance(parsed, list)
    assert all(isinstance(found, dict) for found in parsed)
    assert set(page) <= {ITER, RUNNING, WAITING}
    assert all(map(math.isfinite, page.values()))

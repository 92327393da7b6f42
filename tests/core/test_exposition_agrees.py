"""Our reader finds what prometheus_client's parsers find, on real pages and on generated ones, cut anywhere.

Where the library is known to judge otherwise, and why ours is right for a watcher:
    - One malformed line makes the library refuse the page; here it costs itself (test_exposition.py).
    - The library takes `m 5 6 7` (the last number as timestamp), a leading comma in braces and `infinity`; here a line
      with anything that the format does not know is torn, and dropped. Generated pages hold none of these.
    - The library keeps integers beyond 2**53; here every value is a float.
    - The OpenMetrics parser fails on an escape in an exemplar, even one that the library wrote itself.
    - The library reads a NUL in a label value; here a body with a NUL is binary. Generated pages hold none.
"""

import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from enginewatch.core.exposition import PageReader, SeriesCache, canonical_series
from enginewatch.engines import sglang, vllm

as_openmetrics: Any = openmetrics.generate_latest
openmetrics_families: Any = openmetrics_parser.text_string_to_metric_families

PAGES = sorted((Path(__file__).parents[1] / "data").glob("*.prom"))
PROFILES = [vllm.PROFILE, sglang.PROFILE]


def by_library(families: Iterable[Any], names: frozenset[str] | None = None) -> dict[str, float]:
    """Wanted samples as the library reads them, put together by our rules: finite ones only, the maximum of equals."""
    found: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            if names is None or sample.name in names:
                value = float(sample.value)
                if math.isfinite(value):
                    series = canonical_series(sample.name, sample.labels)
                    found[series] = max(value, found.get(series, -math.inf))
    return found


def by_us(
    body: bytes, names: frozenset[str], cuts: Iterable[int], cache: SeriesCache | None = None
) -> dict[str, float]:
    reader = PageReader(names, cache=cache)
    at = 0
    for cut in sorted(cuts):
        reader.feed(body[at:cut])
        at = max(at, cut)
    reader.feed(body[at:])
    return reader.finish()


def every(step: int, size: int) -> range:
    return range(step, size, step)


# --- real pages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_sample_of_a_real_page(page: Path) -> None:
    body = page.read_bytes()
    families = list(text_string_to_metric_families(body.decode()))
    # The library gives a counter without a suffix one that does not stand there (llama.cpp's n_tokens_max).
    there = {line.replace("{", " ").split(" ")[0] for line in body.decode().splitlines()}
    names = frozenset(sample.name for family in families for sample in family.samples) & there
    expected = by_library(families, names)
    assert len(expected) >= 10, "or there is nothing to agree on"
    for step in (1, 63, 1000, 65536):
        assert by_us(body, names, every(step, len(body))) == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.kind)
def test_what_a_profile_asks_of_a_real_page(page: Path, profile: Any) -> None:
    body = page.read_bytes()
    expected = by_library(text_string_to_metric_families(body.decode()), profile.names())
    engine = "vllm" if "mocker" in page.stem else page.stem.partition("-")[0]
    assert bool(expected) is (profile.kind == engine), "control: there is something to agree on"
    cache = SeriesCache()
    shuffled = random.Random(page.stem)
    for _ in range(5):
        cuts = [shuffled.randrange(len(body)) for _ in range(shuffled.randrange(40))]
        assert by_us(body, profile.names(), cuts, cache) == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_cut_at_any_line_gives_the_samples_before_the_cut(page: Path) -> None:
    lines = page.read_bytes().splitlines(keepends=True)
    names = vllm.PROFILE.names() | sglang.PROFILE.names()
    for count in range(1, len(lines), 37):
        body = b"".join(lines[:count])
        assert by_us(body, names, ()) == by_library(text_string_to_metric_families(body.decode()), names)


# --- generated pages ------------------------------------------------------------------------------------------------

WANTED = frozenset({"m", "m_total", "vllm:num_requests_running", "ü.name"})
NAMES = [*WANTED - {"ü.name"}, "mm", "m_created", "m_bucket", "vllm:num_requests_running_x", "other"]

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
tricky = st.sampled_from(['"', "\\", "\n", "\\n", '\\"', "}", "{", ",", "=", "# ", " 5", "}\n", "", "é", "模"])
label_values = st.lists(tricky | texts, max_size=3).map("".join)
label_names = st.sampled_from(["a", "b", "le", "engine", "model_name", "_x9"])
numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-(2**53), 2**53).map(str),
    st.floats(-1e9, 1e9).map(lambda value: f"{value:.3e}".replace("e+", "e+0")),
    st.sampled_from(["NaN", "+Inf", "-Inf", "0", "-0.0", "1e999", "1E5", "5."]),
)
exemplar_values = st.text("abc1 #{},=é", max_size=12)
blanks = st.sampled_from(["", " ", "  "])
gaps = st.sampled_from([" ", "  "])


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@st.composite
def sample_lines(draw: st.DrawFn) -> str:
    labels = draw(st.dictionaries(label_names, label_values, max_size=4))
    pairs = [f'{label}{draw(blanks)}={draw(blanks)}"{escaped(value)}"' for label, value in labels.items()]
    name = draw(st.sampled_from(NAMES))
    if draw(st.booleans()):
        braces = f"{draw(blanks)},{draw(blanks)}".join(pairs)
        trailing = draw(st.sampled_from(["", ","])) if pairs else ""
        series = f"{name}{draw(blanks)}{{{draw(blanks)}{braces}{trailing}{draw(blanks)}}}"
    elif draw(st.booleans()):
        quoted = draw(st.sampled_from([name, "ü.name"]))
        series = "{" + ",".join([f'"{quoted}"', *pairs]) + "}"
    else:
        series = name if not pairs else f"{name}{{{','.join(pairs)}}}"
    timestamp = draw(st.sampled_from(["", "", " 1795976777560", " -1"]))
    return f"{series}{draw(gaps)}{draw(numbers)}{timestamp}{draw(blanks)}"


page_lines = sample_lines() | st.sampled_from(
    ["", "# HELP other text \\n", "# TYPE other gauge", "# a comment", "#", "# m 5", "m 5", 'm{a="1"} 6']
)


@given(st.lists(page_lines, max_size=12), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.data())
def test_every_sample_of_a_generated_page(lines: list[str], end: str, last_newline: bool, data: st.DataObject) -> None:
    text = "# c\n" + end.join(lines) + (end if last_newline else "")
    body = text.encode()
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=6))
    assert by_us(body, WANTED, cuts) == by_library(text_string_to_metric_families(text), WANTED)


@given(st.data())
def test_every_sample_of_an_openmetrics_page(data: st.DataObject) -> None:
    registry = CollectorRegistry()
    some_labels = st.fixed_dictionaries({"engine": label_values, "model_name": label_values})
    counter = Counter("tokens", "text", ["engine", "model_name"], registry=registry)
    gauge = Gauge("running", 'with "quotes"\nand lines', ["engine", "model_name"], registry=registry)
    histogram = Histogram("steps", "text", ["engine", "model_name"], registry=registry, buckets=(1, 10))
    Info("build", "text", registry=registry).info({"version": data.draw(label_values)})
    for labels in data.draw(st.lists(some_labels, max_size=3)):
        exemplar = data.draw(st.none() | st.fixed_dictionaries({"trace_id": exemplar_values}))
        counter.labels(**labels).inc(data.draw(st.floats(0, 1e12)), exemplar)
        gauge.labels(**labels).set(data.draw(st.floats()))
        histogram.labels(**labels).observe(data.draw(st.floats(0, 100)), exemplar)
    body = as_openmetrics(registry)
    families = list(openmetrics_families(body.decode()))
    names = frozenset(sample.name for family in families for sample in family.samples)
    # Parts of the page, not offsets: the page holds the time, and its length varies with it.
    cuts = [int(part * len(body)) for part in data.draw(st.lists(st.floats(0, 1), max_size=6))]
    assert by_us(body, names, cuts) == by_library(families)


def test_an_escape_in_an_exemplar_costs_nothing() -> None:
    registry = CollectorRegistry()
    Counter("tokens", "text", registry=registry).inc(7, {"trace_id": 'a"b\\c\nd'})
    body = as_openmetrics(registry)
    with pytest.raises(ValueError, match="Invalid line"):
        list(openmetrics_families(body.decode()))
    assert by_us(body, frozenset({"tokens_total"}), ()) == {"tokens_total": 7.0}


def test_the_openmetrics_page_of_the_test_has_exemplars_timestamps_and_an_end() -> None:
    text = (
        "# TYPE tokens counter\n"
        'tokens_total{engine="0"} 17.0 1795976777.56 # {trace_id="a } # b"} 1.0 1795976777.123\n'
        'tokens_created{engine="0"} 1.7959764140899632e+09 1795976777.56\n'
        "# TYPE running gauge\n"
        "running NaN\n"
        "# EOF\n"
    )
    names = frozenset({"tokens_total", "running"})
    expected = by_library(openmetrics_families(text), names)
    assert expected == {'tokens_total{engine="0"}': 17.0}
    assert by_us(text.encode(), names, ()) == expected

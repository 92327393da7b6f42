"""The vocabulary of the profiles means what it says."""

from dataclasses import replace

import pytest

from enginewatch.engines import UNKNOWN
from enginewatch.engines.profile import Aim, AnswerFormat, CanaryRequest, FlagEndpoint, Metric, version_tuple


def test_a_missing_label_is_an_empty_one() -> None:
    total = Metric(("x",), where={"priority": frozenset({""})})
    assert total.accepts({})
    assert total.accepts({"priority": ""})
    assert not total.accepts({"priority": "3"})
    assert not Metric(("x",), where={"reason": frozenset({"deferred"})}).accepts({})


def test_only_prefixed_names_get_the_prefixes() -> None:
    assert Metric(("a", "b")).full_names(("x:", "x_")) == ("x:a", "x:b", "x_a", "x_b")
    assert Metric(("a",), prefixed=False).full_names(("x:", "x_")) == ("a",)


@pytest.mark.parametrize(
    ("core", "cores", "from_first_core", "value"),
    [
        ("0", ["0", "1"], False, 0),
        ("3", ["0", "1", "2", "3"], True, 3),
        ("5", ["4", "5", "6", "7"], True, 1),
        ("5", ["4", "5", "6", "7"], False, 5),
        ("10", ["9", "10", "11"], True, 1),
        ("left", ["left", "right"], False, None),
        ("", [""], True, None),
    ],
)
def test_the_value_of_an_aim(core: str, cores: list[str], from_first_core: bool, value: int | None) -> None:
    aim = Aim(since=(1,), source="-", header="x", from_first_core=from_first_core)
    assert aim.value_for(core, cores) == value


@pytest.mark.parametrize(
    ("version", "found"),
    [("1.2.0", "new"), ("1.1.9", "old"), ("1.0", "old"), ("0.9", None), (None, None), ("dev", None), ("", None)],
)
def test_the_newest_aim_that_the_version_honours_is_picked(version: str | None, found: str | None) -> None:
    aims = (Aim(since=(1, 2), source="-", body_field="new"), Aim(since=(1,), source="-", body_field="old"))
    aim = CanaryRequest("POST", "/", {}, AnswerFormat.ANY_2XX, aims).aim_for(version)
    assert (aim.body_field if aim else None) == found


def test_a_flag_bound_to_a_version_is_not_trusted_before_it_or_without_one() -> None:
    always = FlagEndpoint("paused", "/is_paused", key="is_paused")
    late = FlagEndpoint("paused", "/ready", status=503, sound_path="/ping", since=(2, 0))
    profile = replace(UNKNOWN, flag_endpoints=(always, late))
    assert profile.flags_for("2.0.1") == (always, late)
    assert profile.flags_for("1.9") == (always,)
    assert profile.flags_for(None) == (always,)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0.32.0+cpu", (0, 32, 0)), ("0.5.10.post1", (0, 5, 10)), ("v1.2", (1, 2)), ("main", ()), ("", ())],
)
def test_a_version_is_its_leading_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert version_tuple(text) == numbers

"""Every profile is consistent in itself, whatever engine it describes."""

import json
from collections.abc import Iterator

import pytest
import re2

from enginewatch.engines import ALL_NAMES, KINDS, PROFILES, RECOGNITION_PATHS, UNKNOWN, recognise_answer
from enginewatch.engines.profile import ROLES, Aim, Profile

EVERY = [*PROFILES.values(), UNKNOWN]
pytestmark = pytest.mark.parametrize("profile", EVERY, ids=lambda profile: profile.kind)


def test_a_kind_is_the_key_it_is_found_under(profile: Profile) -> None:
    if profile is not UNKNOWN:
        assert PROFILES[profile.kind] is profile
    assert profile.title


def test_an_engine_can_be_named_and_is_known_by_what_its_list_of_models_says(profile: Profile) -> None:
    if profile is not UNKNOWN:
        assert profile.kind in KINDS
        assert profile.owners
    for owner in profile.owners:
        assert recognise_answer("/v1/models", {"data": [{"id": "m", "owned_by": owner}]}) is profile


def test_no_two_legs_share_a_public_name(profile: Profile) -> None:
    names = [leg.name for leg in profile.legs]
    assert len(names) == len(set(names))
    queues = [queue.name for queue in profile.queues]
    assert len(queues) == len(set(queues))


def test_no_two_legs_share_a_series(profile: Profile) -> None:
    names = [name for leg in profile.legs for name in leg.metric.full_names(profile.prefixes)]
    assert len(names) == len(set(names))


def test_a_leg_is_nothing_else_as_well(profile: Profile) -> None:
    legs = {name for leg in profile.legs for name in leg.metric.full_names(profile.prefixes)}
    for metric in (profile.running, profile.waiting, profile.heartbeat, profile.transfers, profile.start_time):
        if metric is not None:
            assert legs.isdisjoint(metric.full_names(profile.prefixes))


def test_near_misses_are_never_asked_for(profile: Profile) -> None:
    for name in profile.names():
        assert not name.endswith(("_created", "_bucket")), name


def test_all_names_holds_what_the_profile_asks_for(profile: Profile) -> None:
    assert profile.names() <= ALL_NAMES


def test_every_role_has_a_canary_that_serialises(profile: Profile) -> None:
    assert set(profile.canaries) == set(ROLES)
    for canary in profile.canaries.values():
        assert canary.method == "POST"
        assert canary.path.startswith("/")
        assert json.loads(json.dumps(canary.body)) == canary.body


def test_an_aim_is_either_a_header_or_a_body_field_and_names_its_source(profile: Profile) -> None:
    for aim in _aims(profile):
        assert (aim.header is None) != (aim.body_field is None)
        assert aim.since
        assert aim.source


def test_aims_are_listed_newest_first(profile: Profile) -> None:
    for canary in profile.canaries.values():
        since = [aim.since for aim in canary.aim]
        assert since == sorted(since, reverse=True)


def test_log_signatures_compile_with_re2(profile: Profile) -> None:
    for pattern in profile.log_signatures:
        assert re2.compile(pattern)


def test_a_flag_endpoint_tells_by_a_key_or_by_a_status(profile: Profile) -> None:
    for flag in profile.flag_endpoints:
        assert bool(flag.key) != (flag.status is not None)
        assert bool(flag.sound_path) == (flag.status is not None)


def test_people_are_told_how_to_get_metrics_in_one_sentence(profile: Profile) -> None:
    assert profile.how_to_get_metrics.endswith(".")
    assert ". " not in profile.how_to_get_metrics


def test_recognition_never_asks_a_path_that_an_engine_answers_through_its_core(profile: Profile) -> None:
    assert not {"/server_info", "/get_server_info", "/is_sleeping", "/is_paused", "/health"} & set(RECOGNITION_PATHS)


def _aims(profile: Profile) -> Iterator[Aim]:
    for canary in profile.canaries.values():
        yield from canary.aim

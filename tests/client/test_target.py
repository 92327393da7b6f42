"""An address is checked before anything is asked, and what is wrong with it is one sentence."""

from __future__ import annotations

import pytest

from enginewatch.client.target import BadTarget, EngineClient, Target


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        (" https://engine.example ", "https://engine.example"),
        ("http://[::1]:8000/prefix/", "http://[::1]:8000/prefix"),
        ("HTTP://engine:80", "http://engine:80"),
        ("localhost:8000", "http://localhost:8000"),
        (" 10.0.0.7:8000/", "http://10.0.0.7:8000"),
        ("my-engine.ns.svc:8000/base", "http://my-engine.ns.svc:8000/base"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_usable_addresses_lose_only_what_does_not_matter(given: str, used: str) -> None:
    assert Target.parse(given).url == used


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "is empty"),
        ("localhost", "write http://localhost"),
        ("localhost:port", "write http://localhost:port"),
        ("localhost:0", "port 0"),
        ("localhost:99999", "unusable host or port"),
        ("localhost:8000/metrics", "METRICS_PATH"),
        ("//engine:8000", "write http://engine:8000"),
        ("ftp://engine", "must begin with http:// or https://"),
        ("http://", "names no host"),
        ("http://:8000", "names no host"),
        ("http://engine:port", "unusable host or port"),
        ("http://engine:99999", "unusable host or port"),
        ("http://engine:0", "port 0"),
        ("http://[::1", "unusable host or port"),
        ("http://engine/?a=b", "query or fragment"),
        ("http://en gine", "blanks"),
        ("http://engine\r\nX: y", "blanks"),
        ("http://engine:8000/metrics", "METRICS_PATH"),
        ("http://user:hunter2@engine", "holds credentials"),
    ],
)
def test_unusable_addresses_are_refused_in_one_sentence(given: str, says: str) -> None:
    with pytest.raises(BadTarget, match=r"^the engine's address .*") as caught:
        Target.parse(given)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given", ["http://u:hunter2@engine", "u:hunter2@engine", "ftp://u:hunter2@e", "http://u:hunter2@e:x"]
)
def test_credentials_in_an_address_are_not_repeated(given: str) -> None:
    with pytest.raises(BadTarget) as caught:
        Target.parse(given)
    assert "hunter2" not in str(caught.value)


def test_empty_values_are_missing_ones() -> None:
    assert Target.parse("http://engine", metrics_path="", api_key_file="", ca_file="") == Target("http://engine")


def test_a_metrics_path_without_its_slash_is_understood() -> None:
    assert Target.parse("http://engine", metrics_path="custom/metrics").metrics_path == "/custom/metrics"


@pytest.mark.parametrize("given", ["http://engine/metrics", "/met rics", "/metrics\r\nX: y"])
def test_a_metrics_path_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(BadTarget, match="metrics path"):
        Target.parse("http://engine", metrics_path=given)


async def test_a_missing_key_file_does_not_stop_the_client_from_being_made() -> None:
    EngineClient(Target.parse("http://engine", api_key_file="/nowhere/key", ca_file="/nowhere/ca"))


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://127.9.9.9", "[::1]:8000", "http://LocalHost:8000/v"])
def test_an_engine_on_the_same_host_is_known_as_one(url: str) -> None:
    assert Target.parse(url).is_loopback


@pytest.mark.parametrize(
    "url", ["http://10.1.2.3:8000", "http://engine:8000", "[fd00::1]:8000", "http://localhost.example"]
)
def test_an_engine_elsewhere_is_not_taken_for_one_on_the_same_host(url: str) -> None:
    assert not Target.parse(url).is_loopback

"""What an operator may write, and what happens to what nobody should."""

from __future__ import annotations

import json

import msgspec
import pytest

from enginewatch.core.settings import Settings
from enginewatch.sidecar.config import (
    EMPTY,
    ENVIRONMENT,
    HOT_KEYS,
    ConfigFile,
    config_schema,
    public_settings,
    read_document,
    read_environment,
    settings_from,
)

FILE = "/etc/hang-watcher/config.json"


def in_file(document: object) -> Settings:
    layer = read_document(json.dumps(document).encode(), FILE)
    assert layer.rejected == ()
    return settings_from(EMPTY, layer)


def reason_against(text: str | bytes) -> str:
    raw = text if isinstance(text, bytes) else text.encode()
    layer = read_document(raw, FILE)
    assert layer.values == {} or layer.rejected
    return "; ".join(str(problem) for problem in layer.rejected)


def test_every_setting_has_a_key_and_every_key_a_setting() -> None:
    assert set(HOT_KEYS) == set(Settings.__dataclass_fields__)


def test_a_hang_watcher_configmap_works_unchanged() -> None:
    settings = in_file(
        {
            "poll_interval_sec": 5,
            "stall_sec": 60,
            "metrics_timeout_sec": 20,
            "warmup_sec": 600,
            "active_probe_enabled": True,
            "active_probe_path": "/health_generate",
            "active_probe_method": "GET",
            "active_probe_body": "",
            "active_probe_timeout_sec": 5,
            "log_stall_sec": 15,
            "log_window_sec": 120,
        }
    )
    assert settings == Settings(
        stall_sec=60, metrics_timeout_sec=20, active_probe_path="/health_generate", active_probe_method="GET"
    )


def test_a_hang_watcher_environment_works_unchanged() -> None:
    layer = read_environment(
        {"ENGINE_URL": "http://127.0.0.1:8050", "POLL_INTERVAL_SEC": "5", "STALL_SEC": "60", "LOG_STALL_SEC": "15"}
    )
    assert layer.rejected == ()
    assert settings_from(layer, EMPTY) == Settings(stall_sec=60)


@pytest.mark.parametrize("key", [key for key in HOT_KEYS if key.endswith("_sec") and key != "warmup_sec"])
def test_zero_means_the_default(key: str) -> None:
    assert in_file({key: 0}) == in_file({key: 0.0}) == in_file({key: None}) == in_file({}) == Settings()


def test_zero_warmup_means_none_and_a_missing_one_the_default() -> None:
    assert in_file({"warmup_sec": 0}).warmup_sec == 0
    assert in_file({}).warmup_sec == 600
    assert settings_from(read_environment({"WARMUP_SEC": "0"}), EMPTY).warmup_sec == 0


def test_zero_in_the_file_leaves_the_environments_value() -> None:
    environment = read_environment({"STALL_SEC": "20"})
    zero = read_document(b'{"stall_sec": 0}', FILE)
    forty = read_document(b'{"stall_sec": 40}', FILE)
    assert settings_from(environment, zero).stall_sec == 20
    assert settings_from(environment, forty).stall_sec == 40, "the file wins"


def test_false_and_zero_warmup_in_the_file_win_over_the_environment() -> None:
    environment = read_environment({"ACTIVE_PROBE_ENABLED": "true", "WARMUP_SEC": "600"})
    settings = settings_from(environment, read_document(b'{"active_probe_enabled": false, "warmup_sec": 0}', FILE))
    assert settings.active_probe_enabled is False
    assert settings.warmup_sec == 0


@pytest.mark.parametrize(("text", "value"), [("1", True), ("0", False), ("true", True), ("false", False)])
def test_a_switch_may_be_a_digit_as_templates_render_it(text: str, value: bool) -> None:
    layer = read_document(f'{{"stall_sec": 20, "active_probe_enabled": {text}}}'.encode(), FILE)
    assert layer.rejected == ()
    settings = settings_from(read_environment({"ACTIVE_PROBE_ENABLED": str(not value)}), layer)
    assert settings.active_probe_enabled is value
    assert settings.stall_sec == 20


def test_numbers_may_be_fractional() -> None:
    assert in_file({"poll_interval_sec": 0.5}).poll_interval_sec == 0.5
    assert in_file({"active_probe_min_failures": 1.5}).active_probe_min_failures == 2, "rounded up: the safer side"
    assert in_file({"active_probe_min_failures": 3}).active_probe_min_failures == 3


def test_empty_strings_are_missing_values() -> None:
    assert in_file({"active_probe_path": "", "active_probe_method": "", "active_probe_body": "", "mode": ""}) == (
        Settings()
    )


def test_comments_and_a_byte_order_mark_are_no_problem() -> None:
    layer = read_document(b'\xef\xbb\xbf{"_comment": {"why": []}, "stall_sec": 45}', FILE)
    assert layer.rejected == layer.unknown == ()
    assert settings_from(EMPTY, layer).stall_sec == 45


def test_unknown_keys_are_named_and_the_others_apply() -> None:
    layer = read_document(b'{"stallSec": 45, "mode": "shadow", "colour": "red"}', FILE)
    assert [(problem.key, problem.reason) for problem in layer.unknown] == [
        ("stallSec", "unknown key, not read; did you mean stall_sec?"),
        ("colour", "unknown key, not read"),
    ]
    assert settings_from(EMPTY, layer).mode == "shadow"


def test_a_key_given_twice_counts_as_written_last_and_is_named() -> None:
    layer = read_document(b'{"stall_sec": 45, "stall_sec": 50}', FILE)
    assert settings_from(EMPTY, layer).stall_sec == 50
    assert [problem.key for problem in layer.repeated] == ["stall_sec"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("stall_sec: 30", "not JSON"),
        ('{"stall_sec": 30', "not JSON"),
        ('{"stall_sec": 30}}', "not JSON"),
        ('{"stall_sec": }', "not JSON"),
        ('{"stall_sec": NaN}', "NaN is not a number"),
        ('{"stall_sec": Infinity}', "Infinity is not a number"),
        ('{"stall_sec": -Infinity}', "-Infinity is not a number"),
        ("[30]", "expected a JSON object, got a list"),
        ('"stall_sec"', "expected a JSON object, got a string"),
        ("null", "expected a JSON object, got null"),
        ('{"stall_sec": "30"}', "stall_sec: expected a number, got a string"),
        ('{"stall_sec": true}', "stall_sec: expected a number, got true or false"),
        ('{"stall_sec": [30]}', "stall_sec: expected a number, got a list"),
        ('{"stall_sec": {}}', "stall_sec: expected a number, got an object"),
        ('{"stall_sec": -1}', "stall_sec: must not be negative"),
        ('{"stall_sec": -0.001}', "stall_sec: must not be negative"),
        ('{"stall_sec": 1e999}', "stall_sec: must not be above 1e+09"),
        ('{"stall_sec": 1e10}', "stall_sec: must not be above 1e+09"),
        ('{"stall_sec": ' + "9" * 400 + "}", "stall_sec: must not be above 1e+09"),
        ('{"stall_sec": ' + "9" * 9000 + "}", "not JSON"),
        ('{"poll_interval_sec": 1e-9}', "poll_interval_sec: must be at least 0.01"),
        ('{"active_probe_enabled": 2}', "active_probe_enabled: expected true, false, 1 or 0, got a number"),
        ('{"active_probe_enabled": 0.0}', "active_probe_enabled: expected true, false, 1 or 0, got a number"),
        ('{"active_probe_enabled": "false"}', "active_probe_enabled: expected true, false, 1 or 0, got a string"),
        ('{"active_probe_body": {"prompt": "x"}}', "active_probe_body: expected a string, got an object"),
        ('{"active_probe_body": "' + "x" * 70000 + '"}', "active_probe_body: longer than"),
        ('{"active_probe_body": "\\ud800"}', "active_probe_body: holds half a surrogate pair"),
        ('{"active_probe_path": "health"}', "active_probe_path: expected a path that begins with /"),
        ('{"active_probe_path": "http://elsewhere/x"}', "active_probe_path: expected a path"),
        ('{"active_probe_path": "/a b"}', "active_probe_path: expected a path"),
        ('{"active_probe_method": "GET /x HTTP/1.1\\r\\n"}', "active_probe_method: expected an HTTP method"),
        ('{"mode": "Shadow"}', 'mode: expected "enforce" or "shadow"'),
        ('{"mode": 1}', 'mode: expected "enforce" or "shadow"'),
        ("[" * 100_000, "not JSON"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8"),
        (b"\x00" * 10, "not JSON"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(text: str | bytes, reason: str) -> None:
    said = reason_against(text)
    assert reason in said
    assert FILE in said


def test_all_bad_keys_of_a_file_are_named_at_once_but_not_without_end() -> None:
    layer = read_document(b'{"stall_sec": "x", "warmup_sec": -1, "mode": "enforce"}', FILE)
    assert [problem.key for problem in layer.rejected] == ["stall_sec", "warmup_sec"]
    many = json.dumps({f"key{number}": 1 for number in range(10_000)}).encode()
    assert len(read_document(many, FILE).unknown) <= 20


def test_a_reason_never_repeats_a_value() -> None:
    said = reason_against('{"active_probe_body": ["hunter2"], "stall_sec": "hunter2", "mode": "hunter2"}')
    assert "hunter2" not in said


def test_a_monstrous_key_is_cut() -> None:
    layer = read_document(json.dumps({"k\n" * 1000: 1}).encode(), FILE)
    assert len(layer.unknown[0].key) <= 70
    assert "\n" not in layer.unknown[0].key


@pytest.mark.parametrize(
    ("text", "value"), [("20", 20), (" 20.5 ", 20.5), (".5", 0.5), ("5.", 5), ("1e2", 100), ("+3", 3)]
)
def test_numbers_in_the_environment(text: str, value: float) -> None:
    assert settings_from(read_environment({"STALL_SEC": text}), EMPTY).stall_sec == value


@pytest.mark.parametrize("text", ["30s", "1_000", "nan", "inf", "1e999", "-1", "0x10", "３０", "1,5", "thirty"])
def test_a_bad_number_in_the_environment_costs_that_key_alone(text: str) -> None:
    layer = read_environment({"STALL_SEC": text, "POLL_INTERVAL_SEC": "2"})
    assert [(problem.key, problem.where) for problem in layer.rejected] == [("STALL_SEC", ENVIRONMENT)]
    assert settings_from(layer, EMPTY) == Settings(poll_interval_sec=2)


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("1", True), ("YES", True), ("False", False), ("0", False), ("no", False), ("", True)],
)
def test_truth_in_the_environment(text: str, value: bool) -> None:
    layer = read_environment({"ACTIVE_PROBE_ENABLED": text})
    assert layer.rejected == ()
    assert settings_from(layer, EMPTY).active_probe_enabled is value


def test_a_word_that_is_no_truth_is_rejected() -> None:
    assert read_environment({"ACTIVE_PROBE_ENABLED": "on"}).rejected[0].key == "ACTIVE_PROBE_ENABLED"


def test_the_served_settings_hold_no_request_body_and_no_query() -> None:
    shown = public_settings(
        Settings(active_probe_body='{"prompt": "secret"}', active_probe_path="/probe?api_key=secret")
    )
    assert "secret" not in json.dumps(shown)
    assert shown["active_probe_path"].startswith("/probe")
    assert shown["unreach_sec"] == 60, "the effective number"
    assert set(shown) == set(HOT_KEYS)


def test_the_schema_knows_every_key_and_agrees_with_the_reader() -> None:
    schema = config_schema()
    assert set(schema["properties"]) == set(HOT_KEYS)
    assert schema["additionalProperties"] is False
    assert "^_" in schema["patternProperties"]
    msgspec.json.decode(b'{"stall_sec": 30.5, "mode": "shadow"}', type=ConfigFile)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"stall_sec": "30"}', type=ConfigFile)


def test_doubtful_combinations_are_named_with_their_numbers() -> None:
    doubts = Settings(stall_sec=10, active_probe_timeout_sec=5, poll_interval_sec=5, log_stall_sec=10).doubts(
        log_file=True
    )
    assert len(doubts) == 2
    assert "10" in doubts[0]


def test_deadlines_that_kill_the_healthy_or_blind_the_watcher_are_doubtful() -> None:
    (short,) = Settings(active_probe_timeout_sec=0.1).doubts(log_file=False)
    assert "active_probe_timeout_sec (0.1)" in short
    assert Settings(active_probe_timeout_sec=0.1, active_probe_enabled=False).doubts(log_file=False) == []
    (long,) = Settings(metrics_timeout_sec=3600).doubts(log_file=False)
    assert "metrics_timeout_sec (3600)" in long


def test_the_defaults_are_not_doubtful() -> None:
    assert Settings().doubts(log_file=True) == []

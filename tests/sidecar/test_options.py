"""What `watch` is told at its start: who is told off, and who is only told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from enginewatch.sidecar.options import VARIABLES, Address, Options, StartError, parse


def refused(*flags: str, **environ: str) -> StartError:
    with pytest.raises(StartError) as caught:
        parse(flags, environ)
    message = str(caught.value)
    assert message.startswith("enginewatch watch: ")
    assert "\n" not in message, "one sentence"
    return caught.value


def test_nothing_given_means_the_documented_defaults() -> None:
    assert parse([], {}) == Options(
        engine_url="http://127.0.0.1:8000",
        listen=Address("", 9090),
        config_file="/etc/hang-watcher/config.json",
        engine_kind="auto",
        engine_role="",
        log_file="",
        log_hang_pattern="",
        engine_api_key_file="",
        engine_ca_file="",
        identity_kv_bootstrap_url="",
        metrics_path="",
        trtllm_json_stats=False,
    )


@pytest.mark.parametrize(
    ("flags", "environ", "asked"),
    [
        (["--trtllm-json-stats"], {}, True),
        (["--trtllm-json-stats=1"], {"TRTLLM_JSON_STATS": "0"}, True),
        (["--trtllm-json-stats=0"], {"TRTLLM_JSON_STATS": "1"}, False),
        ([], {"TRTLLM_JSON_STATS": "1"}, True),
        ([], {"TRTLLM_JSON_STATS": "True"}, True),
        ([], {"TRTLLM_JSON_STATS": "false"}, False),
        ([], {"TRTLLM_JSON_STATS": " "}, False),
        ([], {"TRTLLM_JSON_STATS": "please"}, False),
    ],
)
def test_statistics_that_reading_removes_are_read_only_when_plainly_asked_for(
    flags: list[str], environ: dict[str, str], asked: bool
) -> None:
    options = parse(flags, environ)
    assert options.trtllm_json_stats is asked
    assert [problem.key for problem in options.problems] == (
        ["TRTLLM_JSON_STATS"] if environ.get("TRTLLM_JSON_STATS") == "please" else []
    )


def test_the_flag_wins_over_the_environment_and_an_empty_one_is_missing() -> None:
    environ = {"ENGINE_URL": "http://10.0.0.1:8000", "LOG_FILE": "/logs/engine.log"}
    options = parse(["--engine-url", "http://10.0.0.2:8000/", "--log-file="], environ)
    assert options.engine_url == "http://10.0.0.2:8000"
    assert options.log_file == "/logs/engine.log"


def test_empty_variables_are_missing_ones() -> None:
    assert parse([], dict.fromkeys(VARIABLES, " ")) == parse([], {})


@pytest.mark.parametrize("variable", VARIABLES)
def test_every_variable_is_also_a_flag_and_in_the_help(variable: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(["--help"], {})
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert variable in said
    assert "--" + variable.lower().replace("_", "-") in said


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":9090", Address("", 9090)),
        ("9090", Address("", 9090)),
        ("0.0.0.0:9090", Address("0.0.0.0", 9090)),
        ("[::]:9090", Address("::", 9090)),
        ("[::1]:9091", Address("::1", 9091)),
        ("127.0.0.1:0", Address("127.0.0.1", 0)),
        ("localhost:65535", Address("localhost", 65535)),
    ],
)
def test_listen_addresses(text: str, address: Address) -> None:
    assert parse(["--listen", text], {}).listen == address
    assert parse([], {"LISTEN": text}).listen == address


@pytest.mark.parametrize("text", ["x", ":", ":-1", ":65536", "::1:9090", "[]:1", "a b:1", "[::1]", ":９", "h:1:2"])
def test_a_listen_address_that_cannot_be_one_ends_watch(text: str) -> None:
    assert refused(f"--listen={text}").exit_code == 2
    assert refused(LISTEN=text).exit_code == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--engine-url", "nonsense"],
        ["--engine-url", "ftp://host"],
        ["--engine-url", "http://"],
        ["--engine-url", "http://[::1"],
        ["--engine-url", "http://host:99999"],
        ["--engine-kind", "tgi"],
        ["--engine-role", "router"],
        ["--log-hang-pattern", "(x"],
        ["--log-hang-pattern", r"(?=x)"],
        ["--metrics-path", "metrics"],
        ["--identity-kv-bootstrap-url", "x"],
        ["--no-such-flag"],
        ["--engine"],
        ["http://127.0.0.1:8000"],
        ["--engine-url"],
    ],
)
def test_a_bad_flag_ends_watch_with_one_sentence(flags: list[str]) -> None:
    assert refused(*flags).exit_code == 2


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("ENGINE_KIND", "tgi"),
        ("ENGINE_ROLE", "router"),
        ("LOG_HANG_PATTERN", "(x"),
        ("METRICS_PATH", "metrics"),
        ("IDENTITY_KV_BOOTSTRAP_URL", "x"),
    ],
)
def test_a_bad_variable_is_named_and_its_default_applies(variable: str, text: str) -> None:
    options = parse([], {variable: text})
    assert [problem.key for problem in options.problems] == [variable]
    assert getattr(options, variable.lower()) == getattr(parse([], {}), variable.lower())


def test_a_bad_engine_url_in_the_environment_leaves_nothing_to_watch_and_says_so() -> None:
    options = parse([], {"ENGINE_URL": "nonsense"})
    assert options.engine_url is None
    assert options.problems[0].key == "ENGINE_URL"


@pytest.mark.parametrize("url", ["http://user:hunter2@host:8000", "user:hunter2@host:8000", "hunter2@@"])
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    assert "hunter2" not in str(refused("--engine-url", url))
    assert "hunter2" not in parse([], {"ENGINE_URL": url}).problems[0].reason


def test_kind_and_role_are_not_case_sensitive() -> None:
    options = parse([], {"ENGINE_KIND": "SGLang", "ENGINE_ROLE": " Prefill "})
    assert (options.engine_kind, options.engine_role, options.problems) == ("sglang", "prefill", ())


def test_blanks_at_the_ends_of_a_pattern_are_part_of_it() -> None:
    assert parse([], {"LOG_HANG_PATTERN": " dead "}).log_hang_pattern == " dead "


def test_a_monstrous_value_is_cut_in_the_sentence() -> None:
    assert len(str(refused("--engine-kind", "x" * 100_000))) < 300


@pytest.mark.parametrize(("url", "loaded"), [("http://127.0.0.1:8000", False), ("https://127.0.0.1:8000", True)])
def test_the_systems_certificates_are_loaded_for_an_https_engine_and_only_then(url: str, loaded: bool) -> None:
    script = (
        "import os, sys\n"
        "from enginewatch.sidecar.options import parse\n"
        "before = dict(os.environ)\n"
        "parse(['--engine-url', sys.argv[1]], {})\n"
        "from aiohttp import connector\n"
        "assert os.environ == before\n"
        "print(bool(connector._SSL_CONTEXT_VERIFIED.cert_store_stats()['x509_ca']))\n"
    )
    have = subprocess.run(
        [sys.executable, "-c", "import ssl; print(ssl.create_default_context().cert_store_stats()['x509_ca'])"],
        capture_output=True,
        text=True,
        check=True,
    )
    if have.stdout.strip() == "0":
        pytest.skip("this machine has no certificates")
    done = subprocess.run([sys.executable, "-c", script, url], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(loaded)

"""Settings that cannot work: one sentence and the documented exit code. `live` keeps the router whatever it is told."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from guard_run import POWERLESS, Ended, Guard, ended, run_many, start_guard

LISTS = {
    "no port": "prefill.test",
    "an empty port": "prefill.test:",
    "port zero": "prefill.test:0",
    "a port too high": "prefill.test:65536",
    "a port in words": "prefill.test:http",
    "a port with a sign": "prefill.test:+80",
    "a port in digits that are not ASCII": "prefill.test:٨٠٠٠",
    "a URL": "http://prefill.test:8000",
    "a path": "prefill.test:8000/v1",
    "no host": ":8000",
    "IPv6 without brackets": "::1:8000",
    "half a bracket": "[::1:8000",
    "brackets around a name": "[prefill.test]:8000",
    "brackets without a port": "[::1]",
    "an empty entry": "127.0.0.2:1,,127.0.0.3:1",
    "a space within": "127.0.0.2 :1",
    "four numbers too high": "127.0.0.256:8000",
    "a name of 300 characters": "a." * 150 + "test:8000",
    "a label of 70 characters": "a" * 70 + ".test:8000",
    "two dots": "prefill..test:8000",
    "a name that is not ASCII": "préfill.test:8000",
    "a line end": "prefill.test\n:8000",
    "quotation marks": "'prefill.test:8000'",
    "a byte that is no text": "pre\udcfffill.test:8000",
    "an option": "--prefill:8000",
}
NUMBERS = ["soon", "-1", "nan", "inf", "1e400", "4s", "٤", "1_000", "4,5", "\udcff"]
PORTS = ["-1", "65536", "http", "80.5", "8080,8081", "+80", "9" * 5000]

BAD = [
    *(("GUARD_PREFILL", text) for text in LISTS.values()),
    ("GUARD_DECODE", "decode.test"),
    ("GUARD_DECODE", "127.0.0.4:1,127.0.0.4:2"),
    *(("GUARD_BUDGET_SEC", text) for text in NUMBERS),
    ("GUARD_PARTIAL_SEC", "soon"),
    ("GUARD_DEADLINE_SEC", "soon"),
    ("GUARD_DEADLINE_SEC", "0"),
    *(("GUARD_BOOTSTRAP_PORT", text) for text in [*PORTS, "0"]),
    ("GUARD_PREFILL_WATCHER_PORT", "9090x"),
    ("GUARD_DECODE_WATCHER_PORT", "-1"),
    ("GUARD_ROUTER_PORT", "none"),
    ("GUARD_ROUTER", "nginx"),
    ("GUARD_ROUTER", "vLLM\n"),
]
OF_A_PROBE = ("GUARD_PREFILL", "GUARD_DECODE", "GUARD_DEADLINE_SEC")


GOOD = {
    "GUARD_PREFILL": "127.0.0.2:1",
    "GUARD_DECODE": "127.0.0.4:1",
    "GUARD_BUDGET_SEC": "0.1",
    "GUARD_DEADLINE_SEC": "1",
}


@pytest.fixture
def guard(tmp_path: Path) -> Guard:
    return Guard(tmp_path, dict(GOOD))


def with_each(guard: Guard, bad: Iterable[tuple[str, str]], *arguments: str) -> dict[tuple[str, str], Ended]:
    """What a subcommand makes of each of the bad settings."""
    named = {f"{name}={value}": (name, value) for name, value in bad}
    cases = {case: (arguments, guard.settings | {name: value}) for case, (name, value) in named.items()}
    return {named[case]: result for case, result in run_many(cases, guard.directory).items()}


def test_the_settings_that_the_bad_ones_replace_do_work(guard: Guard) -> None:
    guard.booted()
    assert guard.live().code == 0


def test_boot_refuses_a_bad_setting_before_it_touches_anything(guard: Guard) -> None:
    for (name, value), result in with_each(guard, BAD, "boot", "--", str(guard.router)).items():
        assert result.code == 2, (name, value, result)
        assert name in result.sentence, (name, value, result)
    assert not guard.calls.exists()
    assert not guard.run_dir.exists()


def test_live_keeps_the_router_whatever_its_settings_and_says_why(guard: Guard) -> None:
    bad = [(name, value) for name, value in BAD if name in OF_A_PROBE]
    for (name, value), result in with_each(guard, [*bad, ("GUARD_DECODE_WATCHER_PORT", "-1")], "live").items():
        assert result.code == 0, (name, value, result)
        assert result.err == "", (name, value, result)
        assert name in result.line, (name, value, result)


def test_ready_refuses_a_bad_setting(guard: Guard) -> None:
    bad = [(name, value) for name, value in BAD if name in OF_A_PROBE]
    for (name, value), result in with_each(guard, [*bad, ("GUARD_ROUTER_PORT", "0")], "ready").items():
        assert result.code == 2, (name, value, result)
        assert name in result.sentence, (name, value, result)


def test_an_empty_value_is_a_missing_one(guard: Guard) -> None:
    empty = [(name, value) for name in ("GUARD_PREFILL", "GUARD_DECODE", "GUARD_ROUTER") for value in ("", "  ")]
    for (name, value), result in with_each(guard, empty, "boot", "--", str(guard.router)).items():
        assert result.code == 2, (name, value, result)
        assert name in result.sentence, (name, value, result)


def test_flags_override_the_environment(guard: Guard) -> None:
    result = guard.run("boot", "--router", "sglang", "--budget-sec=0.2", "--", str(guard.router), GUARD_ROUTER="nginx")
    assert result.code == 0, result
    assert "--prefill" in guard.run("live", "--prefill", "nonsense").line


USAGE: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "no such subcommand": ("watch",),
    "an empty subcommand": ("",),
    "a subcommand that is no text": ("\udcff",),
    "boot without a command": ("boot",),
    "boot with nothing behind the dashes": ("boot", "--"),
    "boot with a command but no dashes": ("boot", "/bin/true"),
    "boot with an empty command": ("boot", "--", ""),
    "boot with a command that does not exist": ("boot", "--", "/nowhere/router"),
    "boot with a command that is not on the path": ("boot", "--", "no-such-router"),
    "boot with a command that is a directory": ("boot", "--", "/"),
    "boot with a command that is not executable": ("boot", "--", "/etc/passwd"),
    "boot with a whole command line as one word": ("boot", "--", "/bin/sh -c true"),
    "boot with an unknown flag": ("boot", "--no-such-flag", "1", "--", "/bin/true"),
    "boot with a flag without its value": ("boot", "--budget-sec", "--", "/bin/true"),
    "boot with an abbreviated flag": ("boot", "--budget", "1", "--", "/bin/true"),
    "ready with an argument": ("ready", "now"),
    "ready with an unknown flag": ("ready", "--verbose"),
}


def test_a_command_line_that_cannot_work_is_refused_in_one_sentence(guard: Guard) -> None:
    cases = {name: (arguments, guard.settings) for name, arguments in USAGE.items()}
    for name, result in run_many(cases, guard.directory).items():
        assert result.code == 2, (name, result)
        assert result.sentence, (name, result)


def test_live_keeps_the_router_whatever_its_flags(guard: Guard) -> None:
    flags = (("--verbose",), ("now",), ("--prefill",), ("--",), ("\udcff",))
    cases = {ascii(arguments): (("live", *arguments), guard.settings) for arguments in flags}
    for name, result in run_many(cases, guard.directory).items():
        assert result.code == 0, (name, result)
        assert result.line, (name, result)


@pytest.mark.parametrize("name", ["-pd röuter", "pd\nrouter'\"$HOME", "pd\udcffrouter"])
def test_a_run_directory_of_any_name_works(guard: Guard, name: str) -> None:
    run_dir = {"GUARD_RUN_DIR": str(guard.directory / name)}
    guard.booted(**run_dir)
    assert (guard.directory / name / "prefill-ips").read_text() == "127.0.0.2||\n"
    assert "no drift" in guard.live(**run_dir).line


def test_a_router_command_keeps_its_words_whatever_is_in_them(guard: Guard) -> None:
    odd = guard.directory / 'my router\'s "best"\n\udcff'
    odd.symlink_to(guard.router)
    words = ["two words", "", "$HOME", "a'b\"c", "--", "\udcff", "--help", "ж"]
    result = guard.boot(str(odd), *words)
    assert result.code == 0, result
    said = guard.calls.read_bytes().decode(errors="surrogateescape").split("\n")[1:-1]
    assert said == [*words, "--prefill", "http://127.0.0.2:1", "--decode", "http://127.0.0.4:1"]


def test_a_router_is_found_on_the_path_like_in_a_shell(guard: Guard) -> None:
    guard.booted(**{"PATH": f"{guard.directory}:{os.environ['PATH']}"})
    result = guard.boot("router", PATH=f"{guard.directory}:{os.environ['PATH']}")
    assert result.code == 0, result


def test_a_script_without_a_first_line_is_refused_or_run_but_never_crashes(guard: Guard) -> None:
    guard.router.write_text("exit 3\n")
    result = guard.boot()
    assert "Traceback" not in result.err
    assert result.code in (2, 3), result


@pytest.mark.parametrize("kind", ["a file", "below a file", "read-only"])
def test_a_run_directory_that_cannot_be_written_ends_boot_before_the_wait(guard: Guard, kind: str) -> None:
    run_dir = guard.directory / "place"
    if kind == "read-only":
        run_dir.mkdir(mode=0o555)
    else:
        run_dir.write_text("")
    at = run_dir / "below" if kind == "below a file" else run_dir
    result = guard.run(
        "boot", "--", str(guard.router), wrapped_in=POWERLESS, GUARD_RUN_DIR=str(at), GUARD_BUDGET_SEC="600"
    )
    assert result.code == 2, result
    assert str(at) in result.sentence
    assert not guard.calls.exists()


@pytest.mark.parametrize("output", ["1>/dev/full", ">&- 2>&- <&-"])
@pytest.mark.parametrize(
    "command", [("live",), ("ready",), ("--help",), ("boot", "--", "/bin/true")], ids=lambda c: c[0]
)
def test_a_closed_or_full_output_changes_no_exit_code(guard: Guard, command: tuple[str, ...], output: str) -> None:
    wrapped = ["/bin/sh", "-c", f'exec "$@" {output}', "sh"]
    result = guard.run(*command, wrapped_in=wrapped)
    assert result.code == (1 if command == ("ready",) else 0), result
    assert "Traceback" not in result.err + result.out


def test_a_bare_environment_is_enough_for_a_clear_answer(tmp_path: Path) -> None:
    def bare(*arguments: str) -> Ended:
        return ended(start_guard(*arguments, environment={"PATH": ""}))

    assert bare("live").code == 0
    assert "GUARD_PREFILL" in bare("live").line
    assert bare("ready").code == 2
    assert "GUARD_PREFILL" in bare("ready").sentence
    assert bare("boot", "--", "/bin/true").code == 2
    assert bare("--help").code == 0


def test_a_reader_that_leaves_early_is_no_error(guard: Guard) -> None:
    process = guard.start("live")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


def test_the_guard_needs_no_writable_home_nor_a_present_working_directory(guard: Guard) -> None:
    gone = guard.directory / "gone"
    gone.mkdir()
    result = guard.run("live", wrapped_in=["/bin/sh", "-c", f'cd "{gone}" && rmdir "{gone}" && exec "$@"', "sh"])
    assert result.code == 0, result
    assert result.line

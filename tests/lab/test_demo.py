"""The demo, played whole: it must end well with a sidecar that works and badly with one that does not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from xml.etree import ElementTree

import pytest
from process_tree import assert_all_gone, descendants
from terminal import terminal

from enginewatch.core.settings import Settings
from enginewatch.lab import demo_tether
from enginewatch.lab.demo import UNHURRIED, DemoOptions, fast_settings, run_demo
from enginewatch.lab.demo_cast import PARTS
from enginewatch.lab.demo_scene import NotAsExpected, Result, Scene, Step, detect_sec, play, recover_sec
from enginewatch.lab.demo_story import story
from enginewatch.lab.sim.process import SimError, SimProcess

DEMO = [sys.executable, "-m", "enginewatch", "demo"]
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
WHOLE_STORY_SEC = 240
"""Thirty-five seconds on a machine that has them."""


@contextmanager
def demo(*arguments: str, tmp_path: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A demo whose output is read line by line; killed if the test leaves it running."""
    process = subprocess.Popen(
        [*DEMO, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), **environment},
    )
    try:
        with process:
            yield process
    finally:
        if process.poll() is None:
            process.kill()


def wait_for_line(process: subprocess.Popen[str], beginning: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return
    assert process.stderr is not None
    raise AssertionError(f"the demo ended before it said {beginning}: {process.stderr.read()}")


@dataclass(frozen=True)
class Played:
    """A demo that is being played, with a directory and processes of its own."""

    process: subprocess.Popen[str]
    started: dict[int, str]
    directory: Path

    def until(self, ending: str) -> str:
        """Its output up to a line with this ending; waits for it."""
        assert self.process.stdout is not None
        seen = ""
        for line in self.process.stdout:
            seen += line
            if line.rstrip().endswith(ending):
                return seen
        raise AssertionError(f"it ended before it said {ending!r}: {seen}")

    def end(self) -> tuple[int, str, str]:
        """Its exit code, output and errors; waits for them."""
        out, error = self.process.communicate()
        return self.process.returncode, out, error


# What is meant for another sidecar must not change the story.
WHOLE_STORIES = {
    **{engine: (("--engine", engine), {"MODE": "shadow", "STALL_SEC": "1"}) for engine in PARTS},
    "no hang reported": (("--set", "mode=shadow", "--keep"), {}),
}


@pytest.fixture(scope="module")
def whole_stories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Played]]:
    """All of them at the same time, since they mostly wait; one begins when the one before it is set up."""
    with ExitStack() as stack:
        played: dict[str, Played] = {}
        for name, (arguments, environment) in WHOLE_STORIES.items():
            directory = tmp_path_factory.mktemp("demo")
            svg = ("--svg", str(directory / "demo.svg"))
            process = stack.enter_context(demo(*arguments, *svg, tmp_path=directory, **environment))
            wait_for_line(process, "[1/")
            played[name] = Played(process, descendants(process.pid), directory)
        yield played


@pytest.mark.timeout(WHOLE_STORY_SEC)
@pytest.mark.parametrize("engine", list(PARTS))
def test_the_whole_story_is_seen_as_expected(engine: str, whole_stories: dict[str, Played]) -> None:
    story = whole_stories[engine]
    code, out, error = story.end()
    assert code == 0, out + error
    assert error == ""
    assert "\x1b" not in out
    assert re.search(r"All \d+ steps as expected", out)
    assert "FAILED" not in out
    assert len(story.started) >= 3
    assert_all_gone(story.started)
    assert [path.name for path in story.directory.iterdir()] == ["demo.svg"]
    text = (story.directory / "demo.svg").read_text()
    ElementTree.fromstring(text)
    assert "url(http" not in text


@pytest.mark.timeout(WHOLE_STORY_SEC)
def test_a_sidecar_that_reports_no_hang_fails_the_demo_and_the_steps_are_named(
    whole_stories: dict[str, Played],
) -> None:
    story = whole_stories["no hang reported"]
    out = story.until("guard live; echo $?")
    # Kept running: what it says to try works.
    command = out.splitlines()[-1].strip().replace("enginewatch guard", f"{sys.executable} -m enginewatch guard")
    tried = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, timeout=60)
    assert tried.stdout == "keep: no drift among 2 engines\n0\n", tried
    story.process.send_signal(signal.SIGINT)
    code, rest, error = story.end()
    assert code == 1, out + rest + error
    failed = re.findall(r"^\[(\d+)/\d+\] FAILED: (.+?) \(", out, re.MULTILINE)
    assert [number for number, _ in failed] == ["4", "5", "6", "7"]
    assert "expected 503 within" in out
    assert "shadow-stall-hang" in out
    assert "not 4, 5, 6, 7" in out


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_nothing_outlives_a_demo_that_is_ended_in_the_middle(number: int, code: int, tmp_path: Path) -> None:
    with demo(tmp_path=tmp_path) as process:
        wait_for_line(process, "[1/")
        started = descendants(process.pid)
        rank = next(pid for pid, name in started.items() if name.startswith("VLLM"))
        os.kill(rank, signal.SIGSTOP)
        process.send_signal(number)
        _, error = process.communicate(timeout=30)
    assert process.returncode == code
    assert error == ""
    assert_all_gone(started)


def test_on_a_terminal_a_picture_is_drawn_and_the_cursor_comes_back(tmp_path: Path) -> None:
    with terminal(DEMO, {"TMPDIR": str(tmp_path)}) as seen:
        seen.read_until("A prompt of a million tokens")
        seen.read_until("growing")
        assert seen.end(signal.SIGINT) == 130
    assert "tokens per second" in seen.screen
    assert "sidecar /healthz" in seen.screen
    assert seen.screen.rindex(SHOW_CURSOR) > seen.screen.rindex(HIDE_CURSOR)
    assert "Traceback" not in seen.screen


@pytest.mark.parametrize("wish", ["NO_COLOR", "CI"])
def test_on_a_terminal_without_colours_it_is_as_plain_as_in_a_pipe(wish: str, tmp_path: Path) -> None:
    with terminal(DEMO, {"TMPDIR": str(tmp_path), wish: "1"}) as seen:
        seen.read_until("[1/")
        assert seen.end(signal.SIGINT) == 130
    assert "\x1b" not in seen.screen


def play_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return run_demo(DemoOptions.parse(engine="vllm", keep=False, fast=True, svg="", overrides=[]))


def test_an_engine_that_does_not_start_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise SimError("the simulated vllm engine ended with exit code 1")

    monkeypatch.setattr(SimProcess, "wait_serving", refuse)
    assert play_at_once(monkeypatch, tmp_path) == 1
    assert capsys.readouterr().err == (
        "enginewatch demo: the demo cannot be set up: the simulated vllm engine ended with exit code 1\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_sidecar_that_does_not_start_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_tether, "_TETHERED", "import sys; sys.exit('port taken')")
    assert play_at_once(monkeypatch, tmp_path) == 1
    assert capsys.readouterr().err == "enginewatch demo: the sidecar ended at once: port taken\n"
    assert list(tmp_path.iterdir()) == []


class PretendedScene:
    """A scene on a machine that stands still, or does not, while a step is played."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.is_repeat = False

    async def stood_still(self, since: float) -> str:
        return self.why

    async def set_again(self) -> None:
        pass


async def play_twice_failing_first(scene: PretendedScene) -> Result:
    async def step(scene: Scene) -> str:
        if not scene.is_repeat:
            raise NotAsExpected("503 only after 9 s")
        return "503 after 4 s"

    return await play(Step("", "", step), cast(Scene, scene))


async def test_a_step_that_failed_while_the_machine_stood_still_is_played_again() -> None:
    result = await play_twice_failing_first(PretendedScene("this machine stood still for 3 s"))
    assert (result.passed, result.seen) == (True, "503 after 4 s (second attempt: this machine stood still for 3 s)")


async def test_a_step_that_failed_on_a_machine_that_runs_has_failed() -> None:
    result = await play_twice_failing_first(PretendedScene(""))
    assert (result.passed, result.seen) == (False, "503 only after 9 s")


@pytest.mark.parametrize("engine", list(PARTS))
def test_the_fast_story_leaves_time_for_two_canaries_before_a_hang_is_declared(engine: str) -> None:
    assert fast_settings(engine).doubts(log_file=False) == []


def test_the_unhurried_story_uses_what_runs_in_production() -> None:
    assert Settings(warmup_sec=0.0) == UNHURRIED


@pytest.mark.parametrize(("engine", "detect", "recover"), [("vllm", 9, 3), ("sglang", 9, 3), ("trtllm", 13, 7)])
def test_what_is_expected_follows_from_the_settings(engine: str, detect: int, recover: int) -> None:
    settings, part = Settings(poll_interval_sec=1, stall_sec=5, active_probe_timeout_sec=2), PARTS[engine]
    assert (detect_sec(settings, part), recover_sec(settings, part)) == (detect, recover)
    assert any(f"503 within {detect} s" in step.expected for step in story(part, settings))

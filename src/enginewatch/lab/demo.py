"""`enginewatch demo`: the whole story on this machine, with a simulated engine and the real sidecar.

Everything it starts ends with it, however it ends: the story's end, Ctrl-C, SIGTERM or a bug.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from enginewatch.core.settings import Settings
from enginewatch.lab.demo_cast import PARTS
from enginewatch.lab.demo_pair import Pair
from enginewatch.lab.demo_scene import Scene, play
from enginewatch.lab.demo_stage import Stage
from enginewatch.lab.demo_story import story
from enginewatch.lab.demo_tether import StageError

FAST = Settings(
    poll_interval_sec=0.5, stall_sec=4.0, metrics_timeout_sec=2.0, warmup_sec=0.0, active_probe_timeout_sec=1.0
)
"""A story of under a minute."""
UNHURRIED = Settings(warmup_sec=0.0)
"""What runs in production, but for the warm-up of ten minutes."""


def fast_settings(engine: str) -> Settings:
    """The thresholds of the fast story of one engine."""
    changed: dict[str, Any] = dict(PARTS[engine].hurry)
    return replace(FAST, **changed)


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What the demo is told.

    Attributes:
        engine: one of demo_cast.PARTS.
        keep: leave everything running at the end, until a signal.
        svg: file for a picture of the result; empty = none.
        settings: thresholds of the story.
        overrides: hot settings that the sidecar gets instead, without the story knowing.
    """

    engine: str
    keep: bool
    svg: str
    settings: Settings
    overrides: dict[str, Any]

    @classmethod
    def parse(cls, *, engine: str, keep: bool, fast: bool, svg: str, overrides: Sequence[str]) -> DemoOptions:
        """Options from a command line; `overrides` are KEY=VALUE.

        Raises:
            ValueError: an override that is no setting, or a picture that cannot be written; a sentence.
        """
        if svg and not Path(svg).resolve().parent.is_dir():
            raise ValueError(f"--svg {svg}: there is no such directory")
        settings = fast_settings(engine) if fast else UNHURRIED
        return cls(engine, keep, svg, settings, dict(_override(text) for text in overrides))

    @property
    def hot_settings(self) -> dict[str, Any]:
        """The sidecar's configuration file."""
        usual = asdict(Settings())
        changed = {name: value for name, value in asdict(self.settings).items() if value != usual[name]}
        return {**changed, **self.overrides}


def run_demo(options: DemoOptions) -> int:
    """Play the story. Returns 0 when everything was seen as expected, else 1; 130 after Ctrl-C, 143 after SIGTERM."""
    try:
        return asyncio.run(_run(options))
    except StageError as error:
        print(f"enginewatch demo: {error}", file=sys.stderr)
        return 1


async def _run(options: DemoOptions) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    told: list[int] = []

    def stop(number: int) -> None:
        if not told:  # a second one must not interrupt the tidying up
            told.append(number)
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    results: list[bool] = []
    try:
        await _play(options, results)
    except asyncio.CancelledError:
        if not told:
            raise
        # With --keep a signal is how it is meant to end.
        if not (options.keep and results):
            return 128 + told[0]
    return 0 if all(results) else 1


async def _play(options: DemoOptions, results: list[bool]) -> None:
    """Play all steps; `results` is filled once the story is over."""
    from rich.console import Console

    from enginewatch.lab.demo_view import LiveView, PlainView, Progress, View, wants_picture, write_svg

    part = PARTS[options.engine]
    async with Stage(part, options.hot_settings, options.settings.poll_interval_sec) as stage:
        settings = options.settings
        scene = Scene(stage, settings)
        progress = Progress(
            part.title,
            story(part, settings),
            cell_sec=max(0.5, settings.stall_sec / 8),
        )
        console = Console()
        view: View = LiveView(console, stage, progress) if wants_picture() else PlainView(stage, progress)
        try:
            for number, step in enumerate(progress.steps, 1):
                progress.began_at = time.monotonic()
                result = await play(step, scene)
                progress.results.append(result)
                view.ended(number, result)
            await stage.clients.stop()
            view.finish()
            results += [result.passed for result in progress.results]
            if options.svg:
                try:
                    write_svg(options.svg, stage, progress)
                except OSError as error:
                    raise StageError(f"--svg {options.svg}: {error.strerror}") from None
            if options.keep:
                stage.clients.start()
                view.say(_what_to_try(stage))
                await asyncio.Event().wait()
        finally:
            view.close()


def _what_to_try(stage: Stage) -> str:
    rank, engine, sidecar = stage.sim.ranks[0].pid, stage.sim.url, stage.sidecar_url
    return f"""
Left running until Ctrl-C, with 4 clients.
  engine   {engine}   front end {stage.sim.pid}, rank {rank}
  sidecar  {sidecar}   process {stage.sidecar.pid}, settings {stage.config_file}

  {stage.part.by_hand.format(rank=rank, engine=engine)}
  curl -i {engine}/health        what the engine says of itself
  curl -i {sidecar}/healthz       what the kubelet is told
  enginewatch why {sidecar}       every witness, and what would flip the verdict
  enginewatch doctor {engine}    the engine, seen from outside
  curl -X POST {engine}/_sim/crash -d '{{"down_sec": 3, "load_sec": 10}}'
{_what_to_try_behind_the_router(stage.pair) if stage.pair.router.is_running else ""}"""


def _what_to_try_behind_the_router(pair: Pair) -> str:
    variables = " ".join(f"{name}={value}" for name, value in pair.environment.items())
    return f"""
  router   {pair.url}   process {pair.router.pid}, its log and the guard's in {pair.router.log}
  prefill  {pair.prefill.url}   sidecar {pair.prefill_sidecar.url}
  decode   {pair.decode.url}   sidecar {pair.decode_sidecar.url}

  curl {pair.url}/v1/completions -H 'Content-Type: application/json' -d '{{"prompt": "Test"}}'
  curl -X POST {pair.prefill.url}/_sim/restart -d '{{}}'    another process at the same address
  {variables} enginewatch guard live; echo $?
"""


def _override(text: str) -> tuple[str, Any]:
    """KEY=VALUE as a hot setting.

    Raises:
        ValueError: there is no such setting, or the value is not one for it.
    """
    key, equals, value = text.partition("=")
    kinds = get_type_hints(Settings)
    if not equals or key not in kinds:
        names = ", ".join(field.name for field in fields(Settings))
        raise ValueError(f"--set {text}: expected KEY=VALUE with one of {names}")
    try:
        if kinds[key] is float:
            return key, float(value)
        if kinds[key] is int:
            return key, int(value)
        if kinds[key] is bool:
            return key, {"true": True, "false": False}[value]
    except (ValueError, KeyError):
        raise ValueError(f"--set {text}: expected a value of type {kinds[key].__name__}") from None
    return key, value

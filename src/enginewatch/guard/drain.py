"""`guard drain`: an engine pod's preStop. Waits until the engine has no requests left.

Ends, in this order:
    - when the sidecar says that the engine hangs: its gauges are frozen, waiting would only hold the GPUs;
    - when two pages in a row say that nothing runs, waits or stands in a prefill/decode queue;
    - when nothing could be learned from the engine for 30 s in a row;
    - at the deadline.
A sidecar that is silent or absent changes nothing: it never counts as a hang. The exit code is 0 in all of these cases:
the kubelet stops the container whatever a preStop hook says, and a failed one only adds a misleading event.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from enginewatch.guard.gauges import TRTLLM_OWNER, Load, read_load
from enginewatch.guard.main import say
from enginewatch.guard.plain_http import Address, Answer, Asker, NoAnswer
from enginewatch.guard.settings import UsageError

UNREADABLE_SEC = 30.0
CALM_PAGES = 2
ROUND_SEC = 1.0
"""From the start of a round of questions to that of the next."""
ANSWER_SEC = 2.0
MAX_BYTES = 8 * 1024 * 1024
MAX_REASON_CHARS = 200


class Round(NamedTuple):
    """What one round of questions told.

    Attributes:
        hung: the sidecar's reason, if it says that the engine hangs.
        load: None where the engine did not tell it.
        trouble: why not, a short phrase.
    """

    hung: str | None
    load: Load | None
    trouble: str = ""


class Drain:
    """The rules, on a clock of the caller's.

    Args:
        began: now, in seconds.
        deadline_sec: from `began`.
    """

    def __init__(self, began: float, deadline_sec: float) -> None:
        self._began = began
        self._deadline_sec = deadline_sec
        self._calm = 0
        self._told_at = began
        self._last = "nothing was learned of its requests"

    def left(self, now: float) -> float:
        """Seconds until the deadline."""
        return max(0.0, self._began + self._deadline_sec - now)

    def handle(self, told: Round, now: float) -> str | None:
        """Take in a round. Returns the sentence to end with, None to go on."""
        if told.hung is not None:
            return f"not drained: the sidecar says that the engine hangs, its requests would never end: {told.hung}"
        if told.load is None:
            self._calm = 0
            self._last = f"its requests could not be counted ({told.trouble})"
        else:
            self._told_at = now
            self._calm = 0 if told.load.total else self._calm + 1
            self._last = str(told.load)
        if self._calm >= CALM_PAGES:
            return f"drained: nothing runs or waits, after {now - self._began:.0f} s"
        unreadable_sec = now - self._told_at
        if unreadable_sec >= UNREADABLE_SEC:
            return f"not drained: for {unreadable_sec:.0f} s the engine's requests could not be counted: {told.trouble}"
        if not self.left(now):
            return f"not drained within {self._deadline_sec:g} s: {self._last}"
        return None


class Questions:
    """Asks the sidecar and the engine.

    Args:
        sidecar: its address; None without one.
        engine: its address, or with a path that of its metrics page.
        clock: monotonic seconds.
    """

    def __init__(self, sidecar: Address | None, engine: Address, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sidecar = Asker(sidecar) if sidecar else None
        self._sidecar_base = sidecar.path if sidecar else ""
        self._engine = Asker(engine)
        self._page = engine.path
        self._trtllm = False

    def ask(self, until: float) -> Round:
        """One round of questions, the sidecar's first: a hung engine is not worth the wait for its page."""
        verdict = self._verdict(until)
        if verdict.get("hung") is True:
            return Round(_printable(verdict.get("reason")), None)
        try:
            return Round(None, self._load(verdict, until))
        except NoAnswer as trouble:
            return Round(None, None, str(trouble))

    def _get(self, asker: Asker, path: str, until: float) -> Answer:
        return asker.get(path, timeout=max(0.1, min(ANSWER_SEC, until - self._clock())), max_bytes=MAX_BYTES)

    def _verdict(self, until: float) -> dict[str, Any]:
        if self._sidecar is None:
            return {}
        try:
            answer = self._get(self._sidecar, f"{self._sidecar_base}/verdict", until)
        except NoAnswer:
            return {}
        return _object(answer.body) if answer.status == 200 else {}

    def _load(self, verdict: dict[str, Any], until: float) -> Load:
        if not self._page and not self._trtllm:
            self._look_who_it_is(until)
        if self._trtllm:
            load = _load_by_sidecar(verdict)
            if load is None:
                raise NoAnswer("TensorRT-LLM's page does not tell them, nor does the sidecar")
            return load
        answer = self._get(self._engine, self._page, until)
        if answer.status != 200:
            raise NoAnswer(f"{self._page}: HTTP {answer.status}")
        load = read_load(answer.body)
        if load is None:
            raise NoAnswer(f"{self._page} has no gauges of running and waiting requests that are known here")
        return load

    def _look_who_it_is(self, until: float) -> None:
        """Before /metrics is asked for the first time. TensorRT-LLM has no API key: a refusal is another engine's."""
        answer = self._get(self._engine, "/v1/models", until)
        models = _objects(_object(answer.body), "data") if answer.status == 200 else []
        if any(model.get("owned_by") == TRTLLM_OWNER for model in models):
            self._trtllm = True
        else:
            self._page = "/metrics"


def run(
    arguments: Sequence[str],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    questions: Callable[[Address | None, Address], Questions] = Questions,
) -> int:
    """Drains; prints one line on standard output.

    Returns:
        0, also where the engine was not drained.

    Raises:
        UsageError: a flag cannot be used.
    """
    flags = _parser().parse_args(arguments)
    asked = questions(flags.sidecar, flags.engine)
    drain = Drain(clock(), flags.deadline_sec)
    while True:
        began = clock()
        told = asked.ask(began + drain.left(began))
        now = clock()
        end = drain.handle(told, now)
        if end is not None:
            say(end)
            return 0
        sleep(min(max(0.0, began + ROUND_SEC - now), drain.left(now)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--engine", type=_address, required=True)
    parser.add_argument("--sidecar", type=_optional_address)
    parser.add_argument("--deadline-sec", type=_seconds, default=300.0)
    return parser


def _address(text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _optional_address(text: str) -> Address | None:
    return _address(text) if text else None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a number of seconds above zero")
    return seconds


def _load_by_sidecar(verdict: dict[str, Any]) -> Load | None:
    """What the sidecar counts, if it is something: where TensorRT-LLM is idle, its statistics say nothing at all."""
    cores = _objects(verdict, "cores")
    load = Load(*(sum(_number(core.get(key)) for core in cores) for key in ("running", "waiting")))
    return load if load.total else None


def _number(value: object) -> float:
    return max(0.0, value) if isinstance(value, float) and value < 1e9 else 0.0


def _objects(value: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = value.get(key)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _object(body: bytes) -> dict[str, Any]:
    """A JSON object; empty for everything else."""
    try:
        value = json.loads(body, parse_int=float)  # an integer of a million digits would take seconds
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _printable(reason: object) -> str:
    text = reason if isinstance(reason, str) else ""
    return "".join(char if char.isprintable() else " " for char in text[:MAX_REASON_CHARS]) or "it gives no reason"

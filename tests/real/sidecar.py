"""The real sidecar as a process, asked over HTTP as the kubelet and the operators ask it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from tests.real.engine import get

POLL_SEC = 1.0
STALL_SEC = 5.0
CANARY_SEC = 2.0
LOOKS_MOST = 10
"""So often in a row two answers may differ because the verdict changed between them."""
ENVIRONMENT = {
    "POLL_INTERVAL_SEC": str(POLL_SEC),
    "STALL_SEC": str(STALL_SEC),
    "ACTIVE_PROBE_TIMEOUT_SEC": str(CANARY_SEC),
}


def unix(rfc3339: str) -> float:
    """Unix seconds of a time as the sidecar writes it.

    Raises:
        ValueError: It is none.
    """
    return datetime.fromisoformat(rfc3339).timestamp()


@dataclass(frozen=True)
class Sample:
    """One look at /healthz, with the whole verdict behind it."""

    at: float
    """Unix seconds when the answer was there."""
    status: int
    body: str
    state: str
    cores: Mapping[str, str]
    """Each core's own state."""


class SidecarProcess:
    """`enginewatch watch` with the settings above, warm-up switched off by file; sampled several times a second."""

    def __init__(
        self,
        engine_url: str,
        directory: Path,
        settings: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        port: int = 0,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._config = directory / "config.json"
        self._settings: dict[str, Any] = {"warmup_sec": 0}
        self._write_config(settings or {})
        inherited = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")}
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "enginewatch", "watch", "--engine-url", engine_url),
                *("--listen", f"127.0.0.1:{port}", "--config-file", str(self._config)),
            ],
            env=inherited | ENVIRONMENT | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self.samples: list[Sample] = []
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._read_log, daemon=True)]
        self._threads[0].start()
        try:
            self.url = self._wait_url()
            self.port = int(self.url.rpartition(":")[2])
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        self._threads.append(threading.Thread(target=self._sample, daemon=True))
        self._threads[1].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.set()
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        finally:
            self._process.kill()
            self._process.wait()
            for thread in self._threads:
                thread.join(timeout=10)

    def configure(self, settings: Mapping[str, Any], timeout: float = 20.0) -> None:
        """Turns hot settings, besides those that hold, and returns when the sidecar says that they hold.

        Raises:
            AssertionError: Not within `timeout` seconds.
        """
        self._write_config(settings)
        deadline = time.monotonic() + timeout
        while (holding := self.json("/verdict")["settings"]) != holding | settings:
            assert time.monotonic() < deadline, f"{settings} not in force after {timeout} s: {holding}"
            time.sleep(0.1)

    def json(self, path: str) -> dict[str, Any]:
        """A JSON body of the sidecar's.

        Raises:
            AssertionError: Another status than 200.
        """
        status, body = get(f"{self.url}{path}")
        assert status == 200, f"{path} answered {status}: {body[:300]!r}"
        parsed: dict[str, Any] = json.loads(body)
        return parsed

    def history(self) -> list[dict[str, Any]]:
        """What /history tells, oldest first."""
        status, body = get(f"{self.url}/history")
        assert status == 200, f"/history answered {status}: {body[:300]!r}"
        return [json.loads(line) for line in body.splitlines()]

    def series(self, name: str) -> dict[str, float]:
        """The series of one of the sidecar's own metrics, by their label text."""
        page = get(f"{self.url}/metrics")[1].decode()
        lines = re.findall(rf"^{re.escape(name)}(\{{.*\}})? (\S+)$", page, re.MULTILINE)
        return {labels: float(value) for labels, value in lines}

    def wait(self, wanted: Callable[[Sample], bool], timeout: float, what: str, since: float | None = None) -> Sample:
        """The first sample that is as wanted, from now on or since a moment in Unix seconds.

        Raises:
            AssertionError: None came within `timeout` seconds; the message tells what was seen instead.
        """
        begun = len(self.samples)
        if since is not None:
            begun = next((number for number, sample in enumerate(self.samples) if sample.at >= since), begun)
        deadline = time.monotonic() + timeout
        while True:
            for sample in self.samples[begun:]:
                if wanted(sample):
                    return sample
            assert self._process.poll() is None, f"the sidecar ended: {self.log[-5:]}"
            assert time.monotonic() < deadline, f"not {what} within {timeout} s: {self.told(begun)}"
            time.sleep(0.02)

    def since(self, moment: float) -> list[Sample]:
        """The samples after a moment in Unix seconds."""
        return [sample for sample in self.samples if sample.at >= moment]

    def states(self, moment: float) -> list[str]:
        """The states seen since a moment in Unix seconds, each once per run of its kind."""
        return [state for state, _ in itertools.groupby(sample.state for sample in self.since(moment))]

    def noted(self) -> list[dict[str, Any]]:
        """The verdicts of /history, oldest first.

        Every change from or to a state that is not an everyday one is among them, however short it was.
        """
        return [event for event in self.history() if event["kind"] == "verdict"]

    def told(self, begun: int = 0) -> str:
        """The states seen, each once per run of its kind, and the canaries, for the message of a failed test."""
        lines: list[str] = []
        last = None
        for sample in self.samples[begun:]:
            if (sample.status, sample.state) != last:
                lines.append(f"{sample.at:.2f} {sample.status} {sample.state}; {sample.body}")
                last = (sample.status, sample.state)
        with contextlib.suppress(OSError, AssertionError):
            lines += [f"canary: {event}" for event in self.history() if event["kind"] == "canary"][-10:]
        return "\n".join(lines)

    def _write_config(self, settings: Mapping[str, Any]) -> None:
        self._settings |= settings
        whole = self._config.with_suffix(".new")
        whole.write_text(json.dumps(self._settings))
        whole.replace(self._config)  # never half a file

    def _wait_url(self) -> str:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and self._process.poll() is None:
            for line in self.log:
                try:
                    found = json.loads(line).get("url")
                except ValueError:
                    continue
                if isinstance(found, str) and found.startswith("http://127.0.0.1:"):
                    return found.rstrip("/")
            time.sleep(0.02)
        raise AssertionError(f"the sidecar did not say where it listens: {self.log[-20:]}")

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self.log.append(line.rstrip("\n"))

    def _look(self) -> Sample:
        """One picture of two answers: between them the verdict may change, and then both are asked for again."""
        for _ in range(LOOKS_MOST):
            status, answer = get(f"{self.url}/healthz")
            body = answer.decode(errors="replace")
            status_of_verdict, answer = get(f"{self.url}/healthz?verbose")
            verdict = json.loads(answer)
            # The seconds in the sentence may differ: one is of the last poll, the other of this moment.
            same = [re.sub(r"\d+", "N", sentence) for sentence in (body, verdict["reason"])]
            if status == status_of_verdict and same[0].endswith(same[1]):
                break
        else:
            raise AssertionError(f"/healthz and its verbose form disagree, and not for a moment: {status} {body}")
        cores = {core["core"]: core["state"] for core in verdict["cores"]}
        return Sample(time.time(), status, body, verdict["state"], cores)

    def _sample(self) -> None:
        while not self._closing.wait(0.1):
            try:
                sample = self._look()
            except Exception as error:
                # Whatever it is, it belongs into the story that a failed test tells.
                sample = Sample(time.time(), 0, repr(error), "no answer", {})
            if not self._closing.is_set():
                self.samples.append(sample)

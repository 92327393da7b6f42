"""Asking a simulated engine over plain HTTP, and reading its page with the reference parser."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from enginewatch.lab.sim.process import SimProcess

_SERIES = re.compile(r"^([^{ ]+)(?:\{(.*)\})? \S+$")
_LABEL = re.compile(r'(\w+)="(?:[^"\\]|\\.)*"')


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    seconds: float
    headers: dict[str, str]

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    sim: SimProcess, path: str, body: Any = None, *, timeout: float = 5.0, headers: dict[str, str] | None = None
) -> Answer:
    """GET, or POST with a body. Raises what the socket raises: TimeoutError, ConnectionRefusedError..."""
    began = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", sim.port, timeout=timeout)
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, data, headers or {})
        response = connection.getresponse()
        return Answer(response.status, response.read(), time.monotonic() - began, dict(response.getheaders()))
    finally:
        connection.close()


def canary(sim: SimProcess, *, timeout: float = 5.0, core: int | None = None, stream: bool = False) -> Answer:
    """A one-token request, aimed at a core if one is given."""
    if sim.engine == "trtllm":
        return ask(sim, "/v1/completions", {"prompt": "Test", "max_tokens": 1, "stream": stream}, timeout=timeout)
    if sim.engine == "vllm":
        headers = {} if core is None else {"X-data-parallel-rank": str(core)}
        body = {"prompt": "Test", "max_tokens": 1, "stream": stream}
        return ask(sim, "/v1/completions", body, timeout=timeout, headers=headers)
    native: dict[str, Any] = {"text": "Test", "sampling_params": {"max_new_tokens": 1}, "stream": stream}
    if core is not None:
        native["routed_dp_rank"] = core
    return ask(sim, "/generate", native, timeout=timeout)


def generation_path(sim: SimProcess) -> str:
    """Where a prompt goes that names both `prompt` and `text`."""
    return "/generate" if sim.engine == "sglang" else "/v1/completions"


def page_path(sim: SimProcess) -> str:
    return "/prometheus/metrics" if sim.engine == "trtllm" else "/metrics"


def hangs(question: Callable[[], object]) -> bool:
    """Whether a question gets no answer within its timeout."""
    try:
        question()
    except TimeoutError:
        return True
    return False


def page(sim: SimProcess, **options: Any) -> str:
    answer = ask(sim, page_path(sim), **options)
    assert answer.status == 200
    return answer.text


def value(text: str, name: str, **labels: str) -> float | None:
    """Sum of the series of that name with these labels; None when the page has none."""
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sum(found) if found else None


def shapes(text: str) -> set[tuple[str, tuple[str, ...]]]:
    """(sample name, label keys) of every series on a page."""
    found = set()
    for line in text.splitlines():
        match = None if line.startswith("#") else _SERIES.match(line)
        if match:
            found.add((match.group(1), tuple(sorted(key for key in _LABEL.findall(match.group(2) or "")))))
    return found


def comments(text: str) -> set[tuple[str, str, str]]:
    """(HELP or TYPE, family, type) of every comment on a page."""
    found = set()
    for line in text.splitlines():
        if line.startswith("# "):
            _, kind, name, rest = line.split(" ", 3)
            found.add((kind, name, rest if kind == "TYPE" else ""))
    return found


def eventually(question: Callable[[], bool], within: float = 5.0) -> None:
    """Wait until something is so; fails when it is not in time."""
    deadline = time.monotonic() + within
    while not question():
        assert time.monotonic() < deadline, "it did not become so in time"
        time.sleep(0.02)

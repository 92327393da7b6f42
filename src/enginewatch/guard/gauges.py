"""What an engine's metrics page says of requests that it still has: running, waiting, and in prefill/decode queues.

The guard travels without the rest of the package, so the names stand here once more; a test holds them against the
profiles in `engines/`, where their sources are.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple


class Gauges(NamedTuple):
    """Names of one engine's gauges, each to be read with every prefix."""

    title: str
    prefixes: tuple[str, ...]
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    queues: tuple[str, ...] = ()


GAUGES = (
    # num_requests_waiting is all that wait, those deferred for a remote KV transfer among them.
    Gauges(
        "vLLM",
        ("vllm:", "vllm_", "ray_vllm:", "ray_vllm_"),
        ("num_requests_running",),
        ("num_requests_waiting",),
    ),
    # A request whose grammar is being compiled is in no other queue. The others are empty series in other roles.
    Gauges(
        "SGLang",
        ("sglang:", "sglang_"),
        ("num_running_reqs",),
        ("num_queue_reqs", "num_grammar_queue_reqs"),
        (
            "num_prefill_bootstrap_queue_reqs",
            "num_prefill_prealloc_queue_reqs",
            "num_prefill_inflight_queue_reqs",
            "num_decode_prealloc_queue_reqs",
            "num_decode_transfer_queue_reqs",
        ),
    ),
    Gauges("llama.cpp", ("llamacpp:", "llamacpp_"), ("requests_processing",), ("requests_deferred",)),
)
"""TensorRT-LLM is missing on purpose: its gauges show one long request as nothing and keep their last value for ever on
an idle engine (`engines/trtllm.py`), so that a drain by them would end too early or never."""

TRTLLM_OWNER = "tensorrt_llm"
"""`owned_by` in TensorRT-LLM's list of models. Its /metrics is no page, and reading it removes what is read."""


class Load(NamedTuple):
    """Requests that an engine has, added up over its cores and ranks."""

    running: float
    waiting: float
    queued: float = 0.0
    """In prefill/decode queues."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.running + self.waiting + self.queued

    def __str__(self) -> str:
        queued = f", {self.queued:g} in prefill/decode queues" if self.queued else ""
        return f"{self.running:g} running, {self.waiting:g} waiting{queued}"


_RUNNING, _WAITING, _QUEUED = range(3)
_MEANINGS = {
    (prefix + name).encode(): (gauges.title, meaning)
    for gauges in GAUGES
    for prefix in gauges.prefixes
    for meaning, names in ((_RUNNING, gauges.running), (_WAITING, gauges.waiting), (_QUEUED, gauges.queues))
    for name in names
}
_SAMPLE = re.compile(
    rb"^[ \t]{0,8}("
    + b"|".join(re.escape(name) for name in sorted(_MEANINGS, key=len, reverse=True))
    + rb')[ \t]{0,8}(?:\{((?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*)\})?[ \t]{0,8}([-+.0-9A-Za-z]{1,64})(?=[ \t\r\n]|\Z)',
    re.MULTILINE,
)
# With priority scheduling SGLang's total stands under priority="" and those of each priority come on top of it.
_OF_ONE_PRIORITY = re.compile(rb'(?:^|[,\s])priority\s*=\s*"[^"]')


def read_load(page: bytes) -> Load | None:
    """The load on a metrics page; None where no engine's running and waiting requests both stand on it."""
    found: dict[str, list[float]] = {}
    said: set[tuple[str, int]] = set()
    for name, labels, number in _SAMPLE.findall(page):
        title, meaning = _MEANINGS[name]
        value = _finite(number)
        if value is None or _OF_ONE_PRIORITY.search(labels):
            continue
        said.add((title, meaning))
        found.setdefault(title, [0.0, 0.0, 0.0])[meaning] += max(0.0, value)
    whole = [sums for title, sums in found.items() if {(title, _RUNNING), (title, _WAITING)} <= said]
    if not whole:
        return None
    return Load(*(sum(column) for column in zip(*whole)))


def _finite(number: bytes) -> float | None:
    try:
        value = float(number)
    except ValueError:
        return None
    return value if math.isfinite(value) else None

"""TensorRT-LLM's Prometheus page: counters that move when a request completes, gauges that are written then.

Nothing on it is written by the executor. A completed response counts its request and wakes the task that reads the
records of iterations (trtllm_stats.py); a hang, and one long request just as well, therefore leave all of it as it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from enginewatch.lab.sim.options import SimOptions
from enginewatch.lab.sim.page import Families, in_use
from enginewatch.lab.sim.ranks import Stream
from enginewatch.lab.sim.trtllm_families import CONFIG, FAMILIES, ITERATION_GAUGES


class TrtllmPage:
    """What the front end counts, and the page made of it."""

    gzips = True

    def __init__(self, options: SimOptions) -> None:
        self._options = options
        self.on_completion: Callable[[], None] = lambda: None
        """Called whenever a response is complete."""
        self.reset()

    def reset(self) -> None:
        """All counters from zero in the same process."""
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._families = Families(FAMILIES, self._registry)
        self._missed_blocks = 0
        for name, own in CONFIG.items():
            names = {"model": self._options.model, "served_model_name": self._options.model}
            own = {**own, **(names if name == "trtllm_model_config_info" else {})}
            self._families.set(name, 1, **self._gauge_labels(), **own)
        self._families.add("trtllm_prompt_cached_tokens", 0, **self._labels())

    # --- what moves it ----------------------------------------------------------------------------------------------

    def on_ready(self, core: str, pid: int) -> None:
        """A rank's process started: nothing of it is on the page."""

    def on_step(self, core: str, message: dict[str, Any]) -> None:
        """A rank completed an iteration: the front end takes no notice."""

    def on_output(self, core: str, output: dict[str, Any], stream: Stream) -> None:
        """One request's share of it; only its end counts."""
        now = time.monotonic()
        if output.get("first"):
            stream.first_at = now
        if output.get("finish") not in ("length", "stop"):
            return
        labels = self._labels()
        self._families.add("trtllm_request_success", 1, finished_reason=output["finish"], **labels)
        self._families.add("trtllm_prompt_tokens", stream.prompt, **labels)
        self._families.add("trtllm_generation_tokens", stream.produced, **labels)
        first = stream.first_at if stream.first_at is not None else now
        for name, value in (
            ("e2e_request_latency_seconds", now - stream.arrived_at),
            ("time_to_first_token_seconds", first - stream.arrived_at),
            ("request_queue_time_seconds", output["queue"]),
            ("request_prefill_time_seconds", output["prefill"]),
            ("request_decode_time_seconds", output["decode"]),
            ("request_inference_time_seconds", output["prefill"] + output["decode"]),
            ("prompt_cached_tokens_per_request", 0),
        ):
            self._families.observe(f"trtllm_{name}", value, **labels)
        if stream.produced > 1:
            per_token = output["decode"] / (stream.produced - 1)
            self._families.observe("trtllm_time_per_output_token_seconds", per_token, **labels)
        self.on_completion()

    def on_abort(self, stream: Stream) -> None:
        """A client left: an unfinished request is counted nowhere."""

    def on_iteration(self, record: dict[str, Any]) -> None:
        """The collector read the record of one iteration."""
        gauges = self._gauge_labels()
        for name, path in ITERATION_GAUGES.items():
            value: Any = record
            for key in path:
                value = value[key]
            self._families.set(name, value, **gauges)
        self._families.set("trtllm_iteration_latency_seconds", record["iterLatencyMS"] / 1000, **gauges)
        cache, batch = record["kvCacheStats"], record["inflightBatchingStats"]
        self._families.set("trtllm_kv_cache_utilization", cache["usedNumBlocks"] / cache["maxNumBlocks"], **gauges)
        occupancy = batch["numContextRequests"] / record["maxNumActiveRequests"]
        self._families.set("trtllm_prefill_batch_occupancy", occupancy, **gauges)
        missed = cache["missedBlocks"] - self._missed_blocks
        self._missed_blocks = cache["missedBlocks"]
        if missed > 0:
            self._families.add("trtllm_kv_cache_missed_blocks", missed, **self._labels())
        if record["numCompletedRequests"]:
            self._families.add("trtllm_num_requests_completed", record["numCompletedRequests"], **self._labels())
        if batch["numCtxTokens"]:
            self._families.observe("trtllm_prefill_batch_tokens", batch["numCtxTokens"], **self._labels())

    def sleep_state(self, core: str, level: int) -> None:
        """Not on this page."""

    def rejected(self) -> None:
        """A request was turned away."""
        self._families.add("trtllm_request_error", 1, http_code="503", **self._labels())

    def http_began(self, route: str, method: str) -> None:
        """A request arrived: not counted."""

    def http_left(self, route: str, method: str) -> None:
        """A client left before the end of the response: not counted."""

    def http_ended(
        self, route: str, method: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """A response has ended: not counted, the instrumentation excludes every route."""

    # --- the page ---------------------------------------------------------------------------------------------------

    def render(self, accept: str, engine_series: bool) -> tuple[bytes, str]:
        """The page and its content type, OpenMetrics if the client asks for it."""
        encode, content_type = choose_encoder(accept)
        registry = in_use(self._registry) if engine_series else CollectorRegistry()
        return encode(registry), content_type

    def _labels(self) -> dict[str, str]:
        return {"model_name": self._options.model, "engine_type": "pytorch"}

    def _gauge_labels(self) -> dict[str, str]:
        return self._labels() | {"pid": str(os.getpid())}

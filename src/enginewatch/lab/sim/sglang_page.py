"""SGLang's metrics page, from a multiprocess registry: no process_*, no *_created.

What the schedulers report moves their counters and gauges; what the tokenizer counts (requests, prompt and generation
tokens) moves only when a request ends, and not at all for health probes.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from enginewatch.engines.profile import version_tuple
from enginewatch.lab.sim import sglang_families
from enginewatch.lab.sim.options import SimOptions
from enginewatch.lab.sim.page import Families, in_use
from enginewatch.lab.sim.ranks import Stream

_ENGINE_TYPES = {"agg": "unified", "prefill": "prefill", "decode": "decode"}
_CPU_PERIOD_SEC = 5.0
_PHASES_AT_SEC = (("scheduler_e2e", 1.0), ("tokenizer_e2e", 2.0))
"""Start-up phases that are told only some time after the first page."""
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class SglangPage:
    """What scheduler and tokenizer count, and the page made of it."""

    gzips = True

    def __init__(self, options: SimOptions) -> None:
        self._options = options
        self._version = version_tuple(options.reported_version)
        self._pids: dict[str, int] = {}
        self._told_cpu: dict[str, float] = {}
        self._cpu_due = 0.0
        # Durations of this start, to the nanosecond: no two processes share one.
        self._phases = {
            phase: round(base * random.uniform(0.8, 1.2), 9)
            for phase, base in (
                ("load_weight", 190.0),
                ("kv_cache_allocation", 0.4),
                ("scheduler_e2e", 245.0),
                ("tokenizer_e2e", 12.0),
            )
        }
        self._first_page_at: float | None = None
        self.reset()

    def reset(self) -> None:
        """All counters from zero in the same process."""
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        dp = self._options.dp > 1
        self._table = sglang_families.families(self._version, dp=dp)
        self._names = {family.name for family in self._table}
        self._families = Families(self._table, self._registry)
        for core, pid in self._pids.items():
            self.on_ready(core, pid)

    # --- what moves it ----------------------------------------------------------------------------------------------

    def on_ready(self, core: str, pid: int) -> None:
        """A scheduler started: what it declares exists from now on."""
        self._pids[core] = pid
        labels = self._scheduler(core)
        for name in sglang_families.scheduler_gauges(self._version):
            self._families.set(f"sglang:{name}", 0, **labels)
        for name in ("num_retracted_reqs", "num_paused_reqs"):
            self._families.set(f"sglang:{name}", 0, pid=str(pid), **labels)
        self._families.set("sglang:max_total_num_tokens", self._options.kv_tokens, **labels)
        bounds = sglang_families.ROUTING_KEY_BOUNDS
        for name in ("routing_key_running_req_count", "routing_key_all_req_count"):
            for low, high in itertools.pairwise(bounds):
                self._families.set(f"sglang:{name}", 0, gt=low, le=high, **labels)
        for family in self._table:
            if family.name in sglang_families.OPEN_FROM_START:
                label, values = sglang_families.OPEN_FROM_START[family.name]
                for value in values:
                    self._families.open(family.name, **labels, **{label: value})
            elif family.kind == "histogram" and "tp_rank" in family.labels:
                self._families.open(family.name, **labels)
        if "sglang:scheduler_idle_seconds" in self._names:
            self._families.open("sglang:scheduler_idle_seconds", **labels)
            self._families.open("sglang:scheduler_process_cpu_seconds", **labels)
            for stage in sglang_families.STAGES:
                self._stage(stage, 0.0, labels)
        if "sglang:fwd_occupancy" in self._names:
            self._families.set("sglang:fwd_occupancy", float("nan"), **labels)
        if "sglang:engine_startup_time" in self._names:
            self._families.set("sglang:engine_startup_time", self._phases["scheduler_e2e"], **labels)
            self._families.set("sglang:engine_load_weights_time", self._phases["load_weight"], **labels)

    def on_step(self, core: str, message: dict[str, Any]) -> None:
        """A scheduler reported a batch, its idle time or its gauges."""
        labels = self._scheduler(core)
        tokens = message.get("batch_tokens", 0)
        if message.get("batch") == "prefill":
            self._families.add("sglang:realtime_tokens", tokens, mode="prefill_compute", **labels)
            self._families.add("sglang:cuda_graph_passes", 1, mode="prefill_none", **labels)
            if "sglang:prefill_effective_tokens" in self._names:
                self._families.add("sglang:prefill_effective_tokens", tokens, mode="input", **labels)
        elif message.get("batch") == "decode":
            self._families.add("sglang:realtime_tokens", tokens, mode="decode", **labels)
            self._families.add("sglang:cuda_graph_passes", 1, mode="decode_cuda_graph", **labels)
        for name in ("bootstrap_failed", "transfer_failed"):
            if name in message:
                self._families.add(f"sglang:num_{name}_reqs", message[name], **labels)
        if "sglang:scheduler_idle_seconds" in self._names:
            self._loop_times(core, message, labels)
        if "gauges" in message:
            self._set_gauges(message["gauges"], labels)

    def _loop_times(self, core: str, message: dict[str, Any], labels: dict[str, str]) -> None:
        idle = message.get("idle", 0.0)
        self._families.add("sglang:scheduler_idle_seconds", idle, **labels)
        self._stage("idle", idle, labels)
        self._stage("run_batch", message.get("forward_sec", 0.0), labels)
        cpu = message.get("cpu_sec", 0.0)
        before = self._told_cpu.get(core, 0.0)
        self._families.add("sglang:scheduler_process_cpu_seconds", max(0.0, cpu - before), **labels)
        self._told_cpu[core] = cpu

    def _set_gauges(self, gauges: dict[str, Any], labels: dict[str, str]) -> None:
        values = {
            "num_running_reqs": gauges["num_running_reqs"],
            "num_queue_reqs": gauges["num_queue_reqs"],
            "num_used_tokens": gauges["num_used_tokens"],
            "token_usage": gauges["token_usage"],
            "full_token_usage": gauges["token_usage"],
            "gen_throughput": gauges["gen_throughput"],
            "decode_sum_seq_lens": gauges["decode_sum_seq_lens"],
            "pending_prealloc_token_usage": gauges["pending"],
            "num_prefill_inflight_queue_reqs": gauges["inflight"],
            "num_decode_prealloc_queue_reqs": gauges["prealloc"],
            "num_decode_transfer_queue_reqs": gauges["transfer"],
            sglang_families.bootstrap_gauge(self._version): gauges["bootstrap"],
            "is_cuda_graph": float(gauges["busy"]),
            "kv_used_tokens": gauges["num_used_tokens"],
            "kv_available_tokens": gauges["free"],
            "fwd_occupancy": 97.5 if gauges["busy"] else float("nan"),
        }
        for name, value in values.items():
            if f"sglang:{name}" in self._names:
                self._families.set(f"sglang:{name}", value, **labels)

    def on_output(self, core: str, output: dict[str, Any], stream: Stream) -> None:
        """The tokenizer counts a request when it ends."""
        if stream.probe or "finish" not in output:
            return
        if output["finish"] == "abort":
            self.on_abort(stream)
            return
        labels, streaming = self._tokenizer(), self._streaming(stream)
        self._families.add("sglang:num_requests", 1, **labels, **streaming)
        self._families.add("sglang:prompt_tokens", stream.prompt, **labels, **streaming)
        self._families.add("sglang:generation_tokens", stream.produced, **labels, **streaming)
        self._families.add("sglang:cached_tokens", 0, cache_source="total", **labels)
        took = time.monotonic() - stream.arrived_at
        self._families.observe("sglang:e2e_request_latency_seconds", took, **labels, **streaming)
        for name, value in (
            ("prompt_tokens_histogram", stream.prompt),
            ("uncached_prompt_tokens_histogram", stream.prompt),
            ("generation_tokens_histogram", stream.produced),
            ("num_retractions", 0),
        ):
            if f"sglang:{name}" in self._names:
                self._families.observe(f"sglang:{name}", value, **labels)

    def on_abort(self, stream: Stream) -> None:
        """A request was aborted, by its client or by a pause."""
        if not stream.probe:
            self._families.add("sglang:num_aborted_requests", 1, **self._tokenizer())

    def rejected(self) -> None:
        """A request was turned away because the queue is full: SGLang counts it as aborted."""
        self._families.add("sglang:num_aborted_requests", 1, **self._tokenizer())

    def sleep_state(self, core: str, level: int) -> None:
        """Not told on this page."""

    def http_began(self, route: str, method: str) -> None:
        """A request arrived; /metrics and health probes are counted too."""
        if "sglang:http_requests" in self._names:
            self._families.add("sglang:http_requests", 1, endpoint=route, method=method)
            self._families.add_to_gauge("sglang:http_requests_active", 1, endpoint=route, method=method)

    def http_left(self, route: str, method: str) -> None:
        """Its client left before the end of the response."""
        if "sglang:http_requests" in self._names:
            self._families.add_to_gauge("sglang:http_requests_active", -1, endpoint=route, method=method)

    def http_ended(
        self, route: str, method: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """Its response has ended."""
        self.http_left(route, method)

    # --- the page ---------------------------------------------------------------------------------------------------

    def render(self, accept: str, engine_series: bool) -> tuple[bytes, str]:
        """The page and its content type, OpenMetrics if the client asks for it."""
        if not engine_series:
            return b"", "text/plain; version=1.0.0; charset=utf-8"
        now = time.monotonic()
        self._tell_startup(now)
        if now >= self._cpu_due:
            self._cpu_due = now + _CPU_PERIOD_SEC
            self._tell_cpu()
        encode, content_type = choose_encoder(accept)
        return encode(in_use(self._registry)), content_type

    def _tell_startup(self, now: float) -> None:
        if "sglang:startup_time_seconds" not in self._names:
            return
        if self._first_page_at is None:
            self._first_page_at = now
        told = ["load_weight", "kv_cache_allocation"]
        told += [phase for phase, after in _PHASES_AT_SEC if now - self._first_page_at >= after]
        for phase in told:
            self._families.set("sglang:startup_time_seconds", self._phases[phase], phase=phase, **self._tokenizer())
        for phase, share in (("decode", 0.13), ("prefill", 0.02)):
            seconds = round(self._phases["scheduler_e2e"] * share, 3)
            self._families.set("sglang:startup_cuda_graph_time_seconds", seconds, phase=phase, **self._tokenizer())

    def _tell_cpu(self) -> None:
        """Every 5 s, by threads that do not care whether the scheduler's loop turns; and so it is no progress."""
        components = {"tokenizer": time.process_time(), "detokenizer": time.process_time() / 10}
        components |= {"scheduler": sum(_cpu_of(pid) for pid in self._pids.values())}
        for component, seconds in components.items():
            before = self._told_cpu.get(component, 0.0)
            self._families.add("sglang:process_cpu_seconds", max(0.0, seconds - before), component=component)
            self._told_cpu[component] = seconds

    def _stage(self, stage: str, seconds: float, labels: dict[str, str]) -> None:
        self._families.add("sglang:scheduler_stage_seconds", seconds, category=stage, forward_overlap="none", **labels)

    def _tokenizer(self) -> dict[str, str]:
        return {"model_name": self._options.model, "engine_type": _ENGINE_TYPES[self._options.role]}

    def _streaming(self, stream: Stream) -> dict[str, str]:
        if self._version < sglang_families.NEWER:
            return {}
        return {"is_streaming": "true" if stream.streaming else "false"}

    def _scheduler(self, core: str) -> dict[str, str]:
        labels = self._tokenizer() | {"tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
        return labels | {"dp_rank": core} if self._options.dp > 1 else labels


def _cpu_of(pid: int) -> float:
    """User and system seconds of a process, 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS

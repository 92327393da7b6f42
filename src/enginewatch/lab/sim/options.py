"""What one simulated engine is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from enginewatch.engines.profile import ROLES, Role, version_tuple

Engine = Literal["vllm", "sglang", "trtllm"]
LogFormat = Literal["plain", "cri"]

ENGINES: tuple[Engine, ...] = get_args(Engine)
DEFAULT_VERSIONS: dict[Engine, str] = {"vllm": "0.32.0", "sglang": "0.5.23", "trtllm": "1.4.0rc4"}


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Options of `enginewatch sim` and of `python -m enginewatch.lab.sim`; times in seconds.

    Attributes:
        engine: which engine to imitate.
        host: address to listen on.
        port: TCP port; 0 = one that the system gives, kept over restarts.
        role: agg, or one side of a disaggregated pair.
        dp: data-parallel cores, one rank process each.
        model: served model name.
        api_servers: vLLM API servers; 0 = the engine's default, as many as cores. More than 1 means the page of a
            multiprocess registry: no process_* and no *_created series. One front-end process answers all the same.
        load_sec: model load; until it is over the port refuses connections.
        step_ms: milliseconds of one scheduler step.
        api_key: when set, what `Authorization: Bearer` must carry. TensorRT-LLM has none.
        version: reported version; decides which series a SGLang page has. Empty = the newest known.
        dev_mode: vLLM's VLLM_SERVER_DEV_MODE: /pause, /is_paused, /sleep...
        load_tracking: vLLM's --enable-server-load-tracking: /load tells the open requests, otherwise always 0.
        quiet: no banner on stderr.
        core_death_exit_sec: how long a vLLM front end stays up, answering 503, after a core died.
        restart: start the engine again after it exited by itself, as a kubelet would.
        max_running: requests that run at once on one core; the others wait.
        max_batched_tokens: token budget of one step (vLLM, TensorRT-LLM), chunk of a prefill (SGLang); 0 = the engine's
            default.
        block_size: tokens per KV block.
        kv_tokens: KV capacity of one core in tokens.
        transfer_sec: how long a KV transfer from or to a P/D partner takes.
        bootstrap_port: a vLLM prefill's Mooncake bootstrap server, whose GET /query tells the engine id, new with every
            process; 0 = a port that the system gives, kept over restarts. Negative = none, and the prefill's answers
            carry what NIXL needs. A decode asks for the KV where its request says: an engine id that the bootstrap
            server does not know fails at once, one that it knew when its process still lived waits in vain for
            transfer-timeout-sec.
        transfer_timeout_sec: how long a vLLM decode waits for KV that does not come: the real one's 480, and 60 more.
        health_timeout_sec: after how long SGLang's /health gives up.
        gauge_stale_sec: how long SGLang gauges keep their last value when the engine becomes idle; negative = what
            the version does (30 before 0.5.18, then 0).
        iter_stats: TensorRT-LLM's enable_iter_perf_stats, off as in the real one: without it GET /metrics is always [].
        iter_stats_interval: keep the record of every so many iterations only (iter_perf_stats_interval).
        iter_stats_max: records kept until somebody reads them; the oldest are dropped (iter_stats_max_iterations).
        return_perf_metrics: TensorRT-LLM's option of that name: /prometheus/metrics exists, and its collector is the
            only reader of the records.
        blocking_stats: TensorRT-LLM reads the records as its releases 1.2 and 1.3 did: all of the server waits for the
            rank meanwhile.
        hang_detection_sec: after how long without an iteration TensorRT-LLM's HangDetector kills the ranks; 0 = never.
        exit_when_dead: a TensorRT-LLM server whose executor has died ends at the next GET /health, instead of
            answering 503 for ever (NVIDIA/TensorRT-LLM#18663).
        no_health_generate: no /health_generate, as in old TensorRT-LLM.
        log_file: file that gets the engine's log lines; empty = none.
        log_format: how lines are written: `plain`, or with the prefix a container runtime puts before them.
        until_stdin_closes: end when standard input closes, so that no engine outlives the test that started it.
    """

    engine: Engine
    host: str = "127.0.0.1"
    port: int = 0
    role: Role = "agg"
    dp: int = 1
    model: str = "simulated-model"
    api_servers: int = 0
    load_sec: float = 0.0
    step_ms: float = 25.0
    api_key: str = ""
    version: str = ""
    dev_mode: bool = False
    load_tracking: bool = False
    quiet: bool = False
    core_death_exit_sec: float = 5.0
    restart: bool = False
    max_running: int = 256
    max_batched_tokens: int = 0
    block_size: int = 16
    kv_tokens: int = 2_097_152
    transfer_sec: float = 0.05
    bootstrap_port: int = -1
    transfer_timeout_sec: float = 540.0
    health_timeout_sec: float = 20.0
    gauge_stale_sec: float = -1.0
    iter_stats: bool = False
    iter_stats_interval: int = 1
    iter_stats_max: int = 1000
    return_perf_metrics: bool = False
    blocking_stats: bool = False
    hang_detection_sec: float = 300.0
    exit_when_dead: bool = False
    no_health_generate: bool = False
    log_file: str = ""
    log_format: LogFormat = "plain"
    until_stdin_closes: bool = False

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise ValueError(problem)

    def _problem(self) -> str | None:
        for name, value, allowed in (
            ("engine", self.engine, ENGINES),
            ("role", self.role, ROLES),
            ("log-format", self.log_format, get_args(LogFormat)),
        ):
            if value not in allowed:
                return f"{name} is {value!r}, expected one of {', '.join(allowed)}"
        if not 0 <= self.port <= 65535:
            return f"port is {self.port}, expected 0 (any free port) to 65535"
        if self.bootstrap_port > 65535:
            return f"bootstrap-port is {self.bootstrap_port}, expected 0 (any free port) to 65535, or -1 for none"
        if self.bootstrap_port >= 0 and (self.engine, self.role) != ("vllm", "prefill"):
            return f"bootstrap-port is {self.bootstrap_port}, but only a vllm prefill has that server: leave it out"
        if not 1 <= self.dp <= 256:
            return f"dp is {self.dp}, expected 1 to 256 cores"
        if self.engine == "trtllm" and self.dp > 1:
            return f"dp is {self.dp}, but a simulated trtllm is always one core: leave --dp out"
        if self.engine == "trtllm" and self.api_key:
            return "api-key is set, but a simulated trtllm, like the real one, checks no key: leave --api-key out"
        for name in ("max_running", "block_size", "kv_tokens", "iter_stats_interval", "iter_stats_max"):
            if getattr(self, name) < 1:
                return f"{name.replace('_', '-')} is {getattr(self, name)}, expected at least 1"
        for name in (
            "api_servers",
            "load_sec",
            "step_ms",
            "core_death_exit_sec",
            "transfer_sec",
            "transfer_timeout_sec",
            "max_batched_tokens",
            "hang_detection_sec",
        ):
            if getattr(self, name) < 0:
                return f"{name.replace('_', '-')} is {getattr(self, name)}, expected 0 or more"
        return None

    @property
    def reported_version(self) -> str:
        """The version this engine says it is."""
        return self.version or DEFAULT_VERSIONS[self.engine]

    @property
    def token_budget(self) -> int:
        """Tokens of one step, or of one prefill chunk: the engines' own defaults unless given."""
        return self.max_batched_tokens or {"vllm": 2048, "sglang": 8192, "trtllm": 8192}[self.engine]

    @property
    def multiprocess(self) -> bool:
        """Whether the metrics registry is one of several API processes."""
        return (self.api_servers or self.dp) > 1

    @property
    def stale_sec(self) -> float:
        """How long SGLang gauges keep their value when the engine becomes idle (sgl-project/sglang#31517)."""
        if self.gauge_stale_sec >= 0:
            return self.gauge_stale_sec
        return 30.0 if version_tuple(self.reported_version) < (0, 5, 18) else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON data, for the processes of this engine."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def reachable(host: str) -> str:
    """An address to reach what listens on `host`: itself, or loopback where it is every address."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)

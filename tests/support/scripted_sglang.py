"""An SGLang-like engine for the virtual shell: other names, another core label, counters of two processes."""

from __future__ import annotations

from virtual_shell import ScriptedEngine


class ScriptedSGLang(ScriptedEngine):
    """SGLang as its page shows it; no process start time.

    Attributes:
        data_parallel: whether the scheduler's series carry `dp_rank`; the tokenizer's never do.
        step_series: whether the series that move during work are there (False: counters move at request ends only).
        heartbeat: seconds that the scheduler loop spent idle, from 0.5.20 on; None leaves the series out.
        loop_turns: whether the heartbeat advances.
        engine_type: what the scheduler's series say of the worker's role; None leaves the label out.
        has_ep_rank: whether they have a `moe_ep_rank`, as from the version on that is honest about the role.
        finished_tokens: the tokenizer's counter, which moves when a request ends.
    """

    kind = "sglang"

    def __init__(self, cores: int = 1, *, data_parallel: bool | None = None, version: str = "0.5.23") -> None:
        super().__init__(cores, start_time=None, version=version)
        self.data_parallel = cores > 1 if data_parallel is None else data_parallel
        self.step_series = True
        self.heartbeat: float | None = None
        self.loop_turns = True
        self.engine_type: str | None = None
        self.has_ep_rank = True
        self.finished_tokens = 0.0
        self.queues: dict[str, float] = {}
        self.transfers: float | None = None

    def _live(self, t: float) -> None:
        if self.heartbeat is not None and self.loop_turns:
            self.heartbeat += max(0.0, t - self._now)
        super()._live(t)

    def page(self) -> dict[str, float]:
        page = dict(self.extra)
        page['sglang:generation_tokens_total{model_name="m"}'] = self.finished_tokens
        for name, core in self.cores.items():
            labels = f'dp_rank="{name}",' if self.data_parallel else ""
            if self.engine_type is not None:
                labels += f'engine_type="{self.engine_type}",'
            rank = ',moe_ep_rank="0"' if self.engine_type is not None and self.has_ep_rank else ""
            model = f'model_name="m"{rank}'
            tail = f"{{{labels}{model}}}"
            if self.step_series:
                page[f'sglang:realtime_tokens_total{{{labels}mode="decode",{model}}}'] = float(int(core.tokens))
                page[f"sglang:token_usage{tail}"] = core.kv
            page[f"sglang:num_running_reqs{tail}"] = core.running
            page[f"sglang:num_queue_reqs{tail}"] = core.waiting
            if self.heartbeat is not None:
                page[f"sglang:scheduler_idle_seconds_total{tail}"] = self.heartbeat
            for queue, value in self.queues.items():
                page[f"sglang:{queue}{tail}"] = value
            if self.transfers is not None:
                page[f"sglang:kv_transfer_latency_ms_count{tail}"] = self.transfers
        return {series: value for series, value in page.items() if not self.hide(series)}

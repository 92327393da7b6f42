"""A TensorRT-LLM-like engine for the virtual shell: a page that moves at request ends, a list that reading empties."""

from __future__ import annotations

import json
from collections import deque

from virtual_shell import SCRAPE_SEC, ScriptedCore, ScriptedEngine

from enginewatch.core.events import Outcome
from enginewatch.core.statistics import StatisticsMemory, StatisticsReader
from enginewatch.engines.trtllm import PROFILE

assert PROFILE.json_statistics is not None
STATISTICS = PROFILE.json_statistics
LABELS = 'engine_type="pytorch",model_name="m"'


class ScriptedTrtllm(ScriptedEngine):
    """TensorRT-LLM as a reader of its page or, with `by_json`, of its list sees it. `tokens` are its iterations.

    Attributes:
        by_json: whether the list is read in place of the page.
        finished: requests that have ended.
        full: whether no slot is free, so that a canary waits behind what runs.
        statistics_on: enable_iter_perf_stats.
        others_read: whether somebody else empties the list all the time.
        held_back: whether the list is filled only when a request ends.
    """

    kind = "trtllm"

    def __init__(self, *, by_json: bool = False) -> None:
        super().__init__(start_time=None, version="1.2.0")
        self.by_json = by_json
        self.finished = 0
        self.full = False
        self.statistics_on = True
        self.others_read = False
        self.held_back = False
        self._entries: deque[dict[str, float]] = deque(maxlen=1000)
        self._waiting_entries: deque[dict[str, float]] = deque(maxlen=1000)
        self._last_iteration = int(self.core.tokens)
        self._memory = StatisticsMemory()
        self._written_running = 0.0

    @property
    def core(self) -> ScriptedCore:
        """Its only core."""
        return self.cores["0"]

    @property
    def scrape_sec(self) -> float:
        """A reader of an empty list is kept waiting."""
        return STATISTICS.waits_sec if self.by_json and not self._entries else SCRAPE_SEC

    @scrape_sec.setter
    def scrape_sec(self, value: float) -> None:
        pass

    def set_full(self, full: bool = True) -> ScriptedTrtllm:
        """Leave no slot free, or some."""
        self.full = full
        return self

    def end_request(self) -> ScriptedTrtllm:
        """A request ends: the page moves, and its gauges are written."""
        self.finished += 1
        self._written_running = self.core.running
        self._entries.extend(self._waiting_entries)
        self._waiting_entries.clear()
        return self

    def restart(self) -> ScriptedTrtllm:
        super().restart()
        self.finished = 0
        self._written_running = 0.0
        self._entries.clear()
        self._waiting_entries.clear()
        self._last_iteration = 0
        return self

    def _live(self, t: float) -> None:
        super()._live(t)
        core, iteration = self.core, int(self.core.tokens + 1e-6)
        entries = self._waiting_entries if self.held_back else self._entries
        if self.statistics_on:
            for number in range(max(self._last_iteration, iteration - 1000) + 1, iteration + 1):
                entries.append({"iter": number, "numActiveRequests": core.running, "numQueuedRequests": core.waiting})
        self._last_iteration = iteration
        if self.others_read:
            self._entries.clear()

    def page(self) -> dict[str, float]:
        if self.by_json:
            return self._read_list()
        page = dict(self.extra)
        # Written when a request ended last; by no means what runs now.
        page[f'trtllm_num_requests_running{{{LABELS},pid="71"}}'] = self._written_running
        if self.finished:
            page[f'trtllm_request_success_total{{{LABELS},finished_reason="length"}}'] = float(self.finished)
            page[f"trtllm_generation_tokens_total{{{LABELS}}}"] = 10.0 * self.finished
        return {series: value for series, value in page.items() if not self.hide(series)}

    def _read_list(self) -> dict[str, float]:
        body = json.dumps(list(self._entries)).encode()
        self._entries.clear()
        reader = StatisticsReader(STATISTICS, self._memory)
        reader.feed(body)
        return reader.finish()

    def fail(self, failure: str | None) -> ScriptedTrtllm:
        if failure == "refused":
            self._memory.forget()  # as the client does
        super().fail(failure)
        return self

    def answer_canary(self, name: str | None, deadline_sec: float) -> tuple[Outcome, float]:
        core = self.core
        if self.full and core.canary is None:
            return Outcome.TIMEOUT, deadline_sec
        outcome, after = super().answer_canary(name, deadline_sec)
        if outcome is Outcome.OK:
            self._live(self._now)
            self.end_request()
        return outcome, after

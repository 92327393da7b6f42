"""How TensorRT-LLM's PyTorch executor works: one loop, one batch per iteration, and a record of each iteration.

Kept from the real one (`_torch/pyexecutor/py_executor.py`, versions of 2025-05 to 2026-09):
    - without requests the loop waits for one and makes no iteration: an idle engine leaves no record, and its last one
      still shows the requests that were active when that iteration began;
    - `numActiveRequests` and `iter` are taken when an iteration begins, `numQueuedRequests`, `numCompletedRequests` and
      the KV cache when it ends;
    - a prompt longer than the token budget is computed in chunks (`enable_chunked_prefill`), each an iteration;
    - a request of type generation_only is active but not scheduled until its KV came from the context server; one of
      type context_only ends after its prefill; any other runs here from beginning to end.
"""

from __future__ import annotations

import datetime
from collections import deque

from enginewatch.lab.sim.job import Job
from enginewatch.lab.sim.wire import Message

_TRANSFER_LOOK_SEC = 0.05
"""How often transfers are looked at while nothing else is there to do. The real loop spins; this one rests."""
_GPU_BYTES = 60 * 2**30


class TrtllmCore:
    """The executor loop of one rank. It has no clock of its own; `now` is monotonic seconds."""

    def __init__(self, config: Message) -> None:
        self._step_sec: float = config["step_sec"]
        self._extra_sec = 0.0
        self._budget: int = config["max_batched_tokens"]
        self._max_running: int = config["max_running"]
        self._block_size: int = config["block_size"]
        self._blocks: int = config["kv_blocks"]
        self._transfer_sec: float = config["transfer_sec"]
        self._interval: int = config["iter_stats_interval"] if config["iter_stats"] else 0
        self._peer_gone = False
        self._paused = False
        self._waiting: deque[Job] = deque()
        self._active: list[Job] = []
        self._batch: list[Job] = []
        self._iteration = 0
        self._began_at = 0.0
        self._began_active = 0
        self._new_active = 0
        self._new_blocks = self._total_blocks = 0
        self.records: deque[Message] = deque(maxlen=config["iter_stats_max"] or None)
        """Records of iterations that nobody has fetched yet; the oldest are dropped when there are too many. Filled by
        the loop, emptied by the thread that answers calls (appending and taking are atomic)."""

    # --- messages ---------------------------------------------------------------------------------------------------

    def handle(self, message: Message, now: float) -> list[Message]:
        """Take one message from the front end; returns what is to be sent back at once."""
        op = message["op"]
        if op == "add":
            self._waiting.append(Job(message, now))
        elif op == "abort":
            self._drop(message["id"])
        elif op == "tune":
            self._step_sec = message.get("step_sec", self._step_sec)
            self._extra_sec = message.get("extra_sec", self._extra_sec)
            self._peer_gone = message.get("peer_gone", self._peer_gone)
        elif op == "call":
            if message["name"] in ("pause", "resume"):
                self._paused = message["name"] == "pause"
            value = {"paused": self._paused, "waiting": len(self._waiting), "active": len(self._active)}
            return [{"op": "reply", "call": message["call"], "value": value}]
        return []

    def _drop(self, id_: str) -> None:
        for jobs in (self._active, self._waiting):
            for job in jobs:
                if job.id == id_:
                    jobs.remove(job)
                    return

    # --- iterations -------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> float | None:
        """Put a batch together; returns the seconds its forward pass takes, None when there is nothing to run."""
        self._batch = []
        if self._paused:
            return None
        before = len(self._active)
        while self._waiting and len(self._active) < self._max_running:
            self._active.append(self._waiting.popleft())
        seconds = self._schedule(now)
        self._new_active += len(self._active) - before
        if not self._batch:
            return None
        self._began_at, self._began_active = now, len(self._active)
        return seconds + self._extra_sec

    def _schedule(self, now: float) -> float:
        budget, seconds = self._budget, self._step_sec
        # Generation first: each takes one token of the budget, what is left computes prompts.
        for job in sorted(self._active, key=lambda job: job.missing() > 0):
            if budget <= 0:
                break
            if self._transferring(job, now):
                continue
            count = job.next_chunk(budget) if job.missing() else 1
            if not self._room_for(job, count):
                continue
            if job.chunks and job.missing():  # a prefill made to last: it fills its iterations
                budget, seconds = count, max(seconds, job.chunk_sec)
            if job.admitted_at is None:
                job.admitted_at = now
            job.scheduled = count
            budget -= count
            self._batch.append(job)
        return seconds

    def complete(self, now: float) -> Message:
        """The forward pass is over: what it produced, and the record of the iteration."""
        context = [job for job in self._batch if job.missing()]
        context_tokens = sum(job.scheduled for job in context)
        generating = len(self._batch) - len(context)
        outputs = []
        completed = 0
        before = self._used_blocks()
        for job in self._batch:
            job.computed += job.scheduled
        self._new_blocks = max(0, self._used_blocks() - before)
        self._total_blocks += self._new_blocks
        for job in self._batch:
            if job.missing():
                continue
            job.generated += 1
            output: Message = {"id": job.id, "new": 1}
            if job.first_at is None:
                job.first_at = now
                output["first"] = True
            if job.generated >= job.max_tokens:
                output["finish"] = "length"
                output.update(job.times(now))
                self._active.remove(job)
                completed += 1
            outputs.append(output)
        self._iteration += 1
        if self._interval and self._iteration % self._interval == 0:
            self.records.append(self._record(now, len(context), generating, context_tokens, completed))
        self._new_active = 0
        return {"op": "step", "outputs": outputs}

    def rest(self, now: float) -> Message | None:
        """Nothing to run: nothing is said either."""
        return None

    def rest_sec(self) -> float | None:
        """How long the loop may sleep when no message comes; None = for ever."""
        return _TRANSFER_LOOK_SEC if self._active and not self._paused else None

    # --- details ----------------------------------------------------------------------------------------------------

    def _transferring(self, job: Job, now: float) -> bool:
        """Whether a request still waits for the KV of its context server."""
        if not job.peer:
            return False
        if job.ready_at is None and not self._peer_gone and job.peer != "missing":
            job.ready_at = now + self._transfer_sec
        if job.ready_at is None or now < job.ready_at:
            return True
        job.peer, job.computed = "", max(0, job.prompt - 1)  # one token is left to compute
        return False

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _used_blocks(self) -> int:
        return sum(self._blocks_of(job.computed) for job in self._active)

    def _room_for(self, job: Job, count: int) -> bool:
        more = self._blocks_of(job.computed + count) - self._blocks_of(job.computed)
        return self._used_blocks() + more <= self._blocks

    def _record(self, now: float, context: int, generating: int, context_tokens: int, completed: int) -> Message:
        """One iteration under the names of the C++ executor's `IterationStats` in JSON."""
        used = self._used_blocks()
        return {
            "cpuMemUsage": 0,
            "gpuMemUsage": _GPU_BYTES,
            "inflightBatchingStats": {
                "avgNumDecodedTokensPerIter": 1.0 if generating else 0.0,
                "microBatchId": 0,
                "numContextRequests": context,
                "numCtxTokens": context_tokens,
                "numGenRequests": generating,
                "numPausedRequests": 0,
                "numScheduledRequests": context + generating,
            },
            "iter": self._iteration,
            "iterLatencyMS": (now - self._began_at) * 1000,
            "kvCacheStats": {
                "allocNewBlocks": self._new_blocks,
                "allocTotalBlocks": self._total_blocks,
                "cacheHitRate": 0.0,
                "freeNumBlocks": self._blocks - used,
                "maxNumBlocks": self._blocks,
                "missedBlocks": self._total_blocks,
                "reusedBlocks": 0,
                "tokensPerBlock": self._block_size,
                "usedNumBlocks": used,
            },
            "maxBatchSizeRuntime": self._max_running,
            "maxBatchSizeStatic": self._max_running,
            "maxBatchSizeTunerRecommended": 0,
            "maxNumActiveRequests": self._max_running,
            "maxNumTokensRuntime": self._budget,
            "newActiveRequestsQueueLatencyMS": 0.0,
            "numActiveRequests": self._began_active,
            "numCompletedRequests": completed,
            "numNewActiveRequests": self._new_active,
            "numQueuedRequests": len(self._waiting),
            "pinnedMemUsage": 0,
            "staticBatchingStats": {
                "emptyGenSlots": 0,
                "numContextRequests": 0,
                "numCtxTokens": 0,
                "numGenTokens": 0,
                "numScheduledRequests": 0,
            },
            "timestamp": datetime.datetime.now().strftime("%m-%d-%Y %H:%M:%S.%f"),
        }

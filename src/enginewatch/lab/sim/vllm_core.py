"""How a vLLM engine core schedules: continuous batching with chunked prefill, one message per completed step.

Kept from the real one (facts measured on 0.32.0, source of 0.10 to 0.32):
    - running requests go first, each decode takes one token of the budget, what is left prefills; new requests are
      admitted only into a budget that is not used up, so that a canary waits behind a long chunked prefill;
    - statistics leave the core only with a completed step: a request that arrives while a step hangs, or while the
      core is paused, shows up nowhere;
    - pause and sleep answers come from the same loop, between two steps.
"""

from __future__ import annotations

from collections import deque

from enginewatch.lab.sim.job import Job
from enginewatch.lab.sim.wire import Message

_DEFERRED_LOOK_SEC = 0.25
"""How often the gauges are told while only requests for remote KV are there. The real loop spins; this one rests."""


class VllmCore:
    """The scheduler of one core. It has no clock of its own; `now` is monotonic seconds."""

    def __init__(self, config: Message) -> None:
        self._step_sec: float = config["step_sec"]
        self._extra_sec = 0.0
        self._budget: int = config["max_batched_tokens"]
        self._max_running: int = config["max_running"]
        self._block_size: int = config["block_size"]
        self._blocks: int = config["kv_blocks"]
        self._transfer_sec: float = config["transfer_sec"]
        self._peer_gone = False
        self._paused = False
        self._asleep = False
        self._draining = False
        self._untold = False
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._batch: list[Job] = []
        self._queries = 0
        self._preemptions = 0

    # --- messages ---------------------------------------------------------------------------------------------------

    def handle(self, message: Message, now: float) -> list[Message]:
        """Take one message from the front end; returns what is to be sent back at once."""
        op = message["op"]
        if op == "add":
            self._waiting.append(Job(message, now))
        elif op == "abort":
            self._untold = self._drop(message["id"]) or self._untold
        elif op == "kv":
            for job in self._waiting:
                if job.id == message["id"]:
                    job.peer = "peer"
        elif op == "tune":
            self._step_sec = message.get("step_sec", self._step_sec)
            self._extra_sec = message.get("extra_sec", self._extra_sec)
            self._peer_gone = message.get("peer_gone", self._peer_gone)
        elif op == "call":
            aborted = self._call(message["name"], message.get("args", {}))
            answers = [{"op": "reply", "call": message["call"], "value": self._describe()}]
            return ([self._told(aborted)] if aborted else []) + answers
        return []

    def _call(self, name: str, args: Message) -> list[Message]:
        if name == "pause":
            mode = args.get("mode", "abort")
            self._paused, self._draining = mode != "wait", mode == "wait"
            if mode == "abort":
                gone = [job.id for job in (*self._running, *self._waiting)]
                self._running.clear()
                self._waiting.clear()
                return [{"id": id_, "new": 0, "finish": "abort"} for id_ in gone]
        elif name == "resume":
            self._paused = self._draining = False
        elif name == "sleep":
            self._asleep = True
        elif name == "wake_up":
            self._asleep = False
        return []

    def _describe(self) -> Message:
        return {"paused": self._paused, "sleeping": self._asleep or self._paused, "waiting": len(self._waiting)}

    def _drop(self, id_: str) -> bool:
        for jobs in (self._running, self._waiting):
            for job in jobs:
                if job.id == id_:
                    jobs.remove(job)
                    return True
        return False

    # --- steps ------------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> float | None:
        """Put a batch together; returns the seconds its forward pass takes, None when there is nothing to run."""
        if self._draining and not self._running:
            self._paused, self._draining = True, False
        if self._paused or self._asleep:
            return None
        self._batch = []
        budget = self._budget
        seconds = self._step_sec
        for job in list(self._running):
            if budget <= 0:
                break
            if job in self._running:
                budget, seconds = self._schedule(job, budget, seconds)
        while not self._draining and budget > 0 and len(self._running) < self._max_running:
            admitted = self._next_waiting(now)
            if admitted is None or not self._room_for(admitted, admitted.next_chunk(budget)):
                break
            self._waiting.remove(admitted)
            self._running.append(admitted)
            if admitted.admitted_at is None:
                admitted.admitted_at = now
                self._queries += admitted.prompt
            budget, seconds = self._schedule(admitted, budget, seconds)
        return seconds + self._extra_sec if self._batch else None

    def complete(self, now: float) -> Message:
        """The forward pass is over: what it produced."""
        outputs = []
        tokens = 0
        for job in self._batch:
            job.computed += job.scheduled
            if job.missing():
                continue
            tokens += job.scheduled
            job.generated += 1
            output: Message = {"id": job.id, "new": 1}
            if job.first_at is None:
                job.first_at = now
                output["first"] = True
                output["remote"] = bool(job.peer)
            if job.generated >= job.max_tokens:
                output["finish"] = "length"
                output.update(job.times(now))
                self._running.remove(job)
            outputs.append(output)
        return self._told(outputs, tokens)

    def rest(self, now: float) -> Message | None:
        """Nothing to run: gauges that a step has to tell all the same."""
        if self._paused or self._asleep or not (self._untold or self._waiting):
            return None
        return self._told([])

    def rest_sec(self) -> float | None:
        """How long the loop may sleep when no message comes; None = for ever."""
        return _DEFERRED_LOOK_SEC if self._waiting and not (self._paused or self._asleep) else None

    # --- details ----------------------------------------------------------------------------------------------------

    def _schedule(self, job: Job, budget: int, seconds: float) -> tuple[int, float]:
        if job.missing():
            count = job.next_chunk(budget)
            if job.chunks:  # a prefill made to last: it fills its steps, nothing else is admitted beside it
                budget, seconds = count, max(seconds, job.chunk_sec)
        else:
            count = 1
        while not self._room_for(job, count):
            victim = self._running[-1]
            if victim is job:
                return budget, seconds
            self._preempt(victim)
        job.scheduled = count
        self._batch.append(job)
        return budget - count, seconds

    def _next_waiting(self, now: float) -> Job | None:
        for job in self._waiting:
            if not self._deferred(job, now):
                if job.peer and job.computed == 0:
                    job.computed = max(0, job.prompt - 1)  # the KV came from the partner, one token is left to compute
                return job
        return None

    def _deferred(self, job: Job, now: float) -> bool:
        if not job.peer:
            return False
        if job.ready_at is None and not self._peer_gone and job.peer not in ("missing", "remote"):
            job.ready_at = now + self._transfer_sec
        return job.ready_at is None or now < job.ready_at

    def _preempt(self, job: Job) -> None:
        self._running.remove(job)
        if job in self._batch:
            self._batch.remove(job)
        job.computed = 0
        self._waiting.appendleft(job)
        self._preemptions += 1

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _used_blocks(self) -> int:
        return sum(self._blocks_of(job.computed) for job in self._running)

    def _room_for(self, job: Job, count: int) -> bool:
        more = self._blocks_of(job.computed + count) - self._blocks_of(job.computed)
        return self._used_blocks() + more <= self._blocks

    def _told(self, outputs: list[Message], tokens: int = 0) -> Message:
        message: Message = {
            "op": "step",
            "outputs": outputs,
            "tokens": tokens,
            "running": len(self._running),
            "waiting": len(self._waiting),
            "deferred": sum(1 for job in self._waiting if job.peer),
            "kv": self._used_blocks() / self._blocks,
            "queries": self._queries,
            "preemptions": self._preemptions,
        }
        self._queries = self._preemptions = 0
        self._untold = False
        return message

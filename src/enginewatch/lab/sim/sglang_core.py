"""How a SGLang scheduler works: a prefill batch or a decode batch per turn, and counters of its own.

Kept from the real one (source of 0.5.10 to 0.5.23):
    - a prefill batch goes before decoding; a prompt longer than a chunk is computed chunk by chunk;
    - token and pass counters move with every batch, gauges at prefill reports and every 40 decode steps, and once when
      the loop becomes idle (at once since 0.5.18, before that up to 30 s later);
    - the loop wakes every second while idle and accounts for its idle time: the heartbeat;
    - while paused no batch runs and nothing is said;
    - a health probe that meets a busy scheduler is not run: it is acknowledged after the batch at hand;
    - prefill role: bootstrap queue, prefill, inflight queue; decode role: prealloc queue, transfer queue, decode.
      A request whose partner never comes stays in the first queue until it is aborted or times out.
"""

from __future__ import annotations

from collections import deque

from enginewatch.lab.sim.job import Job
from enginewatch.lab.sim.wire import Message

_DECODE_LOG_INTERVAL = 40
_HEARTBEAT_SEC = 1.0
_QUEUE_LOOK_SEC = 0.05
"""How often the queues are looked at while only they hold requests; the real loop does so at 20 Hz or more."""
_PEER_TIMEOUT_SEC = 300.0
"""SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT and _WAITING_TIMEOUT."""


class SglangCore:
    """The scheduler of one data-parallel rank. It has no clock of its own; `now` is monotonic seconds."""

    def __init__(self, config: Message) -> None:
        self._role: str = config["role"]
        self._step_sec: float = config["step_sec"]
        self._extra_sec = 0.0
        self._chunk_tokens: int = config["max_batched_tokens"]
        self._max_running: int = config["max_running"]
        self._capacity: int = config["block_size"] * config["kv_blocks"]
        self._transfer_sec: float = config["transfer_sec"]
        self._stale_sec: float = config["gauge_stale_sec"]
        self._peer_gone = False
        self._paused = False
        self._handshake: list[Job] = []  # bootstrap queue (prefill), prealloc queue (decode)
        self._transfer: list[Job] = []  # inflight queue (prefill), transfer queue (decode)
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._batch: list[Job] = []
        self._prefilling = False
        self._outputs: list[Message] = []
        self._acks: list[str] = []
        self._failed_handshakes = 0
        self._failed_transfers = 0
        self._decode_steps = 0
        self._decoded = 0
        self._last_batch = 0
        self._logged_at = 0.0
        self._idle_since: float | None = None
        self._idle_told_at = 0.0
        self._gauges_due: float | None = 0.0

    # --- messages ---------------------------------------------------------------------------------------------------

    def handle(self, message: Message, now: float) -> list[Message]:
        """Take one message from the front end; returns what is to be sent back at once."""
        op = message["op"]
        if op == "add":
            self._add(Job(message, now))
        elif op == "abort":
            self._drop(message["id"], now)
        elif op == "tune":
            self._step_sec = message.get("step_sec", self._step_sec)
            self._extra_sec = message.get("extra_sec", self._extra_sec)
            self._peer_gone = message.get("peer_gone", self._peer_gone)
        elif op == "call":
            self._call(message["name"], message.get("args", {}), now)
            value = {"paused": self._paused, "waiting": len(self._waiting), "running": len(self._running)}
            answer = {"op": "reply", "call": message["call"], "value": value}
            return [self._told(now), answer] if self._outputs else [answer]
        return []

    def _add(self, job: Job) -> None:
        if job.probe and (self._waiting or self._running) and not self._paused:
            self._acks.append(job.id)
        elif job.peer and self._role != "agg":
            self._handshake.append(job)
        else:
            self._waiting.append(job)

    def _call(self, name: str, args: Message, now: float) -> None:
        if name == "pause":
            self._paused = True
            self._idle_since = None
            if args.get("mode", "abort") == "abort":
                for job in [*self._handshake, *self._transfer, *self._waiting, *self._running]:
                    self._outputs.append({"id": job.id, "new": 0, "finish": "abort"})
                for jobs in self._queues():
                    jobs.clear()
        elif name == "resume":
            self._paused = False
            self._gauges_due = now

    def _queues(self) -> tuple[list[Job] | deque[Job], ...]:
        return self._handshake, self._transfer, self._waiting, self._running

    def _drop(self, id_: str, now: float) -> None:
        for jobs in self._queues():
            for job in jobs:
                if job.id == id_:
                    jobs.remove(job)
                    self._gauges_due = now + self._stale_sec
                    return

    # --- steps ------------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> float | None:
        """Put a batch together; returns the seconds its forward pass takes, None when there is nothing to run."""
        if self._paused:
            return None
        self._look_at_queues(now)
        self._batch, seconds = self._prefill_batch(now)
        self._prefilling = bool(self._batch)
        if not self._batch:
            self._batch, seconds = self._decode_batch(), self._step_sec
        if not self._batch:
            return None
        self._last_batch = len(self._batch)
        return seconds + self._extra_sec

    def complete(self, now: float) -> Message:
        """The forward pass is over: what it produced, counted as the scheduler counts it."""
        tokens = sum(job.scheduled for job in self._batch)
        for job in self._batch:
            job.computed += job.scheduled
            if not job.missing():
                self._produced(job, now)
        message: Message = {"batch": "prefill" if self._prefilling else "decode", "batch_tokens": tokens}
        if self._prefilling:
            self._gauges_due = now
        else:
            self._decode_steps += 1
            self._decoded += tokens
            if self._decode_steps % _DECODE_LOG_INTERVAL == 0:
                self._gauges_due = now
        if not self._busy() and not self._stale_sec:
            self._gauges_due = now
        return self._told(now) | message

    def rest(self, now: float) -> Message | None:
        """Nothing to run: transfers that ended, the idle refresh of the gauges, the heartbeat."""
        if self._paused:
            return None
        self._acknowledge()
        idle = not self._busy() and not self._handshake and not self._transfer
        if idle and self._idle_since is None:
            self._idle_since = self._idle_told_at = now
            self._gauges_due = self._gauges_due if self._gauges_due is not None else now + self._stale_sec
        if not idle:
            self._idle_since = None
            self._gauges_due = now if self._gauges_due is None else self._gauges_due
        due = self._gauges_due is not None and now >= self._gauges_due
        beat = idle and now - self._idle_told_at >= _HEARTBEAT_SEC
        return self._told(now) if self._outputs or due or beat else None

    def rest_sec(self) -> float | None:
        """How long the loop may sleep when no message comes; None = for ever."""
        if self._paused:
            return None
        return _QUEUE_LOOK_SEC if self._handshake or self._transfer else _HEARTBEAT_SEC

    # --- batches ----------------------------------------------------------------------------------------------------

    def _prefill_batch(self, now: float) -> tuple[list[Job], float]:
        batch: list[Job] = []
        budget, seconds = self._chunk_tokens, self._step_sec
        used = self._used_tokens()
        for job in list(self._waiting):
            if budget <= 0 or len(self._running) + len(batch) >= self._max_running:
                break
            count = job.next_chunk(budget)
            if job.chunks:  # a prefill made to last: it fills its steps
                budget, seconds = count, max(seconds, job.chunk_sec)
            if used + count > self._capacity:
                break
            if job.admitted_at is None:
                job.admitted_at = now
            job.scheduled = count
            budget -= count
            used += count
            batch.append(job)
        return batch, seconds

    def _decode_batch(self) -> list[Job]:
        for job in self._running:
            job.scheduled = 1
        return list(self._running)

    def _produced(self, job: Job, now: float) -> None:
        """One token of one request."""
        job.generated += 1
        output: Message = {"id": job.id, "new": 1}
        if job.first_at is None:
            job.first_at = now
            output["first"] = True
            if job in self._waiting:
                self._waiting.remove(job)
                if self._role == "prefill":
                    job.ready_at = None
                    self._transfer.append(job)
                    return
                self._running.append(job)
        if job.generated >= job.max_tokens:
            self._finish(job, output, now)
        self._outputs.append(output)

    def _finish(self, job: Job, output: Message, now: float) -> None:
        output["finish"] = "length"
        output.update(job.times(now))
        if job in self._running:
            self._running.remove(job)

    # --- prefill and decode partners --------------------------------------------------------------------------------

    def _look_at_queues(self, now: float) -> None:
        for job in list(self._handshake):
            if self._partner(job, now):
                self._handshake.remove(job)
                job.ready_at = None
                (self._waiting if self._role == "prefill" else self._transfer).append(job)
            elif now - job.arrived_at > _PEER_TIMEOUT_SEC:
                self._give_up(job, self._handshake)
                self._failed_handshakes += 1
        for job in list(self._transfer):
            if self._partner(job, now):
                self._transfer.remove(job)
                if self._role == "prefill":
                    output: Message = {"id": job.id, "new": 1, "first": True}
                    self._finish(job, output, now)
                    self._outputs.append(output)
                else:
                    job.admitted_at, job.computed = now, job.prompt
                    self._running.append(job)
            elif now - job.arrived_at > 2 * _PEER_TIMEOUT_SEC:
                self._give_up(job, self._transfer)
                self._failed_transfers += 1

    def _partner(self, job: Job, now: float) -> bool:
        """Whether the partner has done its part of the queue the job is in. The fake host always has."""
        if job.peer == "fake":
            return True
        if job.ready_at is None and job.peer == "peer" and not self._peer_gone:
            job.ready_at = now + self._transfer_sec
            self._gauges_due = now
        return job.ready_at is not None and now >= job.ready_at

    def _give_up(self, job: Job, jobs: list[Job]) -> None:
        jobs.remove(job)
        self._outputs.append({"id": job.id, "new": 0, "finish": "abort"})

    # --- what is told -----------------------------------------------------------------------------------------------

    def _busy(self) -> bool:
        return bool(self._waiting or self._running)

    def _used_tokens(self) -> int:
        return sum(job.computed for jobs in (self._transfer, self._waiting, self._running) for job in jobs)

    def _acknowledge(self) -> None:
        self._outputs += [{"id": id_, "new": 0, "finish": "ack"} for id_ in self._acks]
        self._acks.clear()

    def _told(self, now: float) -> Message:
        self._acknowledge()
        message: Message = {"op": "step", "outputs": self._outputs}
        self._outputs = []
        if self._idle_since is not None:
            message["idle"] = now - self._idle_told_at
            self._idle_told_at = now
            if self._busy():
                self._idle_since = None
        if self._gauges_due is not None and now >= self._gauges_due:
            message["gauges"] = self._gauges(now)
            # Requests that only wait for a partner are told again every second, as the refresh of a stalled loop does.
            self._gauges_due = now + _HEARTBEAT_SEC if self._handshake or self._transfer else None
        for name, count in (("bootstrap", self._failed_handshakes), ("transfer", self._failed_transfers)):
            if count:
                message[f"{name}_failed"] = count
        self._failed_handshakes = self._failed_transfers = 0
        return message

    def _gauges(self, now: float) -> Message:
        used, prefill = self._used_tokens(), self._role == "prefill"
        elapsed = now - self._logged_at
        throughput = self._decoded / elapsed if self._busy() and elapsed > 0 else 0.0
        self._decoded, self._logged_at = 0, now
        return {
            "num_running_reqs": (self._last_batch if self._busy() else 0) if prefill else len(self._running),
            "num_queue_reqs": sum(1 for job in self._waiting if not job.computed),
            "num_used_tokens": used,
            "token_usage": used / self._capacity,
            "gen_throughput": throughput,
            "decode_sum_seq_lens": sum(job.computed for job in self._running),
            "bootstrap": len(self._handshake) if prefill else 0,
            "inflight": len(self._transfer) if prefill else 0,
            "prealloc": 0 if prefill else len(self._handshake),
            "transfer": 0 if prefill else len(self._transfer),
            "pending": 0.0 if prefill else sum(job.prompt for job in self._handshake) / self._capacity,
            "free": self._capacity - used,
            "busy": self._busy(),
        }

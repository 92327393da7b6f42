"""A TensorRT-LLM worker: the executor loop, a thread that answers calls, and a thread that watches the loop.

Three threads as in the real worker, because its faults differ by which of them still runs:
    - SIGSTOP stops all three: statistics are not answered, and the hang detector sleeps too;
    - a deadlock of the loop (`hold`) leaves the other two: statistics are answered, empty, and the detector fires.

The detector (`_torch/pyexecutor/hang_detector.py`): the loop leaves a mark in every iteration; none for so long, and
it logs one line and all ranks are killed hard (since NVIDIA/TensorRT-LLM#15612, 2026-06). It does not watch a loop
that waits for requests.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

from enginewatch.lab.sim.enginelog import EngineLog
from enginewatch.lab.sim.trtllm_core import TrtllmCore
from enginewatch.lab.sim.wire import Inbox, Message, encode

_LOOK_SEC = 0.1
"""How often a call for statistics looks whether there are any (`rpc_worker_mixin.py`)."""
HANG_LINE = "Hang detected after {seconds:g} seconds."


class HangDetector:
    """Fires when the loop leaves no mark for `timeout` seconds; 0 = never."""

    def __init__(self, timeout: float, fired: Callable[[], None]) -> None:
        self._timeout = timeout
        self._fired = fired
        self._deadline = math.inf

    def checkpoint(self) -> None:
        """The loop's mark."""
        self._deadline = time.monotonic() + self._timeout if self._timeout else math.inf

    def disarm(self) -> None:
        """Watch nothing until the next mark."""
        self._deadline = math.inf

    def start(self) -> None:
        """Begin to watch, disarmed."""
        if self._timeout:
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                self._fired()
                return
            time.sleep(min(left, self._timeout))


class Worker:
    """One rank's process: `sock` is the request queue, `calls` the channel for calls."""

    def __init__(self, core: TrtllmCore, config: Message, sock: socket.socket, calls: socket.socket) -> None:
        self._core = core
        self._sock = sock
        self._calls = calls
        self._free = threading.Event()
        self._free.set()
        self._detector = HangDetector(config["hang_detection_sec"], self._hang_detected)
        self._timeout: float = config["hang_detection_sec"]
        self._log = EngineLog(config["log_file"], config["log_format"])

    def run(self) -> None:
        """Run until the front end goes."""
        threading.Thread(target=self._answer_calls, daemon=True).start()
        self._detector.start()
        core, inbox = self._core, Inbox(self._sock)
        rest_sec: float | None = 0.0
        while True:
            if rest_sec != 0.0:
                self._detector.disarm()
            messages = inbox.read(rest_sec)
            self._detector.checkpoint()
            self._free.wait()
            for message in messages:
                for answer in core.handle(message, time.monotonic()):
                    self._sock.sendall(encode(answer))
            forward_sec = core.begin(time.monotonic())
            if forward_sec is None:
                rest_sec = core.rest_sec()
                continue
            time.sleep(forward_sec)
            self._free.wait()
            told = core.complete(time.monotonic())
            self._sock.sendall(encode(told))
            rest_sec = 0.0

    def _answer_calls(self) -> None:
        """One call at a time: statistics, and the simulation's own deadlock."""
        inbox = Inbox(self._calls)
        try:
            while True:
                for message in inbox.read(None):
                    if message["op"] == "hold":
                        (self._free.clear if message["on"] else self._free.set)()
                    else:
                        self._calls.sendall(encode({"records": self._fetch(message["timeout"])}))
        except (EOFError, ConnectionError):
            return

    def _fetch(self, timeout: float) -> list[Message]:
        """All records since the last fetch; waits for the first one."""
        deadline = time.monotonic() + timeout
        records = self._core.records
        while not records and time.monotonic() < deadline:
            time.sleep(_LOOK_SEC)
        return [records.popleft() for _ in range(len(records))]

    def _hang_detected(self) -> None:
        stamp = time.strftime("%m/%d/%Y-%H:%M:%S")
        self._log.write(f"[{stamp}] [TRT-LLM] [E] " + HANG_LINE.format(seconds=self._timeout))
        os.kill(os.getpid(), signal.SIGKILL)

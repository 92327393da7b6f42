"""One engine rank: a process with a scheduler, a forward pass that takes time, and a pipe to the front end.

Started by the front end as `python -m enginewatch.lab.sim.rank JSON`. Imports little: a simulated engine with many
cores should fit on a laptop.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

import setproctitle

from enginewatch.lab.sim.lineage import die_with_parent
from enginewatch.lab.sim.sglang_core import SglangCore
from enginewatch.lab.sim.trtllm_core import TrtllmCore
from enginewatch.lab.sim.trtllm_rank import Worker
from enginewatch.lab.sim.vllm_core import VllmCore
from enginewatch.lab.sim.wire import Inbox, Message, encode

Core = VllmCore | SglangCore


def make_core(config: Message) -> Core:
    """The scheduler of the engine named in `config`, one whose process is nothing but its loop."""
    return VllmCore(config) if config["engine"] == "vllm" else SglangCore(config)


def loop(core: Core, sock: socket.socket) -> None:
    """Run the scheduler until the front end goes."""
    inbox = Inbox(sock)
    rest_sec: float | None = 0.0
    while True:
        for message in inbox.read(rest_sec):
            for answer in core.handle(message, time.monotonic()):
                sock.sendall(encode(answer))
        forward_sec = core.begin(time.monotonic())
        if forward_sec is None:
            told = core.rest(time.monotonic())
            rest_sec = core.rest_sec()
        else:
            time.sleep(forward_sec)  # the forward pass: the loop is deaf meanwhile, as the real ones are
            told = core.complete(time.monotonic())
            told["forward_sec"] = forward_sec
            rest_sec = 0.0
        if told is not None:
            told["cpu_sec"] = time.process_time()
            sock.sendall(encode(told))


def main() -> int:
    """Process entry."""
    config: Message = json.loads(sys.argv[1])
    die_with_parent(config["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the supervisor
    setproctitle.setproctitle(config["title"])
    sock = socket.socket(fileno=config["fd"])
    try:
        sock.sendall(encode({"op": "ready", "pid": os.getpid()}))
        if config["engine"] == "trtllm":
            Worker(TrtllmCore(config), config, sock, socket.socket(fileno=config["calls_fd"])).run()
        loop(make_core(config), sock)
    except (EOFError, ConnectionError):
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())

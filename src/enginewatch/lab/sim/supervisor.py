"""Keeps one simulated engine: its port number, its front end, and an end without orphans.

The supervisor binds the port without listening on it, so that nobody else is given the number while the engine is down,
and connections are refused as they are by a real engine that is not there. The front end listens beside it by
SO_REUSEPORT. Ranks whose front end was killed become the supervisor's children and are reaped.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import setproctitle

from enginewatch.lab.sim.lineage import adopt_orphans
from enginewatch.lab.sim.options import SimOptions, reachable

_GRACE_SEC = 2.0


def run(options: SimOptions) -> int:
    """Run one simulated engine in the foreground until SIGTERM, SIGINT, or its end; returns the exit code."""
    with contextlib.ExitStack() as held:
        for name in ("port", "bootstrap_port"):
            wanted = getattr(options, name)
            if wanted < 0:
                continue
            try:
                holder = held.enter_context(hold_port(options.host, wanted))
            except OSError as error:
                print(
                    f"enginewatch sim: cannot listen on {options.host}:{wanted}: {error.strerror or error}; "
                    f"choose another --{name.replace('_', '-')}, or 0 for any.",
                    file=sys.stderr,
                )
                return 1
            options = replace(options, **{name: holder.getsockname()[1]})
        return Supervisor(options).run()


def hold_port(host: str, port: int) -> socket.socket:
    """Bind a port without listening. Raises OSError when somebody else has it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if port:
        # SO_REUSEPORT would let two engines share the port in silence; a socket that listens without it would not.
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen()
    held = socket.socket(family)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError:
        held.close()
        raise
    return held


class Supervisor:
    """The loop that starts the front end again whenever it is meant to come back."""

    def __init__(self, options: SimOptions) -> None:
        self._options = options
        self._port = options.port
        self._selector = selectors.PollSelector()  # epoll refuses /dev/null as standard input
        self._front: subprocess.Popen[bytes] | None = None
        self._pipe: socket.socket | None = None
        self._heard = b""
        self._starts = 0
        self._next: tuple[float, float] | None = (0.0, options.load_sec)
        """When to start the next front end (monotonic), and its load time."""
        self._code: int | None = None

    def run(self) -> int:
        """Supervise until the end."""
        setproctitle.setproctitle("enginewatch-sim")
        adopt_orphans()
        with _signals(self._selector):
            if self._options.until_stdin_closes:
                self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, "stdin")
            try:
                while self._code is None:
                    self._turn()
            finally:
                self._stop_front(graceful=True)
        self._reap(wait=True)
        return self._code

    def _turn(self) -> None:
        now = time.monotonic()
        if self._front is None and self._next is not None and now >= self._next[0]:
            self._start(self._next[1])
        waiting = None if self._next is None else max(0.0, self._next[0] - now)
        for key, _ in self._selector.select(waiting):
            if key.data == "front":
                self._read_front()
            elif key.data == "stdin":
                if not os.read(sys.stdin.fileno(), 4096):
                    self._code = 0
            else:
                for number in os.read(key.fd, 64):
                    if number == signal.SIGCHLD:
                        self._reap(wait=False)
                    elif number in (signal.SIGTERM, signal.SIGINT):
                        self._code = 0

    def _start(self, load_sec: float) -> None:
        ours, theirs = socket.socketpair()
        config = {
            "options": replace(self._options, load_sec=load_sec).to_dict(),
            "parent": os.getpid(),
            "fd": theirs.fileno(),
            "port": self._port,
            "restarts": self._starts,
        }
        self._front = subprocess.Popen(
            [sys.executable, "-m", "enginewatch.lab.sim.frontend", json.dumps(config)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        theirs.close()
        self._pipe, self._heard = ours, b""
        self._selector.register(ours, selectors.EVENT_READ, "front")
        self._starts += 1
        self._next = None

    def _read_front(self) -> None:
        assert self._pipe is not None
        with contextlib.suppress(ConnectionError):
            data = self._pipe.recv(65536)
            if data:
                *lines, self._heard = (self._heard + data).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
                return
        self._drop_pipe()

    def _obey(self, message: dict[str, Any]) -> None:
        if message["event"] == "serving":
            self._announce(message["ranks"])
        elif message["event"] == "restart":
            self._stop_front(graceful=False)
            self._next = (time.monotonic() + message["down_sec"], message["load_sec"])

    def _announce(self, ranks: list[dict[str, Any]]) -> None:
        assert self._front is not None
        host = reachable(self._options.host)
        host = f"[{host}]" if ":" in host else host
        told = {
            "url": f"http://{host}:{self._port}",
            "port": self._port,
            "bootstrap_port": self._options.bootstrap_port,
            "pid": self._front.pid,
            "supervisor_pid": os.getpid(),
            "restarts": self._starts - 1,
            "ranks": ranks,
        }
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(told), flush=True)
        if not self._options.quiet:
            port = self._options.bootstrap_port
            bootstrap = f"bootstrap server on port {port}, " if port >= 0 else ""
            print(
                f"enginewatch sim: {self._options.engine} ({self._options.role}) serves at {told['url']}, "
                f"{bootstrap}ranks {', '.join(str(rank['pid']) for rank in ranks)}; "
                f"GET {told['url']}/_sim lists its faults",
                file=sys.stderr,
            )

    def _stop_front(self, *, graceful: bool) -> None:
        front = self._front
        if front is None:
            return
        front.send_signal(signal.SIGTERM if graceful else signal.SIGKILL)
        try:
            front.wait(_GRACE_SEC)
        except subprocess.TimeoutExpired:
            front.kill()
            front.wait()
        self._front = None
        self._drop_pipe()

    def _drop_pipe(self) -> None:
        if self._pipe is not None:
            self._selector.unregister(self._pipe)
            self._pipe.close()
            self._pipe = None

    def _reap(self, *, wait: bool) -> None:
        """Collect the front end if it ended by itself, and ranks that outlived theirs (already being killed)."""
        if self._front is not None and self._front.poll() is not None:
            code = self._front.returncode
            self._front = None
            self._drop_pipe()
            if self._options.restart:
                self._next = (time.monotonic(), self._options.load_sec)
            else:
                self._code = code if code >= 0 else 128 - code
        front_pid = self._front.pid if self._front is not None else None
        while True:
            try:
                # WNOWAIT looks first: the front end's own status belongs to its Popen object.
                state = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG))
            except ChildProcessError:
                return
            if state is None or state.si_pid == front_pid:
                return
            os.waitpid(state.si_pid, 0)


@contextlib.contextmanager
def _signals(selector: selectors.BaseSelector) -> Any:
    """Deliver signals as bytes on a socket that the selector watches."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    old_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
    old = {number: signal.signal(number, lambda *_: None) for number in numbers}
    selector.register(reader, selectors.EVENT_READ, "signals")
    try:
        yield
    finally:
        selector.unregister(reader)
        signal.set_wakeup_fd(old_fd)
        for number, handler in old.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()

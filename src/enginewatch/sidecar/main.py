"""`enginewatch watch`: puts the sidecar together and runs it until it is told to stop.

Order matters: options, then the listen address, then everything else. From the moment the address is bound nothing
but a signal ends the process.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from enginewatch.sidecar.lean import leave_to_others
from enginewatch.sidecar.listen import bind, fail_open, url_of
from enginewatch.sidecar.options import Options, StartError, complain, parse

if TYPE_CHECKING:
    from enginewatch.client.kv_bootstrap import KvBootstrap
    from enginewatch.client.target import EngineClient
    from enginewatch.core.events import Verdict
    from enginewatch.core.identity import IdentityTracker
    from enginewatch.core.settings import Settings
    from enginewatch.core.verdict import Watch
    from enginewatch.sidecar.board import Board
    from enginewatch.sidecar.journal import Journal
    from enginewatch.sidecar.keeper import SettingsKeeper

_RESTART_SEC = 1.0
_PARTING_SEC = 0.3
_IDLE_SEC = 5.0
_GC_THRESHOLDS = (300, 4, 2)


@dataclass
class _Life:
    """What outlives a watch that broke and is put together anew: to those who ask it is the same sidecar.

    Attributes:
        started_at: when it began, on the monotonic clock.
        unix_offset: unix seconds at that clock's zero; read once, because wall-clock time is stepped.
        identity: which process the engine is, and the replacements seen.
    """

    started_at: float = field(default_factory=time.monotonic)
    unix_offset: float = field(default_factory=lambda: time.time() - time.monotonic())
    identity: IdentityTracker | None = None

    def identity_tracker(self, *, is_loopback: bool) -> IdentityTracker:
        """The one there is, or a new one; `is_loopback`: the engine is on this host."""
        from enginewatch.core.identity import IdentityTracker

        if self.identity is None:
            self.identity = IdentityTracker(round((self.started_at + self.unix_offset) * 1000), is_loopback=is_loopback)
        return self.identity


def run_watch(argv: Sequence[str]) -> int:
    """Runs the sidecar. Returns its exit code: 0 after SIGTERM or SIGINT, 2 for a bad flag, 1 for a bad address."""
    _end_on_signals()
    leave_to_others()
    life = _Life()
    try:
        options = parse(argv, os.environ)
        sock = bind(options.listen)
    except StartError as error:
        return complain(error)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0

    from enginewatch.sidecar.journal import Journal

    journal = Journal()
    while True:
        try:
            _run(_watch(options, sock.dup(), journal, life))
        except Exception as error:
            # Only a bug gets here, and it must not take the engine along.
            _end_on_signals()
            journal.write("error", "the sidecar could not run and starts again", error=type(error).__name__)
            fail_open(sock, _RESTART_SEC)
        else:
            break
    _leave_threads_behind()
    return 0


def _end_on_signals() -> None:
    # A container's first process ignores signals it has no handler for, so there is one as long as no loop has its own.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    # Operators send it to have a configuration read again, which happens by itself; its default action ends a process,
    # and a sidecar that ends takes the engine with it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _run(work: Coroutine[Any, Any, None]) -> None:
    # Not asyncio.run: at its end it would wait for a name lookup that hangs in a thread.
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(work)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_PARTING_SEC))
        loop.close()


async def _watch(options: Options, sock: socket.socket, journal: Journal, life: _Life) -> None:
    from enginewatch.sidecar.board import Board
    from enginewatch.sidecar.faults import Faults
    from enginewatch.sidecar.history import History
    from enginewatch.sidecar.http import HttpServer, Pages
    from enginewatch.sidecar.keeper import SettingsKeeper
    from enginewatch.sidecar.logtail import LogTail
    from enginewatch.sidecar.metrics import Metrics
    from enginewatch.sidecar.reload import SettingsSource
    from enginewatch.sidecar.shell import Shell
    from enginewatch.sidecar.signatures import Signatures

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    faults = Faults(journal)
    loop.set_exception_handler(lambda _, context: faults.note("loop", context.get("exception") or RuntimeError()))

    source = SettingsSource(options.config_file, os.environ)
    first_look = source.poll()
    tail = LogTail(options.log_file) if options.log_file else None
    if tail is not None and options.log_hang_pattern:
        tail.look_for(Signatures((options.log_hang_pattern,)))
    now = loop.time()
    judge = _judge(options, source.settings, now, life, follows_log=tail is not None)
    board = Board(
        judge=judge,
        verdict=judge.verdict if judge is not None else _nothing_to_watch(now),
        settings=source.settings,
        started_at=life.started_at,
        clock=loop.time,
        unix_offset=life.unix_offset,
    )
    metrics = Metrics(board, faults.note, options.problems)
    faults.count = metrics.internal_error
    history = History(board.unix)
    keeper = SettingsKeeper(
        source, board=board, metrics=metrics, journal=journal, faults=faults, follows_log=tail is not None
    )
    server = HttpServer(Pages(board, history, metrics, faults.note), sock)
    await server.start()
    _say_hello(options, sock, journal)
    keeper.begin(first_look)
    if judge is None or options.engine_url is None:
        watching = loop.create_task(_keep_settings(keeper, board))
    else:
        client = _client(options, options.engine_url)
        if (problem := client.line.key_problem()) is not None:
            journal.write("warning", f"no API key is sent: {problem}", key="ENGINE_API_KEY_FILE")
        shell = Shell(
            judge=judge,
            client=client,
            board=board,
            metrics=metrics,
            history=history,
            journal=journal,
            faults=faults,
            keeper=keeper,
            tail=tail,
            fixed_signatures=bool(options.log_hang_pattern),
            kv_server=_kv_server(options),
        )
        watching = loop.create_task(shell.run())
    gc.collect()
    gc.freeze()
    # A request that is none leaves a cycle of 40 kB behind (aiohttp keeps its traceback). At the usual thresholds a
    # flood of them comes to 30 MB before anybody looks; there is so little to look at that looking often costs nothing.
    gc.set_threshold(*_GC_THRESHOLDS)

    stopping = loop.create_task(stop.wait())
    await asyncio.wait([watching, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        await server.stop()
        watching.result()  # raises what ended it
        raise RuntimeError("the watch ended by itself")
    watching.cancel()
    await asyncio.wait([watching], timeout=_PARTING_SEC)
    await server.stop()
    journal.write("info", "the sidecar was told to stop")


def _judge(options: Options, settings: Settings, now: float, life: _Life, *, follows_log: bool) -> Watch | None:
    from enginewatch.client.target import Target
    from enginewatch.core.verdict import Watch
    from enginewatch.engines import PROFILES

    if options.engine_url is None:
        return None
    return Watch(
        settings,
        profile=PROFILES.get(options.engine_kind),
        role=options.engine_role or None,
        json_statistics=options.trtllm_json_stats,
        log_channel=follows_log,
        identity=life.identity_tracker(is_loopback=Target.parse(options.engine_url).is_loopback),
        now=now,
    )


def _client(options: Options, engine_url: str) -> EngineClient:
    from enginewatch.client.target import EngineClient, Target

    return EngineClient(
        Target.parse(
            engine_url,
            metrics_path=options.metrics_path,
            api_key_file=options.engine_api_key_file,
            ca_file=options.engine_ca_file,
        )
    )


def _kv_server(options: Options) -> KvBootstrap | None:
    if not options.identity_kv_bootstrap_url:
        return None
    from enginewatch.client.kv_bootstrap import KvBootstrap

    return KvBootstrap(options.identity_kv_bootstrap_url, ca_file=options.engine_ca_file or None)


def _nothing_to_watch(now: float) -> Verdict:
    from enginewatch.core.events import Verdict

    reason = "nothing is watched: ENGINE_URL cannot be used, the sidecar's log says why"
    return Verdict("startup", False, False, reason, None, now)


async def _keep_settings(keeper: SettingsKeeper, board: Board) -> None:
    """What is left to do without an engine: the configuration is still read, so that its state can be seen."""
    while True:
        keeper.check()
        board.judged_at = board.clock()
        await asyncio.sleep(min(board.settings.poll_interval_sec, _IDLE_SEC))


def _say_hello(options: Options, sock: socket.socket, journal: Journal) -> None:
    journal.write(
        "info",
        "the sidecar answers",
        url=url_of(sock),
        engine_url=options.engine_url,
        engine_kind=options.engine_kind,
        engine_role=options.engine_role or "as the engine says",
    )
    for problem in options.problems:
        loud = problem.key == "ENGINE_URL"
        journal.write(
            "error",
            "nothing is watched until this is corrected" if loud else "a variable cannot be used: its default applies",
            key=problem.key,
            file=problem.where,
            reason=problem.reason,
        )
    if options.trtllm_json_stats and options.engine_kind not in ("auto", "trtllm"):
        journal.write("warning", "TRTLLM_JSON_STATS is for TensorRT-LLM only: ignored", engine_kind=options.engine_kind)


def _leave_threads_behind() -> None:
    """Ends the process at once when a name lookup or a disk may still hang in a thread: nothing can interrupt it."""
    if any(thread is not threading.main_thread() for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    sys.exit(run_watch(sys.argv[1:]))

"""One front-end process: starts its ranks, loads, listens, serves. Its end is the end of the engine.

Started by the supervisor as `python -m enginewatch.lab.sim.frontend JSON`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
import time
from typing import Any

import setproctitle
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from enginewatch.lab.sim.control import Control
from enginewatch.lab.sim.engine import Engine
from enginewatch.lab.sim.enginelog import EngineLog
from enginewatch.lab.sim.lineage import die_with_parent
from enginewatch.lab.sim.metrics_http import Read, metrics, page_of
from enginewatch.lab.sim.middleware import Routes, counting, guarded, noted, spoiled
from enginewatch.lab.sim.options import SimOptions
from enginewatch.lab.sim.ranks import Ranks
from enginewatch.lab.sim.sglang_http import SglangHttp
from enginewatch.lab.sim.sglang_page import SglangPage
from enginewatch.lab.sim.trtllm_http import TrtllmHttp
from enginewatch.lab.sim.trtllm_page import TrtllmPage
from enginewatch.lab.sim.trtllm_stats import IterationStats
from enginewatch.lab.sim.vllm_http import VllmHttp
from enginewatch.lab.sim.vllm_page import VllmPage
from enginewatch.lab.sim.wire import encode

FrontPage = VllmPage | SglangPage | TrtllmPage

_PAGES: dict[str, type[FrontPage]] = {"vllm": VllmPage, "sglang": SglangPage, "trtllm": TrtllmPage}
_MAX_BODY_BYTES = 64 * 2**20
_SHUTDOWN_SEC = 0.2


class FrontEnd:
    """The life of one front-end process."""

    def __init__(self, options: SimOptions, port: int, restarts: int, supervisor: socket.socket) -> None:
        self._options = options
        self._port = port
        self._restarts = restarts
        self._supervisor = supervisor
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._began = time.monotonic()
        self._stats: IterationStats | None = None

    async def serve(self) -> int:
        """Load, serve until told to end or a core dies; returns the exit code."""
        options = self._options
        page = _PAGES[options.engine](options)
        ranks = Ranks(options, page)
        engine = Engine(options, page, ranks, EngineLog(options.log_file, options.log_format))
        engine.end = self._end
        ranks.on_death = self._core_died
        routes, pages = self._routes(engine, page)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._end, 0)
        runner = web.AppRunner(
            self._app(engine, page, routes, pages),
            handler_cancellation=True,
            shutdown_timeout=_SHUTDOWN_SEC,
            access_log=None,
        )
        try:
            await ranks.start()
            if engine.sender is not None:
                await engine.sender.start()  # the real one's workers start it, long before the server listens
            await asyncio.wait({self._exit}, timeout=max(0.0, self._began + options.load_sec - time.monotonic()))
            if not self._exit.done():
                await runner.setup()
                await web.TCPSite(runner, options.host, self._port, reuse_address=True, reuse_port=True).start()
                ready = [{"core": rank.core, "pid": rank.pid} for rank in ranks.all]
                self._tell({"event": "serving", "ranks": ready})
            return await self._exit
        finally:
            if engine.sender is not None:
                await engine.sender.close()
            await runner.cleanup()
            if self._stats is not None:
                self._stats.close()
            ranks.kill()

    def _routes(self, engine: Engine, page: FrontPage) -> tuple[Routes, dict[str, Read]]:
        """The engine's own routes, and what it answers to scrapes, by path."""
        if engine.options.engine == "vllm":
            return VllmHttp(engine), {"/metrics": page_of(engine)}
        if engine.options.engine == "sglang":
            return SglangHttp(engine), {"/metrics": page_of(engine)}
        assert isinstance(page, TrtllmPage)
        stats = self._stats = IterationStats(engine.options, page.on_iteration)
        engine.ranks.connect_calls = stats.connect
        engine.hold = stats.hold
        page.on_completion = stats.completed
        routes = TrtllmHttp(engine, stats)
        pages: dict[str, Read] = {"/metrics": routes.records}
        if engine.options.return_perf_metrics:
            pages["/prometheus/metrics"] = page_of(engine)
        return routes, pages

    def _app(self, engine: Engine, page: FrontPage, routes: Routes, pages: dict[str, Read]) -> web.Application:
        app = web.Application(
            middlewares=[counting(page), guarded(engine, routes), noted(engine, routes), spoiled(engine, routes)],
            client_max_size=_MAX_BODY_BYTES,
        )
        routes.add_routes(app)

        for path, read in pages.items():

            async def scraped(request: web.Request, read: Read = read) -> web.StreamResponse:
                return await metrics(engine, request, read)

            app.router.add_get(path, scraped)
        Control(engine, self._tell, self._restarts).add_routes(app)
        return app

    def _core_died(self, core: str) -> None:
        # vLLM answers 503 until its watchdog ends the server; SGLang's watches its children every second; TensorRT-LLM
        # answers 503 for ever, or until somebody asks for its health.
        if self._options.engine == "trtllm":
            return
        wait = self._options.core_death_exit_sec if self._options.engine == "vllm" else 1.0
        asyncio.get_running_loop().call_later(wait, self._end, 1)

    def _end(self, code: int) -> None:
        if not self._exit.done():
            self._exit.set_result(code)

    def _tell(self, message: dict[str, Any]) -> None:
        self._supervisor.sendall(encode(message))


def _is_no_bad_request(record: logging.LogRecord) -> bool:
    """Whether a log record is about something else than bytes that are no HTTP/1, which the real servers pass over.

    sglang-router greets every engine in HTTP/2 first, to learn what it speaks.
    """
    return record.exc_info is None or not isinstance(record.exc_info[1], BadHttpMessage)


def main() -> int:
    """Process entry."""
    logging.getLogger("aiohttp.server").addFilter(_is_no_bad_request)
    config = json.loads(sys.argv[1])
    die_with_parent(config["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = SimOptions(**config["options"])
    setproctitle.setproctitle(f"{options.engine}-sim serve {options.model} --port {config['port']}")
    supervisor = socket.socket(fileno=config["fd"])

    async def run() -> int:
        return await FrontEnd(options, config["port"], config["restarts"], supervisor).serve()

    return asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())

"""What the simulated engines have in common in their front end: one object that the routes, the faults and the
controls share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol

from aiohttp import web

from enginewatch.lab.sim.arrivals import Arrivals
from enginewatch.lab.sim.enginelog import EngineLog
from enginewatch.lab.sim.faults import Faults
from enginewatch.lab.sim.kv_transfer import Receiver, Sender
from enginewatch.lab.sim.options import SimOptions
from enginewatch.lab.sim.ranks import Page, Ranks, Stream

CHARS_PER_TOKEN = 4


class EnginePage(Page, Protocol):
    """A metrics page that can be rendered and reset."""

    def render(self, accept: str, engine_series: bool) -> tuple[bytes, str]:
        """The page and its content type; without `engine_series` the engine says nothing of itself."""

    gzips: bool
    """Whether the page is compressed for clients that accept it."""

    def reset(self) -> None:
        """All counters from zero in the same process."""

    def sleep_state(self, core: str, level: int) -> None:
        """A core went to sleep (1, 2) or woke up (0)."""

    def rejected(self) -> None:
        """A request was turned away because the queue is full."""


class Engine:
    """The state of one front-end process.

    Attributes:
        open_requests: generation requests that came over HTTP and have no complete answer yet.
        page_count: metrics pages served.
        end: ends this front end with an exit code.
        hold: switches a deadlock of the rank's loop whose process lives on; None where that cannot be simulated.
        arrivals: the last generation requests, as a router sent them.
        sender, receiver: a vLLM prefill's and a vLLM decode's side of the KV transfer; None in every other engine.
    """

    def __init__(self, options: SimOptions, page: EnginePage, ranks: Ranks, log: EngineLog) -> None:
        self.options = options
        self.page = page
        self.ranks = ranks
        self.log = log
        self.faults = Faults()
        self.open_requests = 0
        self.page_count = 0
        self.end: Callable[[int], None] = lambda code: None
        self.hold: Callable[[bool], None] | None = None
        self.arrivals = Arrivals()
        self.sender = Sender(options) if (options.engine, options.role) == ("vllm", "prefill") else None
        self.receiver = Receiver(options) if (options.engine, options.role) == ("vllm", "decode") else None
        self.started_at = time.time()
        self.paused = False
        self.sleep_level = 0

    async def set_paused(self, paused: bool, mode: str) -> None:
        """Pause or resume every core and wait for their answers."""
        await self.ranks.call("pause" if paused else "resume", {"mode": mode})
        self.paused = paused

    async def set_sleep_level(self, level: int) -> None:
        """Put every core to sleep (1, 2) or wake it (0). A core that hangs is waited for."""
        await self.ranks.call("sleep" if level else "wake_up", {"level": level})
        self.sleep_level = level
        for rank in self.ranks.all:
            self.page.sleep_state(rank.core, level)

    async def run(self, stream: Stream) -> dict[str, Any]:
        """Read a request to its end; returns its last output."""
        while True:
            output = await stream.next()
            if "finish" in output:
                return output


def tokens_of(prompt: Any) -> int:
    """How many tokens a prompt has: token ids are counted, text is estimated, messages are added up."""
    if isinstance(prompt, str):
        return max(1, -(-len(prompt) // CHARS_PER_TOKEN))
    if isinstance(prompt, list):
        if all(isinstance(item, int) for item in prompt):
            return max(1, len(prompt))
        return sum(tokens_of(item) for item in prompt)
    if isinstance(prompt, dict):
        return tokens_of(prompt.get("content") or prompt.get("text") or "")
    return 1


async def read_json(request: web.Request) -> dict[str, Any]:
    """The request's JSON object.

    Raises:
        web.HTTPBadRequest: it has none.
    """
    with contextlib.suppress(ValueError):
        body = await request.json()
        if isinstance(body, dict):
            return body
    raise web.HTTPBadRequest(text='{"error": {"message": "The body is not a JSON object."}}')


async def start_events(request: web.Request) -> web.StreamResponse:
    """Begin a stream of server-sent events.

    The status goes out before the engine has said anything, as from the real servers: a hung core that is asked for a
    stream gives a 200 and then nothing.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response

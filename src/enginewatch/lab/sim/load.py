"""Synthetic clients inside the front end: requests to the ranks without HTTP around them."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, fields
from typing import Any

from enginewatch.lab.sim.engine import Engine
from enginewatch.lab.sim.ranks import CoreDied


@dataclass(frozen=True)
class LoadOptions:
    """How many clients do what.

    Attributes:
        concurrency: clients; each sends its next request when the last one has ended. 0 stops the load.
        prompt_tokens, max_tokens: size of every request.
        forever: send until stopped; otherwise each client sends one request.
        core: aim at one core; empty = spread over all.
    """

    concurrency: int = 4
    prompt_tokens: int = 64
    max_tokens: int = 128
    forever: bool = True
    core: str = ""


class Load:
    """The synthetic clients of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tasks: set[asyncio.Task[None]] = set()
        self.finished = 0
        self.failed = 0

    def start(self, options: LoadOptions) -> None:
        """Replace whatever load there is; open requests of the old one are aborted."""
        self.stop()
        for _ in range(options.concurrency):
            self._begin(self._client(options))

    def stop(self) -> None:
        """Let all clients leave."""
        for task in self._tasks:
            task.cancel()

    def once(self, prompt: int, max_tokens: int, core: str | None, fields_: dict[str, Any]) -> None:
        """Send one request beside the load."""
        self._begin(self._request(prompt, max_tokens, core, fields_))

    def describe(self) -> dict[str, int]:
        """Counters for /_sim/state."""
        return {"clients": len(self._tasks), "finished": self.finished, "failed": self.failed}

    def _begin(self, coroutine: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _client(self, options: LoadOptions) -> None:
        with contextlib.suppress(CoreDied):
            while True:
                await self._request(options.prompt_tokens, options.max_tokens, options.core or None, {})
                if not options.forever:
                    return

    async def _request(self, prompt: int, max_tokens: int, core: str | None, fields_: dict[str, Any]) -> None:
        # A prefill of vLLM and of TensorRT-LLM does its part alone; the other sides of a pair wait for their partner.
        options = self._engine.options
        alone = options.role == "agg" or (options.engine != "sglang" and options.role == "prefill")
        peer = "" if alone else "peer"
        try:
            with self._engine.ranks.open(prompt, max_tokens, core=core, fields={"peer": peer, **fields_}) as stream:
                await self._engine.run(stream)
            self.finished += 1
        except CoreDied:
            self.failed += 1
            raise


def load_options(data: dict[str, Any]) -> LoadOptions:
    """Read `POST /_sim/load`.

    Raises:
        ValueError: an unknown name or a value of the wrong type.
    """
    kinds = {each.name: type(each.default) for each in fields(LoadOptions)}
    for name, value in data.items():
        if name not in kinds:
            raise ValueError(f"{name!r} is no load option; there are {', '.join(kinds)}")
        if type(value) is not kinds[name] or (isinstance(value, int) and value < 0):
            raise ValueError(f"{name} is {value!r}, expected {kinds[name].__name__}")
    return LoadOptions(**data)

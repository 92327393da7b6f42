"""The demo's clients: a few people who stream completions from the engine over HTTP, one after the other."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left

import aiohttp

CLIENTS = 4
PROMPT = "Is this engine hung, or is it only thinking?"
MAX_TOKENS = 40
_RETRY_SEC = 0.25
_LEAVE_SEC = 4.0
_KEPT = 200_000


class Clients:
    """Synthetic clients. Like real ones they wait for a hung engine, and come back to one that was away.

    Args:
        engine_url: base URL of the engine.
        model: the served model's name.
    """

    def __init__(self, engine_url: str, model: str) -> None:
        self._url = engine_url + "/v1/completions"
        self._body = {"model": model, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        self._tasks: set[asyncio.Task[None]] = set()
        self._wanted = False
        self.token_times: list[float] = []
        """Monotonic seconds of every token that reached a client."""

    @property
    def busy(self) -> bool:
        """Whether clients are asking."""
        return self._wanted

    def start(self) -> None:
        """Have the clients ask, unless they already do."""
        if self._wanted:
            return
        self._wanted = True
        for _ in range(CLIENTS):
            task = asyncio.create_task(self._client())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Let every client have the end of its answer and leave; whoever waits too long hangs up."""
        self._wanted = False
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_LEAVE_SEC)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def close(self) -> None:
        """Hang up at once."""
        self._wanted = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    def tokens(self, begin: float, end: float) -> int:
        """Tokens that arrived in [begin, end)."""
        return bisect_left(self.token_times, end) - bisect_left(self.token_times, begin)

    async def _client(self) -> None:
        while self._wanted:
            try:
                await self._completion()
            except aiohttp.ClientError:
                await asyncio.sleep(_RETRY_SEC)  # the engine is away; so does every client library

    async def _completion(self) -> None:
        async with self._session.post(self._url, json=self._body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    self.token_times.append(time.monotonic())
        if len(self.token_times) > _KEPT:
            del self.token_times[: _KEPT // 2]

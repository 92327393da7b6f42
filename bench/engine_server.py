"""A small engine of its own process: serves one kind of page until it is told to serve another.

    python bench/engine_server.py        (ends when its standard input closes)

Prints its port. `/_serve/KIND` changes what /metrics answers: a key of pages.hostile_pages() or pages.CHANGING, `real`,
`idle`, `cores-64`, `gzip bomb`, `slow drip`. A canary gets a good answer at once, or the kind that `/_canary/KIND` asks
for: `ok`, `endless`, `never`, `401`. /health says 200 whatever happens, as a vLLM's does. `/_scrapes` tells how many
pages it served. Its own /healthz is a constant: what the same question costs a server that does nothing else.

Nothing of the HTTP is checked: it serves the sidecar, as cheaply as it can, so that the sidecar is what is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import pages

_COMPLETION = json.dumps(
    {
        "id": "cmpl-0",
        "object": "text_completion",
        "created": 0,
        "model": "measured",
        "choices": [{"index": 0, "text": " a", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "usage": {"prompt_tokens": 1, "total_tokens": 2, "completion_tokens": 1},
    }
).encode()
_MODELS = json.dumps({"object": "list", "data": [{"id": "measured", "object": "model"}]}).encode()
_UNAUTHORIZED = json.dumps({"error": "Unauthorized"}).encode()
_DRIP_BYTES = 512
_DRIP_SEC = 0.05


class EngineServer:
    """The server as a process, and what one may ask of it."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)

    def serve(self, kind: str) -> None:
        """What /metrics answers from now on."""
        self._order("_serve", kind)

    def canary(self, kind: str) -> None:
        """What canaries get from now on."""
        self._order("_canary", kind)

    def scrapes(self) -> int:
        """How many pages were served."""
        return int(self._order("_scrapes", ""))

    def _order(self, what: str, kind: str) -> str:
        with urllib.request.urlopen(f"{self.url}/{what}/{urllib.parse.quote(kind)}", timeout=60) as answer:
            text: str = answer.read().decode()
            return text


class _Engine:
    def __init__(self) -> None:
        self.kind = "real"
        self.canary = "ok"
        self.count = 0
        self.scrapes = 0
        self._made: dict[str, bytes] = {}
        self._fixed: dict[str, Callable[[], bytes]] = {
            "real": pages.real_page,
            "slow drip": pages.real_page,
            "idle": lambda: pages.real_page(pages.IDLE),
            "cores-64": lambda: pages.page_of(64),
            "gzip bomb": pages.gzip_bomb,
        }

    def page(self) -> bytes:
        self.count += 1
        change = pages.CHANGING.get(self.kind)
        if change is not None:
            return change(self.count)
        if self.kind not in self._made:
            make = self._fixed.get(self.kind)
            self._made = {self.kind: make() if make is not None else pages.hostile_pages()[self.kind]}
        return self._made[self.kind]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer_one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError):
            pass  # the sidecar resets what it has read enough of
        finally:
            writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        path = urllib.parse.unquote(head.split(b" ", 2)[1].decode())
        fields = dict(line.lower().partition(b":")[::2] for line in head.split(b"\r\n"))
        length = int(fields.get(b"content-length", b"0"))
        if length:
            await reader.readexactly(length)
        if path == "/metrics":
            await self._metrics(writer)
        elif path == "/v1/completions":
            await self._completion(writer)
        elif path == "/healthz":
            writer.write(_head(200, 14, "text/plain") + b"ok: a constant")
            await writer.drain()
            return True
        elif path == "/v1/models":
            writer.write(_head(200, len(_MODELS), "application/json") + _MODELS)
        elif path == "/version":
            writer.write(_head(200, 21, "application/json") + b'{"version": "0.32.0"}')
        elif path == "/health":
            writer.write(_head(200, 0, "text/plain"))
        elif path == "/_scrapes/":
            said = str(self.scrapes).encode()
            writer.write(_head(200, len(said), "text/plain") + said)
        elif path.startswith("/_serve/"):
            self.kind = path.removeprefix("/_serve/")
            self.page()
            writer.write(_head(200, 0, "text/plain"))
        elif path.startswith("/_canary/"):
            self.canary = path.removeprefix("/_canary/")
            writer.write(_head(200, 0, "text/plain"))
        else:
            writer.write(_head(404, 0, "text/plain"))
        await writer.drain()
        return False

    async def _metrics(self, writer: asyncio.StreamWriter) -> None:
        page = self.page()
        self.scrapes += 1
        head = _head(200, len(page), "text/plain; version=0.0.4")
        if self.kind == "gzip bomb":
            head = head.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
        writer.write(head)
        if self.kind != "slow drip":
            writer.write(page)
            return
        for start in range(0, len(page), _DRIP_BYTES):
            writer.write(page[start : start + _DRIP_BYTES])
            await writer.drain()
            await asyncio.sleep(_DRIP_SEC)

    async def _completion(self, writer: asyncio.StreamWriter) -> None:
        if self.canary == "ok":
            writer.write(_head(200, len(_COMPLETION), "application/json") + _COMPLETION)
            return
        if self.canary == "401":
            writer.write(_head(401, len(_UNAUTHORIZED), "application/json") + _UNAUTHORIZED)
            return
        if self.canary == "endless":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
            event = b"data: " + _COMPLETION.replace(b'"length"', b"null") + b"\n\n"
            while True:
                writer.write(event * 256)
                await writer.drain()
        await asyncio.sleep(3600)


def _head(status: int, length: int, content_type: str) -> bytes:
    return b"HTTP/1.1 %d x\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (status, content_type.encode(), length)


async def _serve() -> None:
    engine = _Engine()
    server = await asyncio.start_server(engine.answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    closed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(closed.set)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    await closed.wait()
    # Not in order: connections that somebody reads slowly, or not at all, would hold this up.
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(_serve())

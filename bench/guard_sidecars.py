"""The sidecars and engines of bench/guard_probe.py: one process that answers on 256 loopback addresses.

    python bench/guard_sidecars.py        (ends when its standard input closes)

Prints its port. GET /engine is an identity, the same everywhere; everything else is 200.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

ADDRESSES = {
    "prefill": [f"127.0.1.{last}" for last in range(1, 129)],
    "decode": [f"127.0.2.{last}" for last in range(1, 129)],
}
ENGINE_ID = "pst-1791943641.29"
_IDENTITY = json.dumps(
    {
        "engine_id": ENGINE_ID,
        "started_at": "2026-10-14T02:07:21.29Z",
        "source": "process_start_time",
        "restarts": 0,
        "watcher_started_at": "2026-10-14T01:52:10.48Z",
    }
).encode()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        body = _IDENTITY if head.startswith(b"GET /engine ") else b"{}"
        length = f"Content-Length: {len(body)}\r\n".encode()
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + length + b"\r\n" + body)
        await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


def listeners(addresses: list[str]) -> list[socket.socket]:
    """A socket on each address, all with one port that the system gives."""
    for _ in range(20):
        first = socket.create_server((addresses[0], 0), backlog=1024)
        port = first.getsockname()[1]
        found = [first]
        try:
            found += [socket.create_server((address, port), backlog=1024) for address in addresses[1:]]
        except OSError:  # somebody has that port on one of them
            for listener in found:
                listener.close()
        else:
            return found
    raise RuntimeError("no port is free on all addresses")


async def _serve() -> None:
    found = listeners([address for role in ADDRESSES.values() for address in role])
    servers = [await asyncio.start_server(_answer, sock=listener) for listener in found]
    print(found[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for server in servers:
        server.close()


class Sidecars:
    """They as a process of their own."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()


if __name__ == "__main__":
    asyncio.run(_serve())

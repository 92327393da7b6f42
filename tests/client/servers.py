"""Servers on 127.0.0.1 that misbehave on purpose, and a look at what the client leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Serve = Callable[[Handler], Awaitable[str]]


def response(body: bytes | str, *, status: str = "200 OK", headers: str = "") -> bytes:
    """A whole answer; `headers` are lines, each with its line end."""
    raw = body.encode() if isinstance(body, str) else body
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(raw)}\r\n{headers}\r\n".encode() + raw


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Head and body of one request."""
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    return head + await reader.readexactly(sum(lengths))


def answering(*answers: bytes) -> Handler:
    """Gives each connection's one request the next of `answers`, the last one for ever, and closes."""
    left = list(answers)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(left.pop(0) if len(left) > 1 else left[0])
        await writer.drain()

    return handle


class Recorder:
    """Answers by path, anything else with 404, and keeps the requests it saw."""

    def __init__(self, answers: dict[str, bytes]) -> None:
        self.answers = answers
        self.requests: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader)
        self.requests.append(request)
        path = request.split(b" ", 2)[1].decode()
        writer.write(self.answers.get(path, response("", status="404 Not Found")))
        await writer.drain()

    def paths(self) -> list[str]:
        return [request.split(b" ", 2)[1].decode() for request in self.requests]


async def wait_for_ever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Takes a request and never answers."""
    await reader.read()


def reset(writer: asyncio.StreamWriter) -> None:
    """Break the connection with a RST."""
    opened = writer.get_extra_info("socket")
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def open_sockets() -> int:
    """How many sockets this process holds."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{entry}").startswith("socket:")
    return count


def connections_to(url: str) -> int:
    """How many connections to the address the kernel still keeps, also those that no process holds."""
    port = f"{int(url.rpartition(':')[2]):04X}"
    with open("/proc/net/tcp") as table:
        return sum(line.split()[2].endswith(f":{port}") for line in list(table)[1:])

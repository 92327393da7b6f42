"""The pipe between front end and rank: one JSON object per line over a Unix socket pair.

Front end to rank:
    - `{"op": "add", "id", "prompt", "max", ...}`: a request (see job.py for its fields)
    - `{"op": "abort", "id"}`: the client has gone
    - `{"op": "kv", "id"}`: the KV of a request from another engine is there
    - `{"op": "call", "call", "name", "args"}`: a round trip through the loop (pause, is_sleeping, server_info...)
    - `{"op": "tune", ...}`: how fast steps are, whether the P/D peer is there

Rank to front end:
    - `{"op": "ready", "pid"}` once
    - `{"op": "step", "outputs": [...], ...}` after every step, and without outputs when only gauges are to be told
    - `{"op": "reply", "call", "value"}`

A rank imports this module, so it must stay small.
"""

from __future__ import annotations

import json
import select
import socket
from typing import Any

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """One message as it goes over the pipe."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Inbox:
    """The rank's blocking end of the pipe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""

    def read(self, timeout: float | None) -> list[Message]:
        """Messages that are there, after waiting at most `timeout` seconds for the first (None = for ever).

        Raises:
            EOFError: the front end has gone.
        """
        ready, _, _ = select.select([self._sock], [], [], timeout)
        if not ready:
            return []
        try:
            data = self._sock.recv(65536)
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

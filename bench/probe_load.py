"""Asks one URL so many times a second and says how long the answers took.

    python bench/probe_load.py PORT PATH PER_SECOND SECONDS

Over one kept connection; who closes it after each answer pays for the next one himself. A process of its own, so that
what it costs is not taken from who is measured. Each answer counts from the moment at which its question was due, not
from when it could be sent: a server that stalls for a second has been late for two hundred. Prints the milliseconds,
one a line.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

_CHUNKED = b"transfer-encoding: chunked"


def ask(port: int, path: str, per_sec: float, seconds: float) -> list[float]:
    """Milliseconds of each answer."""
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    took: list[float] = []
    connection: socket.socket | None = None
    try:
        began = time.perf_counter()
        for number in range(int(per_sec * seconds)):
            due = began + number / per_sec
            while (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            if connection is None:
                connection = socket.create_connection(("127.0.0.1", port), timeout=30)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(request)
            kept = _read_answer(connection)
            took.append((time.perf_counter() - due) * 1000)
            if not kept:
                connection.close()
                connection = None
    finally:
        if connection is not None:
            connection.close()
    return took


def start(port: int, path: str, per_sec: float, seconds: float) -> subprocess.Popen[str]:
    """The same in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), str(port), path, str(per_sec), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> list[float]:
    """What it measured, when it is done.

    Raises:
        RuntimeError: it broke.
    """
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError("the load generator broke: its connection was closed, or it waited 30 s for an answer")
    return [float(line) for line in output.split()]


def _read_answer(connection: socket.socket) -> bool:
    """Reads one answer to its end; whether another question may follow on this connection."""
    data = b""
    while True:
        piece = connection.recv(65536)
        if not piece:
            if b"\r\n\r\n" in data and _length(data) is None:
                return False  # the end of the connection was the end of the body
            raise ConnectionError("closed")
        data += piece
        head, found, body = data.partition(b"\r\n\r\n")
        if not found:
            continue
        length = _length(data)
        whole = len(body) >= length if length is not None else _CHUNKED in head.lower() and body.endswith(b"0\r\n\r\n")
        if whole:
            return head.startswith(b"HTTP/1.1") and b"connection: close" not in head.lower()


def _length(answer: bytes) -> int | None:
    head = answer.partition(b"\r\n\r\n")[0]
    return next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), None)


if __name__ == "__main__":
    for milliseconds in ask(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4])):
        print(f"{milliseconds:.4f}")

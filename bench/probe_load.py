"""Asks one URL so many times a second over one kept connection, and says how long the answers took.

    python bench/probe_load.py PORT PATH PER_SECOND SECONDS

A process of its own, so that what it costs is not taken from who is measured. Each answer counts from the moment at
which its question was due, not from when it could be sent: a server that stalls for a second has been late for two
hundred. Prints the milliseconds, one a line.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path


def ask(port: int, path: str, per_sec: float, seconds: float) -> list[float]:
    """Milliseconds of each answer."""
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    took: list[float] = []
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.perf_counter()
        for number in range(int(per_sec * seconds)):
            due = began + number / per_sec
            while (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            connection.sendall(request)
            _read_answer(connection)
            took.append((time.perf_counter() - due) * 1000)
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


def _read_answer(connection: socket.socket) -> None:
    data = b""
    while True:
        piece = connection.recv(65536)
        if not piece:
            raise ConnectionError("closed")
        data += piece
        head, found, body = data.partition(b"\r\n\r\n")
        if found:
            length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            if len(body) >= length:
                return


if __name__ == "__main__":
    for milliseconds in ask(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4])):
        print(f"{milliseconds:.4f}")

"""Binding the address to answer on, before anything else is started, and answering there when nothing else can."""

from __future__ import annotations

import os
import select
import socket
import time

from enginewatch.sidecar.options import Address, StartError

BACKLOG = 100
_OPEN_BODY = b"ok: watcher broken, the sidecar's log says how"
_OPEN_ANSWER = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
    % (len(_OPEN_BODY), _OPEN_BODY)
)
_ONE_CLIENT_SEC = 0.1


def bind(address: Address) -> socket.socket:
    """A listening socket. Without a host, or with `::`, it takes IPv6 and IPv4; IPv4 alone where there is no IPv6.

    Raises:
        StartError: the address cannot be had; exit code 1.
    """
    try:
        sock = _bind(address)
    except (OSError, UnicodeError) as error:
        raise StartError(
            f"enginewatch watch: cannot listen on {shown(address)}: {_phrase(error)}; choose another address with "
            "--listen or LISTEN",
            1,
        ) from None
    sock.setblocking(False)
    return sock


def fail_open(sock: socket.socket, seconds: float) -> None:
    """Answers whoever connects with 200 for so long: a port that is bound and silent would kill the engine."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        try:
            if not select.select([sock], [], [], left)[0]:
                return
            client, _ = sock.accept()
            with client:
                client.settimeout(_ONE_CLIENT_SEC)
                client.recv(4096)
                client.sendall(_OPEN_ANSWER)
                client.shutdown(socket.SHUT_WR)
        except OSError:
            time.sleep(0.01)  # out of descriptors, perhaps


def url_of(sock: socket.socket) -> str:
    """A URL at which the socket can be reached from this machine."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        return f"http://127.0.0.1:{port}"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def shown(address: Address) -> str:
    """The address as an operator would write it."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{host}:{address.port}"


def _bind(address: Address) -> socket.socket:
    if address.host in ("", "::") and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("::", address.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG
            )
        except OSError:
            if address.host:
                raise
            # IPv6 may be compiled in and switched off; if the port is taken, the next attempt says so.
    host = address.host or "0.0.0.0"
    family, *_, where = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(where[:2], family=family, backlog=BACKLOG)


def _phrase(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "the name cannot be resolved"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return "not a usable host name"

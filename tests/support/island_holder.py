"""Runs inside an island (island.py), keeps its namespaces alive and opens sockets there for the test.

A socket belongs to the network it was opened in, whichever process uses it. So the test keeps its servers as ordinary
objects of its own process and only has their sockets opened here.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import socket
import struct
import sys

MS_BIND = 4096
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
SIOCSIFADDR = 0x8916
SIOCGIFINDEX = 0x8933
ETC = ("resolv.conf", "nsswitch.conf", "hosts")


def mount_over_etc(directory: str) -> None:
    """Puts the island's own files where libc's getaddrinfo reads them."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ETC:
        target = os.path.realpath(f"/etc/{name}")
        if not os.path.exists(target):
            continue  # an image without nsswitch.conf: libc's own order then holds
        if libc.mount(f"{directory}/{name}".encode(), target.encode(), None, MS_BIND, None):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), target)


def bring_up_loopback(ipv6: list[str]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
        index = struct.unpack("16si", fcntl.ioctl(any_socket, SIOCGIFINDEX, struct.pack("16si", b"lo", 0)))[1]
    # A kernel without IPv6 is no reason to have no island.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as any_socket:
        for address in ipv6:
            raw = socket.inet_pton(socket.AF_INET6, address)
            fcntl.ioctl(any_socket, SIOCSIFADDR, struct.pack("16sIi", raw, 128, index))


def serve(line: socket.socket) -> None:
    """Answers each request {family, kind, address} with "ok" and the bound socket, or with what was wrong."""
    while request := line.recv(4096):
        wanted = json.loads(request)
        try:
            opened = socket.socket(wanted["family"], wanted["kind"])
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if wanted["address"]:
                opened.bind(tuple(wanted["address"]))
        except OSError as error:
            line.send(str(error).encode())
            continue
        socket.send_fds(line, [b"ok"], [opened.fileno()])
        opened.close()


def main() -> None:
    directory, number, *ipv6 = sys.argv[1:]
    line = socket.socket(fileno=int(number))
    try:
        mount_over_etc(directory)
        bring_up_loopback(ipv6)
    except OSError as error:
        line.send(str(error).encode())
        return
    line.send(b"ready")
    serve(line)


if __name__ == "__main__":
    main()

"""A small DNS server (RFC 1035) over UDP and TCP, whose answers a test switches while it runs."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Literal

NXDOMAIN: Literal["nxdomain"] = "nxdomain"
SERVFAIL: Literal["servfail"] = "servfail"
SILENCE: Literal["silence"] = "silence"
EMPTY: Sequence[str] = ()
"""NOERROR without a record: the name is there, this kind of address is not. A headless Service without pods."""

Zone = dict[str, "Sequence[str] | Literal['nxdomain', 'servfail', 'silence']"]

A, AAAA = 1, 28
_RCODES = {SERVFAIL: 2, NXDOMAIN: 3}
_LARGEST_OVER_UDP = 512


class DnsServer:
    """`a` and `aaaa` hold what is said for a name: addresses, in another order each time, or a fault.

    A name in neither does not exist; a name in only one of them has no addresses of the other kind.
    """

    def __init__(self, udp: socket.socket, tcp: socket.socket) -> None:
        self.a: Zone = {}
        self.aaaa: Zone = {}
        self.tcp_answers = True
        self.asked: Counter[str] = Counter()
        self._udp, self._tcp = udp, tcp
        self._selector = selectors.DefaultSelector()
        self._ours, self._wake = socket.socketpair()
        for readable in (udp, tcp, self._ours):
            self._selector.register(readable, selectors.EVENT_READ)
        tcp.listen()
        self._thread = threading.Thread(target=self._serve, name="dns")
        self._thread.start()

    def close(self) -> None:
        self._wake.close()
        self._thread.join()
        for open_one in (self._udp, self._tcp, self._ours, self._selector):
            open_one.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._ours:
                    return
                with contextlib.suppress(OSError):  # the asker may be gone, or gone too early
                    if key.fileobj is self._udp:
                        query, asker = self._udp.recvfrom(4096)
                        if answer := self._answer(query, largest=_LARGEST_OVER_UDP):
                            self._udp.sendto(answer, asker)
                    else:
                        self._over_tcp(self._tcp.accept()[0])

    def _over_tcp(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(5)
            while self.tcp_answers and (head := connection.recv(2, socket.MSG_WAITALL)):
                query = connection.recv(struct.unpack("!H", head)[0], socket.MSG_WAITALL)
                if answer := self._answer(query, largest=65535):
                    connection.sendall(struct.pack("!H", len(answer)) + answer)

    def _answer(self, query: bytes, *, largest: int) -> bytes | None:
        (number,) = struct.unpack_from("!H", query)
        labels, at = [], 12
        while length := query[at]:
            labels.append(query[at + 1 : at + 1 + length].decode("ascii", "replace"))
            at += 1 + length
        kind, _ = struct.unpack_from("!HH", query, at + 1)
        question = query[12 : at + 5]
        name = ".".join(labels).lower()
        self.asked[name] += 1
        said = self._said(name, kind)
        if said == SILENCE:
            return None
        rcode, truncated, records = 0, 0, b""
        if isinstance(said, str):
            rcode = _RCODES[said]
        else:
            family = socket.AF_INET if kind == A else socket.AF_INET6
            first = self.asked[name] % len(said) if said else 0
            raw = [socket.inet_pton(family, address) for address in (*said[first:], *said[:first])]
            # 0xc00c: the name as in the question. Time to live 0, as in a headless Service's answers at their freshest.
            records = b"".join(struct.pack("!HHHIH", 0xC00C, kind, 1, 0, len(one)) + one for one in raw)
            if 12 + len(question) + len(records) > largest:
                truncated, records = 0x0200, b""
        count = 0 if not records else len(said)
        return struct.pack("!HHHHHH", number, 0x8180 | truncated | rcode, 1, count, 0, 0) + question + records

    def _said(self, name: str, kind: int) -> Sequence[str] | Literal["nxdomain", "servfail", "silence"]:
        if name not in self.a and name not in self.aaaa:
            return NXDOMAIN
        return {A: self.a, AAAA: self.aaaa}.get(kind, {}).get(name, EMPTY)

"""A network and an /etc of a test's own, without root: names in it are looked up by libc, in real DNS, at our server.

`unshare` makes the namespaces: a user namespace in which this user is root, a network in which port 53 of 127.0.0.1 is
free, and a mount table in which /etc/resolv.conf can be another file. A holder process keeps them alive, `nsenter` runs
the program under test inside. The servers stay in the test's own process (island_holder.py says how).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from island_holder import ETC

IPV6 = ("fd00::1", "fd00::2", "fd00::3")
"""Addresses on the island's loopback besides ::1 and all of 127.0.0.0/8."""

CONTENTS = {
    "resolv.conf": "nameserver 127.0.0.1\n",
    "nsswitch.conf": "hosts: files dns\n",
    "hosts": "127.0.0.1 localhost\n",
}


class NoIslandError(Exception):
    """This kernel lets this user make no namespaces."""


class Island:
    """Made by `Island.settle`; `close` when done."""

    def __init__(self, etc: Path, holder: subprocess.Popen[bytes], line: socket.socket, *, as_user: bool) -> None:
        self.etc, self._holder, self._line, self._as_user = etc, holder, line, as_user

    @classmethod
    def settle(cls, etc: Path) -> Island:
        """Makes the namespaces. `etc` is an empty directory for the files that stand for those of /etc.

        Raises NoIslandError, with what each attempt said, where they cannot be made.
        """
        for name in ETC:
            (etc / name).write_text(CONTENTS[name])
        said: list[str] = []
        for as_user in (True, False):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            new = ["unshare", *(["--user", "--map-root-user"] if as_user else []), "--mount", "--net"]
            program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("island_holder.py"))]
            try:
                holder = subprocess.Popen(
                    [*new, *program, str(etc), str(theirs.fileno()), *IPV6],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )
            except FileNotFoundError as error:
                ours.close()
                raise NoIslandError("there is no `unshare` on this machine") from error
            finally:
                theirs.close()
            answer = ours.recv(4096)
            if answer == b"ready":
                return cls(etc, holder, ours, as_user=as_user)
            errors = holder.communicate()[1].decode(errors="replace").strip()
            said.append(f"{' '.join(new)}: {answer.decode() or errors}")
            ours.close()
            if os.geteuid() != 0:
                break  # without root, a user namespace was the only way
        raise NoIslandError("; ".join(said))

    def command(self, *command: str) -> list[str]:
        """The command that runs `command` inside; the process keeps its pid. Paths must be absolute."""
        user = ["--user", "--preserve-credentials"] if self._as_user else []
        return ["nsenter", "-t", str(self._holder.pid), *user, "--mount", "--net", "--", *command]

    def socket(
        self, family: int, kind: int = socket.SOCK_STREAM, address: tuple[str, int] | None = None
    ) -> socket.socket:
        """A socket of the island's network, bound to `address` if that is given. Raises OSError like `bind`."""
        self._line.send(json.dumps({"family": int(family), "kind": int(kind), "address": address}).encode())
        answer, received, _, _ = socket.recv_fds(self._line, 4096, 1)
        if answer != b"ok":
            raise OSError(answer.decode())
        return socket.socket(fileno=received[0])

    def close(self) -> None:
        self._line.close()
        self._holder.wait()
        assert self._holder.stderr is not None
        self._holder.stderr.close()

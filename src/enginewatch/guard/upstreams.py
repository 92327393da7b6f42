"""Asking the outside: where engines are (DNS), who they are (their sidecar's /engine), whether they serve (/health).

Nothing here raises: each question has an answer, and one that failed says why.
"""

from __future__ import annotations

import http.client
import socket
import time
from typing import Final, NamedTuple, Optional

from enginewatch.core.drift import LARGEST_BODY_BYTES, Identity, read_identity

OK: Final = 200
NOT_FOUND: Final = 404
NO_SUCH_NAME: Final = frozenset(
    code for name in ("EAI_NONAME", "EAI_NODATA") if (code := getattr(socket, name, None)) is not None
)
"""A lookup that ends so has an answer: there is no such address."""


class Lookup(NamedTuple):
    """What a name resolves to.

    Attributes:
        addresses: IPs, both families, each once; empty if it failed or there are none.
        trouble: why there are none, else empty.
        failed: nobody knows; as against a name that has no addresses now.
    """

    addresses: tuple[str, ...]
    trouble: str = ""
    failed: bool = False


class Said(NamedTuple):
    """What one HTTP question brought.

    Attributes:
        status: None without an answer.
        body: of a 200 and as far as asked for, and one byte more if there is more.
        trouble: why there is no answer, else empty.
    """

    status: Optional[int]  # noqa: UP045 - evaluated by Python 3.9
    body: bytes = b""
    trouble: str = ""


class Who(NamedTuple):
    """What /engine brought.

    Attributes:
        identity: None if there is none.
        trouble: why there is none, else empty.
        is_old: the sidecar has no such endpoint and never will.
    """

    identity: Optional[Identity]  # noqa: UP045
    trouble: str = ""
    is_old: bool = False


def look_up(name: str, family: int = socket.AF_UNSPEC) -> Lookup:
    """Resolve a name, for as long as the system takes.

    Args:
        name: a host's name.
        family: AF_INET or AF_INET6, to ask for addresses of one family only.
    """
    try:
        # As bytes: a str goes through the codec for international names, which loads slowly and has its own errors.
        found = socket.getaddrinfo(name.encode(), None, family, socket.SOCK_STREAM)
    except socket.gaierror as error:
        return Lookup((), error.strerror or str(error), error.errno not in NO_SUCH_NAME)
    except (OSError, UnicodeError) as error:
        return Lookup((), str(error), True)
    addresses = dict.fromkeys(str(where[0]) for _, _, _, _, where in found)
    return Lookup(tuple(addresses), "" if addresses else "no address")


def one_family(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """The IPv4 addresses of a name if it has any, else its IPv6 ones: a pod with both must not count twice."""
    return tuple(address for address in addresses if ":" not in address) or addresses


def who(address: str, watcher_port: int, deadline: float) -> Who:
    """Ask a sidecar which process its engine is.

    Args:
        address: an IP.
        watcher_port: the sidecar's port.
        deadline: when to give up, on the monotonic clock.
    """
    said = ask(address, watcher_port, "/engine", deadline, most_bytes=LARGEST_BODY_BYTES)
    if said.status is None:
        return Who(None, said.trouble)
    if said.status == NOT_FOUND:
        return Who(None, "its sidecar has no /engine (404)", is_old=True)
    if said.status != OK:
        return Who(None, f"HTTP {said.status}")
    identity = read_identity(said.body)
    return Who(identity, "" if identity else "its answer is no identity")


def serves(address: str, port: int, deadline: float) -> str | None:
    """None if an engine answers /health with 200, or why that cannot be said."""
    said = ask(address, port, "/health", deadline, most_bytes=0)
    if said.status == OK:
        return None
    return said.trouble or f"HTTP {said.status}"


def accepts(address: str, port: int, deadline: float) -> str | None:
    """None if a TCP connection is accepted, or why not."""
    try:
        _connect(address, port, deadline).close()
    except OSError as error:
        return _reason(error)
    return None


def ask(address: str, port: int, path: str, deadline: float, *, most_bytes: int) -> Said:
    """GET a page: no proxy, no redirect, not more of its body than asked for, everything before the deadline."""
    try:
        connection = _Connection(address, port, deadline)
        try:
            connection.request("GET", path, headers={"Accept": "application/json", "Connection": "close"})
            response = connection.getresponse()
            wanted = most_bytes and response.status == OK
            return Said(response.status, response.read(most_bytes + 1) if wanted else b"")
        finally:
            connection.close()
    except OSError as error:
        return Said(None, trouble=_reason(error))
    except Exception as error:
        # HTTPException, ValueError, and what else the library makes of an answer that is none.
        return Said(None, trouble=f"no HTTP answer ({type(error).__name__})")


def _reason(error: OSError) -> str:
    if isinstance(error, (TimeoutError, socket.timeout)):
        return "timed out"
    return (error.strerror or str(error) or type(error).__name__).lower()


class _Socket(socket.socket):
    """A socket whose every wait ends at one deadline, so that an answer that drips does not push it away."""

    deadline = 0.0

    def wait_no_longer(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self.settimeout(left)

    def recv_into(self, *args: object, **kwargs: object) -> int:
        self.wait_no_longer()
        return super().recv_into(*args, **kwargs)  # type: ignore[arg-type]

    def sendall(self, *args: object, **kwargs: object) -> None:
        self.wait_no_longer()
        super().sendall(*args, **kwargs)  # type: ignore[arg-type]


def _connect(address: str, port: int, deadline: float) -> _Socket:
    connected = _Socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    connected.deadline = deadline
    try:
        connected.wait_no_longer()
        connected.connect((address, port))
    except BaseException:
        connected.close()
        raise
    return connected


class _Connection(http.client.HTTPConnection):
    """The library's connection over such a socket."""

    def __init__(self, address: str, port: int, deadline: float) -> None:
        super().__init__(address, port)
        self._deadline = deadline

    def connect(self) -> None:
        self.sock = _connect(self.host, self.port, self._deadline)

"""One question and its answer, over a connection of its own.

Rules:
    - One deadline covers name lookup, connect, TLS, request and body to the last byte.
    - Whatever ends an exchange early (deadline, cancellation, a reader that gives up) resets the connection at once:
      the engine learns that nobody waits and drops the request, and neither unsent bytes nor a half-closed socket stay
      behind, however long the engine is frozen.
    - Connections are never reused: one that the engine closed while it idled would read as a dead engine.
    - Nothing is followed, retried, remembered or taken from the environment: no redirects, cookies or proxies.
    - What comes in is taken in sips (`intake`). A body is handed on piece by piece, decompressed and counted, with a
      turn for the event loop between pieces, and at most half of the time is spent on one that takes long.
    - No aiohttp exception leaves this module: they carry the request's headers, and with them the API key.

Faults are told apart by what they mean for a verdict. `REFUSED` means that nobody listens, and only that. A name that
does not resolve, a certificate that is not trusted or a watcher out of file descriptors is `SETUP`: no engine was
asked, so nothing is known about one, and restarting it would not help. A request that can never be sent, to any engine,
is `UNSENDABLE`: an operator's path, method or key is at fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from ipaddress import ip_address

import aiohttp
from aiohttp.client_proto import ResponseHandler
from yarl import URL

from enginewatch.client.credentials import SentKeys, Trust, Unusable, read_key
from enginewatch.client.intake import Intake, TooMuch

MAX_BODY_BYTES = 8 * 1024 * 1024
"""Longest body read, on the wire and after decompression."""
_PIECE_BYTES = 16 * 1024
_STRETCH_SEC = 0.001
"""After so much reading without a pause there is one of the same length."""
_MAX_MEMBERS = 256
"""Most members of a gzip body. Each may be empty, 20 bytes long, and costs as much as a page of ordinary size."""

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_CLOSE_IN_ORDER = struct.pack("ii", 0, 0)

Feed = Callable[[bytes], None]

_NO_PATH = "the path cannot be part of a URL"
_NAME_FIX = "correct the host in ENGINE_URL, or the name service"

_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ENETDOWN}


class Fault(StrEnum):
    """Why there is no whole answer."""

    SETUP = "setup"
    """The question could not be put: name, certificate, address or the watcher's own resources."""
    UNSENDABLE = "unsendable"
    """The question itself is no HTTP request; whom it is for makes no difference."""
    REFUSED = "refused"
    """Nobody listens."""
    TIMEOUT = "timeout"
    """The deadline passed; with a head, in the middle of an answer."""
    RESET = "reset"
    """The connection broke before an answer began."""
    TRUNCATED = "truncated"
    """The connection ended in the middle of an answer."""
    GARBLED = "garbled"
    """Not HTTP, an encoding nobody asked for, or more than may be read."""


@dataclass(frozen=True, slots=True)
class Head:
    """What an answer begins with."""

    status: int
    content_type: str = ""
    location: str | None = None
    sized: bool = True
    """Whether the body's end is marked; without, a broken connection looks like a whole body."""


class Trouble(Exception):  # noqa: N818
    """There is no whole answer. `detail` is a short phrase for people and holds nothing that the engine sent."""

    def __init__(self, fault: Fault, detail: str, head: Head | None = None) -> None:
        super().__init__(detail)
        self.fault = fault
        self.detail = detail
        self.head = head


@dataclass(frozen=True, slots=True)
class Question:
    """One request. `path` begins with a slash and may carry a query."""

    path: str
    method: str = "GET"
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    with_key: bool = True


class Line:
    """Where questions go: one origin, its key and whom to trust there."""

    def __init__(self, url: str, *, api_key_file: str | None = None, ca_file: str | None = None) -> None:
        self.url = url
        self._api_key_file = api_key_file
        self._trust = Trust(ca_file) if url.startswith("https:") else None
        self._sent_keys = SentKeys()
        self._under_way: list[list[socket.socket]] = []

    def redacted(self, text: str) -> str:
        """Text that the engine sent, without an API key that it was sent: an echo must not get into logs and pages."""
        return self._sent_keys.redacted(text)

    def close(self) -> None:
        """Break the connections of all questions under way; they end as failed."""
        for sockets in self._under_way:
            _reset(sockets)

    def key_problem(self) -> str | None:
        """Why the API key cannot be sent right now, as one sentence; None if it can, or there is none to send."""
        if self._api_key_file is None:
            return None
        try:
            read_key(self._api_key_file)
        except Unusable as problem:
            return str(problem)
        return None

    def key_advice(self) -> str:
        """What a 401 or 403 most likely means here, as a short phrase."""
        if self._api_key_file is None:
            return "an API key is wanted"
        return self.key_problem() or "the API key was not accepted"

    def same_origin(self, location: str, path: str) -> str | None:
        """The path that a redirect from `path` leads to, below the base path; None if it leaves the origin.

        What does not begin with the base path is taken as it is: a proxy took the base path off on the way in.
        """
        try:
            here = URL(self.url + path)
            there = here.join(URL(location))
            if there.origin() != here.origin():
                return None
            base = URL(self.url).raw_path.rstrip("/")
        except (ValueError, UnicodeError):
            return None
        led_to = there.raw_path_qs
        return led_to.removeprefix(base) if led_to.startswith(f"{base}/") else led_to

    async def ask(self, question: Question, *, until: float, on_head: Callable[[Head], Feed | None]) -> Head:
        """Put one question and hand the answer's body on, piece by piece.

        Args:
            question: what to ask.
            until: deadline on the running loop's clock.
            on_head: called when the answer begins; returns what takes the body's pieces, or None to leave it unread.

        Raises:
            Trouble: there is no whole answer.
            Exception: whatever `on_head` or the taker of pieces raises.
        """
        headers = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "enginewatch", **question.headers}
        try:
            url = URL(self.url + question.path)
            trust = self._trust.current() if self._trust else True
        except Unusable as problem:
            raise Trouble(Fault.SETUP, f"{problem}: correct ENGINE_CA_FILE") from None
        except ValueError:
            raise Trouble(Fault.UNSENDABLE, _NO_PATH) from None
        if question.with_key and self._api_key_file is not None:
            try:
                key = read_key(self._api_key_file)
                self._sent_keys.note(key)
                headers["Authorization"] = f"Bearer {key}"
            except Unusable:
                pass  # The engine may not want it here; if it does, it answers 401 and `key_problem` says why.

        loop = asyncio.get_running_loop()
        sockets: list[socket.socket] = []
        intakes: list[Intake] = []
        self._under_way.append(sockets)
        session = _session(sockets, intakes)
        response: aiohttp.ClientResponse | None = None
        head: Head | None = None
        whole = False
        trouble: Trouble
        scope = asyncio.timeout_at(until)
        try:
            async with scope:
                response = await _send(session, question, url, headers, trust)
                _linger(sockets, _CLOSE_IN_ORDER)
                for intake in intakes:
                    intake.answer_begins()
                head = _head_of(response)
                feed = on_head(head)
                if feed is None:
                    return head
                decoder = _Decoder(response.headers.get("Content-Encoding", ""))
                begun = loop.time()
                body_bytes = 0
                async for chunk in response.content.iter_any():
                    body_bytes += len(chunk)
                    for intake in intakes:
                        intake.check(body_bytes)
                    for piece in decoder.pieces(chunk):
                        feed(piece)
                        # A full buffer never suspends, and /healthz would wait until it is empty. An answer of ours
                        # takes several turns; were there a piece before each, requests would come faster than they go.
                        if loop.time() - begun < _STRETCH_SEC:
                            await asyncio.sleep(0)
                        else:
                            await asyncio.sleep(_STRETCH_SEC)
                            begun = loop.time()
                if not decoder.whole:
                    raise aiohttp.ClientPayloadError
                whole = True
                return head
        except TimeoutError:
            if not scope.expired():
                trouble = Trouble(Fault.TIMEOUT, "the connection timed out", head)
            elif sockets or _is_address(url.host):
                trouble = Trouble(Fault.TIMEOUT, _silence(sockets, head), head)
            else:
                trouble = Trouble(Fault.SETUP, f"cannot resolve {url.host} in time: {_NAME_FIX}")
        except _Broken as broken:
            trouble = Trouble(Fault.RESET, broken.detail)
        except _Garbled as garbled:
            trouble = Trouble(Fault.GARBLED, garbled.detail, head)
        except TooMuch as excess:
            trouble = Trouble(Fault.GARBLED, str(excess), head)
        except (aiohttp.ClientError, OSError) as problem:
            trouble = _trouble_of(problem, head, url.host, has_ca_file=self._trust is not None and self._trust.is_own)
        except _Unsendable:
            trouble = Trouble(
                Fault.UNSENDABLE, "the request cannot be sent: its method, path or a header is not valid HTTP"
            )
        finally:
            self._under_way[:] = [others for others in self._under_way if others is not sockets]
            if not whole:
                _reset(sockets)
            if response is not None:
                response.close()
            await session.close()
        # Raised here, where no aiohttp exception is being handled: a traceback would print its chain.
        raise trouble

    async def fetch(self, question: Question, *, until: float, max_bytes: int = 256 * 1024) -> tuple[Head, bytes]:
        """Put one question whose answer is small and wanted as a whole.

        Raises:
            Trouble: there is no whole answer of at most `max_bytes`.
        """
        body = bytearray()

        def take(piece: bytes) -> None:
            if len(body) + len(piece) > max_bytes:
                raise _Garbled(f"the answer is longer than {max_bytes} bytes")
            body.extend(piece)

        head = await self.ask(question, until=until, on_head=lambda _: take)
        return head, bytes(body)


class _Garbled(Exception):  # noqa: N818
    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class _Broken(Exception):  # noqa: N818
    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class _Unsendable(Exception):  # noqa: N818
    pass


async def _send(
    session: aiohttp.ClientSession,
    question: Question,
    url: URL,
    headers: Mapping[str, str],
    trust: ssl.SSLContext | bool,
) -> aiohttp.ClientResponse:
    try:
        return await session.request(
            question.method, url, data=question.body, headers=headers, allow_redirects=False, ssl=trust
        )
    except aiohttp.ClientError:
        raise
    except ValueError:
        # aiohttp's checks of what an operator wrote; chaining it would show the headers.
        unsendable = _Unsendable()
    raise unsendable


async def _never_twice(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Stop aiohttp from repeating a GET whose connection broke: one canary is one canary, one reset is a reset."""
    try:
        return await handler(request)
    except aiohttp.ClientConnectorError:
        raise
    except aiohttp.ServerDisconnectedError:
        broken = _Broken("the connection was closed without an answer")
    except aiohttp.ClientOSError:
        broken = _Broken("the connection was reset before an answer")
    raise broken


def _session(sockets: list[socket.socket], intakes: list[Intake]) -> aiohttp.ClientSession:
    """A session for one question; the sockets it opens and what they feed are noted in the lists."""
    loop = asyncio.get_running_loop()

    def open_socket(address: tuple[int, int, int, str, tuple[object, ...]]) -> socket.socket:
        family, kind, protocol, _, _ = address
        opened = socket.socket(family=family, type=kind, proto=protocol)
        # From the start: a connect that is cancelled half-way is closed by others, before `_reset` sees it.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        sockets.append(opened)
        return opened

    def new_intake() -> ResponseHandler:
        intakes.append(Intake(loop))
        return intakes[-1]

    connector = aiohttp.TCPConnector(
        force_close=True,
        use_dns_cache=False,
        resolver=aiohttp.ThreadedResolver(),
        socket_factory=open_socket,
    )
    # aiohttp has no public way to choose the protocol; test_scrape.py notices when this one is gone.
    connector._factory = partial(new_intake)
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=None, sock_read=None),
        auto_decompress=False,
        trust_env=False,
        middlewares=(_never_twice,),
    )


def _reset(sockets: list[socket.socket]) -> None:
    """Break connections at once. Closing alone would not do: bytes that a frozen peer does not take keep them open."""
    _linger(sockets, _RESET_ON_CLOSE)
    for opened in sockets:
        with contextlib.suppress(OSError):  # closed already, or never connected
            opened.shutdown(socket.SHUT_RDWR)


def _linger(sockets: list[socket.socket], how: bytes) -> None:
    for opened in sockets:
        with contextlib.suppress(OSError):  # closed already
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, how)


def _head_of(response: aiohttp.ClientResponse) -> Head:
    headers = response.headers
    return Head(
        status=response.status,
        content_type=headers.get("Content-Type", ""),
        location=headers.get("Location"),
        sized="Content-Length" in headers or "chunked" in headers.get("Transfer-Encoding", "").lower(),
    )


class _Decoder:
    """Takes a body's content encoding off, never more than one piece ahead, whatever the ratio of a bomb."""

    def __init__(self, encoding: str) -> None:
        encoding = encoding.strip().lower()
        if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise _Garbled("the body has a content encoding that was not asked for")
        self._inflate = _inflater() if encoding not in ("", "identity") else None
        self._members = 1
        self._on_wire = 0
        self._total = 0

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        """The next pieces of the body, each of at most 16 KiB."""
        self._on_wire = self._count(self._on_wire, chunk)
        if self._inflate is None:
            for at in range(0, len(chunk), _PIECE_BYTES):
                yield chunk[at : at + _PIECE_BYTES]
            return
        full = False
        while chunk or full:
            if self._inflate.eof:
                self._members += 1
                if self._members > _MAX_MEMBERS:
                    raise _Garbled(f"the compressed body has more than {_MAX_MEMBERS} members")
                self._inflate = _inflater()  # gzip may consist of several members
            try:
                piece = self._inflate.decompress(chunk, _PIECE_BYTES)
            except zlib.error:
                raise _Garbled("the body's compression is broken") from None
            chunk = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
            # Output may be left inside although all input was taken.
            full = len(piece) == _PIECE_BYTES and not self._inflate.eof
            if piece:
                self._total = self._count(self._total, piece)
                yield piece

    @property
    def whole(self) -> bool:
        """Whether the compressed stream came to its own end."""
        return self._inflate is None or self._inflate.eof or not self._on_wire

    def _count(self, before: int, more: bytes) -> int:
        if before + len(more) > MAX_BODY_BYTES:
            raise _Garbled(f"the body is larger than {MAX_BODY_BYTES} bytes")
        return before + len(more)


def _inflater() -> zlib._Decompress:
    return zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip or zlib, by its first bytes


def _trouble_of(
    problem: aiohttp.ClientError | OSError, head: Head | None, host: str | None, *, has_ca_file: bool
) -> Trouble:
    if head is not None:
        return Trouble(Fault.TRUNCATED, "the answer ended before its end", head)
    if isinstance(problem, aiohttp.ClientConnectorDNSError):
        return Trouble(Fault.SETUP, f"cannot resolve {host}: {_NAME_FIX}")
    if isinstance(problem, aiohttp.ClientConnectorCertificateError):
        fix = "the certificates in ENGINE_CA_FILE do not vouch for it" if has_ca_file else "set ENGINE_CA_FILE"
        why = _verify_message(problem.certificate_error)
        return Trouble(Fault.SETUP, f"the certificate is not trusted ({why}): {fix}")
    if isinstance(problem, aiohttp.ClientConnectorSSLError):
        if isinstance(problem.os_error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            return Trouble(Fault.RESET, "the connection was closed during the TLS handshake")
        return Trouble(
            Fault.SETUP,
            "no TLS connection, the other side does not speak TLS or none that is accepted: "
            "write http:// in ENGINE_URL if it is plain HTTP",
        )
    if isinstance(problem, aiohttp.ClientConnectorError):
        return _connect_trouble(problem.os_error)
    if isinstance(problem, aiohttp.ClientResponseError):
        return Trouble(Fault.GARBLED, "the answer is not HTTP")
    if isinstance(problem, aiohttp.InvalidURL):
        return Trouble(Fault.UNSENDABLE, _NO_PATH)
    return Trouble(Fault.RESET, "the connection broke before an answer")


def _connect_trouble(problem: OSError) -> Trouble:
    if isinstance(problem, ConnectionRefusedError):
        return Trouble(Fault.REFUSED, "connection refused: nobody listens")
    if isinstance(problem, ConnectionAbortedError) and problem.errno is None:
        # asyncio gives up a TLS handshake after 60 s on its own, and calls it that.
        return Trouble(Fault.TIMEOUT, "no answer to the TLS handshake")
    if isinstance(problem, ConnectionError):
        return Trouble(Fault.RESET, "the connection broke while it was being made")
    why = os.strerror(problem.errno) if problem.errno else "unknown error"
    if problem.errno in _UNREACHABLE:
        return Trouble(Fault.TIMEOUT, f"no way to the engine: {why}")
    fix = ": raise the watcher's limit of open files" if problem.errno in (errno.EMFILE, errno.ENFILE) else ""
    return Trouble(Fault.SETUP, f"no connection can be opened ({why}){fix}")


def _verify_message(problem: Exception) -> str:
    return problem.verify_message if isinstance(problem, ssl.SSLCertVerificationError) else "verification failed"


def _silence(sockets: list[socket.socket], head: Head | None) -> str:
    if head is not None:
        return "the answer stopped before its end"
    return "no answer before the deadline" if sockets else "the deadline had passed before the question was put"


def _is_address(host: str | None) -> bool:
    try:
        ip_address(host or "")
    except ValueError:
        return False
    return True

"""One GET with a deadline, for `drain`: the whole answer in time and in bounds, or a short phrase that says why not."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from typing import NamedTuple
from urllib.parse import urlsplit


class NoAnswer(Exception):  # noqa: N818  what was found, and so it reads where it is caught
    """There is no whole answer; the message is a short phrase for people and holds nothing of the body."""


class Address(NamedTuple):
    """Where to ask, taken from a URL; `path` without a slash at its end, empty for the bare address."""

    tls: bool
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> Address:
        """From `http://HOST:PORT[/PATH]`, `https://...` or `HOST:PORT`.

        Raises:
            ValueError: it is none of these; the message is for people.
        """
        wrong = ValueError(f"{text[:80]!r} is not an address; give one like http://127.0.0.1:8000")
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname, parts.port
        except ValueError:
            raise wrong from None
        usable = parts.scheme in ("http", "https") and host and port != 0 and not parts.query and not parts.fragment
        if not usable or not host or not text.isascii() or not text.isprintable() or " " in text or "@" in text:
            raise wrong
        tls = parts.scheme == "https"
        return cls(tls, host, port or (443 if tls else 80), parts.path.rstrip("/"))


class Answer(NamedTuple):
    """A whole answer."""

    status: int
    body: bytes


class Asker:
    """Asks one address; each question in a daemon thread, so that no lookup and no dripping answer takes longer.

    A question that is still out when the next one is put counts as unanswered, and the next one is not sent: a server
    that never ends its answers gets one connection from us, not hundreds.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._out: threading.Thread | None = None

    def get(self, path: str, *, timeout: float, max_bytes: int) -> Answer:
        """The answer to GET `path`.

        Args:
            path: from the root; whatever path the address has is not put before it.
            timeout: seconds for all of it, the lookup of the name included.
            max_bytes: longest body.

        Raises:
            NoAnswer: none, or not a whole one, or a longer one.
        """
        if self._out is not None and self._out.is_alive():
            self._out.join(timeout)
            if self._out.is_alive():
                raise NoAnswer("no answer in time")
        result: list[Answer | NoAnswer] = []
        self._out = threading.Thread(
            target=lambda: result.append(_get(self.address, path, timeout, max_bytes)), daemon=True
        )
        self._out.start()
        self._out.join(timeout)
        if not result:
            raise NoAnswer("no answer in time")
        if isinstance(result[0], NoAnswer):
            raise result[0]
        return result[0]


def _get(address: Address, path: str, timeout: float, max_bytes: int) -> Answer | NoAnswer:
    connection: http.client.HTTPConnection
    if address.tls:
        # Not verified: a certificate is made out to a name, and the engine of the same pod is asked at 127.0.0.1.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(address.host, address.port, timeout=timeout, context=context)
    else:
        connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout)
    try:
        connection.request("GET", path, headers={"Connection": "close"})
        response = connection.getresponse()
        body = response.read(max_bytes + 1)
        if len(body) > max_bytes:
            return NoAnswer(f"an answer of more than {max_bytes} bytes")
        # A read with a limit takes an early end for the end (until Python 3.12 without a word).
        if response.length:
            return NoAnswer("an answer that broke off")
        return Answer(response.status, body)
    except socket.timeout:  # an alias of TimeoutError only since Python 3.10
        return NoAnswer("no answer in time")
    except http.client.HTTPException:
        return NoAnswer("an answer that is not HTTP, or that broke off")
    except OSError as error:
        return NoAnswer(error.strerror.lower() if error.strerror else "no connection")
    except Exception as error:  # a broken answer must not end a drain
        return NoAnswer(f"an answer that cannot be read ({type(error).__name__})")
    finally:
        connection.close()

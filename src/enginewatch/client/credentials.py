"""The API key and the CA file, read anew before each use so that a rotated Secret works without a restart.

Nothing read here is kept but the SSL context, until the content of the CA file changes, and the keys that were sent
last, to know them again: an engine that echoes one must not get it into logs and pages.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import stat
from collections import deque

MAX_KEY_BYTES = 64 * 1024
MAX_CA_BYTES = 1024 * 1024
"""Four times what a system's own bundle has. Reading 4 MiB of certificates took a second, and /healthz waited."""


SHORTEST_SECRET = 8
"""Shorter keys are not looked for: they protect nothing, and would be found in words that mean something."""
_KEYS_KEPT = 4
_REDACTED = "<API key>"


class Unusable(Exception):  # noqa: N818  a finding, and so it reads where it is caught
    """A file cannot be used; the message is one sentence naming the file and never its content."""


def read_key(path: str) -> str:
    """The API key in a file, without the white space around it.

    Raises:
        Unusable: unreadable, empty, or not something a header can carry.
    """
    raw = _read_small(path, MAX_KEY_BYTES, "API key file").strip()
    if not raw:
        raise Unusable(f"the API key file {path} is empty")
    if any(byte <= 0x20 or byte >= 0x7F for byte in raw):
        raise Unusable(f"the API key file {path} holds more than one word of printable ASCII")
    return raw.decode("ascii")


class SentKeys:
    """The keys sent last, to take them out of what the engine says."""

    def __init__(self) -> None:
        self._keys: deque[str] = deque(maxlen=_KEYS_KEPT)

    def note(self, key: str) -> None:
        """This key is sent now."""
        if len(key) >= SHORTEST_SECRET and key not in self._keys:
            self._keys.append(key)

    def redacted(self, text: str) -> str:
        """Text of the engine's, as it may be shown: without a key, also as a label's value writes it."""
        for key in self._keys:
            escaped = key.replace("\\", "\\\\").replace('"', '\\"')
            text = text.replace(escaped, _REDACTED).replace(key, _REDACTED)
        return text


class Trust:
    """Whom to trust over TLS: the certificates in a CA file, or the system's where there is none."""

    def __init__(self, ca_file: str | None) -> None:
        self._ca_file = ca_file
        self._digest = b""
        self._context: ssl.SSLContext | None = None

    @property
    def is_own(self) -> bool:
        """Whether it is a CA file's, not the system's."""
        return self._ca_file is not None

    def current(self) -> ssl.SSLContext | bool:
        """What aiohttp takes as `ssl`; True means the system's certificates.

        The last good context stays in use while the file cannot be read or parsed (a half-written file, for example);
        it never falls back to other certificates.

        Raises:
            Unusable: there never was a good one.
        """
        if self._ca_file is None:
            return True
        try:
            raw = _read_small(self._ca_file, MAX_CA_BYTES, "CA file")
            digest = hashlib.sha256(raw).digest()
            if self._context is None or digest != self._digest:
                self._context = _context_for(raw)
                self._digest = digest
        except (Unusable, ValueError, ssl.SSLError) as problem:
            if self._context is None:
                if isinstance(problem, Unusable):
                    raise
                raise Unusable(f"the CA file {self._ca_file} holds no certificates in PEM form") from None
        return self._context


def _context_for(bundle: bytes) -> ssl.SSLContext:
    # Bundles carry comments in any encoding; between the markers PEM is ASCII.
    text = bundle.decode("ascii", "ignore")
    if not text.strip():
        raise ValueError  # The ssl module takes an empty text for none given, and would trust the system's.
    return ssl.create_default_context(cadata=text)


def _read_small(path: str, max_bytes: int, what: str) -> bytes:
    # Without O_NONBLOCK, opening a FIFO would stop the event loop until somebody writes to it.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as problem:
        raise Unusable(f"the {what} {path} cannot be read: {_why(problem)}") from None
    try:
        # Before open(), which would refuse the descriptor of a directory and leave it open.
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Unusable(f"the {what} {path} is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            raw = file.read(max_bytes + 1)
    except OSError as problem:
        raise Unusable(f"the {what} {path} cannot be read: {_why(problem)}") from None
    finally:
        os.close(descriptor)
    if len(raw) > max_bytes:
        raise Unusable(f"the {what} {path} is larger than {max_bytes} bytes")
    return raw


def _why(problem: Exception) -> str:
    return (problem.strerror or "unknown error") if isinstance(problem, OSError) else "not a path"

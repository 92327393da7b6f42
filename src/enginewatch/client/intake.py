"""What comes in on a connection, in small sips.

asyncio hands on up to 256 KiB at once, and aiohttp parses all of it before anybody else has a turn. Of ordinary bytes
that is nothing. Of answers like `100 Continue` in a row, or of chunks of one byte, it is a third of a second, and ten
times that under a sidecar's usual CPU limit: longer than a kubelet waits for /healthz.
"""

from __future__ import annotations

import asyncio

from aiohttp.client_proto import ResponseHandler

SIP_BYTES = 8 * 1024
MAX_BEFORE_ANSWER_BYTES = 128 * 1024
"""Most that may come before an answer begins; an ordinary head has 1 kB."""
MAX_FRAMING_BYTES = 128 * 1024
"""Most that may be neither head nor body, beside as much again as the body has."""


class TooMuch(Exception):  # noqa: N818  a finding, and so it reads where it is caught
    """More came than an answer needs; the message is a short phrase for people."""


class Intake(ResponseHandler, asyncio.BufferedProtocol):
    """aiohttp's end of one connection, given at most `SIP_BYTES` per turn of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._sip = memoryview(bytearray(SIP_BYTES))
        self._has_begun = False
        self._taken_bytes = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the transport puts what it reads next."""
        # Not the bytearray itself: over TLS asyncio fills a slice of it, which would be a copy.
        return self._sip

    def buffer_updated(self, nbytes: int) -> None:
        """The transport has read so much."""
        self._taken_bytes += nbytes
        if self._taken_bytes > MAX_BEFORE_ANSWER_BYTES and not self._has_begun:
            self.set_exception(TooMuch(f"more than {MAX_BEFORE_ANSWER_BYTES} bytes before an answer"))
            if self.transport is not None:
                self.transport.abort()
            return
        self.data_received(bytes(self._sip[:nbytes]))

    def answer_begins(self) -> None:
        """The head of the answer is in; from now on its body comes."""
        self._has_begun = True

    def check(self, body_bytes: int) -> None:
        """Compare what came with what of it was body.

        Raises:
            TooMuch: nearly all of it was something else.
        """
        if self._taken_bytes > MAX_BEFORE_ANSWER_BYTES + MAX_FRAMING_BYTES + 2 * body_bytes:
            raise TooMuch("the body comes in pieces that are far too small")

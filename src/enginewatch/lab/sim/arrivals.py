"""The generation requests that arrived last, as far as they concern a prefill/decode pair: what a router sent."""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from typing import Any

from aiohttp import web

_KEPT = 200
_FIELDS = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")


class Arrivals:
    """A bounded list; prompts are not kept."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._kept: deque[dict[str, Any]] = deque(maxlen=_KEPT)

    async def begin(self, request: web.Request) -> dict[str, Any]:
        """Note one request; whoever answers it puts the `status` into what is returned."""
        try:
            body = json.loads(await request.read())
        except ValueError:
            body = None
        sent = body if isinstance(body, dict) else {}
        arrived = {
            "number": next(self._numbers),
            "at": time.time(),
            "path": request.path,
            "request_id": request.headers.get("X-Request-Id"),
            **{name: sent[name] for name in _FIELDS if name in sent},
            "status": None,
        }
        self._kept.append(arrived)
        return arrived

    def told(self) -> list[dict[str, Any]]:
        """All that are kept, oldest first."""
        return list(self._kept)

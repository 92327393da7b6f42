"""Asking a Mooncake bootstrap server which KV engines it knows.

`GET /query` of vLLM 0.18 and later gives `{"0": {"engine_id": "...", "worker_addr": {...}, ...}}`, data-parallel rank
-> entry, and `{}` before the first worker has registered (the source of vLLM's Mooncake connector; later ones add keys
to an entry). Everything but the ids is left alone.

The server is a port of its own and not the engine: it is sent no API key, and nothing it redirects to is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from enginewatch.client.exchange import Fault, Line, Question, Trouble
from enginewatch.client.models import parse_json
from enginewatch.core.kv_engines import MAX_RANKS

QUERY_PATH = "/query"
MAX_BODY_BYTES = 256 * 1024
"""A rank with 64 workers has 3 kB."""
_MAX_ID_CHARS = 128
_MAX_RANK_DIGITS = 5

_FAULTS = {
    Fault.SETUP: "it could not be asked: its name or its certificate",
    Fault.UNSENDABLE: "it could not be asked: its path",
    Fault.REFUSED: "nobody listens",
    Fault.TIMEOUT: "no answer in time",
    Fault.RESET: "the connection broke",
    Fault.TRUNCATED: "the answer broke off",
    Fault.GARBLED: "the answer is not HTTP, or too long",
}
NOT_ITS_ANSWER = "the answer is not that of a bootstrap server"
NOBODY_YET = "no rank has registered yet"


@dataclass(frozen=True, slots=True)
class KvAnswer:
    """What the server told: rank -> engine id; none, and then `failure` is a short phrase that says why."""

    ids: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""


class KvBootstrap:
    """Asks one bootstrap server; each question has a connection of its own.

    Args:
        url: its base URL.
        ca_file: PEM file with the certificates to trust instead of the system's.
    """

    def __init__(self, url: str, *, ca_file: str | None = None) -> None:
        self._line = Line(url, ca_file=ca_file)

    def close(self) -> None:
        """Break the connection of a question that is under way."""
        self._line.close()

    async def read(self, *, timeout_sec: float) -> KvAnswer:
        """Ask once. Never raises for what the server does."""
        until = asyncio.get_running_loop().time() + timeout_sec
        try:
            head, body = await self._line.fetch(
                Question(QUERY_PATH, with_key=False), until=until, max_bytes=MAX_BODY_BYTES
            )
        except Trouble as trouble:
            return KvAnswer(failure=_FAULTS[trouble.fault])
        if head.status != 200:
            return KvAnswer(failure=f"it answers HTTP {head.status}")
        return kv_answer(body)


def kv_answer(body: bytes) -> KvAnswer:
    """The ids in the body of an answer. An entry that is none is left out, as if its rank were missing."""
    payload = parse_json(body)
    if not isinstance(payload, Mapping):
        return KvAnswer(failure=NOT_ITS_ANSWER)
    if not payload:
        return KvAnswer(failure=NOBODY_YET)
    ids: dict[str, str] = {}
    for rank, entry in payload.items():
        engine_id = entry.get("engine_id") if isinstance(entry, Mapping) else None
        if _is_rank(rank) and isinstance(engine_id, str) and _is_id(engine_id):
            ids[str(int(rank))] = engine_id
    if not ids or len(ids) > MAX_RANKS:
        return KvAnswer(failure=NOT_ITS_ANSWER)
    return KvAnswer(ids)


def _is_rank(rank: object) -> bool:
    return isinstance(rank, str) and rank.isascii() and rank.isdigit() and len(rank) <= _MAX_RANK_DIGITS


def _is_id(engine_id: str) -> bool:
    return 0 < len(engine_id) <= _MAX_ID_CHARS and engine_id.isprintable()

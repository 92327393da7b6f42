"""The served model's name, read from /v1/models once per engine process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from enginewatch.client.exchange import Line, Question

MODELS_PATH = "/v1/models"
MAX_PARTS = 20_000
"""Most items in a JSON answer, of all levels together; a list of five hundred adapters has as many. A quarter of a MiB
of empty objects would be five times as many, 6 MB in memory, and several answers are read side by side."""


class NoModel(Exception):  # noqa: N818  what was found, and so it reads where it is caught
    """The list of models was refused or names none; the message is a short phrase for people."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.body = body
        self.successful = 200 <= status < 300
        super().__init__(f"{MODELS_PATH} names no model" if self.successful else f"{MODELS_PATH}: HTTP {status}")


class ModelName:
    """Remembers the name until told to forget it."""

    def __init__(self) -> None:
        self._name: str | None = None

    def forget(self) -> None:
        """Read it anew next time: another process may serve another model."""
        self._name = None

    async def get(self, line: Line, *, until: float) -> str:
        """The name, asked for if it is not known.

        Raises:
            Trouble: there is no whole answer.
            NoModel: the answer holds no name.
        """
        if self._name is None:
            head, body = await line.fetch(Question(MODELS_PATH), until=until)
            name = served_model(parse_json(body)) if 200 <= head.status < 300 else None
            if name is None:
                raise NoModel(head.status, body)
            self._name = name
        return self._name


def served_model(payload: Any) -> str | None:
    """The base model in an answer of /v1/models: the first entry that is not an adapter of another."""
    models = payload.get("data") if isinstance(payload, Mapping) else None
    if not isinstance(models, list):
        return None
    named = [model for model in models if isinstance(model, Mapping) and isinstance(model.get("id"), str)]
    found = next((model for model in named if not model.get("parent")), named[0] if named else None)
    return found["id"] if found else None


def parse_json(body: bytes) -> Any:
    """The JSON value in `body`, or None where it is none, or one of far too many parts."""
    if sum(body.count(sign) for sign in (b",", b":", b"[", b"{")) > MAX_PARTS:
        return None
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None

"""What an engine says of itself outside the metrics page: kind, version, model, role.

The paths that tell the engine apart answer without its core and are asked side by side. The version may need the core
(SGLang), so its paths are asked afterwards, one by one, and an engine that leaves one without an answer is not asked
for the next: a hung engine costs one deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginewatch.client.exchange import Fault, Line, Question, Trouble
from enginewatch.client.models import MODELS_PATH, parse_json, served_model
from enginewatch.engines import RECOGNITION_PATHS, recognise_answer, stranger
from enginewatch.engines.profile import Profile, RoleWords, ToldRole

_MAX_WORD_CHARACTERS = 64
_SILENCE = object()
_NO_KEY = object()


@dataclass(frozen=True, slots=True)
class Description:
    """What the engine said; None = it did not say.

    Attributes:
        unanswered: a path that told nothing before the deadline and that this engine answers by way of its core.
        could_be: title of the engine without a profile that its list of models points to.
        batches_statistics: its JSON statistics, where it has any, are filled only when a request ends.
        told_at: the path whose answer told the kind.
        guarded: the path that would have told the version, and was refused for want of a key (401, 403).
    """

    kind: str | None = None
    version: str | None = None
    model: str | None = None
    role: ToldRole | None = None
    unanswered: str | None = None
    could_be: str | None = None
    batches_statistics: bool = False
    told_at: str | None = None
    guarded: str | None = None


async def describe(line: Line, profiles: tuple[Profile, ...], *, timeout_sec: float) -> Description:
    """Ask an engine who it is.

    With a single profile (the page told, or the operator) the version is looked for where that engine keeps it; else
    where the engine that the answers point to does.
    """
    answers = await asyncio.gather(*(_read(line, path, timeout_sec) for path in RECOGNITION_PATHS))
    said = dict(zip(RECOGNITION_PATHS, answers, strict=True))
    told_at, found = next(
        ((path, known) for path in said if (known := recognise_answer(path, said[path]))), (None, None)
    )
    assumed = profiles[0] if len(profiles) == 1 else found
    version: str | None = None
    role: ToldRole | None = None
    unanswered: str | None = None
    guarded: str | None = None
    for path, key in assumed.version_paths if assumed else ():
        payload = said[path] if path in said else await _read(line, path, timeout_sec)
        if payload is _SILENCE:
            unanswered = None if path in said else path
            break
        if payload is _NO_KEY:
            guarded = guarded or path
        version, role = _version(payload, key), _role(payload, assumed.role_words if assumed else None)
        if version is not None:
            break
    model = served_model(said[MODELS_PATH])
    known_by_name = stranger((), said[MODELS_PATH])
    statistics = assumed.json_statistics if assumed else None
    return Description(
        kind=found.kind if found else None,
        version=line.redacted(version) if version is not None else None,
        model=line.redacted(model) if model is not None else None,
        role=role,
        unanswered=unanswered,
        could_be=known_by_name.title if known_by_name else None,
        batches_statistics=statistics is not None and await _has(line, statistics.batched_by, timeout_sec),
        told_at=told_at,
        guarded=guarded if version is None else None,
    )


async def _read(line: Line, path: str, timeout_sec: float) -> Any:
    until = asyncio.get_running_loop().time() + timeout_sec
    try:
        head, body = await line.fetch(Question(path), until=until)
    except Trouble as trouble:
        return _SILENCE if trouble.fault is Fault.TIMEOUT else None
    if head.status in (401, 403):
        return _NO_KEY
    return parse_json(body) if head.status == 200 else None


async def _has(line: Line, path: str, timeout_sec: float) -> bool:
    """Whether there is anything at `path`; also where nobody said."""
    until = asyncio.get_running_loop().time() + timeout_sec
    try:
        head = await line.ask(Question(path), until=until, on_head=lambda _: None)
    except Trouble:
        return True
    return head.status not in (404, 405, 501)


def _version(payload: Any, key: str) -> str | None:
    """A version as the engine tells it, if it looks like one: it ends up in logs and labels."""
    text = payload.get(key) if isinstance(payload, Mapping) else None
    if not isinstance(text, str) or len(text) > _MAX_WORD_CHARACTERS or not text.isprintable():
        return None
    return text or None


def _role(payload: Any, words: RoleWords | None) -> ToldRole | None:
    text = payload.get(words.key) if words is not None and isinstance(payload, Mapping) else None
    return words.words.get(text) if words is not None and isinstance(text, str) else None

"""Does the engine rest on purpose? Its pause endpoints, asked side by side.

Each answer is yes, no, absent (404, 405, 501: this engine has no such endpoint), doubtful (a status that a pause and an
unhealthy server share) or silence (everything else). A yes outweighs silence elsewhere: vLLM's /is_sleeping needs every
core's answer and may hang while /is_paused answers. PAUSED outweighs SLEEPING, because vLLM 0.32 says "sleeping" while
it is paused, too. `CLEAR` takes a no from every endpoint that exists; one silent endpoint leaves the question open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal

from enginewatch.client.exchange import Line, Question, Trouble
from enginewatch.client.models import parse_json
from enginewatch.core.events import Flags
from enginewatch.engines.profile import FlagEndpoint

_Answer = Literal["yes", "no", "absent", "doubtful", "silent"]
_ABSENT = frozenset({404, 405, 501})
_STATES = (("paused", Flags.PAUSED), ("sleeping", Flags.SLEEPING))


async def read_flags(line: Line, endpoints: tuple[FlagEndpoint, ...], *, timeout_sec: float) -> Flags:
    """What the pause endpoints say within `timeout_sec`; `ABSENT` where there are none to ask."""
    until = asyncio.get_running_loop().time() + timeout_sec
    answers = await asyncio.gather(*(_ask(line, endpoint, until=until) for endpoint in endpoints))
    said = list(zip(endpoints, answers, strict=True))
    for state, flags in _STATES:
        if any(endpoint.state == state and answer == "yes" for endpoint, answer in said):
            return flags
    if all(answer == "absent" for answer in answers):
        return Flags.ABSENT
    if "doubtful" in answers:
        return Flags.DOUBTFUL
    return Flags.SILENT if "silent" in answers else Flags.CLEAR


async def _ask(line: Line, endpoint: FlagEndpoint, *, until: float) -> _Answer:
    if endpoint.status is None:
        return _by_key(endpoint, await _get(line, endpoint.path, until=until))
    asked = await asyncio.gather(*(_get(line, path, until=until) for path in (endpoint.path, endpoint.sound_path)))
    return _by_status(endpoint, *asked)


def _by_key(endpoint: FlagEndpoint, answer: tuple[int, bytes] | None) -> _Answer:
    """An endpoint that says it in its body."""
    if answer is None:
        return "silent"
    status, body = answer
    if status in _ABSENT:
        return "absent"
    payload = parse_json(body)
    value = payload.get(endpoint.key) if status == 200 and isinstance(payload, Mapping) else None
    if not isinstance(value, bool):
        return "silent"
    return "yes" if value else "no"


def _by_status(endpoint: FlagEndpoint, answer: tuple[int, bytes] | None, sound: tuple[int, bytes] | None) -> _Answer:
    """An endpoint that says it by its status, which means a pause only while another one says that all is well."""
    if answer is None or sound is None:
        return "silent"
    if answer[0] in _ABSENT or sound[0] in _ABSENT:
        return "absent"
    if answer[0] == endpoint.status:
        return "yes" if sound[0] == 200 else "doubtful"
    return "no" if answer[0] == 200 else "silent"


async def _get(line: Line, path: str, *, until: float) -> tuple[int, bytes] | None:
    try:
        head, body = await line.fetch(Question(path), until=until)
    except Trouble:
        return None
    return head.status, body

"""From a canary's answer to its outcome.

Rules, first match wins:
    status   429 and 529: `saturated`. Any other 4xx, any redirect, 1xx or made-up number: `misconfigured`.
             503 whose body says that the engine takes no more for now (`_NOT_NOW`): `saturated`. Other 5xx:
             `error_answer`. A status that is no success decides, whatever becomes of its body.
    own path any 2xx that was read to its end: `ok`.
    error    an error object or event anywhere in a 200, a finish reason like `abort` or `error`: `error_answer`, unless
             it says itself that the queue is full (SGLang sends that inside a stream, after the 200 is out).
    foreign  HTML, other JSON, 204, longer than MAX_BODY_BYTES, a finish reason nobody here knows: `misconfigured`.
    empty    nothing, or a stream without a single item: `error_answer`.
    whole    every choice finished by a known reason, SGLang's with output, an OpenAI stream closed by `[DONE]`: `ok`.
    cut off  the rest: items of the engine's, but no end: `error_answer`. The connection was closed in good order, so
             nothing is frozen, and an answer without its end proves nothing: a synthetic first item looks the same.

A first item is never proof. dynamo#8611: SGLang's prefill worker yields its bootstrap data before the scheduler has
seen the request; dynamo#13675: an engine frozen after its first chunk passed for ever; dynamo#9642: a chunk that *is*
an error was taken for health.

An abort counts as an error, although a pause can cause one: the pause flags are asked beside, and one failed canary
never decides anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from enginewatch.core.events import Outcome
from enginewatch.engines.profile import AnswerFormat

MAX_BODY_BYTES = 64 * 1024
"""Longest answer to a canary; a one-token answer has less than 2 kB, and parsing this much takes 5 ms at worst."""
MAX_STREAM_LINES = 4096
"""Most lines of a stream of server-sent events that are read."""
MAX_PARTS = 4096
"""Most items and choices in one answer that are read."""

_MAX_ERROR_BYTES = 16 * 1024  # of an error page: enough to find what it says

# What engines and their front ends say when they take no more for now, in lower case.
_NOT_NOW = (
    "queue is full",  # SGLang --max-queued-requests: "The request queue is full."
    "queue full",
    "higher priority request",  # SGLang: displaced from the queue
    "waiting timeout reached",  # SGLang SGLANG_REQ_WAITING_TIMEOUT
    "currently busy",  # vLLM >= 0.29 --max-num-queued-reqs: "The engine is currently busy and cannot accept..."
    "cannot accept new requests",
    "backlog limit",  # vLLM >= 0.29 --max-num-queued-tokens
    "currently scaling",  # vLLM elastic expert parallelism: 503 on every path while ranks are added or removed
    "too many requests",
    "rate limit",
    "overloaded",  # TGI, Dynamo front end
    "at capacity",
    "workers are busy",  # Dynamo front end
    "server is busy",
)
_SATURATED_STATUS = (429, 529)
_FINISHED = frozenset(
    {"stop", "length", "repetition", "tool_calls", "function_call", "content_filter", "eos_token", "stop_sequence"}
)
_FAILED = frozenset({"error", "abort", "aborted", "cancelled", "timeout"})
_STREAM_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")

Finding = tuple[Outcome, str]


class Ending(StrEnum):
    """Why an exchange ended before the last byte of an answer."""

    DEADLINE = "deadline"
    """The canary's deadline passed."""
    REFUSED = "refused"
    """Nobody listens."""
    BROKEN = "broken"
    """The connection broke."""
    UNASKED = "unasked"
    """The request could not be put: a name, a certificate or the watcher's own resources. No engine was asked."""
    UNSENDABLE = "unsendable"
    """The request can be sent to nobody: its path or method is not valid HTTP."""
    NOT_HTTP = "not-http"
    """What came back is not HTTP."""


class AnswerJudge:
    """Judges one answer, fed in chunks. Never raises, whatever the bytes.

    Args:
        answer: what a complete answer looks like.
        status: HTTP status.
        content_type: the header's value, may be empty.
    """

    def __init__(self, answer: AnswerFormat, status: int, content_type: str) -> None:
        self._answer = answer
        self._status = status
        self._is_stream = content_type.partition(";")[0].strip().lower() == "text/event-stream"
        self._decided = _judge_status(status)
        if answer is AnswerFormat.ANY_2XX and self.successful:
            self._limit = 0
        else:
            self._limit = MAX_BODY_BYTES if self.successful else _MAX_ERROR_BYTES
        self._kept = bytearray()
        self._overlong = False

    @property
    def successful(self) -> bool:
        """Whether the status is a success, so that the body decides."""
        return 200 <= self._status < 300

    @property
    def settled(self) -> bool:
        """Whether nothing that may still come can change the outcome; the rest need not be read."""
        return self._decided is not None or (self._overlong and self._limit > 0)

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the body."""
        room = self._limit - len(self._kept)
        self._overlong = self._overlong or len(chunk) > room
        self._kept += chunk[:room]

    def finish(self) -> Finding:
        """The outcome of an answer that came to its end, and a short phrase for people.

        The phrase holds nothing from the body but status numbers and finish reasons of a fixed list.
        """
        if self._decided is not None:
            return self._decided
        if not self.successful:
            return self._judge_unavailable()
        if self._answer is AnswerFormat.ANY_2XX:
            return Outcome.OK, f"HTTP {self._status}, read to its end"
        if self._status in (204, 205):
            return Outcome.MISCONFIGURED, f"HTTP {self._status}: no engine answers a completion so"
        if self._overlong:
            return Outcome.MISCONFIGURED, f"an answer longer than {MAX_BODY_BYTES} bytes"
        return _judge_body(self._answer, bytes(self._kept), is_stream=self._is_stream)

    def _judge_unavailable(self) -> Finding:
        said = self._kept.decode(errors="replace")
        if _says_not_now(said):
            return Outcome.SATURATED, f"HTTP {self._status}: takes no more requests for now"
        return Outcome.ERROR_ANSWER, f"HTTP {self._status}"


def unfinished(ending: Ending, judge: AnswerJudge | None) -> Finding:
    """The outcome of a canary whose answer never began (`judge` is None) or did not come to its end."""
    if judge is not None and (judge.settled or not judge.successful):
        return judge.finish()
    match ending:
        case Ending.UNASKED:
            return Outcome.UNASKED, "the request could not be put"
        case Ending.UNSENDABLE:
            return Outcome.MISCONFIGURED, "the request cannot be sent"
        case Ending.NOT_HTTP:
            return Outcome.MISCONFIGURED, "what answers does not speak HTTP"
        case Ending.DEADLINE if judge is None:
            return Outcome.TIMEOUT, "no answer before the deadline"
        case Ending.DEADLINE:
            return Outcome.FROZEN, "the answer began and did not end before the deadline"
        case Ending.REFUSED if judge is None:
            return Outcome.REFUSED, "nobody listens"
        case _ if judge is None:
            return Outcome.REFUSED, "the connection broke before an answer began"
        case _:
            return Outcome.FROZEN, "the connection broke in the middle of the answer"


def _judge_status(status: int) -> Finding | None:
    """What the status decides by itself; None where the body has a say."""
    if 200 <= status < 300 or status == 503:
        return None
    if status in _SATURATED_STATUS:
        return Outcome.SATURATED, f"HTTP {status}"
    if 500 <= status < 600:
        return Outcome.ERROR_ANSWER, f"HTTP {status}"
    if 300 <= status < 400:
        return Outcome.MISCONFIGURED, f"HTTP {status}: a redirect"
    return Outcome.MISCONFIGURED, f"HTTP {status}"


def _judge_body(answer: AnswerFormat, body: bytes, *, is_stream: bool) -> Finding:
    body = body.removeprefix(b"\xef\xbb\xbf").strip()
    if not body:
        return Outcome.ERROR_ANSWER, "an empty stream" if is_stream else "an empty answer"
    reading = _Reading(answer)
    if body.startswith(_STREAM_FIELDS):
        if body.count(b"\n") + body.count(b"\r") > MAX_STREAM_LINES:
            return Outcome.MISCONFIGURED, f"a stream of more than {MAX_STREAM_LINES} lines"
        for event, data in _stream_items(body):
            reading.take_event(event, data)
        return reading.conclude(closed=reading.done or answer is not AnswerFormat.OPENAI_COMPLETION)
    value = _parsed(body)
    for item in value[: MAX_PARTS + 1] if isinstance(value, list) else [value]:
        reading.take_item(item, alone=True)
    return reading.conclude(closed=True)


def _stream_items(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(event name, data) of each server-sent event; the last one counts without the blank line after it, too."""
    event = b""
    data: list[bytes] = []
    for line in (*body.splitlines(), b""):
        if not line:
            if data or event:
                yield event, b"\n".join(data)
            event, data = b"", []
            continue
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            data.append(value)
        elif name == b"event":
            event = value.strip()


class _Foreign:
    """Stands for bytes that are not JSON."""


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _Foreign()


@dataclass(slots=True)
class _Choice:
    finished: str | None = None
    output: bool = False


@dataclass(slots=True)
class _Reading:
    """What the items of one answer have said so far."""

    answer: AnswerFormat
    choices: dict[int, _Choice] = field(default_factory=dict)
    trouble: Finding | None = None
    unknown_reason: bool = False
    foreign: bool = False
    parts: int = 0
    items: int = 0
    own_items: int = 0
    done: bool = False

    def take_event(self, event: bytes, data: bytes) -> None:
        if data.strip() == b"[DONE]" and event != b"error":
            self.done = True
            return
        value = _parsed(data)
        if event == b"error":
            self._fail(value if isinstance(value, dict) else {}, data.decode(errors="replace"), "an error event")
        elif data.strip():
            self.take_item(value, alone=False)

    def take_item(self, item: Any, *, alone: bool) -> None:
        """Read one JSON value; `alone` means that it is the whole answer, not part of a stream."""
        self.items += 1
        self.parts += 1
        if not isinstance(item, dict) or self.parts > MAX_PARTS:
            self.foreign = True
        elif item.get("error") or item.get("object") == "error" or item.get("type") == "error":
            self._fail(item, _messages_of(item), "an error object")
        elif self.answer is AnswerFormat.SGLANG_GENERATE:
            self._take_sglang(item, alone=alone)
        else:
            self._take_openai(item)

    def conclude(self, *, closed: bool) -> Finding:
        if self.trouble is not None:
            return self.trouble
        if self.unknown_reason:
            return Outcome.MISCONFIGURED, "a finish_reason that is not known"
        if self.foreign or (self.items and not self.own_items):
            return Outcome.MISCONFIGURED, "not an answer of the engine's"
        if not self.items:
            return Outcome.ERROR_ANSWER, "an empty stream"
        reasons = [choice.finished for choice in self.choices.values()]
        if not reasons or None in reasons:
            return Outcome.ERROR_ANSWER, "an answer without its finish_reason"
        if self.answer is AnswerFormat.SGLANG_GENERATE and not all(choice.output for choice in self.choices.values()):
            return Outcome.ERROR_ANSWER, "a finished answer without output"
        if not closed:
            return Outcome.ERROR_ANSWER, "a stream that ended without [DONE]"
        return Outcome.OK, f"complete, finish_reason {reasons[0]}"

    def _take_openai(self, item: dict[str, Any]) -> None:
        choices = item.get("choices")
        if not isinstance(choices, list):
            # dynamo#8611: an item made up before the scheduler saw the request has no choices.
            return
        self.own_items += 1
        self.parts += len(choices)
        if self.parts > MAX_PARTS:
            self.foreign = True
            return
        for choice in choices:
            if not isinstance(choice, dict):
                self.foreign = True
            elif choice.get("error"):
                self._fail(choice, _messages_of(choice), "an error object")
            else:
                self._finish(self._choice(choice), choice.get("finish_reason"))

    def _take_sglang(self, item: dict[str, Any], *, alone: bool) -> None:
        meta = item.get("meta_info")
        if not isinstance(meta, dict):
            return
        self.own_items += 1
        choice = self._choice(item)
        tokens = meta.get("completion_tokens")
        if (isinstance(tokens, int) and tokens > 0) or item.get("output_ids") or item.get("text"):
            choice.output = True
        self._finish(choice, meta.get("finish_reason"))
        if alone and choice.finished is None and meta.get("finish_reason") is None:
            # The native endpoint answers outside a stream only when the request has ended.
            choice.finished = "stop"

    def _choice(self, item: dict[str, Any]) -> _Choice:
        index = item.get("index")
        return self.choices.setdefault(index if isinstance(index, int) else 0, _Choice())

    def _finish(self, choice: _Choice, reason: Any) -> None:
        """Read a finish reason: OpenAI's text, SGLang's `{"type": ...}`, Dynamo's `{"error": ...}`, or not yet."""
        if reason is None:
            return
        kind = reason.get("type", "error" if reason.get("error") else None) if isinstance(reason, dict) else reason
        if not isinstance(kind, str):
            self.unknown_reason = True
        elif kind in _FINISHED:
            choice.finished = kind
        elif kind in _FAILED:
            details = reason if isinstance(reason, dict) else {}
            self._fail(details, _messages_of(details), f"finish_reason {kind}")
        else:
            self.unknown_reason = True

    def _fail(self, item: dict[str, Any], said: str, what: str) -> None:
        if self.trouble is not None:
            return
        code = _code_of(item)
        if code in _SATURATED_STATUS or (code in (None, 503) and _says_not_now(said)):
            self.trouble = (Outcome.SATURATED, f"{what}: takes no more requests for now")
        else:
            self.trouble = (Outcome.ERROR_ANSWER, what if code is None else f"{what}, code {code}")


def _says_not_now(text: str) -> bool:
    lowered = text[:_MAX_ERROR_BYTES].lower()
    return any(phrase in lowered for phrase in _NOT_NOW)


def _messages_of(item: dict[str, Any]) -> str:
    """The texts in which an error object says what is wrong."""
    error = item.get("error")
    inner = error if isinstance(error, dict) else {}
    texts = (error, inner.get("message"), item.get("message"), item.get("detail"))
    return " ".join(text for text in texts if isinstance(text, str))


def _code_of(item: dict[str, Any]) -> int | None:
    """The HTTP-like status that an error object names, if it does."""
    error = item.get("error")
    for holder in (error, item):
        if isinstance(holder, dict):
            for key in ("code", "status_code", "status"):
                code = holder.get(key)
                if isinstance(code, str) and code.isascii() and code.isdecimal() and len(code) == 3:
                    code = int(code)
                if type(code) is int and 100 <= code < 600:
                    return code
    return None

"""One canary: a request that must travel the whole engine, judged when its last byte came or did not.

`core.answer` says what an answer, or the lack of one, means; here it is sent, aimed and timed. One deadline holds from
the first byte sent to the last byte received, the question for the model's name included.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from enginewatch.client.exchange import Fault, Feed, Head, Line, Question, Trouble
from enginewatch.client.models import ModelName, NoModel
from enginewatch.core.answer import AnswerJudge, Ending, unfinished
from enginewatch.core.events import Outcome
from enginewatch.engines.profile import Aim, AnswerFormat, CanaryRequest, DeathNotice, Role

MODEL_PLACE = "{model}"

_ENDINGS = {
    Fault.SETUP: Ending.UNASKED,
    Fault.UNSENDABLE: Ending.UNSENDABLE,
    Fault.REFUSED: Ending.REFUSED,
    Fault.TIMEOUT: Ending.DEADLINE,
    Fault.RESET: Ending.BROKEN,
    Fault.TRUNCATED: Ending.BROKEN,
    Fault.GARBLED: Ending.NOT_HTTP,
}
_ACCEPT = "application/json, text/event-stream;q=0.9, */*;q=0.1"


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """How one canary ended.

    Attributes:
        outcome: what it counts as.
        detail: a short phrase for people, never engine text.
        duration_sec: from the first question (for the model's name, where that was needed) to the end.
        aimed: whether it was aimed at the core that was asked for.
        answered: whether an HTTP answer with a status below 500 came.
    """

    outcome: Outcome
    detail: str
    duration_sec: float
    aimed: bool
    answered: bool = False


async def send_canary(
    line: Line,
    names: ModelName,
    request: CanaryRequest,
    *,
    model: str | None,
    core: str | None,
    cores: Collection[str],
    aim: Aim | None,
    deadline_sec: float,
    role: Role,
) -> CanaryReport:
    """Send `request`, aimed at `core` if `aim` says how, and judge its answer within `deadline_sec`."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    until = began + deadline_sec
    aimed = answered = False
    try:
        if model is None and _holds_place(request.body):
            model = await names.get(line, until=until)
        question, aimed = _question(request, model=model, core=core, cores=cores, aim=aim)
        outcome, detail, answered = await _put(line, question, request, until=until)
    except Trouble as trouble:
        outcome, detail = _judge_trouble(trouble, None)
        detail += ", asking for the model's name"
    except NoModel as problem:
        outcome, detail = _judge_without_model(line, problem)
        answered = problem.status < 500
    if outcome is Outcome.MISCONFIGURED:
        # The model may have been renamed, and its name in the request be what is wrong.
        names.forget()
        detail += f" (canary for role {role})"
    return CanaryReport(outcome, detail, loop.time() - began, aimed, answered)


async def _put(line: Line, question: Question, request: CanaryRequest, *, until: float) -> tuple[Outcome, str, bool]:
    judge: AnswerJudge | None = None
    answered = False

    def begin(head: Head) -> Feed | None:
        nonlocal judge, answered
        answered = head.status < 500
        judge = AnswerJudge(request.answer, head.status, head.content_type)
        # Where the status decides, a body that never comes must not turn a 401 into a hang.
        return None if judge.settled else judge.feed

    try:
        head = await line.ask(question, until=until, on_head=begin)
    except Trouble as trouble:
        return *_judge_trouble(trouble, judge), answered
    assert judge is not None
    outcome, detail = judge.finish()
    notice = request.death_notice
    refused = outcome is Outcome.MISCONFIGURED and 400 <= head.status < 500
    if refused and notice is not None and await _is_dead(line, notice, until=until):
        return Outcome.ERROR_ANSWER, f"{detail}, and {notice.path} says {notice.status}: its core is gone", answered
    return outcome, _with_key_advice(line, head.status, detail), answered


async def _is_dead(line: Line, notice: DeathNotice, *, until: float) -> bool:
    try:
        head = await line.ask(Question(notice.path), until=until, on_head=lambda _: None)
    except Trouble:
        return False
    return head.status == notice.status


def _judge_trouble(trouble: Trouble, judge: AnswerJudge | None) -> tuple[Outcome, str]:
    outcome, detail = unfinished(_ENDINGS[trouble.fault], judge)
    # Here it is known more exactly what is wrong with a question that was not put or an answer that is none.
    better = trouble.fault in (Fault.SETUP, Fault.UNSENDABLE, Fault.GARBLED) and (judge is None or judge.successful)
    return outcome, trouble.detail if better else detail


def _judge_without_model(line: Line, problem: NoModel) -> tuple[Outcome, str]:
    if problem.successful:
        return Outcome.MISCONFIGURED, str(problem)
    # Only the status and perhaps a "queue is full" in the body count: the rules for a canary of the user's own.
    judge = AnswerJudge(AnswerFormat.ANY_2XX, problem.status, "")
    judge.feed(problem.body)
    return judge.finish()[0], _with_key_advice(line, problem.status, str(problem))


def _with_key_advice(line: Line, status: int, detail: str) -> str:
    return f"{detail}: {line.key_advice()}" if status in (401, 403) else detail


def _question(
    request: CanaryRequest, *, model: str | None, core: str | None, cores: Collection[str], aim: Aim | None
) -> tuple[Question, bool]:
    """The request as it goes over the wire, and whether it is aimed at `core`."""
    headers = {"Accept": _ACCEPT}
    body = None if request.body is None else _with_model(request.body, model)
    aimed = False
    rank = aim.value_for(core, cores) if aim is not None and core is not None else None
    if aim is not None and rank is not None:
        if aim.header is not None:
            headers[aim.header] = str(rank)
            aimed = True
        elif aim.body_field is not None and body is not None:
            body = {**body, aim.body_field: rank}
            aimed = True
    payload: bytes | None = None
    if body is not None:
        payload = json.dumps(body, separators=(",", ":")).encode()
    elif request.raw_body is not None:
        payload = request.raw_body.encode("utf-8", "surrogateescape")
    if payload is not None:
        headers["Content-Type"] = "application/json"
    path = request.path if request.path.startswith("/") else f"/{request.path}"
    return Question(path, method=request.method, body=payload, headers=headers), aimed


def _holds_place(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_place(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_place(item) for item in value)
    return bool(value == MODEL_PLACE)


def _with_model(value: Any, model: str | None) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_model(item, model) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_model(item, model) for item in value]
    return model if value == MODEL_PLACE else value

"""What an answer to a canary proves, and what it does not.

Beside the traps stand the judgements that fall into them, as a control: a trap into which nobody falls proves nothing.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginewatch.core.answer import MAX_BODY_BYTES, MAX_PARTS, MAX_STREAM_LINES, AnswerJudge, Ending, unfinished
from enginewatch.core.events import Outcome
from enginewatch.engines.profile import AnswerFormat

OPENAI = AnswerFormat.OPENAI_COMPLETION
SGLANG = AnswerFormat.SGLANG_GENERATE
OWN_PATH = AnswerFormat.ANY_2XX
JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"


def judged(answer: AnswerFormat, body: bytes | Any, status: int = 200, content_type: str = JSON) -> tuple[Outcome, str]:
    judge = AnswerJudge(answer, status, content_type)
    judge.feed(body if isinstance(body, bytes) else json.dumps(body).encode())
    return judge.finish()


def outcome(answer: AnswerFormat, body: bytes | Any, status: int = 200, content_type: str = JSON) -> Outcome:
    return judged(answer, body, status, content_type)[0]


def stream(*items: Any, done: bool = True) -> bytes:
    events = [f"data: {json.dumps(item)}\n\n" for item in items]
    return "".join([*events, "data: [DONE]\n\n" if done else ""]).encode()


def alive_by_status(body: bytes, status: int = 200) -> bool:
    """Control: the judgement of most probes. Alive is a 2xx, whatever it says; dead is anything else."""
    return 200 <= status < 300


def alive_by_first_item(body: bytes, status: int = 200) -> bool:
    """Control: the judgement of a canary that waits for the first item of a stream (dynamo#13429)."""
    return 200 <= status < 300 and body.startswith(b"data: {")


def completion(finish_reason: Any = "length", text: str = "a") -> dict[str, Any]:
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def generated(finish_reason: Any = None, text: str | None = " the", tokens: int = 1) -> dict[str, Any]:
    return {
        "text": text,
        "output_ids": [279] * tokens,
        "meta_info": {
            "id": "1",
            "finish_reason": {"type": "length", "length": 1} if finish_reason is None else finish_reason,
            "prompt_tokens": 2,
            "completion_tokens": tokens,
            "cached_tokens": 0,
            "e2e_latency": 0.05,
        },
    }


ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
BOOTSTRAP_ITEM = {"token_ids": [], "disaggregated_params": {"bootstrap_host": "10.0.0.1", "bootstrap_room": 7}}
USAGE_ITEM = {"id": "cmpl-1", "object": "text_completion", "choices": [], "usage": {"completion_tokens": 1}}


# --- complete answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["stop", "length", "repetition"])
def test_a_finished_completion_is_proof_of_life(reason: str) -> None:
    assert judged(OPENAI, completion(reason)) == (Outcome.OK, f"complete, finish_reason {reason}")


def test_an_end_token_at_once_is_output_although_its_text_is_empty() -> None:
    assert outcome(OPENAI, completion("stop", text="")) is Outcome.OK
    assert outcome(SGLANG, generated({"type": "stop", "matched": 2}, text="")) is Outcome.OK


def test_an_openai_stream_is_complete_with_a_finish_reason_and_done() -> None:
    body = stream(completion(None), completion("length", ""), USAGE_ITEM)
    assert outcome(OPENAI, body, content_type=EVENTS) is Outcome.OK


def test_a_one_token_stream_may_finish_in_its_first_item() -> None:
    assert outcome(OPENAI, stream(completion("length")), content_type=EVENTS) is Outcome.OK


def test_sglang_answers_with_text_and_meta_info() -> None:
    assert judged(SGLANG, generated()) == (Outcome.OK, "complete, finish_reason length")


def test_an_sglang_stream_is_complete_with_its_finished_item() -> None:
    first = generated(text=" the")
    first["meta_info"]["finish_reason"] = None
    assert outcome(SGLANG, stream(first, generated()), content_type=EVENTS) is Outcome.OK
    assert outcome(SGLANG, stream(first, generated(), done=False), content_type=EVENTS) is Outcome.OK


def test_sglang_prefill_ends_with_length_zero_and_one_token() -> None:
    assert outcome(SGLANG, generated({"type": "length", "length": 0})) is Outcome.OK


def test_sglang_without_a_finish_reason_is_complete_outside_a_stream() -> None:
    old = {"text": " the", "meta_info": {"completion_tokens": 1}}
    assert outcome(SGLANG, old) is Outcome.OK
    assert outcome(SGLANG, stream(old), content_type=EVENTS) is Outcome.ERROR_ANSWER


def test_a_batch_is_complete_when_each_of_its_answers_is() -> None:
    assert outcome(SGLANG, [generated() | {"index": 0}, generated() | {"index": 1}]) is Outcome.OK
    assert outcome(SGLANG, [generated() | {"index": 0}, generated(ABORT) | {"index": 1}]) is Outcome.ERROR_ANSWER


def test_several_choices_must_all_finish() -> None:
    both = completion("length")
    both["choices"] = [{"index": 0, "finish_reason": "length"}, {"index": 1, "finish_reason": None}]
    assert outcome(OPENAI, both) is Outcome.ERROR_ANSWER
    rest = completion("stop")
    rest["choices"][0]["index"] = 1
    assert outcome(OPENAI, stream(both, rest), content_type=EVENTS) is Outcome.OK


@pytest.mark.parametrize(
    "body",
    [
        b": ping\n\n" + stream(completion("length")),
        stream(completion("length")).replace(b"\n", b"\r\n"),
        stream(completion("length")).replace(b"\n", b"\r"),
        stream(completion("length")).rstrip(b"\n"),
        b"\xef\xbb\xbf" + stream(completion("length")),
        b"id: 1\nevent: completion\nretry: 5\n" + stream(completion("length")),
        stream(completion("length")).replace(b'"choices"', b'\ndata: "choices"'),
    ],
    ids=["comment", "crlf", "cr", "no-last-newline", "bom", "other-fields", "data-in-two-lines"],
)
@pytest.mark.parametrize("content_type", [EVENTS, JSON, ""])
def test_a_stream_is_read_as_the_format_allows(body: bytes, content_type: str) -> None:
    assert outcome(OPENAI, body, content_type=content_type) is Outcome.OK


def test_json_is_read_whatever_the_content_type() -> None:
    assert outcome(OPENAI, completion(), content_type="text/plain") is Outcome.OK
    assert outcome(OPENAI, completion(), content_type=EVENTS) is Outcome.OK


def test_where_the_body_is_cut_into_chunks_does_not_matter() -> None:
    for body in (json.dumps(completion()).encode(), stream(completion(None), completion("length"))):
        judge = AnswerJudge(OPENAI, 200, JSON)
        for at in range(len(body)):
            judge.feed(body[at : at + 1])
        assert judge.finish()[0] is Outcome.OK


# --- a first item is never proof ------------------------------------------------------------------------------------


def test_a_first_item_and_then_the_end_of_the_body_proves_nothing() -> None:
    for body in (stream(completion(None), done=False), stream(completion(None))):
        assert outcome(OPENAI, body, content_type=EVENTS) is Outcome.ERROR_ANSWER
        assert alive_by_first_item(body)


def test_a_finished_openai_item_without_done_is_cut_off() -> None:
    body = stream(completion("length"), done=False)
    assert judged(OPENAI, body, content_type=EVENTS) == (Outcome.ERROR_ANSWER, "a stream that ended without [DONE]")


def test_bootstrap_data_made_up_before_the_scheduler_is_no_output() -> None:
    for answer in (OPENAI, SGLANG):
        body = stream(BOOTSTRAP_ITEM)
        assert outcome(answer, body, content_type=EVENTS) is Outcome.MISCONFIGURED
        assert alive_by_first_item(body)
    assert outcome(SGLANG, stream(BOOTSTRAP_ITEM, generated()), content_type=EVENTS) is Outcome.OK


def test_sglang_must_have_produced_a_token() -> None:
    empty = generated({"type": "length", "length": 0}, text="", tokens=0)
    assert judged(SGLANG, empty) == (Outcome.ERROR_ANSWER, "a finished answer without output")


# --- errors inside a 200 --------------------------------------------------------------------------------------------

ERRORS_IN_A_200 = {
    "openai": (OPENAI, {"error": {"message": "boom", "type": "InternalServerError", "param": None, "code": 500}}),
    "openai-bad-request": (OPENAI, {"error": {"message": "boom", "type": "BadRequestError", "code": 400}}),
    "old-vllm": (OPENAI, {"object": "error", "message": "boom", "type": "InternalServerError", "code": 500}),
    "anthropic-style": (OPENAI, {"type": "error", "error": {"type": "api_error", "message": "boom"}}),
    "beside-a-finished-choice": (OPENAI, completion() | {"error": {"message": "boom"}}),
    "inside-a-choice": (OPENAI, {"choices": [{"index": 0, "finish_reason": "stop", "error": {"message": "boom"}}]}),
    "finish-error": (OPENAI, completion("error")),
    "finish-abort": (OPENAI, completion("abort")),
    "dynamo-sleeping-worker": (OPENAI, completion({"error": "Worker is temporarily rejecting new requests"})),
    "sglang-text": (SGLANG, {"error": "boom"}),
    "sglang-object": (SGLANG, {"error": {"message": "boom"}}),
    "sglang-abort": (SGLANG, generated(ABORT)),
    "sglang-abort-500": (SGLANG, generated(ABORT | {"status_code": 500})),
}


@pytest.mark.parametrize("name", ERRORS_IN_A_200)
@pytest.mark.parametrize("streamed", [False, True], ids=["json", "stream"])
def test_an_error_in_a_200_is_an_error(name: str, streamed: bool) -> None:
    answer, item = ERRORS_IN_A_200[name]
    body = stream(item) if streamed else json.dumps(item).encode()
    assert outcome(answer, body, content_type=EVENTS if streamed else JSON) is Outcome.ERROR_ANSWER
    assert alive_by_status(body)


def test_an_error_after_good_items_is_an_error() -> None:
    body = stream(completion(None), completion("length"), {"error": {"message": "boom"}})
    assert outcome(OPENAI, body, content_type=EVENTS) is Outcome.ERROR_ANSWER
    assert alive_by_first_item(body)


@pytest.mark.parametrize("data", ['{"message": "boom"}', "boom", "[DONE]", ""])
def test_an_error_event_is_an_error_whatever_it_carries(data: str) -> None:
    body = stream(completion("length")) + f"event: error\ndata: {data}\n\n".encode()
    assert outcome(OPENAI, body, content_type=EVENTS) is Outcome.ERROR_ANSWER


@pytest.mark.parametrize("body", [b"", b" \n", b": ping\n\n: ping\n\n", b"data: [DONE]\n\n", b"data:\n\n"])
@pytest.mark.parametrize("content_type", [EVENTS, JSON])
@pytest.mark.parametrize("answer", [OPENAI, SGLANG])
def test_an_empty_stream_is_an_error(answer: AnswerFormat, body: bytes, content_type: str) -> None:
    assert outcome(answer, body, content_type=content_type) is Outcome.ERROR_ANSWER
    assert alive_by_status(body)


def test_an_answer_without_a_choice_is_an_error() -> None:
    assert outcome(OPENAI, {"object": "text_completion", "choices": []}) is Outcome.ERROR_ANSWER
    assert outcome(OPENAI, completion(None)) is Outcome.ERROR_ANSWER


# --- saturated ------------------------------------------------------------------------------------------------------

NOT_NOW = {
    "vllm-queued-reqs": {
        "error": {
            "message": "The engine is currently busy and cannot accept new requests. Please try again later or on a "
            "different instance.",
            "type": "ServiceUnavailableError",
            "param": None,
            "code": 503,
        }
    },
    "vllm-queued-tokens": {
        "error": {"message": "The engine has reached its prefill token backlog limit.", "code": 503}
    },
    "sglang-queue": {"object": "error", "message": "The request queue is full.", "code": 503},
    "sglang-displaced": {"message": "The request is aborted by a higher priority request."},
    "dynamo": {"message": "Service temporarily unavailable: All workers are busy, please retry later", "code": 503},
    "gateway": {"error": "Worker at capacity: 14 in-flight, 0 queued requests. Retry later."},
    "tgi": {"error": "Model is overloaded", "error_type": "overloaded"},
    "plain": b"Too Many Requests",
}


@pytest.mark.parametrize("name", NOT_NOW)
@pytest.mark.parametrize("answer", list(AnswerFormat))
def test_a_503_that_says_not_now_is_saturated(answer: AnswerFormat, name: str) -> None:
    assert outcome(answer, NOT_NOW[name], 503) is Outcome.SATURATED
    assert not alive_by_status(b"", 503)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"Service Unavailable",
        b"<html><body><h1>503 Service Temporarily Unavailable</h1></body></html>",
        b'{"error": {"message": "EngineCore encountered an issue.", "type": "EngineDeadError", "code": 503}}',
        b'{"error": {"message": "Request failed; please retry", "code": 503}}',
        b"maintenance downtime or capacity problems",
    ],
)
@pytest.mark.parametrize("answer", list(AnswerFormat))
def test_any_other_503_is_an_error(answer: AnswerFormat, body: bytes) -> None:
    assert outcome(answer, body, 503) is Outcome.ERROR_ANSWER


@pytest.mark.parametrize("status", [429, 529])
@pytest.mark.parametrize("answer", list(AnswerFormat))
def test_too_many_requests_is_saturated_by_its_status(answer: AnswerFormat, status: int) -> None:
    assert outcome(answer, b"", status) is Outcome.SATURATED


def test_sglang_says_inside_a_stream_that_its_queue_is_full() -> None:
    refused = generated(ABORT | {"message": "The request queue is full.", "status_code": 503}, text="", tokens=0)
    error = {"error": {"message": "The request queue is full.", "type": "overloaded", "code": 503}}
    for item in (
        refused,
        error,
        {"error": {"message": "slow down", "code": 429}},
        {"error": "Rate limit", "code": "429"},
    ):
        assert outcome(SGLANG, stream(item), content_type=EVENTS) is Outcome.SATURATED


def test_a_queue_in_the_output_of_the_model_is_not_saturation() -> None:
    assert outcome(OPENAI, completion("abort", text="the request queue is full")) is Outcome.ERROR_ANSWER
    assert outcome(OPENAI, completion("length", text="too many requests")) is Outcome.OK


# --- misconfigured --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "status", [301, 302, 307, 308, 304, 400, 401, 403, 404, 405, 413, 415, 422, 499, 100, 0, -1, 999]
)
@pytest.mark.parametrize("answer", list(AnswerFormat))
def test_redirects_and_refusals_are_never_a_hang(answer: AnswerFormat, status: int) -> None:
    assert outcome(answer, completion(), status) is Outcome.MISCONFIGURED
    assert not alive_by_status(b"", status)


@pytest.mark.parametrize("status", [500, 501, 502, 504, 507])
@pytest.mark.parametrize("answer", list(AnswerFormat))
def test_any_other_5xx_is_an_error(answer: AnswerFormat, status: int) -> None:
    assert outcome(answer, b"queue is full", status) is Outcome.ERROR_ANSWER


FOREIGN: list[bytes] = [
    b"<!doctype html><html><body>Welcome to nginx!</body></html>",
    b"OK",
    b'"ok"',
    b"null",
    b"[]",
    b"[1, 2]",
    b'{"status": "ok"}',
    b'{"detail": "Not Found"}',
    b'{"choices": "none"}',
    b'{"choices": [1]}',
    b'{"text": "a"}',
    b'{"meta_info": []}',
    b'{"choices": [{"text": "a", "finish_rea',
    b"data: hello\n\ndata: [DONE]\n\n",
    b'data: {"status": "ok"}\n\ndata: [DONE]\n\n',
    b"\x1f\x8b\x08\x00\xff\xff",
    b"[" * 200_000,
    b"9" * 10_000,
]


@pytest.mark.parametrize("body", FOREIGN, ids=lambda body: repr(body[:24]))
@pytest.mark.parametrize("answer", [OPENAI, SGLANG])
@pytest.mark.parametrize("content_type", [JSON, "text/html", EVENTS])
def test_a_body_that_is_not_the_engines_is_misconfigured(answer: AnswerFormat, body: bytes, content_type: str) -> None:
    empty_batch = body == b"[]"
    expected = Outcome.ERROR_ANSWER if empty_batch else Outcome.MISCONFIGURED
    assert outcome(answer, body, content_type=content_type) is expected
    assert alive_by_status(body)


def test_one_engines_answer_is_foreign_where_the_other_is_expected() -> None:
    assert outcome(SGLANG, completion()) is Outcome.MISCONFIGURED
    assert outcome(OPENAI, generated()) is Outcome.MISCONFIGURED


@pytest.mark.parametrize("reason", ["rejected", "not_finished", 7, True, [], {}, {"type": 3}, {"type": "new"}])
def test_a_finish_reason_nobody_knows_counts_for_nothing(reason: Any) -> None:
    assert outcome(OPENAI, completion(reason)) is Outcome.MISCONFIGURED


@pytest.mark.parametrize("status", [204, 205])
def test_no_content_is_no_completion(status: int) -> None:
    assert outcome(OPENAI, b"", status) is Outcome.MISCONFIGURED


def test_an_answer_without_end_is_not_kept_and_not_the_engines() -> None:
    judge = AnswerJudge(OPENAI, 200, JSON)
    for _ in range(16):
        assert not judge.settled or judge.finish()[0] is Outcome.MISCONFIGURED
        judge.feed(b" " * 16 * 1024)
    assert judge.settled
    assert judge.finish() == (Outcome.MISCONFIGURED, f"an answer longer than {MAX_BODY_BYTES} bytes")
    assert len(judge._kept) <= MAX_BODY_BYTES


def test_an_answer_just_within_the_limit_is_judged() -> None:
    body = json.dumps(completion()).encode()
    assert outcome(OPENAI, body + b" " * (MAX_BODY_BYTES - len(body))) is Outcome.OK
    assert outcome(OPENAI, body + b" " * (MAX_BODY_BYTES - len(body) + 1)) is Outcome.MISCONFIGURED


def test_a_stream_of_endless_lines_is_not_the_engines() -> None:
    body = stream(completion("length")) + b":\n" * MAX_STREAM_LINES
    assert outcome(OPENAI, body, content_type=EVENTS) is Outcome.MISCONFIGURED


def test_an_answer_of_countless_parts_is_not_the_engines() -> None:
    assert outcome(OPENAI, {"choices": [{"finish_reason": "stop"}] * (MAX_PARTS + 1)}) is Outcome.MISCONFIGURED
    assert outcome(SGLANG, b"[" + b"{}," * 50_000 + b"{}]") is Outcome.MISCONFIGURED


# --- a path of the user's own ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 201, 202, 204, 206])
@pytest.mark.parametrize("body", [b"", b"OK", b'{"error": "x"}', b"x" * (2 * MAX_BODY_BYTES)], ids=len)
def test_any_2xx_read_to_its_end_is_ok_on_a_path_of_the_users_own(status: int, body: bytes) -> None:
    assert judged(OWN_PATH, body, status) == (Outcome.OK, f"HTTP {status}, read to its end")


def test_nothing_of_such_an_answer_is_kept() -> None:
    judge = AnswerJudge(OWN_PATH, 200, "")
    judge.feed(b"x" * 1000)
    assert not judge._kept
    assert not judge.settled, "it has to be read to its end"


# --- answers that do not end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "before", "within"),
    [
        (Ending.DEADLINE, Outcome.TIMEOUT, Outcome.FROZEN),
        (Ending.REFUSED, Outcome.REFUSED, Outcome.FROZEN),
        (Ending.BROKEN, Outcome.REFUSED, Outcome.FROZEN),
        (Ending.UNASKED, Outcome.UNASKED, Outcome.UNASKED),
        (Ending.UNSENDABLE, Outcome.MISCONFIGURED, Outcome.MISCONFIGURED),
        (Ending.NOT_HTTP, Outcome.MISCONFIGURED, Outcome.MISCONFIGURED),
    ],
)
@pytest.mark.parametrize("answer", list(AnswerFormat))
def test_what_it_means_that_an_answer_does_not_end(
    answer: AnswerFormat, ending: Ending, before: Outcome, within: Outcome
) -> None:
    assert unfinished(ending, None)[0] is before
    begun = AnswerJudge(answer, 200, EVENTS)
    begun.feed(stream(completion(None), done=False))
    assert unfinished(ending, begun)[0] is within


@pytest.mark.parametrize("status", [307, 401, 404, 429, 500, 503])
def test_a_status_that_is_no_success_decides_even_when_its_body_never_ends(status: int) -> None:
    judge = AnswerJudge(OPENAI, status, JSON)
    assert unfinished(Ending.DEADLINE, judge) == judge.finish()
    assert unfinished(Ending.BROKEN, judge)[0] is not Outcome.FROZEN
    assert judge.settled is (status != 503)


# --- any bytes ------------------------------------------------------------------------------------------------------

keys = [
    "error",
    "object",
    "type",
    "choices",
    "finish_reason",
    "index",
    "text",
    "meta_info",
    "completion_tokens",
    "code",
]
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["error", "stop"])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(keys) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=12,
)
bodies = (
    st.binary(max_size=300)
    | values.map(lambda value: json.dumps(value).encode())
    | st.lists(values, max_size=4).map(lambda items: stream(*items))
    | st.lists(st.sampled_from([b"data:", b"event: error", b"\n", b"\r", b"[DONE]", b"{", b'"', b":"])).map(b"".join)
)


@given(
    st.sampled_from(AnswerFormat),
    st.sampled_from([200, 503]) | st.integers(-10, 1000),
    st.sampled_from([EVENTS, JSON, ""]) | st.text(max_size=10),
    st.lists(bodies, max_size=3),
)
def test_no_bytes_make_the_judge_raise_or_repeat_what_the_engine_said(
    answer: AnswerFormat, status: int, content_type: str, chunks: list[bytes]
) -> None:
    judge = AnswerJudge(answer, status, content_type)
    for chunk in chunks:
        judge.feed(chunk)
        unfinished(Ending.DEADLINE, judge)
    found, detail = judge.finish()
    assert isinstance(found, Outcome)
    assert judge.finish() == (found, detail)
    assert len(detail) < 80
    assert detail.isascii()
    if found is Outcome.OK:
        assert 200 <= status < 300


@given(values)
def test_nothing_the_engine_wrote_gets_into_the_phrase(value: Any) -> None:
    secret = {"error": {"message": "s3cret", "type": "s3cret", "code": "s3cret"}, "finish_reason": "s3cret", "x": value}
    for item in (secret, {"choices": [secret]}, {"meta_info": secret}, generated(secret), completion(secret)):
        for answer in (OPENAI, SGLANG):
            assert "s3cret" not in judged(answer, item)[1]
            assert "s3cret" not in judged(answer, stream(item), content_type=EVENTS)[1]

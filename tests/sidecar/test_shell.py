"""The loop around the judgement, on virtual time: what it asks, when, and what it survives."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.sidecar.fakes import OK, FakeClient, FakeJudge, House, verdict

from enginewatch.client.kv_bootstrap import KvAnswer
from enginewatch.client.target import CanaryReport, Description, ScrapeFailure
from enginewatch.core.canaries import LATE_SEC
from enginewatch.core.events import (
    AbandonCanary,
    CanaryDone,
    CaptureEvidence,
    DescribeEngine,
    EngineDescribed,
    Event,
    Flags,
    FlagsRead,
    Instruction,
    KvBootstrapRead,
    Log,
    LogChannelChanged,
    LogHits,
    Outcome,
    Publish,
    ReadFlags,
    Rescrape,
    Scraped,
    ScrapeFailed,
    SettingsChanged,
    StartCanary,
    Tick,
    Verdict,
)
from enginewatch.engines import PROFILES
from enginewatch.sidecar.errands import GRACE_SEC
from enginewatch.sidecar.logtail import LogTail
from enginewatch.sidecar.signatures import Signatures

pytestmark = pytest.mark.looptime

HUNG = Verdict("stall-hang", True, True, "core 0: no progress for 30 s", "0", 0.0)


@pytest.fixture(autouse=True)
def _the_log_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread: time is virtual here, and on a busy machine a second of it passes before a real thread has begun."""

    class AtOnce(concurrent.futures.Executor):
        def __init__(self, *_: object) -> None:
            pass

        def submit(self, read: Callable[..., Any], /, *args: Any, **more: Any) -> concurrent.futures.Future[Any]:
            done: concurrent.futures.Future[Any] = concurrent.futures.Future()
            try:
                done.set_result(read(*args, **more))
            except Exception as error:
                done.set_exception(error)
            return done

    monkeypatch.setattr("enginewatch.sidecar.logtail.concurrent.futures.ThreadPoolExecutor", AtOnce)


def once(kind: type[Event], *instructions: Instruction) -> Callable[[Event, float], list[Instruction]]:
    """A judgement that gives its instructions at the first event of a kind."""
    left = [list(instructions)]

    def script(event: Event, now: float) -> list[Instruction]:
        return left.pop() if left and isinstance(event, kind) else []

    return script


def takes(seconds: float, result: Any) -> Callable[[], Awaitable[Any]]:
    async def answer() -> Any:
        await asyncio.sleep(seconds)
        return result

    return answer


async def never() -> Any:
    await asyncio.Event().wait()


async def breaks() -> Any:
    raise RuntimeError("a bug")


# --- polling --------------------------------------------------------------------------------------------------------


async def test_polls_are_measured_start_to_start() -> None:
    async with House(client=FakeClient(on_scrape=takes(2, {}))) as house:
        await asyncio.sleep(16)
    assert house.judge.times_of(Tick) == [0, 5, 10, 15]
    assert house.judge.times_of(Scraped) == [2, 7, 12]


async def test_a_scrape_longer_than_the_interval_is_followed_by_the_next_poll_at_once_and_no_burst() -> None:
    async with House(client=FakeClient(on_scrape=takes(8, {}))) as house:
        await asyncio.sleep(25)
    assert house.judge.times_of(Tick) == [0, 8, 16, 24]


async def test_a_scrape_is_told_with_the_moment_it_began() -> None:
    async with House(client=FakeClient(on_scrape=takes(2, {"a_total": 3.0}))) as house:
        await asyncio.sleep(3)
    assert house.judge.heard(Scraped) == [Scraped(0, {"a_total": 3.0}, recheck=False)]
    assert house.client.asked[0] == ("scrape", (frozenset({"a_total"}), 10.0, house.judge.profile))


async def test_a_failed_scrape_is_told_as_what_it_was() -> None:
    failure = ScrapeFailure("http_503", "answered 503")
    async with House(client=FakeClient(on_scrape=takes(0, failure))) as house:
        await asyncio.sleep(1)
    assert house.judge.heard(ScrapeFailed) == [ScrapeFailed(0, "http_503", "answered 503", recheck=False)]
    assert house.metric('enginewatch_scrapes_total{outcome="http_503"}') == 1


async def test_a_scrape_that_ignores_its_deadline_does_not_stop_the_loop() -> None:
    async with House(client=FakeClient(on_scrape=never)) as house:
        await asyncio.sleep(50)
        assert len(house.judge.times_of(Tick)) >= 3
        assert house.metric('enginewatch_internal_errors_total{task="scrape"}') == 2


async def test_a_poll_interval_of_a_day_can_be_corrected_within_seconds(tmp_path: Path) -> None:
    async with House(directory=tmp_path, settings='{"poll_interval_sec": 86400}') as house:
        await asyncio.sleep(60)
        assert house.judge.times_of(Tick) == [0]
        assert house.config is not None
        house.config.write_text('{"poll_interval_sec": 2}')
        await asyncio.sleep(10)
        assert len(house.judge.times_of(Tick)) >= 3


async def test_a_tiny_poll_interval_leaves_the_loop_to_others(tmp_path: Path) -> None:
    async with House(directory=tmp_path, settings='{"poll_interval_sec": 0.01}') as house:
        await asyncio.sleep(1)
    assert 90 <= len(house.judge.times_of(Tick)) <= 101


# --- settings and log -----------------------------------------------------------------------------------------------


async def test_changed_settings_reach_the_judgement_before_the_next_page(tmp_path: Path) -> None:
    async with House(directory=tmp_path) as house:
        await asyncio.sleep(1)
        assert house.config is not None
        house.config.write_text('{"poll_interval_sec": 5, "stall_sec": 45}')
        await asyncio.sleep(5)
        kinds = [type(event) for _, event in house.judge.told]
        assert kinds == [Tick, Scraped, Tick, SettingsChanged, Scraped]
        assert house.judge.heard(SettingsChanged)[0].settings.stall_sec == 45
        assert house.board.settings.stall_sec == 45


async def test_a_rejected_file_is_told_to_people_and_not_to_the_judgement(tmp_path: Path) -> None:
    async with House(directory=tmp_path) as house:
        await asyncio.sleep(1)
        house.log_lines()
        assert house.config is not None
        house.config.write_text('{"stall_sec": "soon"}')
        await asyncio.sleep(15)
        assert house.judge.heard(SettingsChanged) == []
        lines = [line for line in house.log_lines() if line["level"] == "error"]
        assert [(line["key"], line["file"], line["reason"]) for line in lines] == [
            ("stall_sec", str(house.config), "expected a number, got a string")
        ]
        assert house.metric("enginewatch_config_last_reload_successful") == 0
        problem = 'enginewatch_config_problem{file="%s",key="stall_sec",reason="expected a number, got a string"}'
        assert house.metric(problem % house.config) == 1
        house.config.write_text('{"poll_interval_sec": 5}')
        await asyncio.sleep(5)
        assert house.metric("enginewatch_config_last_reload_successful") == 1
        assert house.metric(problem % house.config) is None


async def test_log_hits_come_before_the_page_of_the_same_poll(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.touch()
    tail = LogTail(str(log))
    tail.look_for(Signatures(("dead",)))
    async with House(tail=tail, fixed_signatures=True) as house:
        await asyncio.sleep(1)
        log.write_text("dead\ndead\n")
        await asyncio.sleep(5)
    kinds = [type(event) for _, event in house.judge.told]
    assert kinds == [Tick, Scraped, Tick, LogHits, Scraped]
    assert house.judge.heard(LogHits) == [LogHits(2, (0,))]
    assert house.metric("enginewatch_log_hits_total") == 2


async def test_signatures_come_from_the_engines_profile_once_it_is_known(tmp_path: Path) -> None:
    from enginewatch.engines import PROFILES

    log = tmp_path / "engine.log"
    log.touch()
    judge = FakeJudge(profile=None)
    async with House(judge, tail=LogTail(str(log))) as house:
        await asyncio.sleep(1)
        judge.profile = PROFILES["sglang"]
        await asyncio.sleep(5)
        log.write_text("Health check failed. Server couldn't get a response from detokenizer for last 20 seconds\n")
        await asyncio.sleep(5)
    assert house.judge.heard(LogHits) == [LogHits(1, (0,))]


async def test_a_broken_log_channel_is_told_once_and_its_recovery_too(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    tail = LogTail(str(log))
    async with House(tail=tail) as house:
        await asyncio.sleep(11)
        log.touch()
        await asyncio.sleep(10)
    assert house.judge.heard(LogChannelChanged) == [
        LogChannelChanged(f"no file matches {log}"),
        LogChannelChanged(None),
    ]


# --- instructions ---------------------------------------------------------------------------------------------------


async def test_a_canary_runs_beside_the_loop_and_reports() -> None:
    judge = FakeJudge(once(Scraped, StartCanary(7, None, 5)))
    async with House(judge, FakeClient(on_canary=takes(12, OK))) as house:
        await asyncio.sleep(16)
    assert house.judge.times_of(Tick) == [0, 5, 10, 15], "no poll is delayed"
    assert house.judge.times_of(CanaryDone) == [12]


async def test_a_canary_is_sent_as_ordered_and_aimed_by_version() -> None:
    judge = FakeJudge(once(Scraped, StartCanary(7, "3", 5)), canary_role="prefill")
    async with House(judge) as house:
        await asyncio.sleep(1)
    request, core, aim, deadline, role = next(value for name, value in house.client.asked if name == "canary")
    assert (core, deadline, role) == ("3", 5, "prefill")
    assert aim is not None
    assert aim == request.aim_for("0.32.0")
    assert house.judge.heard(CanaryDone) == [CanaryDone(7, Outcome.OK, "complete")]


async def test_an_answer_that_was_not_aimed_proves_nothing_about_a_core() -> None:
    judge = FakeJudge(once(Scraped, StartCanary(7, "3", 5)), version=None)
    unaimed = CanaryReport(Outcome.OK, "complete", 0.1, aimed=False)
    async with House(judge, FakeClient(on_canary=takes(0, unaimed))) as house:
        await asyncio.sleep(1)
    assert house.judge.heard(CanaryDone)[0].outcome is Outcome.MISCONFIGURED


async def test_an_abandoned_canary_is_cancelled_and_reports_nothing() -> None:
    def script(event: Event, now: float) -> list[Instruction]:
        if isinstance(event, Scraped):
            return [StartCanary(1, None, 60)] if now < 1 else [AbandonCanary(1), StartCanary(2, None, 60)]
        return []

    client = FakeClient(on_canary=takes(1000, OK))
    async with House(FakeJudge(script), client) as house:
        await asyncio.sleep(6)
        assert client.cancelled == ["canary"]
        assert client.times("canary") == 2
    assert house.judge.heard(CanaryDone) == []


async def test_abandoning_another_token_leaves_the_canary_alone() -> None:
    judge = FakeJudge(once(Scraped, StartCanary(2, None, 60), AbandonCanary(1)))
    async with House(judge, FakeClient(on_canary=takes(3, OK))) as house:
        await asyncio.sleep(4)
    assert [done.token for done in house.judge.heard(CanaryDone)] == [2]


async def test_a_canary_that_ignores_its_deadline_is_given_up_too_late_to_count() -> None:
    judge = FakeJudge(once(Scraped, StartCanary(1, None, 5)))
    async with House(judge, FakeClient(on_canary=never)) as house:
        await asyncio.sleep(16)
    assert house.judge.times_of(CanaryDone) == [15]
    assert GRACE_SEC > LATE_SEC
    assert house.judge.heard(CanaryDone)[0].outcome is Outcome.TIMEOUT


async def test_canaries_switched_off_meanwhile_report_all_the_same() -> None:
    judge = FakeJudge(once(Scraped, StartCanary(1, None, 5)), canary=None)
    async with House(judge) as house:
        await asyncio.sleep(1)
    assert house.judge.heard(CanaryDone)[0].outcome is Outcome.MISCONFIGURED
    assert house.client.times("canary") == 0


async def test_a_recheck_is_a_scrape_beside_the_loop_at_the_asked_moment() -> None:
    judge = FakeJudge(once(Scraped, Rescrape(2.5)))
    async with House(judge) as house:
        await asyncio.sleep(4)
    assert house.judge.times_of(Scraped) == [0, 2.5]
    assert [event.recheck for event in house.judge.heard(Scraped)] == [False, True]
    assert house.judge.heard(Scraped)[1].started_at == 2.5


@pytest.mark.parametrize(("second", "moment"), [(0.0, 1.0), (3.0, 4.0)])
async def test_a_newer_recheck_replaces_one_that_has_not_begun(second: float, moment: float) -> None:
    def script(event: Event, now: float) -> list[Instruction]:
        if isinstance(event, Scraped) and not event.recheck:
            return [Rescrape(2), StartCanary(1, None, 5)] if now < 1 else []
        return [Rescrape(second)] if isinstance(event, CanaryDone) else []

    async with House(FakeJudge(script), FakeClient(on_canary=takes(1, OK))) as house:
        await asyncio.sleep(4.5)
    assert house.judge.times_of(Scraped) == [0, moment]


async def test_a_recheck_asked_for_while_one_is_under_way_follows_it() -> None:
    scripted = [[Rescrape(0)], [Rescrape(0)], []]

    def script(event: Event, now: float) -> list[Instruction]:
        return list(scripted.pop(0)) if isinstance(event, Scraped) and scripted else []

    async with House(FakeJudge(script), FakeClient(on_scrape=takes(1, {}))) as house:
        await asyncio.sleep(4)
    assert house.judge.times_of(Scraped) == [1, 2, 3]


@pytest.mark.parametrize(("in_turn", "begun"), [(False, [0, 2.5]), (True, [0, 5])])
async def test_a_list_that_reading_empties_has_not_begun_while_it_waits_its_turn(
    *, in_turn: bool, begun: list[float]
) -> None:
    """It would pass for a page of the time before, on which a canary that failed meanwhile cannot be confirmed."""
    profile = PROFILES["trtllm"].on_json_statistics() if in_turn else PROFILES["vllm"]
    judge = FakeJudge(once(Tick, Rescrape(2.5)), profile=profile)
    async with House(judge, FakeClient(on_scrape=takes(5, {}))) as house:
        await asyncio.sleep(10.5)
    assert [event.started_at for event in house.judge.heard(Scraped)][:2] == begun


async def test_flags_are_read_beside_the_loop() -> None:
    judge = FakeJudge(once(Scraped, ReadFlags()))
    async with House(judge, FakeClient(on_flags=takes(1, Flags.PAUSED))) as house:
        await asyncio.sleep(2)
    assert house.judge.heard(FlagsRead) == [FlagsRead(Flags.PAUSED)]


async def test_flags_without_an_answer_are_silent() -> None:
    judge = FakeJudge(once(Scraped, ReadFlags()))
    async with House(judge, FakeClient(on_flags=never)) as house:
        await asyncio.sleep(12)
    assert house.judge.heard(FlagsRead) == [FlagsRead(Flags.SILENT)]


async def test_a_new_process_is_asked_who_it_is_and_its_models_name_forgotten() -> None:
    judge = FakeJudge(once(Scraped, DescribeEngine()))
    async with House(judge) as house:
        await asyncio.sleep(400)
    assert house.judge.heard(EngineDescribed) == [EngineDescribed("vllm", "0.32.0")]
    assert house.client.times("forget") == 1


async def test_an_engine_that_does_not_tell_its_version_is_asked_again() -> None:
    answers = [Description("vllm", None), Description("vllm", None), Description("vllm", "0.32.0")]

    async def describe() -> Description:
        return answers.pop(0)

    judge = FakeJudge(once(Scraped, DescribeEngine()))
    async with House(judge, FakeClient(on_describe=describe)) as house:
        await asyncio.sleep(30)
    assert house.judge.heard(EngineDescribed) == [
        EngineDescribed("vllm", None),
        EngineDescribed("vllm", "0.32.0"),
    ]


async def test_a_published_verdict_is_what_health_answers() -> None:
    async with House(FakeJudge(once(Scraped, Publish(HUNG)))) as house:
        assert house.board.health() == (200, "ok: core 0: tokens move")
        await asyncio.sleep(1)
        assert house.board.health() == (503, "hung: core 0: no progress for 30 s")


async def test_transitions_are_counted_but_not_among_everyday_states() -> None:
    states = iter(["growing", "freeze-grace", "stall-hang", "stall-hang", "growing"])

    def script(event: Event, now: float) -> list[Instruction]:
        return [Publish(verdict(state))] if isinstance(event, Scraped) and (state := next(states, "")) else []

    async with House(FakeJudge(script)) as house:
        await asyncio.sleep(26)
        page = house.metrics.render().decode()
    assert 'verdict_transitions_total{from="freeze-grace",to="stall-hang"} 1.0' in page
    assert 'verdict_transitions_total{from="stall-hang",to="growing"} 1.0' in page
    assert page.count("enginewatch_verdict_transitions_total{") == 2


async def test_suppressed_hangs_are_counted_once_each() -> None:
    shown = [
        Verdict("warmup-stall-hang", True, False, "a", "0", 0.0),
        Verdict("warmup-stall-hang-log", True, False, "a", "0", 0.0),
        verdict("growing"),
        Verdict("shadow-stall-hang", True, False, "a", "0", 0.0),
    ]

    def script(event: Event, now: float) -> list[Instruction]:
        return [Publish(shown.pop(0))] if isinstance(event, Scraped) and shown else []

    async with House(FakeJudge(script)) as house:
        await asyncio.sleep(26)
        assert house.metric('enginewatch_suppressed_hangs_total{why="warmup"}') == 1
        assert house.metric('enginewatch_suppressed_hangs_total{why="shadow"}') == 1


async def test_what_the_judgement_logs_is_one_structured_line() -> None:
    judge = FakeJudge(once(Scraped, Log("warning", "the engine was replaced", {"from": "growing", "restarts": 1})))
    async with House(judge) as house:
        await asyncio.sleep(1)
        line = house.log_lines()[-1]
    assert (line["level"], line["event"], line["from"], line["restarts"]) == (
        "warning",
        "the engine was replaced",
        "growing",
        1,
    )


async def test_evidence_is_kept_where_a_hang_is_declared() -> None:
    async with House(FakeJudge(once(Scraped, Publish(HUNG), CaptureEvidence("core 0: no progress")))) as house:
        await asyncio.sleep(1)
        assert b'"kind":"evidence","reason":"core 0: no progress"' in house.history.lines()


# --- what it survives -----------------------------------------------------------------------------------------------


async def test_a_bug_in_the_judgement_is_survived_and_health_fails_open() -> None:
    def script(event: Event, now: float) -> list[Instruction]:
        if isinstance(event, Scraped):
            if now > 1:
                raise RuntimeError("a bug")
            return [Publish(HUNG)]
        return []

    async with House(FakeJudge(script)) as house:
        await asyncio.sleep(40)
        assert house.board.health()[0] == 503, "not stale yet: 3 x (5 + 10) s"
        await asyncio.sleep(11)
        assert house.board.health() == (200, "ok: watcher stale")
        assert len(house.judge.times_of(Tick)) == 11, "and it goes on"
        errors = house.metric('enginewatch_internal_errors_total{task="judge"}')
        assert errors == 10
        lines = [line for line in house.log_lines() if line.get("task") == "judge"]
        assert len(lines) == 1, "once per kind"
        assert lines[0]["error"] == "RuntimeError"


async def test_a_bug_in_the_scrape_is_no_evidence_against_the_engine() -> None:
    async with House(client=FakeClient(on_scrape=breaks)) as house:
        await asyncio.sleep(60)
        assert house.judge.heard(ScrapeFailed) == []
        assert house.board.health() == (200, "ok: watcher stale")


@pytest.mark.parametrize(
    ("order", "client", "event", "task"),
    [
        (StartCanary(1, None, 5), FakeClient(on_canary=breaks), CanaryDone, "canary"),
        (ReadFlags(), FakeClient(on_flags=breaks), FlagsRead, "flags"),
        (DescribeEngine(), FakeClient(on_describe=breaks), EngineDescribed, "describe"),
    ],
)
async def test_a_bug_in_an_errand_is_survived_and_it_reports_all_the_same(
    order: Instruction, client: FakeClient, event: type[Event], task: str
) -> None:
    async with House(FakeJudge(once(Scraped, order)), client) as house:
        await asyncio.sleep(4)
        assert len(house.judge.heard(event)) == 1
        assert house.metric(f'enginewatch_internal_errors_total{{task="{task}"}}') == 1
        await asyncio.sleep(3)
        assert house.judge.times_of(Tick) == [0, 5]


@pytest.mark.parametrize(
    ("part", "task"),
    [
        ("history.note_event", "history"),
        ("history.note_verdict", "loop"),
        ("metrics.state_changed", "loop"),
        ("keeper._source.poll", "config"),
        ("shell._tail.read", "log"),
        ("metrics.scraped", "poll"),
        ("shell._errands.send_canary", "loop"),
    ],
)
async def test_a_bug_anywhere_in_a_poll_leaves_the_loop_running(
    part: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(event: Event, now: float) -> list[Instruction]:
        if isinstance(event, Scraped):
            return [Publish(verdict("paused")), StartCanary(1, None, 5)]
        return []

    async with House(FakeJudge(script), tail=LogTail(str(tmp_path / "log"))) as house:
        *path, name = part.split(".")
        owner: Any = house
        for step in path:
            owner = getattr(owner, step)

        def broken(*_: object, **__: object) -> None:
            raise ValueError("a bug")

        monkeypatch.setattr(type(owner), name, broken)
        await asyncio.sleep(21)
        assert len(house.judge.times_of(Tick)) >= 4
        assert (house.metric(f'enginewatch_internal_errors_total{{task="{task}"}}') or 0) >= 1


async def test_a_bug_in_the_recheck_loop_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(event: Event, now: float) -> list[Instruction]:
        return [Rescrape(0)] if isinstance(event, Scraped) and not event.recheck else []

    async with House(FakeJudge(script)) as house:
        scraped = house.metrics.scraped
        bugs = [True]

        def broken(outcome: str, duration_sec: float) -> None:
            if bugs and len(house.judge.heard(Scraped)) == 1:
                bugs.pop()
                raise ValueError("a bug")
            scraped(outcome, duration_sec)

        monkeypatch.setattr(house.metrics, "scraped", broken)
        await asyncio.sleep(11)
        assert [event.recheck for event in house.judge.heard(Scraped)] == [False, False, True, False, True]
        assert house.metric('enginewatch_internal_errors_total{task="recheck"}') == 1


async def test_stopping_leaves_no_task_and_closes_the_client() -> None:
    judge = FakeJudge(once(Scraped, StartCanary(1, None, 60), ReadFlags(), DescribeEngine(), Rescrape(3)))
    client = FakeClient(on_canary=never, on_flags=never, on_describe=never)
    before = asyncio.all_tasks()
    async with House(judge, client) as house:
        await asyncio.sleep(1)
        await house.stop()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
    assert client.is_closed
    assert client.cancelled == ["canary"]


# --- the bootstrap server ---------------------------------------------------------------------------------------------


class FakeKvServer:
    """A bootstrap server that takes a while over each answer, or breaks."""

    def __init__(self, seconds: float = 0.0, answer: KvAnswer | Exception | None = None) -> None:
        self.seconds = seconds
        self.answer = answer or KvAnswer({"0": "a"})
        self.asked: list[float] = []
        self.is_closed = False

    async def read(self, *, timeout_sec: float) -> KvAnswer:
        self.asked.append(asyncio.get_running_loop().time())
        await asyncio.sleep(min(self.seconds, timeout_sec))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer if self.seconds <= timeout_sec else KvAnswer(failure="no answer in time")

    def close(self) -> None:
        self.is_closed = True


async def test_the_bootstrap_server_is_asked_beside_each_poll() -> None:
    server = FakeKvServer()
    async with House(kv_server=server) as house:
        await asyncio.sleep(21)
        assert len(server.asked) == len(house.judge.times_of(Scraped)) == 5
        heard = house.judge.heard(KvBootstrapRead)
        assert [read.engine_ids for read in heard] == [{"0": "a"}] * 5
        assert [read.started_at for read in heard] == server.asked
    assert server.is_closed


async def test_control_without_a_bootstrap_server_nobody_is_asked() -> None:
    async with House() as house:
        await asyncio.sleep(21)
        assert house.judge.heard(KvBootstrapRead) == []


async def test_a_slow_bootstrap_server_delays_no_poll_and_is_asked_one_question_at_a_time(tmp_path: Path) -> None:
    server = FakeKvServer(seconds=60)
    settings = '{"poll_interval_sec": 0.5}'
    async with House(kv_server=server, directory=tmp_path, settings=settings) as slow:
        await asyncio.sleep(20)
        polls = slow.judge.times_of(Scraped)
    assert [round(later - before, 3) for before, later in itertools.pairwise(polls)] == [0.5] * (len(polls) - 1)
    assert len(polls) >= 40
    assert 5 <= len(server.asked) <= 11, "each has two seconds"
    assert {read.failure for read in slow.judge.heard(KvBootstrapRead)} == {"no answer in time"}


async def test_a_bug_in_asking_it_is_counted_and_tells_nothing() -> None:
    async with House(kv_server=FakeKvServer(answer=RuntimeError("a bug"))) as house:
        await asyncio.sleep(21)
        assert house.judge.heard(KvBootstrapRead) == []
        assert len(house.judge.times_of(Scraped)) == 5
        assert house.metric('enginewatch_internal_errors_total{task="kv_bootstrap"}') == 5

"""The engine's log on disk, with everything that rotates, truncates and wraps it."""

from __future__ import annotations

import asyncio
import glob
import os
import threading
import time
from pathlib import Path

import pytest

from enginewatch.sidecar.lines import MAX_LINE_BYTES, LineReader
from enginewatch.sidecar.logtail import MAX_NEWS_BYTES, MAX_NEWS_LINES, PATIENCE_SEC, LogNews, LogTail, _expanded
from enginewatch.sidecar.signatures import PatternError, Signatures

DEAD = "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.\n"
SIGNATURE = r"Health check failed\. Server couldn't get a response from detokenizer"


def tail(path: Path | str, *patterns: str) -> LogTail:
    followed = LogTail(str(path))
    followed.look_for(Signatures(patterns or (SIGNATURE,)))
    return followed


def append(path: Path, text: str | bytes) -> None:
    with open(path, "ab") as file:
        file.write(text.encode() if isinstance(text, str) else text)


async def hits(followed: LogTail) -> int:
    news = await followed.read()
    assert news.problem is None
    return news.hits


async def at_last(followed: LogTail) -> LogNews:
    """What it says once it can read again."""
    for _ in range(3000):
        news = await followed.read()
        if news.problem is None:
            return news
        await asyncio.sleep(0.01)
    pytest.fail("it cannot be read after half a minute")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "engine.log"
    path.touch()
    return path


async def test_a_signature_is_counted_once(log: Path) -> None:
    followed = tail(log)
    append(log, f"INFO fine\n{DEAD}INFO fine\n")
    assert await hits(followed) == 1
    assert await hits(followed) == 0


async def test_a_healthy_log_has_none(log: Path) -> None:
    followed = tail(log)
    append(log, "INFO fine\nHealth check failed. Nothing else.\n" * 1000)
    assert await hits(followed) == 0


async def test_a_file_that_exists_at_the_start_is_read_from_its_end(log: Path) -> None:
    append(log, DEAD)
    followed = tail(log)
    assert await hits(followed) == 0
    append(log, DEAD)
    assert await hits(followed) == 1


async def test_a_file_that_appears_later_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    followed = tail(path)
    news = await followed.read()
    assert news.problem == f"no file matches {path}"
    append(path, DEAD)
    assert await hits(followed) == 1


async def test_what_was_written_between_the_start_and_the_first_look_counts(log: Path) -> None:
    append(log, DEAD)
    followed = tail(log)
    append(log, DEAD)
    assert await hits(followed) == 1


async def test_a_line_counts_when_it_is_complete(log: Path) -> None:
    followed = tail(log)
    append(log, DEAD[:30])
    assert await hits(followed) == 0
    append(log, DEAD[30:])
    assert await hits(followed) == 1


async def test_the_rest_of_a_line_begun_before_the_start_is_left_out(log: Path) -> None:
    append(log, "half a li")
    followed = tail(log, "^ne$", "^next$")
    append(log, "ne\nnext\n")
    news = await followed.read()
    assert (news.hits, news.patterns) == (1, (1,))


async def test_patterns_are_told_by_index_and_lines_are_counted_once(log: Path) -> None:
    followed = tail(log, "dead", "scheduler", "never")
    append(log, "scheduler dead\nscheduler\n")
    news = await followed.read()
    assert (news.hits, news.patterns) == (2, (0, 1))


async def test_rotation_by_rename_reads_the_old_file_to_its_end_and_the_new_from_its_beginning(log: Path) -> None:
    followed = tail(log)
    append(log, "INFO\n")
    await hits(followed)
    append(log, DEAD)
    log.rename(log.with_suffix(".log.1"))
    append(log, DEAD * 2)
    assert await hits(followed) == 3
    append(log, DEAD)
    assert await hits(followed) == 1


async def test_a_glob_that_also_matches_the_rotated_file_does_not_read_it_twice(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.touch()
    followed = tail(tmp_path / "engine.log*")
    append(log, DEAD)
    assert await hits(followed) == 1
    log.rename(tmp_path / "engine.log.1")
    append(log, "INFO\n")
    assert await hits(followed) == 0
    os.utime(tmp_path / "engine.log.1")  # a compressor touches the old one
    assert await hits(followed) == 0


async def test_truncation_begins_anew(log: Path) -> None:
    followed = tail(log)
    append(log, "INFO\n" * 100)
    await hits(followed)
    log.write_text(DEAD)
    assert await hits(followed) == 1


async def test_copytruncate_that_grew_past_the_old_place_is_noticed(log: Path) -> None:
    followed = tail(log)
    append(log, "INFO 1\n" * 10)
    await hits(followed)
    log.write_text(DEAD + "INFO 2\n" * 100)
    assert await hits(followed) == 1


async def test_a_hole_left_by_copytruncate_does_not_hide_the_line_after_it(log: Path) -> None:
    followed = tail(log, "^dead")
    append(log, "INFO\n" * 100)
    await hits(followed)
    size = log.stat().st_size
    os.truncate(log, 0)
    writer = os.open(log, os.O_WRONLY)
    os.pwrite(writer, b"dead\n", size)  # a writer without O_APPEND goes on where it was
    os.close(writer)
    assert await hits(followed) == 1


async def test_the_newest_match_of_a_glob_is_followed_and_the_rest_of_the_old_one_read_first(tmp_path: Path) -> None:
    first, second = tmp_path / "0.log", tmp_path / "1.log"
    append(first, "INFO\n")
    followed = tail(tmp_path / "*.log")
    await hits(followed)
    append(first, DEAD)
    os.utime(first, (1, 1))
    append(second, DEAD)
    assert await hits(followed) == 2, "the container restarted: 1.log is new"


async def test_two_files_written_in_turns_are_each_read_once(tmp_path: Path) -> None:
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    first.touch()
    second.touch()
    followed = tail(tmp_path / "*.log")
    total = 0
    for number in range(1, 7):
        written = first if number % 2 else second
        append(written, DEAD)
        os.utime(written, (number, number))
        for other in (first, second):
            if other is not written:
                os.utime(other, (0, 0))
        total += await hits(followed)
    assert total == 6


async def test_a_line_cut_by_a_switch_of_files_is_put_together_again(tmp_path: Path) -> None:
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    first.touch()
    followed = tail(tmp_path / "*.log", "^whole line$")
    await hits(followed)
    append(first, "whole ")
    await hits(followed)
    append(second, "INFO\n")
    os.utime(first, (1, 1))
    await hits(followed)
    append(first, "line\n")
    os.utime(second, (2, 2))
    assert await hits(followed) == 1


async def test_a_name_with_brackets_is_taken_as_it_is(tmp_path: Path) -> None:
    log = tmp_path / "engine[0].log"
    log.touch()
    followed = tail(log)
    append(log, DEAD)
    assert await hits(followed) == 1


async def test_symlinks_as_the_kubelet_makes_them_are_followed(tmp_path: Path) -> None:
    pods = tmp_path / "pods" / "ns_pod_uid" / "engine"
    pods.mkdir(parents=True)
    append(pods / "0.log", "INFO\n")
    (tmp_path / "containers.log").symlink_to(pods / "0.log")
    followed = tail(tmp_path / "containers.log")
    append(pods / "0.log", f"2026-10-14T02:07:21.291234567Z stderr F {DEAD}")
    assert await hits(followed) == 1


async def test_cri_prefixes_are_taken_off_and_parts_put_together(log: Path) -> None:
    followed = tail(log, "^one dead scheduler$")
    stamp = "2026-10-14T02:07:21.291234567Z"
    append(log, f"{stamp} stdout P one dea\n{stamp} stderr F other stream\n{stamp} stdout F d scheduler\n")
    assert await hits(followed) == 1
    append(log, f"{stamp} stdout F one dead scheduler\n")
    assert await hits(followed) == 1
    append(log, f"{stamp} stdout F not one dead scheduler\n")
    assert await hits(followed) == 0


async def test_an_offset_instead_of_z_and_an_empty_message_are_cri_too(log: Path) -> None:
    followed = tail(log, "^x$")
    append(log, "2026-10-14T02:07:21.29+02:00 stdout F x\n2026-10-14T02:07:21Z stdout F\r\n")
    assert await hits(followed) == 1


async def test_more_than_four_mib_at_once_skips_to_the_end(log: Path) -> None:
    followed = tail(log)
    append(log, DEAD + "x" * MAX_NEWS_BYTES + "\n")
    news = await followed.read()
    assert news.hits == 0
    assert news.skipped_bytes > MAX_NEWS_BYTES
    append(log, DEAD)
    assert await hits(followed) == 1, "the first line after the skip is a whole one"


async def test_more_lines_than_an_engine_writes_skip_to_the_end_as_well(log: Path) -> None:
    # 4 MiB of nothing but line ends took four seconds per poll.
    followed = tail(log)
    append(log, "\n" * (2 * MAX_NEWS_LINES) + DEAD)
    news = await followed.read()
    assert news.hits == 0
    assert news.skipped_bytes > len(DEAD)
    append(log, "\n" * 1000 + DEAD)
    assert await hits(followed) == 1


async def test_a_file_system_that_hangs_delays_nobody_and_may_come_back(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = tail(log)
    append(log, DEAD)
    back = threading.Event()
    look = os.stat

    def hanging(path: str) -> os.stat_result:
        back.wait(30)
        return look(path)

    with monkeypatch.context() as patched:
        patched.setattr("enginewatch.sidecar.logtail.os.stat", hanging)
        turns, counting = 0, True

        async def others() -> None:
            nonlocal turns
            while counting:
                turns += 1
                await asyncio.sleep(0.01)

        counter = asyncio.create_task(others())
        began = time.monotonic()
        for _ in range(20):
            news = await followed.read()
            assert (news.hits, news.problem) == (0, "reading it takes too long")
        assert time.monotonic() - began < 2 * PATIENCE_SEC, "one poll waits, the others do not wait again"
        counting = False
        await counter
        assert turns > 10
        back.set()
    assert (await at_last(followed)).hits == 1, "what was found meanwhile is not lost"


async def test_a_pattern_that_takes_its_time_gives_the_event_loop_its_own(log: Path) -> None:
    # RE2 is linear in the line, but the factor is the size of the pattern: a second for these 64 KiB.
    followed = tail(log, "(a?){300}(a?){300}b$")
    append(log, "a" * 65_000 + "\n")
    gaps, last = [], time.monotonic()
    reading = asyncio.create_task(followed.read())
    while not reading.done():
        await asyncio.sleep(0.005)
        gaps.append(time.monotonic() - last)
        last += gaps[-1]
    assert len(gaps) > 10
    assert sorted(gaps)[len(gaps) // 2] < 0.1
    await at_last(followed)


async def test_a_directory_of_too_many_names_is_a_problem_not_a_delay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginewatch.sidecar.logtail.MAX_NAMES", 50)
    for number in range(60):
        (tmp_path / f"{number}.txt").touch()
    assert "more than 50 names" in str((await tail(tmp_path / "*.log").read()).problem)
    assert "more than 50 names" in str((await tail(tmp_path / ".." / "*" / "*.log").read()).problem)
    (tmp_path / "engine.log").touch()
    assert (await tail(tmp_path / "engine.log").read()).problem is None


@pytest.mark.parametrize(
    "pattern", ["*.log", "**/*.log", "*/*/*.log", "a/[bc].log", "a/?/*", ".*", "*", "a/b.log", "no/*", "*/", "a*/b.*"]
)
def test_a_glob_means_what_globs_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    for path in ("x.log", ".hidden.log", "a/b.log", "a/c.log", "a/d/e.log", "a/.d/e.log", "ab/b.txt"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    monkeypatch.chdir(tmp_path)
    for given in (pattern, f"{tmp_path}/{pattern}"):
        assert sorted(_expanded(given, iter(range(100)))) == sorted(glob.glob(given))


async def test_an_endless_line_is_not_held(log: Path) -> None:
    followed = tail(log)
    for _ in range(40):
        append(log, "x" * 100_000)
        assert await hits(followed) == 0
    assert followed._open is not None
    assert len(followed._open.lines._rest) <= MAX_LINE_BYTES
    append(log, "\n" + DEAD)
    assert await hits(followed) == 1


def test_endless_parts_are_not_held() -> None:
    reader = LineReader()
    for _ in range(10_000):
        list(reader.feed(b"2026-10-14T02:07:21Z stdout P " + b"x" * 100 + b"\n"))
    assert sum(len(part) for part in reader._parts.values()) <= MAX_LINE_BYTES


async def test_invalid_utf_8_does_not_hide_a_signature(log: Path) -> None:
    followed = tail(log)
    append(log, b"\xff\xfe\x80 " + DEAD.encode() + b"\xc3\n")
    assert await hits(followed) == 1


async def test_news_are_skipped_while_nobody_knows_what_to_look_for(log: Path) -> None:
    followed = LogTail(str(log))
    append(log, DEAD)
    await hits(followed)
    followed.look_for(Signatures((SIGNATURE,)))
    assert await hits(followed) == 0, "old lines must not pass for new ones once the engine is recognised"
    append(log, DEAD)
    assert await hits(followed) == 1


async def test_a_broken_channel_says_how_and_recovers(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.mkdir()
    followed = tail(log)
    assert (await followed.read()).problem == f"{log} is not a regular file"
    log.rmdir()
    os.mkfifo(log)
    assert (await followed.read()).problem == f"{log} is not a regular file"
    log.unlink()
    assert (await followed.read()).problem == f"no file matches {log}"
    log.symlink_to(tmp_path / "nowhere")
    assert "does not exist" in str((await followed.read()).problem)
    log.unlink()
    append(log, DEAD)
    assert await hits(followed) == 1


async def test_a_file_deleted_while_it_is_followed_is_read_to_its_end_first(log: Path) -> None:
    followed = tail(log)
    await hits(followed)
    append(log, DEAD)
    log.unlink()
    news = await followed.read()
    assert (news.hits, news.problem) == (1, f"no file matches {log}")
    append(log, DEAD + "INFO\n" * 100)  # often gets the same inode
    assert await hits(followed) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
async def test_a_log_that_may_not_be_read_says_so(log: Path) -> None:
    log.chmod(0)
    assert "permission denied" in str((await tail(log).read()).problem)


@pytest.mark.parametrize("path", ["/proc/\0", "[", "", "/dev/null", "/" + "x" * 5000])
async def test_impossible_paths_are_problems_not_crashes(path: str) -> None:
    assert (await tail(path).read()).problem is not None


async def test_no_descriptor_is_left_open(log: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    followed = tail(log)
    for number in range(20):
        append(log, DEAD)
        await hits(followed)
        log.rename(log.with_name(f"old{number}"))
        log.touch()
    await hits(followed)
    followed.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("pattern", ["(x", "(?=x)", "(x{1000}){1000}", "\udc80", "[z-a]"])
def test_a_pattern_that_re2_does_not_take_says_why_without_repeating_it(pattern: str) -> None:
    with pytest.raises(PatternError) as caught:
        Signatures((pattern,))
    assert pattern not in str(caught.value)


def test_several_patterns_joined_into_one_as_charts_do() -> None:
    signatures = Signatures((r"(?:scheduler died)|(?:out of memory)",))
    assert signatures.found_in(b"CUDA out of memory") == (0,)
    assert signatures.found_in(b"fine") == ()


def test_a_pattern_that_would_take_pythons_re_for_ever_is_fast() -> None:
    signatures = Signatures((r"(a|aa)+$",))
    assert signatures.found_in(b"a" * 5000 + b"b") == ()

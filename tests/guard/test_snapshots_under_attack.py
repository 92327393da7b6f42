"""The files in the run directory: whole or absent whatever dies, and no content of theirs may kill a router."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from fleet import SEEN, Fleet, identity
from guard_run import POWERLESS, Guard, ended, run_many


@pytest.fixture
def drifted(guard: Guard, fleet: Fleet) -> Guard:
    """A router whose every engine is another process by now, and healthy: whatever is judged at all fires."""
    prefill, decode = fleet.role("127.0.0.2"), fleet.role("127.0.0.4")
    guard.between(prefill, decode).recorded(prefill.lines(), decode.lines())
    for role in (prefill, decode):
        for engine in role.engines.values():
            engine.says(identity("pst-99.00"))
    return guard


def fires(guard: Guard) -> bool:
    result = guard.live()
    assert result.err == ""
    assert len(result.line) < 1000
    return result.code == 1


def keeps(guard: Guard) -> str:
    result = guard.live()
    assert (result.code, result.err) == (0, ""), result
    assert len(result.line) < 1000
    return result.line


GOOD = f"127.0.0.2|0|{SEEN}|pst-1.00\n".encode()

CORRUPT = {
    "empty": b"",
    "an empty line": b"\n",
    "half a line": GOOD[:-9],
    "no line end": GOOD[:-1],
    "half of it": GOOD + b"127.0.0.3|0|2026",
    "a line too few fields": GOOD + b"127.0.0.3|0\n",
    "a line too many fields": GOOD + f"127.0.0.3|0|{SEEN}|pst-1.00|\n".encode(),
    "an empty line within": GOOD + b"\n" + b"127.0.0.3||\n",
    "line ends of another system": GOOD.replace(b"\n", b"\r\n"),
    "NULs behind it": GOOD + b"\0" * 512,
    "only NULs": b"\0" * 4096,
    "bytes that are no text": b"\xff\xfe\xfd\n",
    "HTML": b"<html></html>\n",
    "restarts that are no number": GOOD.replace(b"|0|", b"|none|"),
    "negative restarts": GOOD.replace(b"|0|", b"|-1|"),
    "5,000 digits of restarts": GOOD.replace(b"|0|", b"|" + b"9" * 5000 + b"|"),
    "digits that are not ASCII": GOOD.replace(b"|0|", "|٣|".encode()),
    "an address that is a name": GOOD.replace(b"127.0.0.2", b"prefill.test"),
    "an id that is none": GOOD.replace(b"pst-1.00", b"pst 1.00"),
    "the same address twice": GOOD + GOOD,
    "a space": b" " + GOOD,
    "a mark of byte order": b"\xef\xbb\xbf" + GOOD,
}


def test_the_snapshot_that_the_corrupt_ones_replace_does_fire(drifted: Guard) -> None:
    (drifted.run_dir / "prefill-ips").write_bytes(GOOD)
    assert fires(drifted)


def test_a_snapshot_that_boot_cannot_have_written_keeps_the_router(drifted: Guard) -> None:
    cases = {}
    for number, (name, content) in enumerate(CORRUPT.items()):
        run_dir = drifted.directory / f"run{number}"
        shutil.copytree(drifted.run_dir, run_dir)
        (run_dir / "prefill-ips").write_bytes(content)
        cases[name] = (("live",), drifted.settings | {"GUARD_RUN_DIR": str(run_dir)})
    for name, result in run_many(cases, drifted.directory).items():
        assert (result.code, result.err) == (0, ""), (name, result)
        assert "prefill-ips" in result.line, (name, result)
        assert len(result.line) < 1000, (name, result)


@pytest.mark.parametrize("name", ["prefill-ips", "decode-ips"])
def test_a_missing_snapshot_keeps_the_router_and_is_not_ready(drifted: Guard, name: str) -> None:
    (drifted.run_dir / name).unlink()
    assert name in keeps(drifted)
    result = drifted.ready()
    assert (result.code, name in result.line) == (1, True)


def directory(path: Path) -> None:
    path.mkdir()


def a_loop_of_links(path: Path) -> None:
    path.symlink_to(path.name)


def a_link_to_nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


def zeros_for_ever(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_pipe_that_nobody_writes(path: Path) -> None:
    os.mkfifo(path)


def enormous(path: Path) -> None:
    path.write_bytes(GOOD)
    os.truncate(path, 5 * 2**30)  # takes no room: the rest is a hole


def enormous_and_well_formed(path: Path) -> None:
    path.write_bytes(b"".join(b"10.%d.%d.%d||\n" % (n >> 16, n >> 8 & 255, n & 255) for n in range(2**18)))


def unreadable(path: Path) -> None:
    path.write_bytes(GOOD)
    path.chmod(0)


@pytest.mark.parametrize(
    "put",
    [
        directory,
        a_loop_of_links,
        a_link_to_nowhere,
        zeros_for_ever,
        a_pipe_that_nobody_writes,
        enormous,
        enormous_and_well_formed,
        unreadable,
    ],
    ids=lambda put: str(put.__name__),
)
def test_something_else_than_a_snapshot_keeps_the_router(drifted: Guard, put: Callable[[Path], None]) -> None:
    path = drifted.run_dir / "prefill-ips"
    path.unlink()
    put(path)
    result = drifted.run("live", wrapped_in=POWERLESS)
    assert (result.code, result.err) == (0, ""), result
    assert "prefill-ips" in result.line
    result = drifted.run("ready", wrapped_in=POWERLESS)
    assert result.code == 1, result
    assert result.line


def test_a_directory_in_the_snapshots_place_ends_boot_in_one_sentence(guard: Guard, fleet: Fleet) -> None:
    guard.between(fleet.role("127.0.0.2"), fleet.role("127.0.0.4"))
    (guard.run_dir / "decode-ips").mkdir(parents=True)
    result = guard.boot(GUARD_BUDGET_SEC="600")
    assert result.code == 2, result
    assert str(guard.run_dir) in result.sentence


def test_probes_write_nothing(drifted: Guard) -> None:
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in drifted.run_dir.iterdir()}
    assert set(before) == {"prefill-ips", "decode-ips"}
    assert fires(drifted)
    drifted.ready()
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in drifted.run_dir.iterdir()} == before


# --- writing --------------------------------------------------------------------------------------------------------


class Many:
    """Two sets of prefills in one run directory, each with a snapshot of many lines."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        addresses = [[f"10.{net}.{n >> 8}.{n & 255}" for n in range(1200)] for net in (1, 2)]
        self.upstreams = [",".join(f"{address}:80" for address in some) for some in addresses]
        self.whole = {"".join(sorted(f"{address}||\n" for address in some)) for some in addresses}
        guard.settings |= {
            "GUARD_DECODE": "10.3.0.1:80",
            "GUARD_PREFILL_WATCHER_PORT": "0",
            "GUARD_DECODE_WATCHER_PORT": "0",
        }

    def boot(self, which: int) -> subprocess.Popen[str]:
        return self.guard.start("boot", "--", "/bin/true", GUARD_PREFILL=self.upstreams[which])

    def content(self) -> str | None:
        try:
            return (self.guard.run_dir / "prefill-ips").read_text()
        except FileNotFoundError:
            return None


def test_a_boot_killed_at_any_moment_leaves_a_whole_snapshot_or_none(guard: Guard) -> None:
    many, chance = Many(guard), random.Random(4)
    begun = time.monotonic()
    assert ended(many.boot(0)).code == 0
    usual_sec = time.monotonic() - begun
    for number in range(12):
        process = many.boot(number % 2)
        time.sleep(chance.uniform(0.3, 1.0) * usual_sec)
        process.kill()
        ended(process)
        content = many.content()
        assert content is None or content in many.whole
        assert set(os.listdir(guard.run_dir)) <= {"prefill-ips", "decode-ips", "prefill-ips.new", "decode-ips.new"}
    assert ended(many.boot(0)).code == 0, "what a killed one left does not hinder the next"
    assert sorted(os.listdir(guard.run_dir)) == ["decode-ips", "prefill-ips"]


def test_a_reader_beside_the_boots_never_sees_a_part(guard: Guard) -> None:
    many = Many(guard)
    seen, done = Counter[str](), threading.Event()

    def read() -> None:
        while not done.is_set():
            content = many.content()
            time.sleep(0.0005)
            seen["absent" if content is None else "whole" if content in many.whole else f"part: {content!r}"] += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(6):
            assert ended(many.boot(number % 2)).code == 0
    finally:
        done.set()
        reader.join()
    assert seen["whole"] > 0
    assert set(seen) <= {"absent", "whole"}


def test_a_probe_killed_at_any_moment_changes_nothing(drifted: Guard) -> None:
    chance = random.Random(5)
    before = {path.name: path.read_bytes() for path in drifted.run_dir.iterdir()}
    for _ in range(6):
        process = drifted.start("live")
        time.sleep(chance.uniform(0.0, 0.1))
        process.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM]))
        ended(process)
    assert {path.name: path.read_bytes() for path in drifted.run_dir.iterdir()} == before
    assert fires(drifted)


def test_a_disk_that_fills_up_leaves_no_part_and_ends_boot_in_one_sentence(guard: Guard) -> None:
    many = Many(guard)
    little = ["/bin/sh", "-c", 'ulimit -f 8 && exec "$@"', "sh"]
    result = guard.run("boot", "--", "/bin/true", wrapped_in=little, GUARD_PREFILL=many.upstreams[0])
    assert result.code == 2, result
    assert "Traceback" not in result.err
    assert str(guard.run_dir) in result.err.splitlines()[-1]
    assert many.content() is None

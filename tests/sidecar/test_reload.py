"""A configuration file under the hands of operators, ConfigMaps and worse."""

from __future__ import annotations

import os
import stat
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import pytest

from enginewatch.core.settings import Settings
from enginewatch.sidecar.config import MAX_NAMED_KEYS
from enginewatch.sidecar.reload import MAX_FILE_BYTES, SettingsSource


def source(path: Path, environ: Mapping[str, str] | None = None) -> SettingsSource:
    return SettingsSource(str(path), environ or {})


def write(path: Path, text: str) -> None:
    path.write_text(text)


def settle(path: Path) -> None:
    """Makes a file look as if it had been written a while ago."""
    os.utime(path, ns=(10**18, 10**18))


def test_a_missing_file_means_environment_and_defaults_and_is_no_error(tmp_path: Path) -> None:
    watched = source(tmp_path / "config.json", {"STALL_SEC": "40"})
    first = watched.poll()
    assert first is not None
    assert (first.outcome, first.rejected, first.settings) == ("absent", (), Settings(stall_sec=40))
    assert watched.poll() is None, "said once"


def test_a_file_that_appears_later_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    watched = source(path)
    watched.poll()
    write(path, '{"stall_sec": 45}')
    reload = watched.poll()
    assert reload is not None
    assert (reload.outcome, reload.settings.stall_sec) == ("loaded", 45)


def test_an_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    write(path, '{"stall_sec": 45}')
    settle(path)
    watched = source(path)
    assert watched.poll() is not None
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened again"))
    assert watched.poll() is None


def test_a_rewrite_of_the_same_length_within_one_tick_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write(path, '{"stall_sec": 45}')
    watched = source(path)
    watched.poll()
    times = os.stat(path)
    write(path, '{"stall_sec": 46}')
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    reload = watched.poll()
    assert reload is not None
    assert reload.settings.stall_sec == 46


def test_a_touched_file_with_the_same_content_is_no_news(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write(path, '{"stall_sec": 45}')
    watched = source(path)
    watched.poll()
    settle(path)
    assert watched.poll() is None


def test_a_configmap_update_swaps_a_symlink_above_the_file(tmp_path: Path) -> None:
    for version, seconds in (("v1", 45), ("v2", 50)):
        (tmp_path / version).mkdir()
        write(tmp_path / version / "config.json", f'{{"stall_sec": {seconds}}}')
        settle(tmp_path / version / "config.json")
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "config.json").symlink_to("..data/config.json")
    watched = source(tmp_path / "config.json")
    first = watched.poll()
    assert first is not None
    assert first.settings.stall_sec == 45

    (tmp_path / "..data_tmp").symlink_to("v2")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    second = watched.poll()
    assert second is not None
    assert second.settings.stall_sec == 50


@pytest.mark.parametrize("bad", ['{"stall_sec": "x"}', "{", "", '{"stall_sec": 50, "warmup_sec": -1}'])
def test_a_bad_file_leaves_the_last_good_settings(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "config.json"
    write(path, '{"stall_sec": 45}')
    watched = source(path, {"POLL_INTERVAL_SEC": "2"})
    watched.poll()
    write(path, bad)
    reload = watched.poll()
    assert reload is not None
    assert (reload.outcome, reload.settings) == ("kept", Settings(stall_sec=45, poll_interval_sec=2))
    assert reload.rejected[0].where == str(path)
    assert watched.poll() is None, "said once"

    write(path, '{"stall_sec": 45}')
    healed = watched.poll()
    assert healed is not None
    assert (healed.outcome, healed.rejected) == ("loaded", ())


def test_a_bad_file_at_the_start_leaves_environment_and_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write(path, "{")
    reload = source(path, {"STALL_SEC": "40"}).poll()
    assert reload is not None
    assert (reload.outcome, reload.settings) == ("kept", Settings(stall_sec=40))


def test_a_file_that_goes_away_leaves_the_last_good_settings_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write(path, '{"stall_sec": 45}')
    watched = source(path)
    watched.poll()
    path.unlink()
    reload = watched.poll()
    assert reload is not None
    assert (reload.outcome, reload.settings.stall_sec) == ("kept", 45)
    assert reload.rejected[0].reason == "the file is gone"
    write(path, '{"stall_sec": 45}')
    back = watched.poll()
    assert back is not None
    assert back.outcome == "loaded"


def test_a_key_that_is_taken_out_falls_back_to_the_default(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write(path, '{"stall_sec": 45}')
    watched = source(path)
    watched.poll()
    write(path, "{}")
    reload = watched.poll()
    assert reload is not None
    assert reload.settings == Settings()


def test_unknown_keys_are_counted_until_they_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write(path, '{"colour": 1, "shape": 2}')
    watched = source(path)
    first = watched.poll()
    assert first is not None
    assert (first.outcome, first.unknown_keys, len(first.notes)) == ("loaded", 2, 2)
    write(path, '{"_colour": 1}')
    second = watched.poll()
    assert second is not None
    assert second.unknown_keys == 0


def test_a_bad_variable_stays_named_beside_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write(path, '{"stall_sec": 45}')
    reload = source(path, {"WARMUP_SEC": "ten minutes"}).poll()
    assert reload is not None
    assert [problem.key for problem in reload.rejected] == ["WARMUP_SEC"]
    assert reload.settings == Settings(stall_sec=45)


def test_what_is_not_a_file_is_named_and_never_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    large = tmp_path / "large"
    large.write_bytes(b" " * (10 * MAX_FILE_BYTES))
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    expected = {
        tmp_path: "directory",
        fifo: "regular file",
        Path("/dev/zero"): "regular file",
        large: "larger than",
        loop: "symbolic links",
        tmp_path / ("x" * 300): "too long",
    }
    for path, reason in expected.items():
        reload = source(path).poll()
        assert reload is not None, path
        assert reload.outcome == "kept", path
        assert reason in reload.rejected[0].reason
    assert source(Path("/dev/null/x")).poll().outcome == "absent"  # type: ignore[union-attr]


@pytest.mark.parametrize("item", ["[],", "{},", '{"":0},', '"ab",', "0.5,"])
def test_the_largest_file_costs_no_more_than_the_sidecar_can_spare(tmp_path: Path, item: str) -> None:
    # 1 MiB of it, which a ConfigMap may hold, took 33 MiB of the 64 that the container has.
    path = tmp_path / "config.json"
    write(path, '{"_": [' + item * ((MAX_FILE_BYTES - 20) // len(item)) + "0]}")
    watched = source(path)
    tracemalloc.start()
    try:
        reload = watched.poll()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reload is not None
    assert reload.outcome == "loaded"
    assert peak < 10 * 1024 * 1024


def test_of_thousands_of_unknown_keys_only_the_first_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Comparing 100,000 keys with every key there is took two thirds of a second, and /healthz waited for it.
    looked_at: list[str] = []
    monkeypatch.setattr("enginewatch.sidecar.config._unknown_reason", looked_at.append)
    path = tmp_path / "config.json"
    write(path, "{" + ",".join(f'"{number}":0' for number in range(20_000)) + "}")
    reload = source(path).poll()
    assert reload is not None
    assert reload.unknown_keys == len(looked_at) == MAX_NAMED_KEYS


def test_looking_at_a_directory_for_ever_leaks_no_descriptors(tmp_path: Path) -> None:
    watched = source(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        watched.poll()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write(path, "{}")
    path.chmod(0)
    reload = source(path).poll()
    assert reload is not None
    assert "permission denied" in reload.rejected[0].reason
    path.chmod(stat.S_IRUSR)


def test_a_path_with_a_zero_byte_is_a_problem_not_a_crash() -> None:
    reload = SettingsSource("/etc/\0/config.json", {}).poll()
    assert reload is not None
    assert reload.outcome == "kept"

"""`guard export DIR`: all of the file or nothing, and a sentence where it cannot be written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from enginewatch.guard import pack
from enginewatch.guard.main import run as guard
from enginewatch.guard.version import version


def exported(directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code and the one line."""
    code = guard(["export", str(directory)])
    out, err = capsys.readouterr()
    assert (out + err).count("\n") == 1
    assert bool(err) == (code != 0)
    return code, (out + err).strip()


def test_sources_export_what_they_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / pack.FILE_NAME
    assert exported(tmp_path, capsys) == (0, str(target))
    assert target.read_bytes() == pack.build(version())
    assert os.listdir(tmp_path) == [pack.FILE_NAME]


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_everybody_may_run_it_whatever_the_umask(
    umask: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.umask(umask)
    try:
        assert exported(tmp_path, capsys)[0] == 0
    finally:
        os.umask(before)
    assert (tmp_path / pack.FILE_NAME).stat().st_mode & 0o7777 == 0o755


def test_an_older_one_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / pack.FILE_NAME
    target.write_text("old")
    target.chmod(0o400)
    assert exported(tmp_path, capsys)[0] == 0
    assert target.read_bytes() == pack.build(version())


def test_what_lies_where_it_writes_is_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    volume, precious = tmp_path / "volume", tmp_path / "precious"
    volume.mkdir()
    precious.write_text("precious")
    for name in (pack.FILE_NAME, f".{pack.FILE_NAME}.{os.getpid()}.part"):
        (volume / name).symlink_to(precious)
    assert exported(volume, capsys)[0] == 0
    assert precious.read_text() == "precious"
    assert os.listdir(volume) == [pack.FILE_NAME]
    assert not (volume / pack.FILE_NAME).is_symlink()


def test_a_directory_that_is_none_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for name, says in (("missing", "does not exist"), ("file", "is not a directory"), ("file/below", "")):
        code, line = exported(tmp_path / name, capsys)
        assert code == 1
        assert says in line
        assert not (tmp_path / "missing").exists()


def test_a_place_that_is_a_directory_itself_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / pack.FILE_NAME / "full").mkdir(parents=True)
    code, line = exported(tmp_path, capsys)
    assert code == 1
    assert "cannot be written: is a directory" in line
    assert os.listdir(tmp_path) == [pack.FILE_NAME]


def test_a_file_system_that_takes_no_files_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    code, line = exported(Path("/proc"), capsys)
    assert code == 1
    assert f"/proc/{pack.FILE_NAME} cannot be written" in line


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_volume_that_cannot_be_written_is_said(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync" if number == errno.ENOSPC else "open", refuse)
    code, line = exported(tmp_path, capsys)
    assert code == 1
    assert os.strerror(number).lower() in line
    assert os.listdir(tmp_path) == []


def test_a_write_that_stops_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / pack.FILE_NAME
    target.write_text("old")

    # 20 blocks of 512 or 1024 bytes, as the shell counts: less than the file has.
    limited = ["sh", "-c", 'ulimit -f 20 && exec "$0" "$@"', sys.executable]
    done = subprocess.run(
        [*limited, "-m", "enginewatch", "guard", "export", str(tmp_path)],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "file too large" in done.stderr
    assert done.stderr.count("\n") == 1
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == [pack.FILE_NAME]


@pytest.mark.parametrize("arguments", [[], [""], ["a", "b"], ["--force"], ["--dir", "x"]])
def test_a_wrong_call_is_one_sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert guard(["export", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "guard export DIR" in err

"""The builder of the real llama.cpp: what excuses its absence, and what never does. Needs no network."""

from __future__ import annotations

import sys
import tarfile
import time
from pathlib import Path

import pytest
from tests.real import install_llamacpp
from tests.real.install_vllm import BROKEN, UNOBTAINABLE, InstallError
from tests.real.tiny_gguf import write

SERVER = "#!/bin/sh\necho version 1\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return tmp_path / "enginewatch"


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[InstallError | None]:
    """What each fetch ends with, first to last; None is a success. What is fetched compiles by itself."""
    script: list[InstallError | None] = []

    def fetch_once(directory: Path) -> tuple[Path, Path]:
        end = script.pop(0)
        if end is not None:
            raise end
        return directory, directory

    def compile_server(programs: Path, source: Path, build: Path) -> Path:
        build.mkdir()
        server = build / "llama-server"
        server.write_text(SERVER)
        server.chmod(0o755)
        return server

    monkeypatch.setattr(install_llamacpp, "check_compiler", lambda: None)
    monkeypatch.setattr(install_llamacpp, "fetch_once", fetch_once)
    monkeypatch.setattr(install_llamacpp, "compile_server", compile_server)
    return script


def test_three_tries_then_the_tests_are_skipped_loudly(
    cache: Path, fetches: list[InstallError | None], capsys: pytest.CaptureFixture[str]
) -> None:
    fetches += [InstallError(UNOBTAINABLE, "no network")] * 3
    assert install_llamacpp.main() == UNOBTAINABLE
    out, err = capsys.readouterr()
    assert out == ""
    assert "THE REAL llama.cpp CANNOT BE HAD HERE" in err
    assert fetches == []
    assert list(cache.glob("llamacpp-*")) == [], "a failed build leaves nothing behind"


def test_a_file_with_another_hash_fails_at_once(
    fetches: list[InstallError | None], capsys: pytest.CaptureFixture[str]
) -> None:
    fetches += [InstallError(BROKEN, "hashes differ"), None]
    assert install_llamacpp.main() == BROKEN
    assert "CANNOT BE HAD" not in capsys.readouterr().err
    assert len(fetches) == 1


def test_a_server_that_was_built_is_found_again(
    cache: Path, fetches: list[InstallError | None], capsys: pytest.CaptureFixture[str]
) -> None:
    fetches += [InstallError(UNOBTAINABLE, "flaky"), None]
    assert install_llamacpp.main() == 0
    assert install_llamacpp.main() == 0
    server = install_llamacpp.server_in(install_llamacpp.target_dir())
    assert capsys.readouterr().out.splitlines() == [str(server)] * 2
    assert [path.name for path in cache.glob("llamacpp-*/")] == [install_llamacpp.target_dir().name]
    assert {path.name for path in install_llamacpp.target_dir().iterdir()} == {"bin", "complete"}, "and nothing else"


def test_a_server_that_does_not_start_is_not_usable(fetches: list[InstallError | None]) -> None:
    fetches.append(None)
    server = install_llamacpp.ensure()
    assert install_llamacpp.usable(install_llamacpp.target_dir())
    server.write_text("#!/bin/sh\nexit 127\n")
    assert not install_llamacpp.usable(install_llamacpp.target_dir())


def test_want_of_a_compiler_is_excused_and_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InstallError, match="apt-get install g") as raised:
        install_llamacpp.check_compiler()
    assert raised.value.code == UNOBTAINABLE


@pytest.mark.parametrize(
    ("ninja", "code", "says"),
    [("echo error: oops; exit 1", BROKEN, "ninja failed:\nerror: oops"), ("exec sleep 60", UNOBTAINABLE, "in time")],
)
def test_code_that_does_not_compile_is_a_failure_and_a_slow_machine_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ninja: str, code: int, says: str
) -> None:
    monkeypatch.setattr(install_llamacpp, "BUILD_SEC", 1.0)
    for name, script in {"cmake": "exit 0", "ninja": ninja}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(InstallError, match=says) as raised:
        install_llamacpp.compile_server(tmp_path, tmp_path, tmp_path / "build")
    assert raised.value.code == code


def test_only_what_is_needed_of_the_lock_is_handed_to_pip() -> None:
    source = install_llamacpp.pinned(install_llamacpp.SOURCE)
    assert source.startswith(f"{install_llamacpp.SOURCE}==")
    assert "--hash=sha256:" in source
    tools = install_llamacpp.pinned(*install_llamacpp.TOOLS)
    assert tools.count("==") == len(install_llamacpp.TOOLS)
    with pytest.raises(InstallError, match="does not pin nonsense"):
        install_llamacpp.pinned("nonsense")


@pytest.mark.parametrize("carries", [True, False])
def test_the_tree_is_taken_out_of_the_archive(tmp_path: Path, carries: bool) -> None:
    tree = tmp_path / "llama_cpp_python-1" / ("vendor/llama.cpp" if carries else "vendor/other")
    tree.mkdir(parents=True)
    (tree / "CMakeLists.txt").write_text("project(x)\n")
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "llama_cpp_python-1", "llama_cpp_python-1")
    if carries:
        assert (install_llamacpp.unpack(tmp_path / "x.tar.gz", tmp_path / "out") / "CMakeLists.txt").exists()
    else:
        with pytest.raises(InstallError, match="carries no"):
            install_llamacpp.unpack(tmp_path / "x.tar.gz", tmp_path / "out")


def test_the_model_is_the_same_every_time(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes().startswith(b"GGUF\x03\x00\x00\x00")
    assert sys.byteorder == "little", "the weights are written as this machine has them"

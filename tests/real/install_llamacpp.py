"""Builds the real llama.cpp server (CPU only) that tests/real talks to, from the source that PyPI carries.

Run by `make test-real`, or by hand from the project's root: `python -m tests.real.install_llamacpp`. Standard library
only. Prints the path of `llama-server` on stdout, everything else on stderr. Needs a C++ compiler; cmake and ninja come
with the lock. 77 MB are downloaded and compiled the first time; afterwards the server is found again under
${XDG_CACHE_HOME:-~/.cache}/enginewatch, by the hash of its lock.

Exit codes as those of install_vllm: 0 ready, 1 the build is broken (a failure of the project), 75 it cannot be had
here: no network, no compiler, or a machine too slow. 75 is what makes its tests skip, so it is given for nothing else.

Nothing is fetched while compiling: no web interface, no OpenSSL, no curl. The optimiser is kept low, and no instruction
set of this machine's own is used: the model is tiny, and compiling is what takes the time.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.real.install_vllm import (
    BROKEN,
    ROOT,
    UNOBTAINABLE,
    InstallError,
    cache_dir,
    code_for,
    only_one,
    pip_environment,
    remove_old,
    tell,
)

LOCK = ROOT / "requirements" / "real-llamacpp.txt"
RECIPE = "1"
"""Part of the directory's name; raise it when the steps below change without the lock changing."""

SOURCE = "llama-cpp-python"
TOOLS = ("cmake", "ninja", "packaging", "pathspec", "scikit-build-core")
"""What compiles it, and what pip needs to unpack a source distribution without fetching anything unpinned."""

TRIES = 3
PIP_SEC = 600
BUILD_SEC = 900
"""Compiling. Measured: eight minutes of one core's time, on as many cores as there are."""

OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_C_FLAGS_RELEASE": "-O2",
    "CMAKE_CXX_FLAGS_RELEASE": "-O1",
    "BUILD_SHARED_LIBS": "OFF",
    "GGML_NATIVE": "OFF",
    "GGML_OPENMP": "OFF",
    "GGML_CCACHE": "OFF",
    "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_ALL_WARNINGS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}
"""Options that a version does not know do no harm."""


def say(text: str) -> None:
    print(f"[install_llamacpp] {text}", file=sys.stderr, flush=True)


def target_dir() -> Path:
    digest = hashlib.sha256(LOCK.read_bytes() + RECIPE.encode()).hexdigest()[:16]
    return cache_dir() / f"llamacpp-{digest}"


def server_in(directory: Path) -> Path:
    return directory / "bin" / "llama-server"


def usable(directory: Path) -> bool:
    """Whether the build is complete and still starts (a library of the system's may be gone)."""
    if not (directory / "complete").is_file():
        return False
    try:
        run = subprocess.run([server_in(directory), "--version"], check=False, capture_output=True, timeout=60)
    except OSError:
        return False
    return run.returncode == 0


def pinned(*names: str) -> str:
    """The lock's entries of these distributions.

    Raises:
        InstallError: The lock lacks one.
    """
    blocks = re.split(r"\n(?=\S)", LOCK.read_text())
    entries = {block.partition("==")[0].strip(): block for block in blocks if "==" in block.partition("\n")[0]}
    missing = [name for name in names if name not in entries]
    if missing:
        raise InstallError(BROKEN, f"{LOCK} does not pin {', '.join(missing)}; run `make lock`")
    return "\n".join(entries[name] for name in names) + "\n"


def check_compiler() -> None:
    """There must be a C and a C++ compiler.

    Raises:
        InstallError: One is missing.
    """
    for variable, names in (("CC", ("cc", "gcc", "clang")), ("CXX", ("c++", "g++", "clang++"))):
        if not os.environ.get(variable) and not any(map(shutil.which, names)):
            raise InstallError(UNOBTAINABLE, f"no compiler ({' or '.join(names)}); on Debian: apt-get install g++")


def run(command: Sequence[str | Path], what: str, limit_sec: float, env: dict[str, str]) -> str | None:
    """Run one command; what it said where it failed, else None.

    Raises:
        InstallError: It was not done in time.
    """
    try:
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=max(limit_sec, 1.0),
        )
    except subprocess.TimeoutExpired:
        raise InstallError(UNOBTAINABLE, f"{what} was not done in time") from None
    return done.stdout if done.returncode else None


def run_pip(python: Path, directory: Path, name: str, requirements: str, *arguments: str | Path) -> None:
    """Run pip over some of the lock's entries.

    Raises:
        InstallError: It failed.
    """
    listed = directory / f"{name}.txt"
    listed.write_text(requirements)
    command: list[str | Path] = [python, "-m", "pip", *arguments, "--quiet", "--progress-bar", "off"]
    # The environment's own programs come first, or another cmake would be taken.
    env = pip_environment() | {"PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    said = run([*command, "--no-deps", "--require-hashes", "-r", listed], "pip", PIP_SEC, env)
    if said is not None:
        raise InstallError(code_for(said), "pip failed:\n" + tail(said))


def fetch(directory: Path) -> tuple[Path, Path]:
    """Fetch the tools and the source; (directory of the tools' programs, llama.cpp's source tree).

    Raises:
        InstallError: They cannot be had in three tries, or at once when another try cannot help.
    """
    for attempt in range(1, TRIES + 1):
        say(f"fetching llama.cpp's source, try {attempt} of {TRIES} (77 MB, and as much of tools)")
        try:
            return fetch_once(directory)
        except InstallError as error:
            if error.code == BROKEN or attempt == TRIES:
                raise
            say(str(error))
        time.sleep(5 * attempt)
    raise AssertionError("unreachable")


def fetch_once(directory: Path) -> tuple[Path, Path]:
    """One try of the above.

    Raises:
        InstallError: They cannot be had.
    """
    venv = directory / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True, stdin=subprocess.DEVNULL)
    python = venv / "bin" / "python"
    run_pip(python, directory, "tools", pinned(*TOOLS), "install", "--only-binary", ":all:")
    downloads = directory / "downloads"
    # Without isolation, or pip would fetch the newest of what unpacks it.
    arguments = ("download", "--no-build-isolation", "--no-binary", SOURCE, "--dest", downloads)
    run_pip(python, directory, "source", pinned(SOURCE), *arguments)
    [archive] = downloads.glob("llama_cpp_python-*.tar.gz")
    return python.parent, unpack(archive, directory / "source")


def unpack(archive: Path, directory: Path) -> Path:
    """The tree of llama.cpp out of the archive.

    Raises:
        InstallError: There is none.
    """
    with tarfile.open(archive) as members:
        wanted = [member for member in members if "/vendor/llama.cpp/" in member.name]
        if hasattr(tarfile, "data_filter"):
            members.extractall(directory, wanted, filter="data")
        else:  # an early 3.11; the archive's hash has been checked
            members.extractall(directory, wanted)
    found = next(directory.glob("*/vendor/llama.cpp"), None)
    if found is None:
        raise InstallError(BROKEN, f"{archive.name} carries no vendor/llama.cpp any more")
    return found


def compile_server(programs: Path, source: Path, build: Path) -> Path:
    """Compile the server.

    Raises:
        InstallError: It does not compile, or not in time.
    """
    env = dict(os.environ) | {"PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    options = [f"-D{name}={value}" for name, value in OPTIONS.items()]
    until = time.monotonic() + BUILD_SEC
    steps: dict[str, list[str | Path]] = {
        "cmake": ["-S", source, "-B", build, "-G", "Ninja", *options],
        "ninja": ["-C", build, f"-j{os.cpu_count() or 1}", "llama-server"],
    }
    for program, arguments in steps.items():
        what = f"{program} ({BUILD_SEC} s for all)"
        said = run([programs / program, *arguments], what, until - time.monotonic(), env)
        if said is not None:
            raise InstallError(BROKEN, f"{program} failed:\n" + tail(said))
    return build / "bin" / "llama-server"


def tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-25:])


def build(target: Path) -> None:
    """Make the server under a temporary name, keep the program alone, and rename it when complete.

    Raises:
        InstallError: It could not be made; nothing is left behind.
    """
    check_compiler()
    started = time.monotonic()
    building = Path(tempfile.mkdtemp(prefix=f"{target.name}.building-", dir=target.parent))
    try:
        work = building / "work"
        work.mkdir()
        programs, source = fetch(work)
        say(f"compiling it (at most {BUILD_SEC} s)")
        server = compile_server(programs, source, work / "build")
        (building / "bin").mkdir()
        server.rename(server_in(building))
        shutil.rmtree(work)
        (building / "complete").touch()
        if not usable(building):
            raise InstallError(BROKEN, "llama-server was compiled and does not start")
        shutil.rmtree(target, ignore_errors=True)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    say(f"llama-server built in {time.monotonic() - started:.0f} s: {target}")


def ensure() -> Path:
    """The server's path, built first if need be.

    Raises:
        InstallError: It cannot be built.
    """
    target = target_dir()
    with only_one("llamacpp"):
        if usable(target):
            (target / "complete").touch()
            return server_in(target)
        remove_old(target, "llamacpp")
        build(target)
    return server_in(target)


def main() -> int:
    return tell("THE REAL llama.cpp", ensure, say)


if __name__ == "__main__":
    sys.exit(main())

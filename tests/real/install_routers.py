"""Installs the real routers, vllm-router and sglang-router, into a virtual environment that they share.

Run by `make test-real`, or by hand from the project's root: `python -m tests.real.install_routers`. Standard library
only. Prints the path of the environment on stdout, everything else on stderr. Some 60 MB are downloaded the first time;
afterwards it is found again under ${XDG_CACHE_HOME:-~/.cache}/enginewatch, by the hash of its lock.

Exit codes as those of install_vllm: 0 ready, 1 the install is broken (a failure of the project), 75 it cannot be had
here: no network, or another platform. 75 is what makes their tests skip, so it is given for nothing else.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.real.install_vllm import (
    BROKEN,
    ROOT,
    UNOBTAINABLE,
    InstallError,
    cache_dir,
    only_one,
    remove_old,
    run_pip,
    tell,
    usable,
)

LOCK = ROOT / "requirements" / "real-routers.txt"
RECIPE = "1"
"""Part of the environment's name; raise it when the steps below change without the lock changing."""

PYTHON = (3, 11)
"""The lock is made for this version and newer ones: what it pins has wheels for them too, or needs none."""

LAUNCHERS = ("vllm_router.launch_router", "sglang_router.launch_router")
TRIES = 3
PIP_SEC = 600
HELP_SEC = 120


def say(text: str) -> None:
    print(f"[install_routers] {text}", file=sys.stderr, flush=True)


def venv_dir() -> Path:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    digest = hashlib.sha256(LOCK.read_bytes() + RECIPE.encode() + version.encode()).hexdigest()[:16]
    return cache_dir() / f"routers-{digest}"


def check_platform() -> None:
    """The routers are compiled programs, and the lock has hashes of everything.

    Raises:
        InstallError: There are none for this machine or this Python.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise InstallError(
            UNOBTAINABLE, f"the lock is for Linux on x86_64, this is {platform.system()} {platform.machine()}"
        )
    if sys.version_info[:2] < PYTHON:
        raise InstallError(UNOBTAINABLE, f"the lock needs Python {'.'.join(map(str, PYTHON))} or newer")


def check_starts(venv: Path) -> None:
    """Asks each router for its help, which loads the compiled program.

    Raises:
        InstallError: One does not start.
    """
    for launcher in LAUNCHERS:
        done = subprocess.run(
            [venv / "bin" / "python", "-m", launcher, "--help"],
            capture_output=True,
            text=True,
            check=False,
            timeout=HELP_SEC,
        )
        if done.returncode != 0 or "--prefill" not in done.stdout:
            raise InstallError(BROKEN, f"{launcher} was installed and does not start:\n{tail(done.stderr)}")


def tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-25:])


def build(target: Path) -> None:
    """Makes the environment under a temporary name and renames it when complete.

    Raises:
        InstallError: It could not be made; nothing is left behind.
    """
    check_platform()
    started = time.monotonic()
    # Scripts in bin/ keep the temporary path in their first line: the routers are started with `python -m`.
    building = Path(tempfile.mkdtemp(prefix=f"{target.name}.building-", dir=target.parent))
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", building], check=True, stdin=subprocess.DEVNULL)
        run_pip(building, LOCK, PIP_SEC)
        check_starts(building)
        (building / "complete").touch()
        if target.exists():
            shutil.rmtree(target)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    say(f"installed in {time.monotonic() - started:.0f} s: {target}")


def ensure() -> Path:
    """The environment's path, made first if need be.

    Raises:
        InstallError: After three tries, or at once when another try cannot help.
    """
    target = venv_dir()
    with only_one("routers"):
        if usable(target):
            (target / "complete").touch()
            return target
        remove_old(keep=target, engine="routers")
        for attempt in range(1, TRIES + 1):
            say(f"installing the real routers, try {attempt} of {TRIES} (220 MB in {target})")
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


def main() -> int:
    return tell("THE REAL routers", ensure, say)


if __name__ == "__main__":
    sys.exit(main())

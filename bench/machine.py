"""What was measured on: figures without it mean nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path


def description() -> list[tuple[str, str]]:
    """Name and value, in the order in which people read them."""
    one, five, _ = os.getloadavg()
    return [
        ("CPU", f"{_cpu_model()}, {os.cpu_count()} cores"),
        ("Memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"),
        ("System", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("Python", f"{platform.python_implementation()} {platform.python_version()}"),
        ("Commit", _commit()),
        ("Date", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
        ("Load before", f"{one:.2f} over one minute, {five:.2f} over five"),
    ]


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or "unknown"


def _commit() -> str:
    root = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD")
    if not commit:
        return "unknown"
    return f"{commit}, with changes" if git("status", "--porcelain", "--", "src", "bench") else commit

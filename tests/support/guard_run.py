"""Runs the guard as an operator's pod does: a process of its own, configured by environment, judged by what it leaves.

The interpreter is as bare as a router image's may be (-I -S: no site packages, no PYTHON* variables). It may be another
than the tests' own: GUARD_TEST_PYTHON=/usr/bin/python3.9 make test ARGS=tests/guard
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleet import Role
from island import Island

SRC = Path(__file__).resolve().parents[2] / "src"
PROGRAM = [
    os.environ.get("GUARD_TEST_PYTHON", sys.executable),
    "-I",
    "-S",
    "-c",
    f"import sys; sys.path.insert(0, {str(SRC)!r})\nfrom enginewatch.guard.main import main\nmain()",
]
"""`enginewatch guard` without the rest of the package and its start-up time."""

ROUTER = """\
#!/bin/sh
{ echo "$$"; for word in "$@"; do echo "$word"; done; } > "$ROUTER_CALLS.new" && mv "$ROUTER_CALLS.new" "$ROUTER_CALLS"
"""
"""Stands in for a router: notes its pid and its flags, one a line, and ends."""

POWERLESS = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
"""Runs what follows so that permissions stop it: root without capabilities, or who we are."""


@dataclass
class Ended:
    """A guard that has ended."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line of a probe. Fails if there is not exactly one, or if anything looks like a crash."""
        assert "Traceback" not in self.err, self.err
        assert self.out.endswith("\n"), self
        assert self.out.count("\n") == 1, self
        return self.out[:-1]

    @property
    def sentence(self) -> str:
        """The one sentence on stderr of an error of usage."""
        assert self.out == "", self
        assert self.err.endswith("\n"), self
        assert self.err.count("\n") == 1, self
        assert "Traceback" not in self.err, self.err
        return self.err[:-1]


@dataclass
class Guard:
    """One router container: its run directory, its settings, and the guard's commands in it."""

    directory: Path
    settings: dict[str, str] = field(default_factory=dict)
    island: Island | None = None

    def __post_init__(self) -> None:
        self.run_dir = self.directory / "run"
        self.router = self.directory / "router"
        self.calls = self.directory / "calls"
        if not self.router.exists():
            self.router.write_text(ROUTER)
            self.router.chmod(0o755)
        self.settings = {
            "GUARD_ROUTER": "vllm",
            "GUARD_RUN_DIR": str(self.run_dir),
            "GUARD_BUDGET_SEC": "20",
            "GUARD_ROUTER_PORT": "1",
        } | self.settings

    def between(self, prefill: Role, decode: Role, names: tuple[str, str] = ("", "")) -> Guard:
        """In front of these engines, by their addresses or by the two `names`."""
        for what, role, name in (("prefill", prefill, names[0]), ("decode", decode, names[1])):
            self.settings[f"GUARD_{what.upper()}"] = f"{name}:{role.port}" if name else role.upstreams()
            self.settings[f"GUARD_{what.upper()}_WATCHER_PORT"] = str(role.watcher_port)
        return self

    def start(self, *arguments: str, wrapped_in: Sequence[str] = (), **more: str) -> subprocess.Popen[str]:
        """The process itself, for what happens to it while it runs. `more` are further variables."""
        return start_guard(
            *arguments,
            environment=self.settings | {"ROUTER_CALLS": str(self.calls)} | more,
            island=self.island,
            wrapped_in=wrapped_in,
        )

    def run(self, *arguments: str, wrapped_in: Sequence[str] = (), **more: str) -> Ended:
        return ended(self.start(*arguments, wrapped_in=wrapped_in, **more))

    def boot(self, *command: str, **more: str) -> Ended:
        """Up to the router's end, hence with the router's exit code once it started."""
        self.calls.unlink(missing_ok=True)
        return self.run("boot", "--", *(command or (str(self.router),)), **more)

    def live(self, **more: str) -> Ended:
        return self.run("live", **more)

    def ready(self, **more: str) -> Ended:
        return self.run("ready", **more)

    def recorded(self, prefill: Sequence[str], decode: Sequence[str]) -> Guard:
        """As if a boot had written these lines; test_boot_over_sockets.py holds it to what it writes."""
        self.run_dir.mkdir(exist_ok=True)
        for role, lines in (("prefill", prefill), ("decode", decode)):
            (self.run_dir / f"{role}-ips").write_text("".join(f"{line}\n" for line in lines))
        return self

    def booted(self, **more: str) -> Guard:
        """Boots and holds the test up to a router that started."""
        result = self.boot(**more)
        assert result.code == 0, result
        assert self.calls.exists(), result
        return self

    def snapshot(self, role: str) -> list[str]:
        return (self.run_dir / f"{role}-ips").read_text().splitlines()

    def flags(self) -> list[str]:
        """What the router was started with."""
        return self.calls.read_text().splitlines()[1:]


def start_guard(
    *arguments: str,
    environment: Mapping[str, str],
    island: Island | None = None,
    wrapped_in: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """`wrapped_in` is a command that runs the one that follows it (`unshare --pid ...`)."""
    command = [*wrapped_in, *PROGRAM, *arguments]
    return subprocess.Popen(
        island.command(*command) if island else command,
        env={"PATH": os.environ["PATH"], **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="surrogateescape",
    )


def run_many(cases: Mapping[str, tuple[Sequence[str], Mapping[str, str]]], directory: Path) -> dict[str, Ended]:
    """Runs many guards, each with its arguments and its environment, from one interpreter that forks: cheap."""
    files = {name: (directory / f"{number}.out", directory / f"{number}.err") for number, name in enumerate(cases)}
    orders = [[arguments, environment, *map(str, files[name])] for name, (arguments, environment) in cases.items()]
    forking = [*PROGRAM[:-1], FORKING]
    codes = subprocess.run(
        forking, input=json.dumps(orders), stdout=subprocess.PIPE, text=True, check=True, timeout=100
    )
    return {
        name: Ended(code, *(file.read_text() for file in files[name]))
        for name, code in zip(cases, json.loads(codes.stdout), strict=True)
    }


FORKING = f"""
import json, os, sys
sys.path.insert(0, {str(SRC)!r})
from enginewatch.guard import boot, live, main, ready
codes = []
for arguments, environment, out, err in json.load(sys.stdin):
    child = os.fork()
    if not child:
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv[1:] = arguments
        main.main()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


def ended(process: subprocess.Popen[str], *, timeout_sec: float = 60) -> Ended:
    try:
        out, err = process.communicate(timeout=timeout_sec)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"the guard did not end within {timeout_sec:g} s: {out!r} {err!r}") from None
    return Ended(process.returncode, out, err)


def wait_until(holds: Callable[[], bool], at_most_sec: float = 40) -> None:
    until = time.monotonic() + at_most_sec
    while not holds():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.02)

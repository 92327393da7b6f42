"""The guard's command line: `enginewatch guard SUB ...`, and the same as `python3 enginewatch-guard.pyz SUB ...`.

Every subcommand is loaded when it runs: a probe is started every few seconds and pays for each import.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, TextIO

from enginewatch.guard.settings import UsageError

USAGE: Final = 2
SUBCOMMANDS: Final = ("boot", "live", "ready", "drain", "export")
HELP_FLAGS: Final = ("--help", "-h")
LONGEST_LINE: Final = 900
"""Characters. An event of the kubelet has room for 1024."""


def main() -> NoReturn:
    """Run this process's arguments and end it at once, whatever threads still wait for an answer."""
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    leave(code)


def leave(code: int) -> NoReturn:
    """End the process, with what was printed, without waiting for threads."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # nobody reads it any more
    os._exit(code)


def run(argv: Sequence[str]) -> int:
    """Run one subcommand.

    Args:
        argv: the arguments, without the program's name.

    Returns:
        The exit code.
    """
    started = time.monotonic()  # the deadline of a probe holds for its imports as well
    sub, *rest = argv or [""]
    if sub in HELP_FLAGS or sub == "help":
        return _help("")
    if sub == "--version":
        return _version()
    if sub not in SUBCOMMANDS:
        given = f"{sub!r} is no subcommand" if sub else "a subcommand is missing"
        complain(f"{given}; expected one of {', '.join(SUBCOMMANDS)}; see guard --help")
        return USAGE
    own = rest[: rest.index("--")] if sub == "boot" and "--" in rest else rest
    if any(flag in own for flag in HELP_FLAGS):
        return _help(sub)
    if sub == "live":
        return _live(rest, started)
    try:
        return _ready(rest, started) if sub == "ready" else _runner(sub)(rest)
    except UsageError as error:
        complain(f"{error}; see guard {sub} --help")
        return USAGE


def _runner(sub: str) -> Callable[[Sequence[str]], int]:
    if sub == "boot":
        from enginewatch.guard import signals

        signals.end_at_once()
        from enginewatch.guard import boot

        return boot.run
    if sub == "drain":
        from enginewatch.guard import drain

        return drain.run
    from enginewatch.guard import export

    return export.run


def _live(flags: Sequence[str], started: float) -> int:
    # Whatever breaks here must not kill a router: what a probe cannot judge, it keeps.
    try:
        from enginewatch.guard import live

        code, line = live.run(flags, started)
    except BaseException as error:
        code, line = 0, f"keep: the guard itself failed: {type(error).__name__}: {error}"
    say(line)
    return code


def _ready(flags: Sequence[str], started: float) -> int:
    from enginewatch.guard import ready

    code, line = ready.run(flags, started)
    say(line)
    return code


def say(line: str) -> None:
    """Print one line on stdout, in any locale, also when nobody reads."""
    _print(sys.stdout, line)


def complain(sentence: str) -> None:
    """Print one sentence on stderr."""
    _print(sys.stderr, f"guard: {sentence}")


def _print(stream: TextIO | None, line: str) -> None:
    plain = "".join(letter if " " <= letter <= "~" else ascii(letter)[1:-1] for letter in " ".join(line.split()))
    _write(stream, (plain if len(plain) <= LONGEST_LINE else f"{plain[:LONGEST_LINE]}...") + "\n")


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # closed before this process began
        return
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        if stream is sys.stdout:
            _let_go_of_stdout()


def _let_go_of_stdout() -> None:
    # At its end the interpreter would try once more to write what could not be written, and exit with 120. Not so for
    # stderr, which becomes the router's.
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass


def _version() -> int:
    from enginewatch.guard.version import described

    say(described())
    return 0


def _help(sub: str) -> int:
    from enginewatch.guard.help import page

    _write(sys.stdout, page(sub))
    return 0

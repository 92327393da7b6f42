"""The metrics pages that measurements are made on: real ones, one with many cores, and hostile ones."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
BUSY = "vllm-0.32.0-single-hung-while-decoding.prom"
IDLE = "vllm-0.32.0-single-idle-fresh.prom"
HOSTILE_BYTES = 8 * 1024 * 1024

_HEAD = b"# HELP x x\n"
_WANTED = b"vllm:num_requests_running"
_LEG = b"vllm:generation_tokens_total"
_FROZEN_AT = 10**9
"""More tokens than any moving page before it had: what follows a page must not look like a restart."""


def real_page(name: str = BUSY) -> bytes:
    """A page of a live engine."""
    return (DATA / name).read_bytes()


def page_of(cores: int) -> bytes:
    """A live vLLM page on which each series of the one core stands `cores` times."""

    def lines() -> Iterator[bytes]:
        for line in real_page().splitlines(keepends=True):
            if b'engine="0"' in line:
                for core in range(cores):
                    yield line.replace(b'engine="0"', b'engine="%d"' % core)
            else:
                yield line

    return b"".join(lines())


def hostile_pages() -> dict[str, bytes]:
    """Pages of up to 8 MiB, each meant to cost a reader as much as it can."""

    def filled(line: bytes) -> bytes:
        return _HEAD + line * ((HOSTILE_BYTES - len(_HEAD)) // len(line))

    return {
        "one giant line, wanted name": _HEAD + _WANTED + b'{a="' + b"x" * (HOSTILE_BYTES - 64),
        "one giant line": b"#" + b"x" * (HOSTILE_BYTES - 64),
        "newlines only": filled(b"\n"),
        "2 million lines": filled(b"a 1\n"),
        "4 million lines": filled(b"#\n"),
        "lines that nearly match": filled(b"vllm:num_requests_runnin 1\n"),
        "wanted lines, torn": filled(_WANTED + b'{a="b 1\n'),
        "wanted lines, NaN": filled(_WANTED + b'{a="b"} NaN\n'),
        "one wanted line over and over": filled(_WANTED + b'{a="b"} 1\n'),
        "new series for ever": _HEAD
        + b"".join(_WANTED + b'{b="%d",a="x"} 1\n' % number for number in range(HOSTILE_BYTES // 45)),
        "lines of hundreds of labels": _HEAD
        + b"".join(
            _WANTED + b'{n="%d",' % number + b",".join(b'l%x=""' % label for label in range(550)) + b"} 1\n"
            for number in range(130)
        ),
    }


def gzip_bomb() -> bytes:
    """64 MiB of lines in 64 kB."""
    return gzip.compress((b"a 1\n" * 256 * 1024) * 64, 9)


# What follows stays just below what a page may keep (4,096 lines, 512 KiB), so that all of it gets through, and is
# another page each time it is asked for.


def with_new_series(number: int) -> bytes:
    """As many series as a page may keep, none of which was there before, on one core."""
    return real_page() + b"".join(
        _LEG + b'{engine="0",model_name="%08d-%04d-%s"} %d\n' % (number, line, b"x" * 40, line) for line in range(3900)
    )


def with_new_cores(number: int) -> bytes:
    """As many cores as a page may keep, none of which was there before."""
    return real_page() + b"".join(
        _LEG + b'{engine="%d",model_name="%s"} %d\n' % (number * 4000 + line, b"x" * 40, line) for line in range(3900)
    )


def with_long_series(number: int) -> bytes:
    """Series as long as a line may be, none of which was there before."""
    return real_page() + b"".join(
        _WANTED + b'{engine="0",model_name="%08d-%03d-%s"} %d\n' % (number, line, b"x" * 3_900, line)
        for line in range(125)
    )


def many_cores(_: int) -> bytes:
    """As many cores as a page may keep, always the same."""
    return with_new_cores(0)


def moving_page(number: int) -> bytes:
    """A real page on which tokens are being generated: one more each time."""
    head, name, rest = real_page().partition(b"\n" + _LEG + b"{")
    labels, _, rest = rest.partition(b"} ")
    _, _, rest = rest.partition(b"\n")
    return b"%s%s%s} %d.0\n%s" % (head, name, labels, 1_000_000 + number, rest)


def frozen_that_loses_a_series(number: int) -> bytes:
    """A busy engine that stands still, on whose page the counter of generated tokens is every other time missing."""
    page = moving_page(_FROZEN_AT)
    if number % 2:
        return page
    return b"".join(line for line in page.splitlines(keepends=True) if not line.startswith(_LEG + b"{"))


def moving_and_padded(number: int) -> bytes:
    """A real page on which tokens are being generated, filled up to 8 MiB with series of somebody else's."""
    page = moving_page(number)
    line = b'http_request_duration_seconds_bucket{handler="/v1/completions",le="0.25",method="POST"} 1017.0\n'
    return page + line * ((HOSTILE_BYTES - len(page)) // len(line))


CHANGING: dict[str, Callable[[int], bytes]] = {
    "moving": moving_page,
    "as many new series as may be kept": with_new_series,
    "as many new cores as may be kept": with_new_cores,
    "as many cores as may be kept": many_cores,
    "new series of 4 kB each": with_long_series,
    "frozen, loses a series every other time": frozen_that_loses_a_series,
    "moving, padded to 8 MiB": moving_and_padded,
}

"""What a plain livenessProbe on the engine's own /health sees, as a watcher program of its own.

    ENGINE_URL=http://127.0.0.1:8000 LISTEN=127.0.0.1:9091 python bench/rivals/health_endpoint.py [--period 10]

The rule is the kubelet's: asked every `--period` seconds, an answer that is no 2xx or takes longer than `--timeout` is
a failure, and `--failures` of them in a row restart the engine. Here /healthz turns 503 instead. One success clears it.

A control of bench/side_by_side.py: an engine whose core is stopped answers /health with 200 as ever, so this one must
never see that hang. If it does, what was frozen was not what was meant to be.
"""

from __future__ import annotations

import argparse
import http.client
import os
import time
import urllib.request

from rival_server import Answer, serve


class Probe:
    """Counts failures in a row.

    Args:
        failures: how many of them restart the engine.
    """

    def __init__(self, failures: int) -> None:
        self._allowed = failures
        self._in_a_row = 0

    def asked(self, problem: str) -> Answer:
        """What stands after one more question; an empty problem is a success."""
        self._in_a_row = self._in_a_row + 1 if problem else 0
        if self._in_a_row >= self._allowed:
            return Answer(True, f"/health failed {self._in_a_row} times in a row, last: {problem}")
        return Answer(False, problem or "/health answered")


def ask(url: str, timeout_sec: float) -> str:
    """What is wrong with the answer; empty if nothing is."""
    try:
        # Statuses from 400 are exceptions of urllib's, which are OSErrors.
        with urllib.request.urlopen(url, timeout=timeout_sec) as answer:
            answer.read()
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--period", type=float, default=10, metavar="SEC")
    parser.add_argument("--timeout", type=float, default=1, metavar="SEC")
    parser.add_argument("--failures", type=int, default=3)
    options = parser.parse_args()
    url = os.environ["ENGINE_URL"].rstrip("/") + "/health"
    probe = Probe(options.failures)
    with serve(os.environ.get("LISTEN", ":9090")) as board:
        while True:
            began = time.monotonic()
            board.answer = probe.asked(ask(url, options.timeout))
            time.sleep(max(0.0, options.period - (time.monotonic() - began)))


if __name__ == "__main__":
    main()

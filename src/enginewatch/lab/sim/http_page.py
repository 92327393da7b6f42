"""The HTTP instrumentation on vLLM's page: counted when the response has ended, per route."""

from __future__ import annotations

from enginewatch.lab.sim.page import Families, Family

_HANDLER = ("handler",)

HTTP_FAMILIES = (
    Family(
        "http_requests",
        "counter",
        "Total number of requests by method, status and handler.",
        ("handler", "method", "status"),
    ),
    Family(
        "http_request_size_bytes",
        "summary",
        "Content length of incoming requests by handler. Only value of header is respected. Otherwise ignored.",
        _HANDLER,
    ),
    Family(
        "http_response_size_bytes",
        "summary",
        "Content length of outgoing responses by handler. Only value of header is respected. Otherwise ignored.",
        _HANDLER,
    ),
    Family(
        "http_request_duration_highr_seconds",
        "histogram",
        "Latency with many buckets but no API specific labels. Made for more accurate percentile calculations.",
        (),
        (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60),
    ),
    Family(
        "http_request_duration_seconds",
        "histogram",
        "Latency with only few buckets by handler. Made to be only used if aggregation by handler is important.",
        ("handler", "method"),
        (0.1, 0.5, 1),
    ),
)

EXCLUDED = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})
"""Routes that are not counted."""


class HttpPage:
    """Counts ended responses."""

    def __init__(self, families: Families) -> None:
        self._families = families

    def ended(
        self, handler: str, method: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """One response has ended; `handler` is the route's path, "none" for an unknown one."""
        if handler in EXCLUDED:
            return
        families = self._families
        families.add("http_requests", 1, handler=handler, method=method, status=f"{status // 100}xx")
        families.observe("http_request_size_bytes", request_bytes, handler=handler)
        families.observe("http_response_size_bytes", response_bytes, handler=handler)
        families.observe("http_request_duration_highr_seconds", seconds)
        families.observe("http_request_duration_seconds", seconds, handler=handler, method=method)

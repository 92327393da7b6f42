"""The guard's settings for tests, from the variables that they change."""

from __future__ import annotations

from enginewatch.guard.settings import DEFAULTS, Settings, read_settings

FLEET = {"GUARD_PREFILL": "10.0.0.1:8000,10.0.0.2:8000", "GUARD_DECODE": "10.0.1.1:8001", "GUARD_ROUTER": "vllm"}


def guard_settings(**variables: str) -> Settings:
    """Two prefills and a decode by address, unless the variables say otherwise."""
    return read_settings([], {**FLEET, **variables}, uses=tuple(DEFAULTS), needs=())

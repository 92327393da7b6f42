"""Which canary goes out: the engine profile's, with the operator's overrides laid over it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from enginewatch.core.settings import Settings
from enginewatch.engines.profile import AnswerFormat, CanaryRequest, Profile, Role


def canary_request(settings: Settings, profile: Profile, role: Role) -> CanaryRequest | None:
    """The effective canary request, or None where canaries are off or the profile has none for the role.

    Rules:
        - `active_probe_path` empty: the profile's request; `active_probe_body` then replaces its body, and
          `active_probe_method` counts only together with a body (existing ConfigMaps name a method alone).
        - set to the profile's own path: the same, judged by the engine's answer format, and it can be aimed.
        - set to another path: any 2xx read to its end is ok, the method is GET unless given, and it cannot be aimed.
    """
    if not settings.active_probe_enabled:
        return None
    own = profile.canaries.get(role)
    path, method = settings.active_probe_path, settings.active_probe_method.upper()
    body, raw_body = _parse_body(settings.active_probe_body)
    has_body = body is not None or raw_body is not None
    if path and (own is None or path != own.path):
        return CanaryRequest(
            method=method or ("POST" if has_body else "GET"),
            path=path,
            body=body,
            raw_body=raw_body,
            answer=AnswerFormat.ANY_2XX,
        )
    if own is None or not has_body:
        return own
    return replace(
        own,
        method=method or own.method,
        body=body,
        raw_body=raw_body,
        aim=tuple(aim for aim in own.aim if aim.header is not None or body is not None),
    )


def _parse_body(text: str) -> tuple[Mapping[str, Any] | None, str | None]:
    if not text.strip():
        return None, None
    try:
        parsed = json.loads(text)
    except ValueError:
        return None, text
    return (parsed, None) if isinstance(parsed, dict) else (None, text)

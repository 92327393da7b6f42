"""The engines that enginewatch knows, and how it finds out which one it is talking to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from enginewatch.engines import sglang, unknown, vllm
from enginewatch.engines.profile import Profile

PROFILES: dict[str, Profile] = {profile.kind: profile for profile in (vllm.PROFILE, sglang.PROFILE)}
"""Kind -> profile, in the order in which they are tried."""

UNKNOWN: Profile = unknown.PROFILE
"""For an engine that none of the profiles fits."""

ALL_NAMES: frozenset[str] = UNKNOWN.names().union(*(profile.names() for profile in PROFILES.values()))
"""Every sample name that any profile asks for: what `auto` keeps of a page until it knows the engine."""


def recognise(sample_names: Iterable[str]) -> Profile | None:
    """The engine whose prefixes stand on the page; None where no sample name carries one.

    `sample_names` are bare names, without labels. A page that passes on another engine's series beside its own (Dynamo
    does) is that engine's. Where two engines' series share a page the one with more names wins, then the order of
    `PROFILES`.
    """
    counts = dict.fromkeys(PROFILES, 0)
    for name in sample_names:
        for kind, profile in PROFILES.items():
            counts[kind] += name.startswith(profile.prefixes)
    best = max(counts, key=lambda kind: counts[kind])
    return PROFILES[best] if counts[best] else None


def recognise_answer(path: str, payload: object) -> Profile | None:
    """The engine that answers `path` with this JSON `payload`; None where it could be any."""
    if not isinstance(payload, Mapping):
        return None
    if path == "/v1/models":
        models = payload.get("data")
        owners = (
            {model.get("owned_by") for model in models if isinstance(model, Mapping)}
            if isinstance(models, list)
            else set()
        )
        return next((profile for kind, profile in PROFILES.items() if kind in owners), None)
    return None

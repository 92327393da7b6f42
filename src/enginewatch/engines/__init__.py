"""The engines that enginewatch knows, and how it finds out which one it is talking to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from enginewatch.engines import llamacpp, sglang, trtllm, unknown, vllm
from enginewatch.engines.profile import Profile
from enginewatch.engines.unknown import Stranger

PROFILES: dict[str, Profile] = {
    profile.kind: profile for profile in (vllm.PROFILE, sglang.PROFILE, trtllm.PROFILE, llamacpp.PROFILE)
}
"""Kind -> profile, in the order in which they are tried."""

KINDS: tuple[str, ...] = ("auto", *PROFILES)
"""What ENGINE_KIND may be; `auto` recognises the engine."""

UNKNOWN: Profile = unknown.PROFILE
"""For an engine that none of the profiles fits."""

STRANGERS: tuple[Stranger, ...] = unknown.STRANGERS
"""Engines without a profile that can be told from one another."""

STRANGER_NAMES: frozenset[str] = frozenset[str]().union(*(stranger.names for stranger in STRANGERS))
"""Sample names by which `stranger` knows them. The sidecar has no use for these."""

ALL_NAMES: frozenset[str] = UNKNOWN.names().union(*(profile.names() for profile in PROFILES.values()))
"""Every sample name that any profile asks for: what `auto` keeps of a page until it knows the engine."""

CONSUMED_PATHS: frozenset[str] = frozenset(
    profile.json_statistics.path for profile in PROFILES.values() if profile.json_statistics is not None
)
"""Paths that some engine empties by answering: not to be read before it is known that it is another engine's."""

RECOGNITION_PATHS: tuple[str, ...] = ("/v1/models", "/model_info", "/get_model_info", "/version")
"""Paths whose answers tell the engine where its page does not, best first; none of them touches an engine's core."""

# Names of the engine's own, so without process_start_time_seconds, which any process may export.
_OWN_NAMES: dict[str, frozenset[str]] = {
    kind: frozenset(name for name in profile.names() if name.startswith(profile.prefixes))
    for kind, profile in PROFILES.items()
}


def recognise(sample_names: Iterable[str]) -> Profile | None:
    """The engine whose series stand on the page; None where there are none.

    A name counts when the profile asks for it, or when it begins with one of the engine's prefixes that end in a colon:
    `vllm_` alone is not enough, vllm_router_* is a router. A page that passes on an engine's series beside its own
    (Dynamo does) is that engine's. Of two engines on one page the one with more different names is taken, then the
    order of `PROFILES`.

    Args:
        sample_names: bare names of samples, without labels; repetitions and a filtered page do no harm.
    """
    names = frozenset(sample_names)
    best, best_count = None, 0
    for kind, profile in PROFILES.items():
        colons = tuple(prefix for prefix in profile.prefixes if prefix.endswith(":"))
        count = sum(name in _OWN_NAMES[kind] or name.startswith(colons) for name in names)
        if count > best_count:
            best, best_count = profile, count
    return best


def recognise_answer(path: str, payload: object) -> Profile | None:
    """The engine that answers `path`, one of `RECOGNITION_PATHS`, with this JSON `payload`.

    Returns:
        A profile; `UNKNOWN` where the answer names an engine without a profile, which ends the search; None where the
        answer could be anybody's.
    """
    if not isinstance(payload, Mapping):
        return None
    match path:
        case "/v1/models":
            return _by_owner(payload.get("data"))
        case "/model_info" | "/get_model_info":
            # Keys of SGLang 0.4.8 to 0.5.23.
            return sglang.PROFILE if {"model_path", "tokenizer_path", "is_generation"} <= payload.keys() else None
        case "/version":
            # The last resort, for a vLLM whose API key we do not have: it guards /v1/models but not this. TensorRT-LLM
            # gives the same answer, but its /v1/models (owned_by tensorrt_llm) has ended the search before.
            return vllm.PROFILE if payload.keys() == {"version"} and isinstance(payload["version"], str) else None
        case _:
            return None


def stranger(sample_names: Iterable[str], models: object) -> Stranger | None:
    """The engine without a profile whose page this is, or whose /v1/models answered this JSON; None = nobody's."""
    names = frozenset(sample_names)
    owners = _owners(models.get("data")) if isinstance(models, Mapping) else frozenset[str]()
    return next((one for one in STRANGERS if names & one.names or owners & one.owners), None)


def _owners(models: object) -> frozenset[str]:
    if not isinstance(models, list):
        return frozenset()
    owners = [model.get("owned_by") for model in models if isinstance(model, Mapping)]
    return frozenset(owner for owner in owners if isinstance(owner, str) and owner)


def _by_owner(models: object) -> Profile | None:
    """By `owned_by`, a constant of the engine (`Profile.owners`)."""
    named = _owners(models)
    for profile in PROFILES.values():
        if not named.isdisjoint(profile.owners):
            return profile
    return UNKNOWN if named else None

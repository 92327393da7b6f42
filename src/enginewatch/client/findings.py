"""From what was found to what it means and how to fix it. Pure; one function per question, worst news not first but
in the order in which somebody would look: page, engine, legs, cores, canary, pause, identity, log.
"""

from __future__ import annotations

from collections.abc import Iterator

from enginewatch.client.diagnosis import Diagnosis, Finding, FoundCanary, FoundCore
from enginewatch.core.events import Outcome
from enginewatch.core.progress import REQUEST_GRAINED_STALL_SEC
from enginewatch.core.reach import is_an_answer
from enginewatch.core.settings import Settings
from enginewatch.engines import PROFILES, STRANGERS
from enginewatch.engines.profile import DYNAMIC, Grain, LegKind, Profile

SLOW_PAGE_SEC = 1.0
LARGE_PAGE_BYTES = 4 * 1024 * 1024
_KEY_FIX = "Put the key into a file and name it in ENGINE_API_KEY_FILE."
_OTHER_KEY_FIX = "Correct the key in ENGINE_API_KEY_FILE."


def findings_of(found: Diagnosis, profile: Profile, settings: Settings) -> tuple[Finding, ...]:
    """All findings about what was found, for an engine of that profile and the settings a sidecar would run with."""
    if found.loading:
        return (*_page(found, profile, settings), *_engine(found, profile, settings))
    if _is_another_engines(found):
        # Asked as another engine, it cannot be said what is missing: only a hang is worth saying beside that.
        hung = [finding for finding in _canaries(found, profile, settings) if finding.level == "critical"]
        return (*_page(found, profile, settings), *_engine(found, profile, settings), *hung)
    parts = (
        *(_page, _engine, _guarded, _core_answers, _role, _legs, _statistics),
        *(_cores, _canaries, _pause, _identity, _log),
    )
    return tuple(finding for part in parts for finding in part(found, profile, settings))


def _is_another_engines(found: Diagnosis) -> bool:
    """Given as one engine, and another by its page, or by other answers where the page is nobody's."""
    return (found.page_of or found.answers_of) not in (None, found.engine)


def _page(found: Diagnosis, profile: Profile, settings: Settings) -> Iterator[Finding]:
    page = found.page
    if found.key_problem is not None:
        yield Finding("warning", f"No API key is sent: {found.key_problem}.", "Make the file readable, or mount it.")
    if not page.asked:
        yield Finding(
            "unknown",
            f"The engine could not be asked: {page.detail}.",
            "Until then nothing is known of it.",
        )
    elif page.failure is not None:
        yield _failed_page(found, profile, settings)
    else:
        what = "Iteration statistics" if profile.reads_json_statistics else "Metrics page"
        yield Finding("ok", f"{what} at {page.path}: {_bytes(page.size_bytes)} in {_sec(page.duration_sec)}.")
        if page.duration_sec > SLOW_PAGE_SEC + _waits_sec(profile):
            yield Finding(
                "warning",
                f"The metrics page took {_sec(page.duration_sec)}; a sidecar gives up after "
                f"metrics_timeout_sec ({settings.metrics_timeout_sec:g} s).",
                "Look for an overloaded front end; raise metrics_timeout_sec if that is normal here.",
            )
        if page.size_bytes > LARGE_PAGE_BYTES:
            yield Finding(
                "warning",
                f"The metrics page is {_bytes(page.size_bytes)}; from 8 MiB on it is not read any more.",
                "Reduce what the engine exports, for example series per adapter.",
            )
    if page.redirected_to is not None:
        yield Finding(
            "warning",
            f"{page.path} redirects to {page.redirected_to}, where no API key is sent, at two requests per poll.",
            f"Set METRICS_PATH={page.redirected_to}",
        )


def _failed_page(found: Diagnosis, profile: Profile, settings: Settings) -> Finding:
    page = found.page
    what = f"No metrics page at {page.path}: {page.detail}."
    alone = "Without it the canary alone decides; "
    if found.loading:
        return Finding(
            "unknown",
            f"It is loading its model: {page.detail}, as {found.engine_title} does on every path until it has.",
            "Look again when it has loaded; where that never comes, look at its log.",
        )
    match page.failure:
        case "refused":
            return Finding("critical", what, "Start the engine, or give the address on which it listens (ENGINE_URL).")
        case "timeout":
            return Finding(
                "critical",
                what,
                "The front end is stopped or overloaded: look at its process; "
                f"if it is merely slow, raise metrics_timeout_sec ({settings.metrics_timeout_sec:g} s).",
            )
        case "reset":
            return Finding("critical", what, "Look at the engine's log; a TLS port asked without TLS reads so, too.")
        case "truncated":
            return Finding("critical", what, "Look for a proxy in between, and at the engine's log.")
        case "http_401" | "http_403":
            fix = _key_fix(page.detail)
            return Finding("warning", what, alone + fix[:1].lower() + fix[1:])
        case "http_404" | "http_405" | "http_422" | "http_501" if _is_another_engines(found):
            return Finding("warning", what, "Another engine has its page elsewhere: first see which one this is.")
        case "http_404" | "http_405" | "http_422" | "http_501":
            return Finding("warning", what, f"{profile.how_to_get_metrics} Is it elsewhere, set METRICS_PATH.")
        case "malformed":
            return Finding("warning", what, alone + _page_elsewhere(page.detail))
        case str(word) if word.startswith("http_5"):
            return Finding("critical", what, "The engine has failed or is still loading: look at its log.")
        case _:
            return Finding("warning", what, alone + "give the engine's own address in ENGINE_URL.")


def _wants_key(found: Diagnosis) -> bool:
    """Whether the page is there, for those who have the key."""
    return found.page.failure in ("http_401", "http_403")


def _key_fix(detail: str) -> str:
    return _OTHER_KEY_FIX if "not accepted" in detail else _KEY_FIX


def _waits_sec(profile: Profile) -> float:
    statistics = profile.json_statistics
    return statistics.waits_sec if profile.reads_json_statistics and statistics is not None else 0.0


def _page_elsewhere(detail: str) -> str:
    if detail.startswith("JSON"):
        return (
            "TensorRT-LLM has its Prometheus page at /prometheus/metrics, with return_perf_metrics: true "
            "(ENGINE_KIND=trtllm). Do not scrape its JSON: reading it removes it."
        )
    if detail.startswith("HTML"):
        return "a proxy or another server answers here: give the engine's own address in ENGINE_URL."
    return "give the path of the Prometheus page in METRICS_PATH."


def _engine(found: Diagnosis, profile: Profile, settings: Settings) -> Iterator[Finding]:
    if not found.page.asked or found.page.failure == "refused":
        return
    if _is_another_engines(found):
        told = "the metrics page is" if found.page_of else f"its answer to GET {found.told_at} is"
        other = found.page_of or found.answers_of
        yield Finding(
            "warning",
            f"The engine was given as {found.engine}, but {told} that of {other}.",
            f"Set ENGINE_KIND={other}, or leave it out, and look again.",
        )
    elif found.could_be is not None and settings.active_probe_path and _has_proof(found):
        yield Finding(
            "ok",
            f"This looks like {found.could_be}, for which enginewatch has no profile: the canary alone decides, and "
            f"{settings.active_probe_path.partition('?')[0]} answers it.",
            "Give its sidecar the same ACTIVE_PROBE_PATH, ACTIVE_PROBE_METHOD and ACTIVE_PROBE_BODY.",
        )
    elif found.could_be is not None:
        yield Finding(
            "warning",
            f"This looks like {found.could_be}, for which enginewatch has no profile: the canary alone decides.",
            next(one.canary for one in STRANGERS if one.title == found.could_be),
        )
    elif found.engine_from == "nothing" and found.page.failure is not None and not _has_proof(found):
        yield Finding(
            "unknown",
            "Nothing tells which engine this is, or that it is one.",
            "Give its API key, with which it may say so."
            if _wants_key(found)
            else "Give the engine's own address; if this is it, set ENGINE_KIND.",
        )
    elif found.engine_from == "nothing":
        known = ", ".join(PROFILES)
        yield Finding("warning", "Nothing tells which engine this is.", f"Set ENGINE_KIND, if it is one of {known}.")
    elif found.engine == "unknown":
        yield Finding("warning", "This is an engine that enginewatch has no profile for.", profile.how_to_get_metrics)
    else:
        told = {"given": "as given", "page": "by its metrics page", "answers": "by its answers"}[found.engine_from]
        yield Finding("ok", f"{found.engine_title} {found.version or 'of an unknown version'}, {told}.")


def _guarded(found: Diagnosis, profile: Profile, settings: Settings) -> Iterator[Finding]:
    """A version that is not told for want of a key. It is said once, for all that hangs on it."""
    if found.guarded is None:
        return
    lost = ["the version is not known"]
    if profile.flag_endpoints and found.pause in ("absent", "silent"):
        lost.append("a pause cannot be told from a hang")
    if len(found.cores) > 1 and not found.can_aim:
        lost.append("a canary cannot be aimed at one of several cores")
    listed = lost[0] if len(lost) == 1 else f"{', '.join(lost[:-1])} and {lost[-1]}"
    sent = found.has_key and found.key_problem is None
    yield Finding(
        "warning",
        f"GET {found.guarded} {'does not accept the API key' if sent else 'wants an API key'}: {listed}.",
        _OTHER_KEY_FIX if sent else _KEY_FIX,
    )


def _core_answers(found: Diagnosis, profile: Profile, settings: Settings) -> Iterator[Finding]:
    if found.unanswered is not None:
        yield Finding(
            "unknown",
            f"GET {found.unanswered} gave no answer in time: the version is not known. It is answered by way of the "
            "engine's core, so one of its cores may hang.",
            "Look again; if the version stays unknown while canaries fail, the engine is hung.",
        )


def _role(found: Diagnosis, profile: Profile, settings: Settings) -> Iterator[Finding]:
    if found.role_told == DYNAMIC:
        yield Finding(
            "warning",
            "The engine is in no single role, so that no canary of a role is sent.",
            "Give active_probe_path, or active_probe_body, a request that it answers in every role.",
        )
    elif found.role_told is not None and found.role_told != found.role:
        yield Finding(
            "warning",
            f"The role was given as {found.role}, but the engine says that it is {found.role_told}.",
            f"Set ENGINE_ROLE={found.role_told}, or leave it out. The canary is that of role {found.role_told} anyway, "
            "but partners are looked for by the role that was given.",
        )
    elif found.role_from == "engine" and found.role != "agg":
        yield Finding(
            "ok",
            f"Role {found.role}, as the engine says.",
            "Its sidecar takes it over, unless ENGINE_ROLE says another one.",
        )


def _legs(found: Diagnosis, profile: Profile, settings: Settings) -> Iterator[Finding]:
    if found.page.failure is not None or not profile.legs:
        return
    if not any(core.legs for core in found.cores):
        yield Finding(
            "warning",
            "The page has no progress legs: nothing on it tells work from a hang, the canary alone decides.",
            profile.how_to_get_legs or profile.how_to_get_metrics,
        )
        return
    step = {leg.name for leg in profile.legs if leg.grain is Grain.STEP and leg.kind is LegKind.COUNTER}
    if not step:
        threshold = max(settings.stall_sec, REQUEST_GRAINED_STALL_SEC)
        yield Finding(
            "warning",
            f"Its progress legs move only when a request ends: one long request looks frozen, so a hang is declared "
            f"after {threshold:g} s at the earliest.",
            f"Where a canary may have to wait that long behind real requests, raise stall_sec above {threshold:g}.",
        )
        return
    for core in found.cores:
        if not step & {leg.name for leg in core.legs}:
            yield Finding(
                "warning",
                f"Core {core.name} has no counter that moves during work (none of {', '.join(sorted(step))}): "
                "a long request looks frozen.",
                "Send a request and look again: some series appear with their first token. Otherwise raise stall_sec.",
            )


def _statistics(found: Diagnosis, profile: Profile, settings: Settings) -> Iterator[Finding]:
    """Statistics that could be read in place of the page, or are."""
    statistics = profile.json_statistics
    if statistics is None or not found.page.asked or found.page.failure == "refused":
        return
    if not profile.reads_json_statistics:
        yield Finding(
            "ok",
            f"Its statistics per iteration at {statistics.path} (JSON) were not read: reading removes them.",
            f"With TRTLLM_JSON_STATS=1 the sidecar reads them in place of the page. {_what_they_want(found, profile)} "
            f"{statistics.how_to_get} {statistics.cost}",
        )
        return
    yield Finding("warning", f"What was read at {statistics.path} is gone.", statistics.cost)
    if all(leg.grain is Grain.REQUEST for leg in profile.legs):
        yield Finding(
            "warning",
            f"There is a page at {statistics.batched_by} as well, and with it newer versions fill the list only when "
            "a request ends.",
            "Choose one: start it without return_perf_metrics, or leave TRTLLM_JSON_STATS out.",
        )


def _what_they_want(found: Diagnosis, profile: Profile) -> str:
    if profile.json_statistics is not None and found.page.path == profile.json_statistics.batched_by:
        if found.page.failure is None:
            return "They move during a long request too, but in newer versions only where the page is switched off."
        return "They move during a long request too, as long as this page is not switched on."
    return "They move during a long request too."


def _cores(found: Diagnosis, profile: Profile, settings: Settings) -> Iterator[Finding]:
    if len(found.cores) < 2:
        return
    names = ", ".join(core.name for core in found.cores)
    yield Finding("ok", f"{len(found.cores)} cores by label {found.core_label}: {names}; each is judged by itself.")
    if not found.can_aim and found.guarded is None:
        aims = [aim for canary in profile.canaries.values() for aim in canary.aim]
        since = ".".join(map(str, min((aim.since for aim in aims), default=())))
        known = f"version {found.version}" if found.version else "this engine, whose version is not known,"
        yield Finding(
            "warning",
            f"On {known} a canary cannot be aimed at one of several cores: a core that hangs while idle is not seen.",
            f"{profile.title} from {since} on can be aimed at." if since else "",
        )


def _canaries(found: Diagnosis, profile: Profile, settings: Settings) -> Iterator[Finding]:
    if found.canary is not None:
        yield _canary_finding(found.canary, found.cores, None, settings)
    aimed = [
        (core.canary, _canary_finding(core.canary, (core,), core.name, settings))
        for core in found.cores
        if core.canary is not None
    ]
    good = [canary.duration_sec for canary, finding in aimed if finding.level == "ok"]
    if good:
        yield Finding(
            "ok", f"{len(good)} of {len(aimed)} cores answered their canary, the slowest in {_sec(max(good))}."
        )
    for _, finding in aimed:
        if finding.level != "ok":
            yield finding


def _canary_finding(canary: FoundCanary, cores: tuple[FoundCore, ...], core: str | None, settings: Settings) -> Finding:
    name = "The canary" if core is None else f"The canary to core {core}"
    took = _sec(canary.duration_sec)
    moved = sorted({leg.name for one in cores for leg in one.legs if leg.moved})
    still = [one.name for one in cores if not _counters_moved(one)]
    has_legs = any(one.legs for one in cores)
    match Outcome(canary.outcome):
        case Outcome.OK if has_legs and not moved:
            return Finding(
                "warning",
                f"{name} was answered in {took}, and yet no leg moved.",
                "Either the page is another process's (behind a load balancer, give one engine's own address), or this "
                "canary never reaches the engine's core (active_probe_path).",
            )
        case Outcome.OK if canary.duration_sec > settings.active_probe_timeout_sec / 2:
            return Finding(
                "warning",
                f"{name} took {took} of its {settings.active_probe_timeout_sec:g} s.",
                "Raise active_probe_timeout_sec, or the canary fails whenever the engine is busier.",
            )
        case Outcome.OK:
            told = f"moved: {', '.join(moved)}" if moved else "there are no legs that could move"
            return Finding("ok", f"{name} was answered in {took}; {told}.")
        case Outcome.TIMEOUT | Outcome.FROZEN if cores and not still:
            return Finding(
                "warning",
                f"{name} failed ({canary.detail}), but the engine works: {', '.join(moved)} moved.",
                "It is busy, not hung. Raise active_probe_timeout_sec if that is normal here.",
            )
        case Outcome.TIMEOUT | Outcome.FROZEN:
            where = f" of core {', '.join(still)}" if len(cores) > 1 else ""
            else_told = f"no counter{where} moved meanwhile" if has_legs else "nothing else tells whether it works"
            return Finding(
                "critical",
                f"{name} failed after {took}: {canary.detail}; {else_told}.",
                "If it stays so, the engine is hung. A first request that still compiles looks the same, and so does a "
                "pause that the engine does not tell of.",
            )
        case Outcome.REFUSED:
            return Finding("critical", f"{name} failed: {canary.detail}.", "Look at the engine's log: is it exiting?")
        case Outcome.ERROR_ANSWER if "HTTP 501" in canary.detail:
            return Finding(
                "warning",
                f"{name} does not fit: {canary.detail}. Without one {_seen_without_canary(cores)}.",
                "This server has no completions, as with embeddings: give a request that it answers in "
                "active_probe_path and active_probe_body.",
            )
        case Outcome.ERROR_ANSWER:
            return Finding(
                "critical",
                f"{name} was answered with an error: {canary.detail}.",
                "Look at the engine's log. Such answers count as failures only after a canary has succeeded once.",
            )
        case Outcome.SATURATED:
            return Finding("warning", f"{name} was turned away: {canary.detail}.", "The queue is full: no hang.")
        case Outcome.UNASKED:
            return Finding("unknown", f"{name} could not be sent: {canary.detail}.", "Then look again.")
        case Outcome.MISCONFIGURED:
            return Finding(
                "warning",
                f"{name} does not fit: {canary.detail}. Without one {_seen_without_canary(cores)}.",
                _fix_of_a_misfit(canary.detail),
            )


def _seen_without_canary(cores: tuple[FoundCore, ...]) -> str:
    if not any(core.legs for core in cores):
        return "no hang is seen at all"
    heartbeat = " or by the scheduler's heartbeat" if any(core.heartbeat for core in cores) else ""
    return f"a hang is seen only under load{heartbeat}"


def _counters_moved(core: FoundCore) -> bool:
    return any(leg.moved and leg.kind == LegKind.COUNTER for leg in core.legs)


def _fix_of_a_misfit(detail: str) -> str:
    if "API key" in detail:
        return _key_fix(detail)
    if "HTTP 404" in detail or "HTTP 405" in detail:
        return "Give a path that this engine has in active_probe_path, with active_probe_body."
    return (
        "Give a request that this engine accepts in active_probe_path and active_probe_body, or the right ENGINE_ROLE."
    )


def _pause(found: Diagnosis, profile: Profile, settings: Settings) -> Iterator[Finding]:
    if found.guarded is not None and profile.flag_endpoints and found.pause in ("absent", "silent"):
        return  # `_guarded` has said so, and why
    match found.pause:
        case "paused" | "sleeping":
            yield Finding(
                "warning",
                f"The engine is {found.pause}: no canary was sent, nothing else can be told now.",
                "Look again when it works.",
            )
        case "clear":
            yield Finding("ok", "The engine says that it is neither paused nor asleep.")
        case "absent" if profile.how_to_tell_a_pause:
            yield Finding(
                "ok", "No pause endpoints: a pause could not be told from a hang.", profile.how_to_tell_a_pause
            )
        case "absent" if profile.flag_endpoints and found.version is None:
            yield Finding(
                "unknown",
                "Whether a pause can be told from a hang depends on the version, which is not known.",
                "Look again when the version is told.",
            )
        case "absent":
            where = "version" if profile.flag_endpoints else "engine"
            yield Finding(
                "ok", f"Nothing tells a pause from a hang on this {where}.", "Where it is paused: mode: shadow."
            )
        case "doubtful":
            yield Finding(
                "ok" if _has_proof(found) else "unknown",
                "The server calls itself unhealthy, which hides whether it is paused.",
                "A /health that meets a pause does that: ask /ping instead.",
            )
        case "silent":
            yield Finding(
                "ok" if _has_proof(found) else "unknown",
                "The pause endpoints gave no answer that tells, or none within a second.",
                "Where they need every core's answer, a busy or hung core keeps them waiting. Look again.",
            )


def _has_proof(found: Diagnosis) -> bool:
    canaries = [found.canary, *(core.canary for core in found.cores)]
    return any(canary is not None and canary.outcome == Outcome.OK for canary in canaries)


def _identity(found: Diagnosis, profile: Profile, settings: Settings) -> Iterator[Finding]:
    identity = found.identity
    if identity is None:
        if _answers_without_a_page(found):
            yield Finding(
                "warning",
                "No identity: without a page the sidecar tells none, and GET /engine stays 503.",
                _key_fix(found.page.detail) if _wants_key(found) else profile.how_to_get_metrics,
            )
        return
    match identity.source, identity.missing:
        case "process_start_time", _:
            yield Finding(
                "ok",
                f"Identity: the process that started at {identity.started_at} (process_start_time). {_SURVIVES}",
            )
        case "startup_fingerprint", _:
            yield Finding(
                "ok",
                "Identity: the process whose weights took so long to load as the page says (startup_fingerprint). "
                f"{_SURVIVES} When it started is not told: GET /engine says when its sidecar saw it first.",
            )
        case "observed", "startup_fingerprint":
            yield Finding(
                "warning",
                "Identity: none yet. The page does not show how long the weights took to load (startup_fingerprint): "
                f"GET /engine stays 503 until it does, and after a minute it is only observed: {_RENEWED}.",
                f"Look again in a minute. {profile.how_to_be_named}".rstrip(),
            )
        case "observed", "process_start_time" if profile.how_to_be_named:
            yield Finding(
                "warning",
                "Identity: only observed. The page has no process_start_time_seconds, as with several API servers: "
                f"{_RENEWED}.",
                profile.how_to_be_named,
            )
        case "observed", "process_start_time":
            yield Finding("ok", f"Identity: observed. This page names no process: {_RENEWED}.")
        case _:
            yield Finding("ok", f"Identity: observed. This engine names no process, and nothing makes it: {_RENEWED}.")


_SURVIVES = "It survives a restart of the sidecar."
_RENEWED = (
    "a restart of the sidecar renews it, so that a guarded router restarts as well, and a replaced engine shows only "
    "when counters fall or nobody listens"
)


def _answers_without_a_page(found: Diagnosis) -> bool:
    failure = found.page.failure
    return found.page.asked and found.engine_from != "nothing" and failure is not None and is_an_answer(failure)


def _log(found: Diagnosis, profile: Profile, settings: Settings) -> Iterator[Finding]:
    if found.log_signatures:
        yield Finding(
            "ok",
            f"Its log is a witness: {len(found.log_signatures)} pattern(s) that mean a dead scheduler.",
            "Set LOG_FILE where the sidecar can read the log.",
        )


def _sec(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _bytes(count: int) -> str:
    if count < 1000:
        return f"{count} bytes"
    return f"{count / 1000:.0f} kB" if count < 1_000_000 else f"{count / 1_000_000:.1f} MB"

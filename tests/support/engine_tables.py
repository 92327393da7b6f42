"""The tables of docs/engines.md that say what the profiles say, rendered from them.

`python tests/support/engine_tables.py` writes them into the page, between the markers that name them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

from enginewatch.engines import PROFILES, UNKNOWN
from enginewatch.engines.profile import (
    ROLES,
    Aim,
    CanaryRequest,
    FlagEndpoint,
    Grain,
    LegKind,
    Metric,
    PageFlag,
    Profile,
)

PAGE = Path(__file__).parents[2] / "docs" / "engines.md"
_MARKED = re.compile(r"(<!-- from the profiles: ([a-z-]+(?:/[a-z-]+)?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Row = tuple[str, ...]


def table_of(name: str) -> str:
    """The table of that name, as Markdown.

    Raises:
        KeyError: there is none.
    """
    kind, _, part = name.partition("/")
    rows = list(_TABLES[part](PROFILES[kind]) if part else _OVERVIEWS[kind]())
    cells = ([cell.replace("|", "\\|") for cell in row] for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]))
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def tables_on(text: str) -> dict[str, str]:
    """The tables on a page, by name."""
    return {match[2]: match[3] for match in _MARKED.finditer(text)}


def rewritten(text: str) -> str:
    """The page with its tables rendered anew."""
    return _MARKED.sub(lambda match: match[1] + table_of(match[2]) + match[4], text)


def without_tables(text: str) -> str:
    """The page without these tables."""
    return _MARKED.sub("", text)


# --- all engines ----------------------------------------------------------------------------------------------------


def _at_a_glance() -> Iterator[Row]:
    yield "engine", "`ENGINE_KIND`", "metrics page", "a core per", "identity", "rest", "canary aimed since", "log"
    for profile in (*PROFILES.values(), UNKNOWN):
        yield (
            profile.title,
            f"`{profile.kind}`" if profile is not UNKNOWN else "none",
            f"`{profile.metrics_path}`" if profile.legs else "not read for progress",
            f"`{profile.core_label}`" if profile.core_label else "page",
            _identity(profile),
            " and ".join(sorted(_rests(profile))) or "cannot be told",
            _since(min((aim.since for aim in _aims(profile)), default=())) or "never",
            f"{len(profile.log_signatures)} signature{'s' * (len(profile.log_signatures) > 1)}"
            if profile.log_signatures
            else "no signature",
        )


def _identity(profile: Profile) -> str:
    if profile.start_time is not None:
        return "start of the process, else observed"
    return "startup fingerprint, else observed" if profile.fingerprint is not None else "observed"


def _rests(profile: Profile) -> set[str]:
    return {flag.state for flag in profile.page_flags} | {flag.state for flag in profile.flag_endpoints}


def _aims(profile: Profile) -> list[Aim]:
    return [aim for canary in profile.canaries.values() for aim in canary.aim]


# --- one engine -----------------------------------------------------------------------------------------------------


def _on_its_page(profile: Profile) -> Iterator[Row]:
    yield "what", "series", "read as"
    for leg in profile.legs:
        kind = "a rise is progress" if leg.kind is LegKind.COUNTER else "a gauge of which only a rise is progress"
        grain = "during work" if leg.grain is Grain.STEP else "when a request ends"
        yield f"leg `{leg.name}`", _series(leg.metric), f"{kind}; moves {grain}"
    for what, metric, meaning in (
        ("running", profile.running, "above zero is busy"),
        ("waiting", profile.waiting, "above zero is busy"),
        ("deferred", profile.deferred, "part of waiting that waits for a partner"),
        *((f"queue `{queue.name}`", queue.metric, "stands still: `peer-stall`") for queue in profile.queues),
        ("transfers", profile.transfers, "a rise acquits the partner"),
        ("heartbeat", profile.heartbeat, "the scheduler's loop turns, also when idle"),
        ("start", profile.start_time, "names the process"),
        *_fingerprint(profile),
        *((flag.state, flag.metric, _while(flag)) for flag in profile.page_flags),
    ):
        if metric is not None and metric.names:
            yield what, _series(metric), meaning
    yield "prefixes", ", ".join(f"`{prefix}`" for prefix in profile.prefixes), "before each of these names"


def _fingerprint(profile: Profile) -> Iterator[tuple[str, Metric, str]]:
    if profile.fingerprint is not None:
        for metric in profile.fingerprint.anchor:
            yield "anchor", metric, "names the process, by its value"
        for metric in profile.fingerprint.others:
            yield "fingerprint", metric, "another value is another process"


def _while(flag: PageFlag) -> str:
    if not flag.counts_calls:
        return f"rests on purpose while it is {flag.value:g}"
    return f"rests on purpose while it is {flag.value:g} or more, for half an hour at most"


def _asked(profile: Profile) -> Iterator[Row]:
    yield "what", "request", "meaning"
    for canary, roles in _by_request(profile):
        yield f"canary, role {', '.join(roles)}", _request(canary), f"answered by a complete `{canary.answer}`"
    for aim in dict.fromkeys(_aims(profile)):
        roles = [role for role in ROLES if aim in profile.canaries[role].aim]
        where = f"header `{aim.header}`" if aim.header else f"body field `{aim.body_field}`"
        counted = ", counted from the server's own first core" if aim.from_first_core else ""
        yield f"aim, role {', '.join(roles)}", where, f"since {_since(aim.since)}{counted}: {aim.source}"
    notice = next((canary.death_notice for canary in profile.canaries.values() if canary.death_notice), None)
    if notice is not None:
        yield (
            "death notice",
            f"GET `{notice.path}`",
            f"{notice.status}: the core is gone; asked after a 4xx canary only",
        )
    if profile.loading_status is not None:
        yield "loading", f"GET `{profile.metrics_path}`", f"answers {profile.loading_status}: `restarting`, no outage"
    for flag in profile.flag_endpoints:
        yield flag.state, *_flag(flag)
    if profile.json_statistics is not None:
        keys = ", ".join(f"`{key}`" for key in profile.json_statistics.keys)
        yield (
            "JSON statistics, only where asked for",
            f"GET `{profile.json_statistics.path}` in place of the page",
            f"keys {keys}; reading removes them",
        )
    for path, key in profile.version_paths:
        yield "version", f"GET `{path}`", f"key `{key}`"
    words = profile.role_words
    if words is not None:
        where = f"label `{words.label}`, else key `{words.key}` beside the version"
        yield "role", where, f"`agg` by the label only beside `{words.agg_beside}`"
    for owner in profile.owners:
        yield "recognised by", "GET `/v1/models`", f"`owned_by` is `{owner}`"


def _patience(profile: Profile) -> Iterator[Row]:
    yield "what", "how long"
    yield "busy gauges may be stale for", f"{profile.gauge_stale_sec:g} s"
    yield "one step without a sign may take", f"{profile.longest_step_sec:g} s" if profile.longest_step_sec else "-"
    yield (
        "a canary may wait behind requests for",
        f"{profile.longest_wait_sec:g} s" if profile.longest_wait_sec else "-",
    )
    yield "log lines that mean a dead scheduler", "<br>".join(f"`{one}`" for one in profile.log_signatures) or "none"


def _by_request(profile: Profile) -> Iterator[tuple[CanaryRequest, list[str]]]:
    """Each different canary with the roles that it is for."""
    ordered = [(profile.canaries[role], role) for role in ROLES]
    for canary, group in groupby(ordered, key=lambda pair: pair[0]):
        yield canary, [role for _, role in group]


def _request(canary: CanaryRequest) -> str:
    return f"{canary.method} `{canary.path}` `{json.dumps(canary.body)}`"


def _flag(flag: FlagEndpoint) -> Row:
    since = f", since {_since(flag.since)}" if flag.since else ""
    if flag.status is not None:
        return f"GET `{flag.path}`, `{flag.sound_path}`", f"{flag.status} while the second answers 200{since}"
    return f"GET `{flag.path}`", f"key `{flag.key}` is true{since}"


def _series(metric: Metric) -> str:
    where = "".join(
        f" with `{label}` {' or '.join(f'`{value}`' if value else 'absent' for value in sorted(allowed, reverse=True))}"
        for label, allowed in metric.where.items()
    )
    bare = "" if metric.prefixed else ", without a prefix"
    return ", ".join(f"`{name}`" for name in metric.names) + where + bare


def _since(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


_OVERVIEWS: dict[str, Callable[[], Iterator[Row]]] = {"at-a-glance": _at_a_glance}
_TABLES: dict[str, Callable[[Profile], Iterator[Row]]] = {
    "page": _on_its_page,
    "asked": _asked,
    "patience": _patience,
}
PARTS = frozenset(_TABLES)

if __name__ == "__main__":
    before = PAGE.read_text()
    PAGE.write_text(rewritten(before))
    sys.exit(0)

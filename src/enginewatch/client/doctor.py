"""The diagnosis behind `enginewatch doctor`: one look at a running engine from outside.

Two metrics pages with the canary between them: so it can be told which legs exist and which of them really move. The
pages are read by the ledger that the sidecar judges with; what doctor shows is what the sidecar would see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Literal

from enginewatch.client.describe import Description
from enginewatch.client.diagnosis import (
    EXIT_CODES,
    Diagnosis,
    Finding,
    FoundCanary,
    FoundCore,
    FoundIdentity,
    FoundLeg,
    FoundPage,
    to_json,
    worst,
)
from enginewatch.client.diagnosis_text import render_text
from enginewatch.client.exchange import Fault
from enginewatch.client.findings import findings_of
from enginewatch.client.scrape import Page, ScrapeFailure
from enginewatch.client.target import EngineClient, Target
from enginewatch.core.events import Flags, Outcome
from enginewatch.core.fingerprint import Durations
from enginewatch.core.identity import IdentityTracker
from enginewatch.core.progress import Ledger
from enginewatch.core.role import WorkerRole, role_on_page
from enginewatch.core.settings import Settings
from enginewatch.engines import ALL_NAMES, PROFILES, STRANGER_NAMES, UNKNOWN, recognise, stranger
from enginewatch.engines.profile import DYNAMIC, Aim, Profile, Role

__all__ = ["Diagnosis", "Finding", "diagnose", "render_text", "to_json"]

DESCRIBE_TIMEOUT_SEC = 2.0
FLAGS_TIMEOUT_SEC = 1.0
SETTLE_SEC = (0.0, 0.3, 1.0)
"""Waits before each look for legs that moved: some engines publish a moment after they answer."""
CANARIES_AT_ONCE = 8


async def diagnose(
    target: Target,
    *,
    kind: str = "auto",
    role: Role | None = None,
    settings: Settings | None = None,
    json_statistics: bool = False,
) -> Diagnosis:
    """Look at an engine once and say what a sidecar would have to go by. Takes seconds where the engine hangs.

    Args:
        target: where it is.
        kind: `auto`, or a kind of `engines.PROFILES`.
        role: the worker's role; None = what the engine says, else `agg`.
        settings: what a sidecar would run with: timeouts, and an operator's own canary.
        json_statistics: read the engine's JSON statistics in place of its page, where it has any; that removes them.

    Raises:
        ValueError: there is no profile of that kind.
    """
    if kind != "auto" and kind not in PROFILES:
        raise ValueError(f"there is no engine kind {kind!r}: use auto, {', '.join(PROFILES)}")
    client = EngineClient(target)
    try:
        return await _Examination(client, PROFILES.get(kind), role, settings or Settings(), json_statistics).run()
    finally:
        await client.close()


class _Examination:
    """One examination of one engine; each step notes what it found."""

    def __init__(
        self,
        client: EngineClient,
        given: Profile | None,
        role: Role | None,
        settings: Settings,
        json_statistics: bool,
    ) -> None:
        self._client = client
        self._given = given
        self._json_statistics = json_statistics
        self._worker = WorkerRole(role)
        self._settings = settings
        self._clock = asyncio.get_running_loop().time

    async def run(self) -> Diagnosis:
        page = await self._read(self._given)
        answers = page.fault not in (Fault.SETUP, Fault.REFUSED)
        on_page = recognise(_names(page))
        said = await self._describe(self._given or on_page) if answers else Description()
        profile, told_by = self._profile(on_page, said)
        if told_by == "page":
            # It is where it was found, and not where this engine has it by itself: somebody passes it on.
            profile = replace(profile, metrics_path=UNKNOWN.metrics_path)
        elif self._json_statistics:
            profile = profile.on_json_statistics(batched=said.batches_statistics)
        is_elsewhere = told_by == "answers" and profile.metrics_path != UNKNOWN.metrics_path
        if answers and (is_elsewhere or profile.reads_json_statistics):
            page = await self._read(profile)
            on_page = recognise(_names(page)) or on_page
        has_page = isinstance(page.result, dict)
        samples = page.result if isinstance(page.result, dict) else {}
        loading = page.status is not None and page.status == profile.loading_status
        worker = self._worker
        worker.hear(on_page=role_on_page(samples, profile), described=said.role)
        ledger = Ledger(profile)
        first = ledger.take(samples, self._clock(), self._clock(), 1, recheck=False)
        found = Diagnosis(
            url=self._client.target.url,
            engine=profile.kind,
            engine_title=profile.title,
            engine_from=told_by,
            page_of=on_page.kind if on_page else None,
            version=said.version,
            model=said.model,
            role=worker.role,
            role_from="given" if worker.is_given else "default" if worker.told in (None, DYNAMIC) else "engine",
            role_told=worker.told,
            page=_found_page(page, self._path(profile)),
            core_label=profile.core_label,
            can_aim=self._can_aim(profile, said.version),
            cores=(),
            canary=None,
            pause=None,
            identity=_identity(profile, first.start_time, ledger.durations.on(samples)) if has_page else None,
            log_signatures=profile.log_signatures,
            key_problem=self._client.line.key_problem(),
            unanswered=said.unanswered,
            could_be=_could_be(page, said) if profile.kind == UNKNOWN.kind else None,
            guarded=said.guarded,
            answers_of=said.kind if told_by == "given" and on_page is None and _is_sure(said) else None,
            told_at=said.told_at,
            has_key=self._client.target.api_key_file is not None,
            loading=loading,
        )
        if answers and not loading:
            found = await self._look_inside(found, profile, ledger, resting=first.resting)
        findings = findings_of(found, profile, self._settings)
        level = worst(findings)
        return replace(found, findings=findings, level=level, exit_code=EXIT_CODES[level])

    async def _look_inside(
        self, found: Diagnosis, profile: Profile, ledger: Ledger, *, resting: str | None
    ) -> Diagnosis:
        """Flags, canaries, and the page after them."""
        endpoints = profile.flags_for(found.version)
        flags = await self._client.read_flags(endpoints, timeout_sec=FLAGS_TIMEOUT_SEC)
        pause = resting or flags.value
        cores = sorted(ledger.cores, key=_by_rank)
        aimed: dict[str, FoundCanary] = {}
        canary: FoundCanary | None = None
        if pause not in (Flags.PAUSED, Flags.SLEEPING):
            if len(cores) > 1 and self._aim(profile, found) is not None:
                aimed = await self._canaries(profile, found, cores)
            else:
                canary = await self._unaimed_canary(profile, found, cores)
        await self._look_again(ledger)
        return replace(
            found,
            pause=pause,
            canary=canary,
            cores=tuple(
                replace(_found_core(ledger, name, is_new=name not in cores), canary=aimed.get(name))
                for name in sorted(ledger.cores, key=_by_rank)
            ),
        )

    async def _read(self, profile: Profile | None) -> Page:
        names = ALL_NAMES | STRANGER_NAMES
        return await self._client.read_page(names, timeout_sec=self._settings.metrics_timeout_sec, profile=profile)

    def _path(self, profile: Profile) -> str:
        """Where the page was asked for."""
        if profile.reads_json_statistics:
            return profile.metrics_path
        return self._client.target.metrics_path or profile.metrics_path

    async def _look_again(self, ledger: Ledger) -> None:
        """Take in pages until a leg has moved, or long enough."""
        for poll, wait in enumerate(SETTLE_SEC, start=2):
            await asyncio.sleep(wait)
            begun = self._clock()
            page = await self._read(ledger.profile)
            if not isinstance(page.result, dict):
                return
            ledger.take(page.result, self._clock(), begun, poll, recheck=False)
            if all(any(leg.moved_at is not None for leg in core.legs.values()) for core in ledger.cores.values()):
                return

    async def _describe(self, profile: Profile | None) -> Description:
        profiles = (profile,) if profile is not None else ()
        return await self._client.describe(*profiles, timeout_sec=DESCRIBE_TIMEOUT_SEC)

    def _profile(
        self, on_page: Profile | None, said: Description
    ) -> tuple[Profile, Literal["given", "page", "answers", "nothing"]]:
        if self._given is not None:
            return self._given, "given"
        if on_page is not None:
            return on_page, "page"
        if said.kind is not None:
            return PROFILES.get(said.kind, UNKNOWN), "answers"
        return UNKNOWN, "nothing"

    def _aim(self, profile: Profile, found: Diagnosis) -> Aim | None:
        """How to aim. Unlike the sidecar, doctor tries the newest way where the version is not known.

        A hung core may be what keeps SGLang from telling it, and the legs show whether the canary arrived.
        """
        request = self._worker.request(self._settings, profile)
        if request is None:
            return None
        untold = request.aim[0] if request.aim and found.version is None else None
        return request.aim_for(found.version) or untold

    def _can_aim(self, profile: Profile, version: str | None) -> bool:
        request = self._worker.request(self._settings, profile)
        return request is not None and request.aim_for(version) is not None

    async def _canaries(self, profile: Profile, found: Diagnosis, cores: list[str]) -> dict[str, FoundCanary]:
        """One canary to each core, a few at a time."""
        answers = await self._all(profile, found, list(cores), cores)
        return {core: answer for core, answer in zip(cores, answers, strict=True) if answer is not None}

    async def _unaimed_canary(self, profile: Profile, found: Diagnosis, cores: list[str]) -> FoundCanary | None:
        """As many as there are cores, because engines hand requests out in turn; the worst of them."""
        count = max(len(cores), 1)
        answers = [answer for answer in await self._all(profile, found, [None] * count, cores) if answer is not None]
        if not answers:
            return None
        bad = [answer for answer in answers if answer.outcome != Outcome.OK]
        chosen = max(bad or answers, key=lambda answer: answer.duration_sec)
        return (
            replace(chosen, detail=f"{chosen.detail} ({len(bad)} of {count} failed)") if bad and count > 1 else chosen
        )

    async def _all(
        self, profile: Profile, found: Diagnosis, aims: Sequence[str | None], cores: list[str]
    ) -> list[FoundCanary | None]:
        turn = asyncio.Semaphore(CANARIES_AT_ONCE)

        async def ask(core: str | None) -> FoundCanary | None:
            async with turn:
                return await self._canary(profile, found, core=core, cores=cores)

        return list(await asyncio.gather(*(ask(core) for core in aims)))

    async def _canary(
        self, profile: Profile, found: Diagnosis, *, core: str | None, cores: list[str]
    ) -> FoundCanary | None:
        request = self._worker.request(self._settings, profile)
        if request is None:
            return None
        report = await self._client.canary(
            request,
            model=found.model,
            core=core,
            cores=cores,
            aim=self._aim(profile, found) if core is not None else None,
            deadline_sec=self._settings.active_probe_timeout_sec,
            role=self._worker.canary_role or found.role,
        )
        return FoundCanary(report.outcome.value, report.detail, report.duration_sec, report.aimed)


def _found_page(page: Page, path: str) -> FoundPage:
    failure = page.result if isinstance(page.result, ScrapeFailure) else None
    return FoundPage(
        path=path,
        asked=page.fault is not Fault.SETUP,
        failure=failure.failure if failure else None,
        detail=failure.detail if failure else "",
        status=page.status,
        content_type=page.content_type,
        size_bytes=page.size_bytes,
        duration_sec=page.duration_sec,
        redirected_to=page.redirected_to,
    )


def _could_be(page: Page, said: Description) -> str | None:
    by_page = stranger(_names(page), None)
    return by_page.title if by_page is not None else said.could_be


def _is_sure(said: Description) -> bool:
    """Whether the answers name a kind that may contradict the operator's: anybody may have a /version."""
    return said.kind in PROFILES and said.told_at != "/version"


def _names(page: Page) -> list[str]:
    samples = page.result if isinstance(page.result, dict) else {}
    return [series.partition("{")[0] for series in samples]


def _found_core(ledger: Ledger, name: str, *, is_new: bool) -> FoundCore:
    """`is_new`: it was not on the page before the canary, so all that it has moved since."""
    core = ledger.cores[name]
    legs = tuple(
        FoundLeg(
            name=leg.name,
            kind=leg.kind.value,
            grain=leg.grain.value,
            value=core.legs[leg.name].value,
            moved=core.legs[leg.name].moved_at is not None or (is_new and core.legs[leg.name].value > 0),
        )
        for leg in ledger.profile.legs
        if leg.name in core.legs
    )
    return FoundCore(
        name=name,
        legs=legs,
        missing_legs=tuple(leg.name for leg in ledger.profile.legs if leg.name not in core.legs),
        running=core.running(ledger.page),
        waiting=core.waiting(ledger.page, without_deferred=False),
        queues={queue.name: max(q.value for q in core.queues if q.name == queue.name) for queue in core.queues},
        heartbeat=core.heartbeat_at is not None,
    )


def _identity(profile: Profile, start_time: float | None, durations: Durations) -> FoundIdentity:
    """What a sidecar would make of the page, by the code that it runs."""
    tracker = IdentityTracker(0)
    tracker.page(start_time, fell=False, rose=False, now=0.0, durations=durations, awaits_durations=True)
    known = tracker.identity
    if known is None or not known.is_durable:
        return _unnamed(profile)
    if known.started_at_unix is None:
        return FoundIdentity(known.source, None, known.engine_id)
    try:
        started_at = datetime.fromtimestamp(known.started_at_unix, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return _unnamed(profile)
    return FoundIdentity(known.source, started_at.replace("+00:00", "Z"), known.engine_id)


def _unnamed(profile: Profile) -> FoundIdentity:
    if profile.fingerprint is not None:
        return FoundIdentity("observed", None, missing="startup_fingerprint")
    return FoundIdentity("observed", None, missing="process_start_time" if profile.start_time is not None else None)


def _by_rank(core: str) -> tuple[int, str]:
    return (int(core) if core.isdecimal() else 1 << 31, core)

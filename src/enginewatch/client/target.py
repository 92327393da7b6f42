"""One engine, seen from outside: where it is (`Target`) and how it is asked (`EngineClient`)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from enginewatch.client.canary import CanaryReport, send_canary
from enginewatch.client.consumed import ConsumedPages
from enginewatch.client.describe import Description, describe
from enginewatch.client.exchange import Fault, Line, Trouble
from enginewatch.client.flags import read_flags
from enginewatch.client.models import ModelName
from enginewatch.client.scrape import Page, ScrapeFailure, no_page, read_page
from enginewatch.core.events import Flags
from enginewatch.core.exposition import PageReader, SeriesCache
from enginewatch.core.statistics import StatisticsMemory, StatisticsReader
from enginewatch.engines import UNKNOWN
from enginewatch.engines.profile import Aim, CanaryRequest, FlagEndpoint, JsonStatistics, Profile, Role

__all__ = ["BadTarget", "CanaryReport", "Description", "EngineClient", "Page", "ScrapeFailure", "Target"]


_HOST_AND_PORT = re.compile(r"(?:[\w.-]+|\[[\da-fA-F:.]+\]):\d+(?:/|$)", re.ASCII)
"""What people type for an address on the same machine or network, `10.0.0.7:8000`: it can only mean http."""


class BadTarget(ValueError):  # noqa: N818  a finding, and so it reads where it is caught
    """An address that cannot be used; the message is one sentence saying what to change."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where an engine is. Build it with `parse`, which checks.

    Attributes:
        url: scheme, host, port and perhaps a base path, without a slash at the end.
        metrics_path: replaces the engine profile's path of the metrics page; empty = the profile's.
        api_key_file: file with the engine's API key, read before each use.
        ca_file: PEM file with the certificates to trust instead of the system's, read before each use.
    """

    url: str
    metrics_path: str = ""
    api_key_file: str | None = None
    ca_file: str | None = None

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        metrics_path: str | None = None,
        api_key_file: str | None = None,
        ca_file: str | None = None,
    ) -> Target:
        """A target from what an operator wrote; empty values are missing ones, `host:port` is http.

        Whether the files can be read is not looked at: a Secret may be mounted later, and the sidecar must start.

        Raises:
            BadTarget: the address or the path cannot be used.
        """
        return cls(
            url=_checked_url(url),
            metrics_path=_checked_path(metrics_path or ""),
            api_key_file=api_key_file or None,
            ca_file=ca_file or None,
        )

    @property
    def is_loopback(self) -> bool:
        """Whether the engine is on the sidecar's own host: there nothing but the engine can refuse a connection."""
        host = urlsplit(self.url).hostname or ""
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"


class EngineClient:
    """Asks one engine. Every question has one deadline, and its own connection, which ends with it.

    Args:
        target: where the engine is.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.line = Line(target.url, api_key_file=target.api_key_file, ca_file=target.ca_file)
        self._model = ModelName()
        self._series = SeriesCache()
        self._consumed = ConsumedPages()
        self._statistics = StatisticsMemory()
        self._reading_statistics = asyncio.Lock()

    async def close(self) -> None:
        """Break the connections of questions that are still under way; these then end as failed."""
        self.line.close()

    def forget_model(self) -> None:
        """Another engine process answers: read the model's name anew before the next canary."""
        self._model.forget()

    async def scrape(
        self, names: frozenset[str], *, timeout_sec: float, profile: Profile | None = None
    ) -> dict[str, float] | ScrapeFailure:
        """Read the metrics page.

        Args:
            names: full sample names to keep.
            timeout_sec: one deadline, from connect to the last byte.
            profile: of the engine, which says where its page is; the target's own path, where given, replaces that.
                None: not known, so a page that some engine empties by answering is read with care (`consumed`).

        Returns:
            Canonical series -> value, or why there is no page.
        """
        return (await self.read_page(names, timeout_sec=timeout_sec, profile=profile)).result

    async def read_page(self, names: frozenset[str], *, timeout_sec: float, profile: Profile | None = None) -> Page:
        """Like `scrape`, with what `doctor` wants to know about the page besides its samples."""
        until = asyncio.get_running_loop().time() + timeout_sec
        if profile is not None and profile.reads_json_statistics and profile.json_statistics is not None:
            page = await self._read_statistics(profile.json_statistics, until=until)
        else:
            path = self.target.metrics_path or (profile or UNKNOWN).metrics_path
            instead = await self._consumed.look_first(self.line, path, profile, until=until)
            page = instead or await read_page(self.line, path, PageReader(names, cache=self._series), until=until)
            self._consumed.seen(path, page)
        if page.fault is Fault.REFUSED:
            self._consumed.forget()
            self._statistics.forget()
        return page

    async def _read_statistics(self, statistics: JsonStatistics, *, until: float) -> Page:
        """Read the engine's JSON statistics, which are gone then.

        One reader at a time: of two, one might end with an older iteration after the other, and a count that falls is
        another process.
        """
        until += statistics.waits_sec  # the engine's own wait is no sign of slowness
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(until):
                await self._reading_statistics.acquire()
        except TimeoutError:
            trouble = Trouble(Fault.TIMEOUT, "the read before this one has not ended")
            return no_page(trouble, duration_sec=until - began)
        try:
            reader = StatisticsReader(statistics, self._statistics)
            return await read_page(self.line, statistics.path, reader, until=until, marks_its_end=True)
        finally:
            self._reading_statistics.release()

    async def canary(
        self,
        request: CanaryRequest,
        *,
        model: str | None = None,
        core: str | None = None,
        cores: Collection[str] = (),
        aim: Aim | None = None,
        deadline_sec: float,
        role: Role = "agg",
    ) -> CanaryReport:
        """Send one canary and wait for its last byte.

        Args:
            request: what to send; the value `"{model}"` in its body is replaced by the model's name.
            model: the name; None = read from /v1/models once per engine process, within the same deadline.
            core: which core to aim at.
            cores: all cores on the page; some engines count from the first of their own.
            aim: how; None = not at all.
            deadline_sec: from now to the last byte; on expiry and on cancellation the connection is reset at once.
            role: the role the request was made for, named when the engine rejects it.
        """
        return await send_canary(
            self.line,
            self._model,
            request,
            model=model,
            core=core,
            cores=cores,
            aim=aim,
            deadline_sec=deadline_sec,
            role=role,
        )

    async def read_flags(self, endpoints: tuple[FlagEndpoint, ...], *, timeout_sec: float = 1.0) -> Flags:
        """Ask the engine's pause endpoints side by side; see `client.flags` for how the answers add up."""
        return await read_flags(self.line, endpoints, timeout_sec=timeout_sec)

    async def describe(self, *profiles: Profile, timeout_sec: float = 2.0) -> Description:
        """Ask the engine who it is; see `client.describe`.

        Args:
            profiles: what it may be; none = every engine that is known.
            timeout_sec: deadline of each question; they are asked side by side where possible.
        """
        return await describe(self.line, profiles, timeout_sec=timeout_sec)


def _checked_url(url: str) -> str:
    given = url.strip()
    if not given:
        raise BadTarget("the engine's address is empty: give one like http://127.0.0.1:8000")
    if any(character <= " " or character == "\x7f" for character in given):
        raise BadTarget(f"the engine's address {given!r} holds blanks or control characters: remove them")
    shown = _without_user(given)
    if "://" not in given:
        if not _HOST_AND_PORT.match(given):
            raise BadTarget(f"the engine's address {shown!r} has no scheme: write http://{shown.lstrip('/')}")
        given = f"http://{given}"
    try:
        parts = urlsplit(given)
        port = parts.port
    except ValueError:
        raise BadTarget(f"the engine's address {shown!r} has an unusable host or port") from None
    if parts.scheme not in ("http", "https"):
        raise BadTarget(f"the engine's address {shown!r} must begin with http:// or https://")
    if "@" in parts.netloc:
        raise BadTarget(f"the engine's address {shown!r} holds credentials: put the API key into a file instead")
    if not parts.hostname:
        raise BadTarget(f"the engine's address {given!r} names no host: write it like http://127.0.0.1:8000")
    if port == 0:
        raise BadTarget(f"the engine's address {given!r} has port 0: give the port it listens on")
    if parts.query or parts.fragment:
        raise BadTarget(f"the engine's address {given!r} holds a query or fragment: leave it out")
    path = parts.path.rstrip("/")
    if path.endswith("/metrics"):
        raise BadTarget(
            f"the engine's address {given!r} is that of its metrics page: leave the path out; "
            "a page elsewhere than usual is given as METRICS_PATH"
        )
    return f"{parts.scheme}://{parts.netloc}{path}"


def _checked_path(path: str) -> str:
    given = path.strip()
    if not given:
        return ""
    if "://" in given or any(character <= " " or character == "\x7f" for character in given):
        raise BadTarget(f"the metrics path {given!r} is not a path: write it like /metrics")
    return given if given.startswith("/") else f"/{given}"


def _without_user(url: str) -> str:
    """The address without what stands before an @: it may be a secret."""
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"

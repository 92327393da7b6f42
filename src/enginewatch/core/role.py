"""Which role a worker has, and whether a canary that fails may be held against it.

Where an engine's canaries differ by role, one of the wrong role waits for a partner that never comes, on an engine that
is well. So:
    - The role is the operator's (`ENGINE_ROLE`), else the engine's own word, else `agg`.
    - The canary is the one of the role that the engine says it has, whatever the operator says: no other can be
      answered. An engine that is in no single role (`DYNAMIC`) is sent none.
    - Until the engine has told its role, a failed canary counts only where the operator named the role, or after one of
      its kind was answered by this process: what was answered once can be.
    - A request that is the same in every role (vLLM's, a path or body of the operator's own) and an engine that never
      tells its role are outside all this.
"""

from __future__ import annotations

from collections.abc import Mapping

from enginewatch.core.request import canary_request
from enginewatch.core.settings import Settings
from enginewatch.engines.profile import DYNAMIC, ROLES, CanaryRequest, Profile, Role, ToldRole


def role_on_page(samples: Mapping[str, float], profile: Profile) -> ToldRole | None:
    """The role that an engine's series carry in a label, from a page's samples; None where they do not say.

    `DYNAMIC` also where they name several roles that exclude one another.
    """
    words = profile.role_words
    if words is None:
        return None
    told = {words.on_series(series) for series in samples} - {None}
    several = told - {"agg"}
    if len(several) > 1:
        return DYNAMIC
    return next(iter(several or told), None)


def told_role(on_page: ToldRole | None, described: ToldRole | None) -> ToldRole | None:
    """What an engine says in all. A page that says `agg` is the weaker word: its front end alone may say so."""
    return on_page if on_page not in (None, "agg") else described or on_page


class WorkerRole:
    """Follows the role of one worker across its processes.

    Args:
        given: the operator's word; None = the engine is to say.
    """

    def __init__(self, given: Role | None) -> None:
        self._given = given
        self._on_page: ToldRole | None = None
        self._described: ToldRole | None = None
        self._matters = False
        self._read: tuple[frozenset[str], Profile, ToldRole | None] | None = None
        self.told: ToldRole | None = None
        """The engine's own word; that of the process before until the one that answers now has spoken."""

    def on_page(self, samples: Mapping[str, float], profile: Profile) -> ToldRole | None:
        """`role_on_page`, which is looked for once on pages that have the same series."""
        if profile.role_words is None:
            return None
        read = self._read
        if read is None or read[1] is not profile or read[0] != samples.keys():
            self._read = read = (frozenset(samples), profile, role_on_page(samples, profile))
        return read[2]

    @property
    def is_given(self) -> bool:
        """Whether the operator named it."""
        return self._given is not None

    @property
    def role(self) -> Role:
        """What the worker is judged as."""
        if self._given is not None:
            return self._given
        return self.told if self.told is not None and self.told != DYNAMIC else "agg"

    @property
    def canary_role(self) -> Role | None:
        """The role whose canary this worker can answer; None where none can be trusted."""
        if self.told is None:
            return self.role
        return None if self.told == DYNAMIC else self.told

    def new_process(self) -> None:
        """Another process answers, which has said nothing yet."""
        self._on_page = self._described = None

    def hear(self, *, on_page: ToldRole | None = None, described: ToldRole | None = None) -> bool:
        """The engine may have said something. Returns True when that changes its word."""
        self._on_page, self._described = on_page or self._on_page, described or self._described
        before, self.told = self.told, told_role(self._on_page, self._described) or self.told
        return self.told != before

    def request(self, settings: Settings, profile: Profile) -> CanaryRequest | None:
        """The effective canary request from now on; None where canaries are off or none can be trusted."""
        self._matters = _matters(settings, profile)
        role = self.canary_role
        return None if role is None and self._matters else canary_request(settings, profile, role or self.role)

    def may_count(self, *, was_answered: bool) -> bool:
        """Whether a canary that fails may be held against the engine.

        Args:
            was_answered: whether this process has answered a canary of this kind.
        """
        if was_answered or not self._matters:
            return True
        if self._on_page is not None or self._described is not None:
            return True
        return self._given is not None and self._given == self.canary_role


def _matters(settings: Settings, profile: Profile) -> bool:
    """Whether this engine has a role to tell, and takes another request in another one."""
    if profile.role_words is None:
        return False
    return len({_sent(canary_request(settings, profile, role)) for role in ROLES}) > 1


def _sent(request: CanaryRequest | None) -> str:
    return "" if request is None else repr((request.method, request.path, request.body, request.raw_body))

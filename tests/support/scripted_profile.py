"""An engine for the virtual shell whose page is made from a profile alone: what can be claimed of every engine."""

from __future__ import annotations

from virtual_shell import ScriptedCore, ScriptedEngine

from enginewatch.core.progress import REQUEST_GRAINED_STALL_SEC
from enginewatch.core.settings import Settings
from enginewatch.engines.profile import Grain, LegKind, Metric, Profile

TOKENS_PER_REQUEST = 500.0
"""Short requests: at the usual rate of 50 tokens a second one ends every ten seconds."""


class ScriptedProfile(ScriptedEngine):
    """One core of the engine that a profile describes; each of its metrics is one series, under its first name."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(start_time=1000.0 if profile.start_time is not None else None, version="99.0")
        self.kind = profile.kind
        self.profile = profile

    def stall_limit_sec(self, settings: Settings) -> float:
        """How long the profile lets a core be frozen."""
        step = any(leg.grain is Grain.STEP for leg in self.profile.legs)
        return max(settings.stall_sec, self.profile.longest_step_sec, 0.0 if step else REQUEST_GRAINED_STALL_SEC)

    def page(self) -> dict[str, float]:
        [core] = self.cores.values()
        page = dict(self.extra)
        if self.start_time is not None:
            page[self.series(self.profile.start_time)] = self.start_time
        for leg in self.profile.legs:
            page[self.series(leg.metric)] = _leg_value(core, leg.kind, leg.grain)
        for metric, value in ((self.profile.running, core.running), (self.profile.waiting, core.waiting)):
            if metric.names:  # some engines have no gauge that can be believed
                page[self.series(metric)] = value
        return {series: value for series, value in page.items() if not self.hide(series)}

    def series(self, metric: Metric | None) -> str:
        """A canonical series that the metric takes in."""
        assert metric is not None
        labels = {label: min(allowed) for label, allowed in metric.where.items() if "" not in allowed}
        if self.profile.core_label and metric.prefixed:
            labels[self.profile.core_label] = "0"
        text = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        name = metric.full_names(self.profile.prefixes)[0]
        return f"{name}{{{text}}}" if text else name


def _leg_value(core: ScriptedCore, kind: LegKind, grain: Grain) -> float:
    if kind is LegKind.RISING_GAUGE:
        return round(core.kv, 9)
    tokens = core.tokens + 1e-6  # however the time was cut
    return float(int(tokens)) if grain is Grain.STEP else float(int(tokens / TOKENS_PER_REQUEST))

"""The numbers an operator may turn while the sidecar runs, as the judgement uses them.

Reading them from a file or the environment, and what happens to bad ones, is `sidecar.config`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Mode = Literal["enforce", "shadow"]

SHORT_CANARY_SEC: Final = 1.0
"""Less is doubtful as a deadline of canaries: one step of a busy neighbour on the same GPU may take as long."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Effective hot settings; all times in seconds. docs/configuration.md explains each."""

    poll_interval_sec: float = 5.0
    stall_sec: float = 30.0
    metrics_timeout_sec: float = 10.0
    warmup_sec: float = 600.0
    active_probe_enabled: bool = True
    active_probe_path: str = ""
    active_probe_method: str = ""
    active_probe_body: str = ""
    active_probe_timeout_sec: float = 5.0
    active_probe_min_failures: int = 2
    active_probe_idle_sec: float = 0.0
    unreach_sec: float = 0.0
    """0 means twice stall_sec; read `unreach_after_sec`."""
    startup_budget_sec: float = 5400.0
    peer_stall_sec: float = 60.0
    log_stall_sec: float = 15.0
    log_window_sec: float = 120.0
    mode: Mode = "enforce"

    @property
    def unreach_after_sec(self) -> float:
        """How long /metrics may fail before `unreach-hang`."""
        return self.unreach_sec or 2 * self.stall_sec

    @property
    def stale_after_sec(self) -> float:
        """How long a watcher that sees nothing may go on reporting a hang: one that cannot see must not kill."""
        return 3 * (self.poll_interval_sec + self.metrics_timeout_sec)

    def doubts(self, *, log_file: bool) -> list[str]:
        """Sentences about combinations that are legal but work badly, naming the numbers."""
        found = []
        canary_round = self.active_probe_timeout_sec + self.poll_interval_sec
        if self.active_probe_enabled and canary_round >= self.stall_sec / 2:
            found.append(
                f"active_probe_timeout_sec ({self.active_probe_timeout_sec:g}) + poll_interval_sec "
                f"({self.poll_interval_sec:g}) is not below half of stall_sec ({self.stall_sec:g}): "
                "fewer than two canaries fit into a stall, so a hang is declared late"
            )
        if self.active_probe_enabled and self.active_probe_timeout_sec < SHORT_CANARY_SEC:
            found.append(
                f"active_probe_timeout_sec ({self.active_probe_timeout_sec:g}) is below {SHORT_CANARY_SEC:g}: "
                "a healthy engine may take longer over one token, and then it is declared hung while it is idle"
            )
        if self.metrics_timeout_sec > max(self.stall_sec, self.poll_interval_sec):
            found.append(
                f"metrics_timeout_sec ({self.metrics_timeout_sec:g}) is above stall_sec ({self.stall_sec:g}): "
                "while one scrape hangs nothing is judged, so a hang is declared late"
            )
        if log_file and self.log_stall_sec >= self.stall_sec:
            found.append(
                f"log_stall_sec ({self.log_stall_sec:g}) is not below stall_sec ({self.stall_sec:g}): "
                "the log channel can never speed up a verdict"
            )
        return found

"""Puts the configuration into force as it changes, and tells people what is wrong with it."""

from __future__ import annotations

from enginewatch.core.settings import Settings
from enginewatch.sidecar.board import Board
from enginewatch.sidecar.config import ENVIRONMENT
from enginewatch.sidecar.faults import Faults
from enginewatch.sidecar.journal import Journal
from enginewatch.sidecar.metrics import Metrics
from enginewatch.sidecar.reload import Reload, SettingsSource


class SettingsKeeper:
    """Looks at the settings' source and carries what is new to the board, the metrics and the log.

    Args:
        source: where the settings come from.
        board: shows the settings in force.
        metrics: count what could not be used.
        journal: the log.
        faults: takes note of survived exceptions.
        follows_log: whether a log file is set; some combinations are doubtful only then.
    """

    def __init__(
        self,
        source: SettingsSource,
        *,
        board: Board,
        metrics: Metrics,
        journal: Journal,
        faults: Faults,
        follows_log: bool = False,
    ) -> None:
        self._source = source
        self._board = board
        self._metrics = metrics
        self._journal = journal
        self._faults = faults
        self._follows_log = follows_log

    def begin(self, reload: Reload | None) -> None:
        """Tells what the first look brought, with what is wrong in the environment."""
        if reload is not None:
            self._tell(reload, self._source.settings, is_first=True)
            self._doubt(reload.settings)

    def check(self) -> Settings | None:
        """Looks at the source; the new settings where they changed. Never raises."""
        try:
            reload = self._source.poll()
            if reload is None:
                return None
            before = self._board.settings
            self._tell(reload, before)
            if reload.settings == before:
                return None
            self._board.settings = reload.settings
            self._doubt(reload.settings)
            return reload.settings
        except Exception as error:
            self._faults.note("config", error)
            return None

    def _tell(self, reload: Reload, before: Settings, *, is_first: bool = False) -> None:
        write = self._journal.write
        self._metrics.reloaded(reload, self._board.unix(self._board.clock()))
        for problem in reload.rejected:
            in_environment = problem.where == ENVIRONMENT
            if in_environment and not is_first:
                continue
            what = "its default applies" if in_environment else "the last good settings stay"
            write(
                "error",
                f"a setting cannot be used: {what}",
                key=problem.key,
                file=problem.where,
                reason=problem.reason,
            )
        for note in reload.notes:
            write("warning", "a doubtful key in the configuration", key=note.key, file=note.where, reason=note.reason)
        if reload.outcome == "loaded":
            changed = reload.settings != before
            write("info", "the configuration was read", file=self._source.path, settings_changed=changed or is_first)
        elif reload.outcome == "absent":
            write("info", "there is no configuration file: environment and defaults apply", file=self._source.path)

    def _doubt(self, settings: Settings) -> None:
        for doubt in settings.doubts(log_file=self._follows_log):
            self._journal.write("warning", doubt)

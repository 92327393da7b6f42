"""The snapshots on disk: `<run dir>/prefill-ips` and `<run dir>/decode-ips`."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from enginewatch.core.drift import LARGEST_SNAPSHOT_BYTES, BadSnapshot, Recorded, parse_snapshot
from enginewatch.guard.settings import ROLES


class NoSnapshot(Exception):  # noqa: N818 - as BadSnapshot
    """There is none that can be used; the text is a sentence that says why."""


class CannotWrite(Exception):  # noqa: N818
    """The run directory cannot be written; the text is a sentence that says why."""


def path_of(run_dir: str, role: str) -> str:
    """Where the snapshot of a role is."""
    return os.path.join(run_dir, f"{role}-ips")


def read_snapshot(run_dir: str, role: str) -> dict[str, Recorded]:
    """The engines that the boot recorded of a role, by address.

    Raises:
        NoSnapshot: it is missing, unreadable, empty or corrupt.
    """
    path = path_of(run_dir, role)
    try:
        return parse_snapshot(_read(path))
    except FileNotFoundError:
        raise NoSnapshot(f"there is no {path} yet: guard boot is still waiting or did not run here") from None
    except OSError as error:
        raise NoSnapshot(f"{path} cannot be read: {error.strerror}") from None
    except BadSnapshot as error:
        raise NoSnapshot(f"{path} {error}") from None


def prepare(run_dir: str) -> None:
    """Make the directory if need be, prove that it can be written, and remove the snapshots of an earlier boot.

    Raises:
        CannotWrite: that failed.
    """
    try:
        os.makedirs(run_dir, exist_ok=True)
        _write(os.path.join(run_dir, "prefill-ips"), "", keep=False)
        for role in ROLES:
            if os.path.lexists(path_of(run_dir, role)):
                os.unlink(path_of(run_dir, role))
    except OSError as error:
        raise CannotWrite(f"the run directory {run_dir} cannot be written: {error.strerror}") from None


def write_all(run_dir: str, snapshots: Mapping[str, str]) -> None:
    """Write the snapshots, by role, each as a whole or not at all.

    Raises:
        CannotWrite: that failed.
    """
    try:
        for role, text in snapshots.items():
            _write(path_of(run_dir, role), text, keep=True)
    except OSError as error:
        raise CannotWrite(f"the run directory {run_dir} cannot be written: {error.strerror}") from None


def _read(path: str) -> bytes:
    # A pipe in its place would hold whoever opens it, and a device has no end.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise BadSnapshot("is not a file")
        return file.read(LARGEST_SNAPSHOT_BYTES + 1)


def _write(path: str, text: str, *, keep: bool) -> None:
    # The name is always the same: what a boot that was killed left behind is written over, not piled up.
    temporary = f"{path}.new"
    try:
        with open(temporary, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        if keep:
            os.replace(temporary, path)
    finally:
        if os.path.lexists(temporary):
            os.unlink(temporary)

"""`guard export DIR`: writes the one-file guard into a directory, from an image into a pod's volume.

From itself where it runs as the one file, from the file in the wheel where it is installed, and from its sources in an
editable install: the same bytes each time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from zipimport import zipimporter

from enginewatch.guard import pack
from enginewatch.guard.main import complain, say
from enginewatch.guard.settings import UsageError
from enginewatch.guard.version import version


def run(arguments: Sequence[str]) -> int:
    """Writes DIR/enginewatch-guard.pyz, mode 0755, all of it or nothing.

    Returns:
        0; 1 where it cannot be written.

    Raises:
        UsageError: it was not called with one directory.
    """
    if len(arguments) != 1 or not arguments[0] or arguments[0].startswith("-"):
        raise UsageError("export takes one directory: guard export DIR")
    directory = Path(arguments[0])
    target = directory / pack.FILE_NAME
    try:
        content = one_file()
    except (OSError, ValueError) as error:
        complain(f"the guard itself cannot be read: {error}")
        return 1
    try:
        if not directory.is_dir():
            what = "is not a directory" if directory.exists() else "does not exist"
            complain(f"{directory} {what}; give the directory where the volume is mounted")
            return 1
        _write(target, content)
    except (OSError, ValueError) as error:
        why = error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)
        complain(f"{target} cannot be written: {why}")
        return 1
    say(str(target))
    return 0


def one_file() -> bytes:
    """The bytes of enginewatch-guard.pyz.

    Raises:
        OSError: a file cannot be read.
        ValueError: the sources name no version.
    """
    loader = __spec__.loader
    if isinstance(loader, zipimporter):
        return Path(loader.archive).read_bytes()
    bundled = Path(__file__).resolve().with_name(pack.FILE_NAME)
    return bundled.read_bytes() if bundled.is_file() else pack.build(version())


def _write(target: Path, content: bytes) -> None:
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()  # of a process that had this number in another container
    try:
        # Exclusively: what lies at that place in a volume that others write to is not followed.
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755), "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), 0o755)  # whatever the umask
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise

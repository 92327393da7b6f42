"""Builds enginewatch-guard.pyz: the guard as one file that any python3 from 3.9 on runs.

    python3 -I pack.py FILE

The same sources give the same bytes on every machine and with every Python: entries are sorted, their dates and modes
are fixed, and nothing is compressed, because what zlib makes of the same bytes depends on which zlib it is.
Imports nothing of the package: the build backend loads it from its file.
"""

from __future__ import annotations

import hashlib
import io
import re
import sys
import zipfile
from pathlib import Path

FILE_NAME = "enginewatch-guard.pyz"
VERSION_ENTRY = "enginewatch/guard/VERSION"
SHEBANG = b"#!/usr/bin/env python3\n"
PACKAGE_DIR = Path(__file__).resolve().parents[1]
_FIXED_DATE = (1980, 1, 1, 0, 0, 0)  # the first that a zip file can hold
_REGULAR_FILE_0644 = 0o100644
_UNIX = 3
_VERSION = re.compile(r'^version\s*=\s*"([0-9A-Za-z.+!-]+)"', re.MULTILINE)


def build(version: str, package_dir: Path = PACKAGE_DIR) -> bytes:
    """The file's bytes.

    Args:
        version: what `guard --version` is to say.
        package_dir: `src/enginewatch`, or where it is installed.

    Raises:
        OSError: a source cannot be read.
    """
    guard = sorted(path for path in (package_dir / "guard").iterdir() if path.suffix == ".py")
    sources = [package_dir / "__init__.py", package_dir / "core/__init__.py", package_dir / "core/drift.py", *guard]
    entries = {f"enginewatch/{path.relative_to(package_dir).as_posix()}": path.read_bytes() for path in sources}
    entries["__main__.py"] = (package_dir / "guard/__main__.py").read_bytes()
    entries[VERSION_ENTRY] = version.encode()
    packed = io.BytesIO()
    packed.write(SHEBANG)
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(entries):
            entry = zipfile.ZipInfo(name, _FIXED_DATE)
            entry.create_system = _UNIX
            entry.external_attr = _REGULAR_FILE_0644 << 16
            archive.writestr(entry, entries[name])
    return packed.getvalue()


def version_in(pyproject: Path) -> str:
    """The version that a pyproject.toml gives, read without tomllib, which Python has only since 3.11.

    Raises:
        OSError: it cannot be read.
        ValueError: it gives none.
    """
    found = _VERSION.search(pyproject.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f'{pyproject} has no line version = "..."')
    return found[1]


def main(arguments: list[str]) -> int:
    """Writes the file named on the command line. Returns 0, 1 where it could not, 2 for a wrong call."""
    if len(arguments) != 1:
        print("guard/pack.py: give the file to write, such as dist/enginewatch-guard.pyz", file=sys.stderr)
        return 2
    target = Path(arguments[0])
    try:
        content = build(version_in(PACKAGE_DIR.parents[1] / "pyproject.toml"))
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.part")
        partial.write_bytes(content)
        partial.chmod(0o755)
        partial.replace(target)
    except (OSError, ValueError) as error:
        print(f"guard/pack.py: {error}", file=sys.stderr)
        return 1
    print(f"{target}: {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

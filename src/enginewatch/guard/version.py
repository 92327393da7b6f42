"""Which version of the guard this is, and the digest of the one file: what `sha256sum enginewatch-guard.pyz` says.

The version is baked into the one file; elsewhere it is what the sources or the installation say.
"""

from __future__ import annotations

import hashlib
import pkgutil
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from enginewatch.guard import pack


def described() -> str:
    """For people, on one line."""
    from enginewatch.guard.export import one_file

    try:
        return f"enginewatch-guard {version()} (sha256 {hashlib.sha256(one_file()).hexdigest()})"
    except (OSError, ValueError) as error:
        return f"enginewatch-guard of unknown version: {error}"


def version() -> str:
    """The version, as pyproject.toml has it.

    Raises:
        ValueError: it runs from sources that nobody installed and that have no pyproject.toml.
    """
    try:
        baked = pkgutil.get_data("enginewatch.guard", "VERSION")
    except OSError:
        baked = None
    if baked is not None:
        return baked.decode()
    try:
        return pack.version_in(pack.PACKAGE_DIR.parents[1] / "pyproject.toml")
    except OSError:
        pass
    try:
        return installed_version("enginewatch")
    except PackageNotFoundError:
        raise ValueError("no version: it is neither installed nor run from a checkout") from None

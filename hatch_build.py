"""Puts the one-file guard into the wheel, so that `enginewatch guard export` can place it from an image.

An editable install has none: there `export` builds it from the sources, as `make guard` does.
"""

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

GUARD = "src/enginewatch/guard"


class GuardHook(BuildHookInterface):  # type: ignore[type-arg]  # its parameter is private to the backend
    """Runs when the wheel is built, also from the sdist."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds the guard beside the sources and names it to the wheel."""
        if version == "editable":
            return
        spec = importlib.util.spec_from_file_location("enginewatch_guard_pack", Path(self.root, GUARD, "pack.py"))
        assert spec is not None
        assert spec.loader is not None
        pack = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(pack)
        self._directory = tempfile.TemporaryDirectory(prefix="enginewatch-guard-")
        built = Path(self._directory.name, pack.FILE_NAME)
        built.write_bytes(pack.build(self.metadata.version, Path(self.root, GUARD).parent))
        built.chmod(0o755)
        build_data["force_include"][str(built)] = f"enginewatch/guard/{pack.FILE_NAME}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what was built: the wheel holds it now."""
        if version != "editable":
            self._directory.cleanup()

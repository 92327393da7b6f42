"""docs/guard.md and its runbook, taken apart: the marked blocks, and the manifests as data."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

yaml: Any = importlib.import_module("yaml")

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "guard.md").read_text()
RUNBOOK = (DOCS / "runbooks" / "router-drift.md").read_text()

MANIFESTS = dict(re.findall(r"^<!-- manifest: (.*?) -->\n```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
_MARKED = re.compile(r"^<!-- ([a-z: ]+) -->\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def marked(text: str, name: str) -> list[str]:
    """The lines of the block that carries this mark."""
    found: list[list[str]] = [body.splitlines() for mark, body in _MARKED.findall(text) if mark == name]
    assert len(found) == 1, f"there is not one block marked {name}"
    return found[0]


def loaded(name: str) -> list[dict[str, Any]]:
    """The documents of a manifest."""
    return [document for document in yaml.safe_load_all(MANIFESTS[name]) if document]


def router() -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod of the whole manifest, and its router's container."""
    pod = loaded("vllm-router with Mooncake")[0]["spec"]["template"]["spec"]
    return pod, pod["containers"][0]


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    """A container's variables."""
    return {entry["name"]: entry["value"] for entry in container["env"]}

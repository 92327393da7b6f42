"""Loading libraries without what this sidecar will not use.

aiohttp builds an SSL context with the system's certificates when it is imported: 1.8 MiB and 30 ms, for good. Most
engines are asked over plain HTTP on the pod's own network, or with a CA file of their own, and redirects are never
followed elsewhere, so nothing would ever be verified against that context.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_FOR_OTHERS = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir", "SSLKEYLOGFILE")


def leave_to_others() -> None:
    """Forgets variables that a pod's containers share and that mean the engine.

    With PROMETHEUS_MULTIPROC_DIR our metrics would stand on the engine's page, and where the directory is missing there
    would be no sidecar. SSLKEYLOGFILE would do the same, and write down what keeps the API key secret.
    """
    for name in _FOR_OTHERS:
        os.environ.pop(name, None)


def load_http_client(engine_url: str) -> None:
    """Imports aiohttp; the system's certificates are only loaded for an https engine."""
    if "aiohttp" in sys.modules or engine_url.lower().startswith("https:"):
        return
    with _no_certificates():
        import aiohttp  # noqa: F401


@contextmanager
def _no_certificates() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _VARIABLES}
    os.environ.update(dict.fromkeys(_VARIABLES, os.devnull))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

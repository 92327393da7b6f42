from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from dns_server import DnsServer
from fleet import Fleet
from guard_run import Guard
from island import Island, NoIslandError


@pytest.fixture(scope="session")
def island(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Island]:
    """A network of its own with real DNS. Skips where this user can have none; in CI, which runs as root, it fails."""
    try:
        made = Island.settle(tmp_path_factory.mktemp("etc"))
    except NoIslandError as error:
        if os.environ.get("CI") and os.geteuid() == 0:
            raise
        pytest.skip(f"no namespaces for a network of its own: {error}")
    yield made
    made.close()


@pytest.fixture
def dns(island: Island) -> Iterator[DnsServer]:
    """The only name server that the guard in the island knows."""
    at = ("127.0.0.1", 53)
    server = DnsServer(
        island.socket(socket.AF_INET, socket.SOCK_DGRAM, at), island.socket(socket.AF_INET, socket.SOCK_STREAM, at)
    )
    yield server
    server.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Engines on this machine's own loopback."""
    made = Fleet()
    yield made
    made.close()


@pytest.fixture
def island_fleet(island: Island) -> Iterator[Fleet]:
    """Engines on the island's loopback."""
    made = Fleet(island.socket)
    yield made
    made.close()


@pytest.fixture
def guard(tmp_path: Path) -> Guard:
    """A router's container on this machine."""
    return Guard(tmp_path)


@pytest.fixture
def island_guard(tmp_path: Path, island: Island) -> Guard:
    """A router's container in the island."""
    return Guard(tmp_path, island=island)

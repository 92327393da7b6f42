"""The guard and names: libc's own lookups, a DNS server that misbehaves, and engines on the addresses it gives."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from dns_server import EMPTY, NXDOMAIN, SERVFAIL, SILENCE, DnsServer
from fleet import HEALTHY, LOADING, Fleet, identity
from guard_run import Guard, ended, wait_until
from island import IPV6, Island, NoIslandError

PREFILL, DECODE = "prefill.serving.test", "decode.serving.test"
BY_NAME = (PREFILL, DECODE)


class Service:
    """Two headless Services: their names, three prefills of which two are published, and one decode."""

    def __init__(self, guard: Guard, fleet: Fleet, dns: DnsServer) -> None:
        self.guard, self.dns = guard, dns
        self.prefill = fleet.role("127.0.0.2", "127.0.0.3", "127.0.0.5")
        self.decode = fleet.role("127.0.0.4")
        guard.between(self.prefill, self.decode, BY_NAME)
        guard.recorded([self.prefill[address].line for address in ("127.0.0.2", "127.0.0.3")], self.decode.lines())
        dns.a[PREFILL], dns.a[DECODE] = ["127.0.0.2", "127.0.0.3"], ["127.0.0.4"]


@pytest.fixture
def service(island_guard: Guard, island_fleet: Fleet, dns: DnsServer) -> Service:
    return Service(island_guard, island_fleet, dns)


def test_names_are_looked_up_in_real_dns(island: Island, dns: DnsServer) -> None:
    dns.a[PREFILL], dns.aaaa[PREFILL] = [f"127.0.1.{number}" for number in range(1, 201)], ["fd00::1"]
    dns.a[DECODE] = dns.aaaa[DECODE] = SERVFAIL
    program = """
import json, socket, sys
said = {}
for name in sys.argv[1:]:
    try:
        said[name] = sorted({found[4][0] for found in socket.getaddrinfo(name, 80)})
    except socket.gaierror as error:
        said[name] = error.errno
print(json.dumps(said))
"""
    asking = island.command(sys.executable, "-I", "-S", "-c", program, PREFILL, DECODE, "absent.test")
    said = json.loads(subprocess.run(asking, check=True, capture_output=True, timeout=30).stdout)
    assert said == {
        PREFILL: sorted(["fd00::1", *dns.a[PREFILL]]),  # 200 do not fit a datagram: libc came again over TCP
        DECODE: socket.EAI_AGAIN,
        "absent.test": socket.EAI_NONAME,
    }


def test_a_machine_that_cannot_make_namespaces_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoIslandError, match="unshare"):
        Island.settle(tmp_path)


def test_the_island_is_another_network(island: Island) -> None:
    theirs = subprocess.run(island.command("/bin/readlink", "/proc/self/ns/net"), capture_output=True, check=True)
    assert theirs.stdout.decode().strip() != os.readlink("/proc/self/ns/net")


@pytest.fixture
def ipv6(island: Island) -> None:
    """Skips on a kernel without IPv6."""
    try:
        island.socket(socket.AF_INET6, address=(IPV6[0], 0)).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


def test_a_name_stands_for_all_its_addresses(service: Service) -> None:
    service.guard.booted()
    assert [line.split("|")[0] for line in service.guard.snapshot("prefill")] == ["127.0.0.2", "127.0.0.3"]
    port = service.prefill.port
    assert service.guard.flags()[:4] == [
        *("--prefill", f"http://127.0.0.2:{port}"),
        *("--prefill", f"http://127.0.0.3:{port}"),
    ]
    assert service.guard.live().code == 0


def test_a_new_address_fires_only_when_its_engine_is_healthy(service: Service) -> None:
    service.dns.a[PREFILL] = ["127.0.0.2", "127.0.0.3", "127.0.0.5"]
    service.prefill["127.0.0.5"].health(LOADING)
    assert service.guard.live().code == 0
    service.prefill["127.0.0.5"].engine.refuse()
    assert service.guard.live().code == 0
    service.prefill["127.0.0.5"].engine.open()
    service.prefill["127.0.0.5"].health(HEALTHY)
    result = service.guard.live()
    assert result.code == 1
    assert "prefill" in result.line
    assert "127.0.0.5" in result.line


def test_a_pod_that_was_replaced_under_another_address_fires_as_growth(service: Service) -> None:
    service.dns.a[PREFILL] = ["127.0.0.2", "127.0.0.5"]
    result = service.guard.live()
    assert result.code == 1
    assert "127.0.0.5" in result.line


def test_fewer_addresses_and_another_order_never_fire(service: Service) -> None:
    service.prefill["127.0.0.2"].says(identity("pst-99.00"))
    service.dns.a[PREFILL] = ["127.0.0.3"]
    assert service.guard.live().code == 0
    service.prefill["127.0.0.2"].says(identity("pst-1.00"))
    service.dns.a[PREFILL] = ["127.0.0.3", "127.0.0.2"]
    for _ in range(3):
        assert service.guard.live().code == 0


def silence(dns: DnsServer) -> None:
    dns.a[PREFILL] = dns.aaaa[PREFILL] = SILENCE


def servfail(dns: DnsServer) -> None:
    dns.a[PREFILL] = dns.aaaa[PREFILL] = SERVFAIL


def nxdomain(dns: DnsServer) -> None:
    dns.a[PREFILL] = dns.aaaa[PREFILL] = NXDOMAIN


def gone(dns: DnsServer) -> None:
    del dns.a[PREFILL]


def empty(dns: DnsServer) -> None:
    dns.a[PREFILL] = EMPTY


def truncated(dns: DnsServer) -> None:
    """Too many for a datagram, the old ones not among them, and nobody answers over TCP."""
    dns.a[PREFILL] = ["127.0.0.5", *(f"127.0.1.{number}" for number in range(1, 200))]
    dns.tcp_answers = False


FAULTS = [silence, servfail, nxdomain, gone, empty, truncated]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.__name__))
def test_a_lookup_that_fails_never_fires_and_hides_nothing_of_the_other_role(
    service: Service, fault: Callable[[DnsServer], None]
) -> None:
    fault(service.dns)
    quickly = {"GUARD_DEADLINE_SEC": "2"}
    result = service.guard.live(**quickly)
    assert result.code == 0, result
    assert result.line
    service.decode["127.0.0.4"].says(identity("pst-99.00"))
    result = service.guard.live(**quickly)
    assert result.code == 1, result
    assert "127.0.0.4" in result.line


@pytest.mark.parametrize("fault", [SILENCE, SERVFAIL, NXDOMAIN], ids=["silence", "servfail", "nxdomain"])
def test_a_resolver_that_loses_the_other_family_does_not_blind_the_guard(service: Service, fault: str) -> None:
    service.dns.aaaa[PREFILL] = service.dns.aaaa[DECODE] = fault
    result = service.guard.live()
    assert result.code == 0
    assert "not judged" not in result.line
    service.prefill["127.0.0.3"].says(identity("pst-99.00"))
    result = service.guard.live()
    assert result.code == 1, result
    assert "127.0.0.3" in result.line


def test_a_hanging_lookup_ends_with_the_deadline(service: Service) -> None:
    silence(service.dns)
    service.dns.a[DECODE] = service.dns.aaaa[DECODE] = SILENCE
    begun = time.monotonic()
    result = service.guard.live(GUARD_DEADLINE_SEC="1")
    assert result.code == 0, result
    assert result.line
    assert time.monotonic() - begun < 1 + 10  # libc itself would go on for 10 s and more, for each name


def test_a_dual_stack_pod_is_one_engine_by_its_ipv4_address(service: Service) -> None:
    service.dns.aaaa[PREFILL] = ["fd00::1", "fd00::2"]
    service.guard.booted()
    assert [line.split("|")[0] for line in service.guard.snapshot("prefill")] == ["127.0.0.2", "127.0.0.3"]
    assert service.guard.live().code == 0


@pytest.mark.usefixtures("ipv6")
@pytest.mark.parametrize("lost", [EMPTY, SERVFAIL, NXDOMAIN, SILENCE], ids=["empty", "servfail", "nxdomain", "silence"])
def test_a_lookup_that_loses_one_address_family_is_no_growth(
    island_guard: Guard, island_fleet: Fleet, dns: DnsServer, lost: str
) -> None:
    names = {PREFILL: ["127.0.0.2"], DECODE: ["127.0.0.4"]}
    prefill, decode = island_fleet.role("127.0.0.2", "fd00::1"), island_fleet.role("127.0.0.4")
    dns.a.update(names)
    dns.aaaa[PREFILL] = ["fd00::1"]
    island_guard.between(prefill, decode, BY_NAME).recorded([prefill["127.0.0.2"].line], decode.lines())
    dns.a[PREFILL] = lost  # only the IPv6 address of the same pod is left, and its engine is healthy
    assert island_guard.live(GUARD_DEADLINE_SEC="2").code == 0
    assert prefill["fd00::1"].engine.connections == 0


@pytest.mark.usefixtures("ipv6")
def test_an_ipv6_address_is_watched_like_any_other(island_guard: Guard, island_fleet: Fleet) -> None:
    prefill, decode = island_fleet.role("::1", "fd00::1"), island_fleet.role("127.0.0.4")
    island_guard.between(prefill, decode).booted()
    assert island_guard.snapshot("prefill") == prefill.lines()
    port = prefill.port
    assert island_guard.flags()[:4] == [
        *("--prefill", f"http://[::1]:{port}"),
        *("--prefill", f"http://[fd00::1]:{port}"),
    ]
    assert island_guard.live().code == 0
    prefill["::1"].says(identity("pst-99.00"))
    result = island_guard.live()
    assert result.code == 1, result
    for what in ("::1", "pst-1.00", "pst-99.00"):
        assert what in result.line


@pytest.mark.usefixtures("ipv6")
def test_ipv6_names_work_like_ipv4_ones(island_guard: Guard, island_fleet: Fleet, dns: DnsServer) -> None:
    prefill, decode = island_fleet.role("fd00::1", "fd00::2"), island_fleet.role("fd00::3")
    dns.aaaa[PREFILL], dns.aaaa[DECODE] = ["fd00::1"], ["fd00::3"]
    island_guard.between(prefill, decode, BY_NAME).booted()
    assert island_guard.snapshot("prefill")[0].endswith("|pst-1.00")
    assert island_guard.flags() == [
        *("--prefill", f"http://[fd00::1]:{prefill.port}"),
        *("--decode", f"http://[fd00::3]:{decode.port}"),
    ]
    assert island_guard.live().code == 0
    # The pods also get IPv4 addresses: the snapshot's family counts.
    dns.a[PREFILL] = ["127.0.0.9"]
    assert island_guard.live().code == 0
    dns.aaaa[PREFILL] = ["fd00::1", "fd00::2"]
    result = island_guard.live()
    assert (result.code, "fd00::2" in result.line) == (1, True)


def test_boot_waits_for_names_that_do_not_resolve_yet(service: Service) -> None:
    dns, guard = service.dns, service.guard
    del dns.a[PREFILL]
    dns.a[DECODE] = EMPTY
    process = guard.start("boot", "--", str(guard.router), GUARD_BUDGET_SEC="600")
    wait_until(lambda: dns.asked[PREFILL] >= 4 and dns.asked[DECODE] >= 4)
    assert process.poll() is None
    assert not guard.calls.exists()
    dns.a[PREFILL] = ["127.0.0.3"]
    asked = dns.asked[DECODE]
    wait_until(lambda: dns.asked[DECODE] >= asked + 4)
    assert process.poll() is None, "one role is not enough"
    dns.a[DECODE] = ["127.0.0.4"]
    result = ended(process)
    assert result.code == 0, result
    assert PREFILL in result.err
    assert [line.split("|")[0] for line in guard.snapshot("prefill")] == ["127.0.0.3"]


@pytest.mark.parametrize("fault", [silence, servfail, nxdomain, empty], ids=lambda fault: str(fault.__name__))
def test_a_role_that_never_resolves_ends_boot_with_its_budget(
    service: Service, fault: Callable[[DnsServer], None]
) -> None:
    fault(service.dns)
    result = service.guard.boot(GUARD_BUDGET_SEC="2")
    assert result.code == 1, result
    assert result.err.splitlines()[-1].startswith("guard: ")
    assert "prefill" in result.err.splitlines()[-1]
    assert not service.guard.calls.exists()
    # The snapshot of the router before this one would let `ready` and `live` speak of engines that are gone.
    assert not (service.guard.run_dir / "prefill-ips").exists()
    assert service.guard.live().code == 0
    assert service.guard.ready().code == 1


def test_engines_that_appear_during_the_wait_are_part_of_the_snapshot(service: Service) -> None:
    guard, dns = service.guard, service.dns
    dns.a[PREFILL] = ["127.0.0.2"]
    service.decode["127.0.0.4"].sidecar.refuse()
    process = guard.start("boot", "--", str(guard.router), GUARD_BUDGET_SEC="600")
    wait_until(lambda: service.prefill["127.0.0.2"].sidecar.connections >= 1)
    dns.a[PREFILL] = ["127.0.0.3", "127.0.0.5"]
    asked = dns.asked[PREFILL]
    wait_until(lambda: dns.asked[PREFILL] >= asked + 4)
    service.decode["127.0.0.4"].sidecar.open()
    assert ended(process).code == 0
    assert [line.split("|")[0] for line in guard.snapshot("prefill")] == ["127.0.0.3", "127.0.0.5"]
    assert guard.live().code == 0


def test_two_thousand_addresses_behind_one_name_end_under_the_deadline(service: Service) -> None:
    strangers = [f"127.1.{number >> 8}.{number & 255}" for number in range(1, 2000)]
    service.dns.a[PREFILL] = ["127.0.0.2", "127.0.0.3", *strangers]
    begun = time.monotonic()
    result = service.guard.live()
    assert result.code == 0, result
    assert len(result.line) < 1000
    assert time.monotonic() - begun < 4 + 15
    service.decode["127.0.0.4"].says(identity("pst-99.00"))
    assert service.guard.live().code == 1


class Sniffer:
    """Counts the connection attempts on the island's loopback, to whichever port."""

    def __init__(self, island: Island) -> None:
        every_protocol = 3
        self._socket = island.socket(socket.AF_PACKET, socket.SOCK_RAW, ("lo", every_protocol))
        self._socket.setblocking(False)

    def attempts(self) -> int:
        """How many since the last call."""
        count = 0
        while True:
            try:
                frame, about = self._socket.recvfrom(65536)
            except BlockingIOError:
                return count
            ethertype, protocol = struct.unpack_from("!H", frame, 12)[0], frame[23]
            if about[2] == socket.PACKET_OUTGOING and ethertype == 0x0800 and protocol == socket.IPPROTO_TCP:
                flags = frame[14 + (frame[14] & 15) * 4 + 13]
                count += flags & 0x12 == 0x02  # SYN without ACK

    def close(self) -> None:
        self._socket.close()


def test_watcher_port_zero_sends_not_one_packet_to_anyone(service: Service, island: Island) -> None:
    service.dns.a[PREFILL] = ["127.0.0.2", "127.0.0.3", "127.0.0.77"]
    none = {"GUARD_PREFILL_WATCHER_PORT": "0", "GUARD_DECODE_WATCHER_PORT": "0"}
    sniffer = Sniffer(island)
    try:
        service.guard.booted(**none)
        assert sniffer.attempts() == 0
        assert service.guard.live(**none).code == 0
        assert sniffer.attempts() == 0
        assert service.guard.live(**(none | {"GUARD_DECODE_WATCHER_PORT": str(service.decode.watcher_port)})).code == 1
        assert sniffer.attempts() == 2  # the decode's sidecar, then its /health: the count does count
    finally:
        sniffer.close()

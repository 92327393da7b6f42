"""TLS towards the engine: whom to trust, and that a wrong certificate is never a dead engine."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.client.servers import Serve, answering, connections_to, open_sockets, read_request, response

from enginewatch.client.target import EngineClient, ScrapeFailure, Target
from enginewatch.core.events import Outcome
from enginewatch.engines.profile import AnswerFormat, CanaryRequest
from enginewatch.engines.vllm import PROFILE as VLLM

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with the openssl command")

PAGE = response(b"# filler\n" * 20_000 + b"a_total 1\n")  # several sips
NAMES = frozenset({"a_total"})
SAMPLES = {"a_total": 1.0}
PROBE = CanaryRequest("GET", "/x", None, AnswerFormat.ANY_2XX)


@dataclass(frozen=True)
class Certificate:
    cert: Path
    key: Path


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Certificate, Certificate]:
    """Two self-signed certificates for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    made = []
    for name in ("one", "two"):
        certificate = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
        how = f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={name}"
        where = ("-keyout", certificate.key, "-out", certificate.cert)
        subprocess.run(
            ["openssl", *how.split(), "-addext", "subjectAltName=IP:127.0.0.1", *where], check=True, capture_output=True
        )
        made.append(certificate)
    return made[0], made[1]


ServeTls = Callable[[Certificate], Awaitable[str]]


@pytest.fixture
async def serve_tls() -> AsyncIterator[ServeTls]:
    servers: list[asyncio.Server] = []

    async def start(certificate: Certificate) -> str:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate.cert, certificate.key)

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.write(PAGE)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
        servers.append(server)
        return f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()


async def scrape(client: EngineClient, timeout_sec: float = 5.0) -> dict[str, float] | ScrapeFailure:
    return await client.scrape(NAMES, timeout_sec=timeout_sec, profile=VLLM)


async def test_a_certificate_of_the_ca_file_is_trusted(
    serve_tls: ServeTls, certificates: tuple[Certificate, Certificate]
) -> None:
    url = await serve_tls(certificates[0])
    assert await scrape(EngineClient(Target.parse(url, ca_file=str(certificates[0].cert)))) == SAMPLES


async def test_a_certificate_nobody_vouches_for_is_a_matter_of_configuration(
    serve_tls: ServeTls, certificates: tuple[Certificate, Certificate]
) -> None:
    url = await serve_tls(certificates[0])
    for target in (Target.parse(url), Target.parse(url, ca_file=str(certificates[1].cert))):
        client = EngineClient(target)
        result = await scrape(client)
        assert isinstance(result, ScrapeFailure)
        assert result.failure == "unasked"
        assert "certificate is not trusted" in result.detail
        own = target.ca_file is not None
        assert result.detail.endswith("ENGINE_CA_FILE do not vouch for it" if own else "set ENGINE_CA_FILE")
        assert (await client.canary(PROBE, deadline_sec=5)).outcome is Outcome.UNASKED


async def test_a_certificate_for_another_name_is_not_accepted(
    serve_tls: ServeTls, certificates: tuple[Certificate, Certificate]
) -> None:
    url = (await serve_tls(certificates[0])).replace("127.0.0.1", "localhost")
    result = await scrape(EngineClient(Target.parse(url, ca_file=str(certificates[0].cert))))
    assert isinstance(result, ScrapeFailure)
    assert result.failure == "unasked"


async def test_a_rotated_ca_file_is_used_with_the_next_question(
    serve_tls: ServeTls, certificates: tuple[Certificate, Certificate], tmp_path: Path
) -> None:
    ca_file = tmp_path / "ca.pem"
    ca_file.write_bytes(certificates[1].cert.read_bytes())
    client = EngineClient(Target.parse(await serve_tls(certificates[0]), ca_file=str(ca_file)))
    assert isinstance(await scrape(client), ScrapeFailure)
    ca_file.write_bytes(b"# \xfc comment\n" + certificates[0].cert.read_bytes())
    assert await scrape(client) == SAMPLES


async def test_a_ca_file_that_goes_bad_leaves_the_last_good_one_in_use(
    serve_tls: ServeTls, certificates: tuple[Certificate, Certificate], tmp_path: Path
) -> None:
    ca_file = tmp_path / "ca.pem"
    ca_file.write_bytes(certificates[0].cert.read_bytes())
    client = EngineClient(Target.parse(await serve_tls(certificates[0]), ca_file=str(ca_file)))
    assert await scrape(client) == SAMPLES
    for content in (b"", certificates[0].cert.read_bytes()[:200]):
        ca_file.write_bytes(content)
        assert await scrape(client) == SAMPLES
    ca_file.unlink()
    assert await scrape(client) == SAMPLES


@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
async def test_a_ca_file_that_never_was_good_is_told_and_replaced_by_nothing(
    serve_tls: ServeTls, certificates: tuple[Certificate, Certificate], tmp_path: Path, content: bytes | None
) -> None:
    ca_file = tmp_path / "ca.pem"
    if content is not None:
        ca_file.write_bytes(content)
    result = await scrape(EngineClient(Target.parse(await serve_tls(certificates[0]), ca_file=str(ca_file))))
    assert isinstance(result, ScrapeFailure)
    assert result.failure == "unasked"
    assert str(ca_file) in result.detail
    assert result.detail.endswith("correct ENGINE_CA_FILE")


async def test_the_context_is_made_anew_only_when_the_file_changes(
    serve_tls: ServeTls,
    certificates: tuple[Certificate, Certificate],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = await serve_tls(certificates[0])
    made = 0
    make = ssl.create_default_context

    def counting(*, cadata: str) -> ssl.SSLContext:
        nonlocal made
        made += 1
        return make(cadata=cadata)

    monkeypatch.setattr("enginewatch.client.credentials.ssl.create_default_context", counting)
    client = EngineClient(Target.parse(url, ca_file=str(certificates[0].cert)))
    for _ in range(3):
        assert await scrape(client) == SAMPLES
    assert made == 1


async def test_an_engine_that_does_not_speak_tls_is_a_matter_of_configuration(serve: Serve) -> None:
    url = (await serve(answering(PAGE))).replace("http:", "https:")
    client = EngineClient(Target.parse(url))
    # asyncio's stream server waits for a request line that never ends; a real one answers 400 and closes.
    assert isinstance(await scrape(client, timeout_sec=0.2), ScrapeFailure)

    async def talks_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(response("", status="400 Bad Request"))
        await writer.drain()

    url = (await serve(talks_first)).replace("http:", "https:")
    result = await scrape(EngineClient(Target.parse(url)))
    assert isinstance(result, ScrapeFailure)
    assert result.failure == "unasked"
    assert "http:// in ENGINE_URL" in result.detail


async def test_plain_http_to_a_tls_engine_is_no_refusal(
    serve_tls: ServeTls, certificates: tuple[Certificate, Certificate]
) -> None:
    url = (await serve_tls(certificates[0])).replace("https:", "http:")
    result = await scrape(EngineClient(Target.parse(url)))
    assert isinstance(result, ScrapeFailure)
    assert result.failure in ("reset", "malformed")


async def test_a_frozen_engine_is_a_timeout_over_tls_too(frozen_url: str) -> None:
    result = await scrape(EngineClient(Target.parse(frozen_url.replace("http:", "https:"))), timeout_sec=0.2)
    assert isinstance(result, ScrapeFailure)
    assert result.failure == "timeout"


async def test_an_engine_that_closes_in_the_handshake_is_a_reset(serve: Serve) -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)

    url = (await serve(close)).replace("http:", "https:")
    result = await scrape(EngineClient(Target.parse(url)))
    assert isinstance(result, ScrapeFailure)
    assert result.failure == "reset"


async def test_a_frozen_engine_behind_tls_leaves_no_task_and_no_socket(
    frozen_url: str, certificates: tuple[Certificate, Certificate]
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates[0].cert, certificates[0].key)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.transport.abort()

    server = await asyncio.start_server(silent, "127.0.0.1", 0, ssl=context)
    after_the_handshake = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    in_the_handshake = frozen_url.replace("http:", "https:")
    for url in (in_the_handshake, after_the_handshake):
        client = EngineClient(Target.parse(url, ca_file=str(certificates[0].cert)))
        sockets = open_sockets()
        for _ in range(20):
            assert (await client.canary(PROBE, deadline_sec=0.1)).outcome is Outcome.TIMEOUT
        await asyncio.sleep(0.1)
        assert open_sockets() == sockets
        assert connections_to(url) == 0
    server.close()
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == {asyncio.current_task()}

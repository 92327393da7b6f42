"""The manifests in docs/guard.md, run as a kubelet would: every command out of the document, on simulated engines."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from guard_page import environment, loaded, router

from enginewatch.lab.sim.process import SimProcess

# The router of the manifest: says how it was started, listens, and leaves with a code of its own.
ROUTER = """#!{python}
import json, signal, socket, sys
args = sys.argv[1:]
port = next(int(each.split("=")[1]) for each in args if each.startswith("--port="))
listening = socket.create_server(("127.0.0.1", port))
json.dump(args, open({told!r}, "w"))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
while True:
    listening.accept()[0].close()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass
class Cluster:
    """What a node would provide: volumes, addresses, images; here by putting ours in the place of the manifest's."""

    directory: Path
    prefill: SimProcess
    decode: SimProcess
    watcher_ports: dict[str, str]
    router_port: int

    @property
    def told(self) -> Path:
        return self.directory / "router.json"

    def command(self, words: Sequence[str]) -> list[str]:
        known = {"python3": [sys.executable], "enginewatch": [sys.executable, "-m", "enginewatch"]}
        places = {
            "/guard": str(self.directory / "guard"),
            "=8080": f"={self.router_port}",
            "http://127.0.0.1:8000": self.prefill.url,
            "http://127.0.0.1:9090": f"http://127.0.0.1:{self.watcher_ports['prefill']}",
        }
        found: list[str] = []
        for word in words:
            for theirs, ours in places.items():
                word = word.replace(theirs, ours)
            found += known.get(word, [word])
        return found

    def environment(self, container: dict[str, Any]) -> dict[str, str]:
        ours = {
            "prefill:8000": f"127.0.0.1:{self.prefill.port}",
            "decode:8000": f"127.0.0.1:{self.decode.port}",
            "8080": str(self.router_port),
        }
        given = {name: ours.get(value, value) for name, value in environment(container).items()}
        # Two roles on one address: as in the colocated shape, their sidecars have ports of their own.
        given |= {f"GUARD_{role.upper()}_WATCHER_PORT": port for role, port in self.watcher_ports.items()}
        path = f"{self.directory / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, **given, "GUARD_RUN_DIR": str(self.directory / "run"), "PATH": path}

    def run(self, words: Sequence[str], env: dict[str, str] | None = None) -> tuple[int, str]:
        done = subprocess.run(self.command(words), env=env, capture_output=True, text=True, check=False, timeout=60)
        assert done.stderr == ""
        return done.returncode, done.stdout.strip()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    for name in ("guard", "run", "bin"):
        (directory / name).mkdir()
    with ExitStack() as stack:
        engines = {role: SimProcess("vllm", role=role, step_ms=5) for role in ("prefill", "decode")}
        for engine in engines.values():
            stack.enter_context(engine.start())
        ports = {role: sidecar(stack, role, engine, directory) for role, engine in engines.items()}
        found = Cluster(directory, engines["prefill"], engines["decode"], ports, free_port())
        script = directory / "bin" / "vllm-router"
        script.write_text(ROUTER.format(python=sys.executable, told=str(found.told)))
        script.chmod(0o755)
        init = router()[0]["initContainers"][0]
        code, said = found.run(init["command"])
        assert (code, said) == (0, str(directory / "guard" / "enginewatch-guard.pyz"))
        yield found


def sidecar(stack: ExitStack, role: str, engine: SimProcess, directory: Path) -> str:
    port = str(free_port())
    variables = {"ENGINE_URL": engine.url, "LISTEN": f"127.0.0.1:{port}", "ENGINE_ROLE": role}
    variables |= {"POLL_INTERVAL_SEC": "0.3", "CONFIG_FILE": str(directory / "none.json")}
    command = [sys.executable, "-m", "enginewatch", "watch"]
    process = subprocess.Popen(command, env={**os.environ, **variables}, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return port


def eventually(cluster: Cluster, words: Sequence[str], env: dict[str, str], code: int) -> str:
    deadline = time.monotonic() + 60
    while (found := cluster.run(words, env))[0] != code:
        assert time.monotonic() < deadline, f"{words[-1]}: {found}"
        time.sleep(0.2)
    return found[1]


def started(cluster: Cluster) -> list[str]:
    args: list[str] = json.loads(cluster.told.read_text())
    return args


def test_the_manifests_commands_boot_judge_and_restart_a_router(cluster: Cluster) -> None:
    _, container = router()
    env = cluster.environment(container)
    live, ready = (container[probe]["exec"]["command"] for probe in ("livenessProbe", "readinessProbe"))
    assert container["startupProbe"]["exec"]["command"] == ready
    code, line = cluster.run(ready, env)
    assert (code, line.partition(":")[0]) == (1, "not ready"), "the kubelet's first tick comes before the boot"
    assert cluster.run(live, env)[0] == 0

    command = cluster.command([*container["command"], *container["args"]])
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as process:
        try:
            eventually(cluster, ready, env, 0)
            added = ["--prefill", cluster.prefill.url, "8998", "--decode", cluster.decode.url]
            assert started(cluster) == [*cluster.command(container["args"])[1:], *added]
            assert cluster.run(live, env) == (0, "keep: no drift among 2 engines")
            cluster.prefill.restart()
            line = eventually(cluster, live, env, 1)
            assert line.startswith("restart the router: prefill 127.0.0.1 was pst-")
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 7, "the router's exit code is the container's"
        finally:
            process.kill()

    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as process:
        try:
            eventually(cluster, ready, env, 0)
            assert cluster.run(live, env) == (0, "keep: no drift among 2 engines")
        finally:
            process.kill()


def test_the_drain_hook_of_the_manifest_lets_an_idle_engine_go(cluster: Cluster) -> None:
    hook = loaded("drain")[0]["lifecycle"]["preStop"]["exec"]["command"]
    code, line = cluster.run(hook)
    assert code == 0
    assert line.startswith("drained:")


def test_it_waits_for_one_that_works(cluster: Cluster) -> None:
    """The control of the test above."""
    hook = loaded("drain")[0]["lifecycle"]["preStop"]["exec"]["command"]
    cluster.prefill.load(1, max_tokens=100_000)
    try:
        code, line = cluster.run([word.replace("=300", "=4") for word in hook])
    finally:
        cluster.prefill.calm()
    assert code == 0
    assert line.startswith("not drained within 4 s: 1 running"), line

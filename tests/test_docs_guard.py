"""docs/guard.md and its runbook: settings, lines and snapshots are the program's, manifests are valid and work."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from guard_page import DOCS, MANIFESTS, PAGE, RUNBOOK, environment, loaded, marked, router, yaml

from enginewatch.core.drift import Identity, Recorded, parse_snapshot, write_snapshot
from enginewatch.guard import live
from enginewatch.guard.files import NoSnapshot, read_snapshot
from enginewatch.guard.help import GUARD
from enginewatch.guard.main import SUBCOMMANDS
from enginewatch.guard.settings import DEFAULTS, Settings, flag_of, read_settings
from enginewatch.guard.side_by_side import SideBySide
from enginewatch.guard.upstreams import Lookup, Who

BOTH = {"guard.md": PAGE, "router-drift.md": RUNBOOK}

A, B = "pst-1791943641.29", "pst-1791945002.77"
SIDECAR_A, SIDECAR_B = "2026-10-14T01:52:10.48Z", "2026-10-14T01:52:11.02Z"


# --- settings and commands ------------------------------------------------------------------------------------------


def test_the_table_of_settings_is_the_one_in_the_code() -> None:
    rows = re.findall(r"^\| `(GUARD_\w+)` \| `(--[\w-]+)` \| (\S+) \|", PAGE, re.MULTILINE)
    documented = {name: (flag, "" if default == "none" else default.strip("`")) for name, flag, default in rows}
    assert documented == {name: (flag_of(name), default) for name, default in DEFAULTS.items()}
    assert len(rows) == len(DEFAULTS)


@pytest.mark.parametrize("page", BOTH)
def test_every_variable_and_subcommand_that_is_named_exists(page: str) -> None:
    text = BOTH[page]
    assert set(re.findall(r"GUARD_[A-Z_]+", text)) <= set(DEFAULTS)
    named = set(re.findall(r"`guard ([a-z]+)", text)) | set(re.findall(r"guard\.pyz,? ([a-z]+)", text))
    assert named
    assert named <= set(SUBCOMMANDS)


def test_the_page_explains_every_subcommand() -> None:
    assert [name for name in SUBCOMMANDS if f"`{name}`" not in PAGE and f"guard {name}" not in PAGE] == []


@pytest.mark.parametrize("page", BOTH)
def test_links_lead_somewhere(page: str) -> None:
    here = DOCS if page == "guard.md" else DOCS / "runbooks"
    for link in re.findall(r"\]\(([^)]+)\)", BOTH[page]):
        path, _, anchor = link.partition("#")
        target = here / path if path else here / page
        assert target.exists(), link
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, link


# --- lines and snapshots --------------------------------------------------------------------------------------------


def test_the_snapshot_shown_is_what_the_guard_writes_and_reads() -> None:
    lines = marked(PAGE, "snapshot")
    engines = (Recorded("10.0.0.9"), Recorded("10.0.0.7", 0, SIDECAR_A, A), Recorded("10.0.0.8", 3, SIDECAR_B))
    assert write_snapshot(engines).splitlines() == lines
    assert list(parse_snapshot(("\n".join(lines) + "\n").encode()).values()) == sorted(engines)


BOOT = {
    "prefill": {
        "10.0.0.7": Recorded("10.0.0.7", 0, SIDECAR_A, A),
        "10.0.0.8": Recorded("10.0.0.8", 0, SIDECAR_B),
        "10.0.0.9": Recorded("10.0.0.9"),
    },
    "decode": {"10.0.0.4": Recorded("10.0.0.4", 0, SIDECAR_A, "pst-1791943640.05")},
}
UNCHANGED = {
    "10.0.0.7": Who(Identity(A, 0, SIDECAR_A, "process_start_time")),
    "10.0.0.8": Who(Identity("obs-1791942731020-1", 0, SIDECAR_B, "observed")),
    "10.0.0.9": Who(None, "its sidecar has no /engine (404)", is_old=True),
    "10.0.0.4": Who(Identity("pst-1791943640.05", 0, SIDECAR_A, "process_start_time")),
}
REPLACED = Who(Identity(B, 1, SIDECAR_A, "process_start_time"))
COUNTED = Who(Identity("obs-1791942731020-2", 1, SIDECAR_B, "observed"))
LATE = Who(Identity("pst-1791943655.80", 0, SIDECAR_A, "process_start_time"))


def tick(
    changed: Mapping[str, Who],
    *,
    prefill: str = "10.0.0.7:8000,10.0.0.8:8000",
    decode: str = "10.0.0.4:8000",
    health: str | None = None,
    lookup: Lookup | None = None,
) -> tuple[int, str]:
    """What `guard live` says when these engines answer something else than at boot."""
    variables = {"GUARD_PREFILL": prefill, "GUARD_DECODE": decode}
    settings = read_settings([], variables, uses=live.USES, needs=live.NEEDS)
    everybody = {**UNCHANGED, **changed}
    return live.judge(
        settings,
        BOOT,
        SideBySide(deadline=60.0, now=lambda: 0.0),
        look_up=lambda name, family: lookup or Lookup((), "nobody is asked"),
        who=lambda address, port, deadline: everybody[address],
        serves=lambda address, port, deadline: health,
    )


def test_the_lines_of_a_restart_are_what_live_prints() -> None:
    printed = [
        tick({"10.0.0.7": REPLACED}),
        tick({"10.0.0.8": COUNTED}),
        tick({}, decode="10.0.0.4:8000,10.0.0.5:8000"),
        tick({"10.0.0.9": LATE}, prefill="10.0.0.9:8000"),
    ]
    assert printed == [(1, line) for line in marked(RUNBOOK, "lines: restart")]


def test_the_lines_of_a_router_that_is_kept_are_what_live_prints(tmp_path: Path) -> None:
    unknown = Lookup((), "Temporary failure in name resolution", True)
    printed = [
        tick({}),
        tick({"10.0.0.7": Who(None, "connection refused")}),
        tick({"10.0.0.7": Who(None, "HTTP 503")}),
        tick({"10.0.0.7": REPLACED}, health="HTTP 503"),
        tick({}, prefill="10.0.0.7:8000,prefill.default.svc:8000", lookup=unknown),
        *(nothing_to_judge(tmp_path, content) for content in (None, "10.0.0.7\n")),
    ]
    assert printed == [(0, line) for line in marked(RUNBOOK, "lines: keep")]


def nothing_to_judge(run_dir: Path, content: str | None) -> tuple[int, str]:
    if content is not None:
        (run_dir / "prefill-ips").write_text(content)
    with pytest.raises(NoSnapshot) as why:
        read_snapshot(str(run_dir), "prefill")
    flags = ["--run-dir", str(run_dir), "--prefill", "10.0.0.7:8000", "--decode", "10.0.0.4:8000"]
    code, line = live.run(flags, time.monotonic())
    assert str(why.value) in line
    return code, line.replace(str(run_dir), DEFAULTS["GUARD_RUN_DIR"])


# --- manifests ------------------------------------------------------------------------------------------------------


def test_there_are_manifests_and_all_of_them_are_marked() -> None:
    assert set(MANIFESTS) == {"vllm-router with Mooncake", "sglang-router", "colocated", "drain"}
    assert PAGE.count("```yaml") == len(MANIFESTS)
    assert [len(loaded(name)) for name in MANIFESTS] == [3, 1, 1, 1]


def settings_of(container: Mapping[str, Any]) -> Settings:
    needs = ("GUARD_PREFILL", "GUARD_DECODE", "GUARD_ROUTER", "GUARD_ROUTER_PORT")
    return read_settings([], environment(container), uses=tuple(DEFAULTS), needs=needs)


@pytest.mark.parametrize("name", ["vllm-router with Mooncake", "sglang-router", "colocated"])
def test_the_guard_takes_the_environment_of_every_manifest(name: str) -> None:
    container = router()[1] if name.startswith("vllm") else loaded(name)[0]
    assert set(environment(container)) <= set(DEFAULTS)
    assert settings_of(container).bootstrap_port == 8998


def probes_in(container: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe")}


def check_probes(container: Mapping[str, Any]) -> None:
    settings = settings_of(container)
    probes = probes_in(container)
    for name, probe in probes.items():
        assert probe["timeoutSeconds"] > settings.deadline_sec, name
        assert probe["exec"]["command"][-1] == ("live" if name == "livenessProbe" else "ready")
    startup = probes["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > settings.budget_sec


def test_the_probes_have_the_patience_that_the_page_promises() -> None:
    check_probes(router()[1])


@pytest.mark.parametrize(
    ("probe", "key", "value"),
    [("startupProbe", "failureThreshold", 500), ("livenessProbe", "timeoutSeconds", 4)],
)
def test_a_probe_without_that_patience_would_be_noticed(probe: str, key: str, value: int) -> None:
    """The control of the test above."""
    container = router()[1]
    container[probe] = {**container[probe], key: value}
    with pytest.raises(AssertionError):
        check_probes(container)


def test_the_probes_on_the_help_page_are_the_ones_in_the_documentation() -> None:
    shown = re.search(r"^  containers:\n.*?(?=^Settings)", GUARD, re.MULTILINE | re.DOTALL)
    assert shown is not None
    helped = yaml.safe_load(shown[0].replace("...]", "]"))["containers"][0]
    documented = router()[1]
    for name, probe in probes_in(documented).items():
        assert {"failureThreshold": 3, **helped[name]} == probe, name
    assert environment(helped).keys() == environment(documented).keys()


def test_the_volumes_of_the_manifest_are_where_the_guard_looks_for_them() -> None:
    pod, container = router()
    volumes = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == volumes
    assert mounts["run"] == DEFAULTS["GUARD_RUN_DIR"]
    init = pod["initContainers"][0]
    exported = Path(init["command"][-1]) / "enginewatch-guard.pyz"
    assert {mount["name"]: mount["mountPath"] for mount in init["volumeMounts"]} == {"guard": str(exported.parent)}
    assert mounts["guard"] == str(exported.parent)
    commands = [container["command"], *(probe["exec"]["command"] for probe in probes_in(container).values())]
    assert {command[3] for command in commands} == {str(exported)}


def test_the_names_of_the_manifest_are_its_headless_services() -> None:
    services = {document["metadata"]["name"]: document["spec"] for document in loaded("vllm-router with Mooncake")[1:]}
    settings = settings_of(router()[1])
    assert set(services) == {upstream.host for role in settings.roles for upstream in role.upstreams}
    for role in settings.roles:
        assert services[role.upstreams[0].host]["clusterIP"] == "None"
        assert services[role.upstreams[0].host]["ports"][0]["port"] == role.upstreams[0].port

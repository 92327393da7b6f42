"""The pages of `guard --help` and `guard SUB --help`, for an operator who has nothing else at hand."""

from __future__ import annotations

from typing import Final

GUARD: Final = """\
guard: keeps a prefill/decode router together with the engines that it started with

A router pins state to one engine process. When the kubelet restarts an engine in place, the pod and its address stay,
the router goes on addressing the process that is gone, and requests hang until their transfer times out. The guard
starts the router with the engines that are there, writes down who they are, and tells the kubelet when it must start
the router again. It runs in the router's container and needs python3 (3.9 or newer), nothing else.

  guard boot -- COMMAND...   wait for the engines, write the snapshot, become the router   the container's command
  guard live                 1 if the router must start again, else 0                      livenessProbe
  guard ready                0 if the router can serve                                     startupProbe, readinessProbe
  guard drain                wait until an engine has nothing left to do                   preStop hook of an engine
  guard export DIR           put the guard into DIR as one file, enginewatch-guard.pyz     init container

`guard SUB --help` says more of each, `guard --version` which guard this is. `enginewatch guard SUB`, where enginewatch
is installed, and `python3 enginewatch-guard.pyz SUB` are the same program.

In a pod, with the file in a volume at /guard:

  containers:
  - name: router
    command: [python3, -I, -S, /guard/enginewatch-guard.pyz, boot, --, vllm-router, --port, "8080", ...]
    env:
    - {name: GUARD_ROUTER, value: vllm}
    - {name: GUARD_PREFILL, value: "prefill.default.svc:8000"}    # headless Services
    - {name: GUARD_DECODE, value: "decode.default.svc:8000"}
    - {name: GUARD_BOOTSTRAP_PORT, value: "8998"}
    - {name: GUARD_ROUTER_PORT, value: "8080"}
    startupProbe:
      exec: {command: [python3, -I, -S, /guard/enginewatch-guard.pyz, ready]}
      periodSeconds: 10
      timeoutSeconds: 6         # more than GUARD_DEADLINE_SEC; Kubernetes' default of 1 fails every slow tick
      failureThreshold: 660     # 110 minutes: longer than GUARD_BUDGET_SEC and the router's own start
    livenessProbe:
      exec: {command: [python3, -I, -S, /guard/enginewatch-guard.pyz, live]}
      periodSeconds: 10
      timeoutSeconds: 6
      failureThreshold: 2       # a drift stays; but a probe that found no CPU in time counts as failed as well
    readinessProbe:
      exec: {command: [python3, -I, -S, /guard/enginewatch-guard.pyz, ready]}
      periodSeconds: 5
      timeoutSeconds: 6
    volumeMounts:
    - {name: run, mountPath: /run/pd-router}                       # an emptyDir

Settings, from the environment so that the command and its probes agree; an empty value is a missing one. Each is also a
flag, which wins: GUARD_RUN_DIR is --run-dir.

  GUARD_PREFILL               HOST:PORT of the prefill engines, several separated by commas. HOST is a name, which
  GUARD_DECODE                stands for all its addresses (a headless Service; IPv4 if it has any), an IPv4 address or
                              an IPv6 address in brackets. Needed by boot, live and ready. Two ports on one address in
                              one role cannot be told apart.
  GUARD_PREFILL_WATCHER_PORT  port of the role's sidecars (9090); 0: it has none, nobody is asked, and only addresses
  GUARD_DECODE_WATCHER_PORT   that are new restart the router
  GUARD_ROUTER                vllm or sglang: whose flags boot appends. Needed by boot
  GUARD_BOOTSTRAP_PORT        follows each --prefill URL: usually 8998, for SGLang and for vLLM with Mooncake; not for
                              vLLM with NIXL
  GUARD_ROUTER_PORT           the router's own port. Needed by ready
  GUARD_RUN_DIR               where the snapshots are (/run/pd-router)
  GUARD_BUDGET_SEC            how long boot waits at most (5400); the startupProbe must have more patience
  GUARD_PARTIAL_SEC           how long boot waits for silent engines once each role has one that serves (120)
  GUARD_DEADLINE_SEC          the whole of one live or ready (4); less than the probe's timeoutSeconds

The snapshots, <run dir>/prefill-ips and <run dir>/decode-ips, have one sorted line per engine, in which engine_id is
only there if the same process has the same id after a restart of its sidecar:

  <ip>|<restarts>|<watcher_started_at>|<engine_id>
  <ip>||                       it did not say who it is, or has no sidecar

Exit codes
  boot    2 it cannot work: a setting, the command or the run directory. 1 a role had no address in all of
          GUARD_BUDGET_SEC. 143, 130 SIGTERM, SIGINT during the wait. Then the router's own
  live    0 keep the router, whatever else is wrong. 1 start it again
  ready   0 ready. 1 not ready. 2 a setting cannot be used
  drain   0 always, also at its deadline. 2 a flag cannot be used
  export  0 written. 1 cannot be written. 2 called wrongly
  2 also for an unknown subcommand
"""

BOOT: Final = """\
guard boot [FLAGS] -- COMMAND...: wait for the engines, write down who they are, become the router

Removes the snapshots of an earlier boot. Then, about once a second, looks up every name and asks every sidecar's
GET /engine, until every engine has said who it is. An engine whose sidecar has no /engine (404) is recorded without an
identity at once; one that is silent, refuses, loads (503) or answers something else is asked again. Once each role has
an engine that is known and whose /health is 200, the silent ones have GUARD_PARTIAL_SEC left; at the end of
GUARD_BUDGET_SEC the router starts with what is known. When a silent engine comes later, `guard live` restarts the
router for it. A name that has no address in all that time is the one thing that a router cannot start without.

Then writes the snapshots and becomes COMMAND with the engines' flags appended, sorted:
  --prefill http://IP:PORT [GUARD_BOOTSTRAP_PORT] ... --decode http://IP:PORT ...
The router has the guard's process id, gets its signals, and its exit code is the container's.

Settings: all (see guard --help). What it waits for is on stderr, when it changes and once a minute.
Exit codes: 2 it cannot work, found before it waits; 1 no address of a role; 143, 130 SIGTERM, SIGINT; else COMMAND's.
"""

LIVE: Final = """\
guard live [FLAGS]: must the router start again? For its livenessProbe

Looks up every name and asks the sidecar's GET /engine of every engine that is in the snapshot and still there, side by
side, in GUARD_DEADLINE_SEC at most. Says 1 if one of these holds and that engine's /health is 200:
  1 growth           an address that was not there at boot
  2 other identity   an engine known at boot is another process: its engine_id where it survives a restart of the
                     sidecar, so that a restarted sidecar restarts no router; else restarts and watcher_started_at
  3 late identity    an engine that had no identity at boot has one
An address that went away, a failed lookup, silence, an answer that is no identity, a missing or corrupt snapshot, an
unusable setting: 0, and the line says so.

Settings: GUARD_PREFILL, GUARD_DECODE, GUARD_PREFILL_WATCHER_PORT, GUARD_DECODE_WATCHER_PORT, GUARD_RUN_DIR,
GUARD_DEADLINE_SEC (see guard --help).
Prints one line. Exit codes: 0 keep the router; 1 start it again; never another.
"""

READY: Final = """\
guard ready [FLAGS]: can the router serve? For its startupProbe and readinessProbe

Says 0 if at least one engine of each role in the snapshot answers /health with 200 and the router accepts a connection
on 127.0.0.1:GUARD_ROUTER_PORT, asked side by side in GUARD_DEADLINE_SEC at most. While guard boot waits there is no
snapshot: 1.

Settings: GUARD_PREFILL, GUARD_DECODE, GUARD_ROUTER_PORT, GUARD_RUN_DIR, GUARD_DEADLINE_SEC (see guard --help).
Prints one line. Exit codes: 0 ready; 1 not ready; 2 a setting cannot be used.
"""

DRAIN: Final = """\
guard drain --engine URL [--sidecar URL] [--deadline-sec N]: wait until an engine has nothing left to do; a preStop hook

Asks once a second and ends when two metrics pages in a row say that no request runs, waits or stands in a
prefill/decode queue, added up over all cores; at once when the sidecar says that the engine hangs, because its gauges
are frozen and waiting would only hold the GPUs; when its requests could not be counted for 30 s in a row; and at the
deadline. A sidecar that is silent changes nothing.

Knows the pages of vLLM, SGLang and llama.cpp. TensorRT-LLM's gauges do not tell what runs: with a sidecar that reads
its statistics (TRTLLM_JSON_STATS=1) what that counts is waited for, and then 30 s more; without one it is 30 s.

  --engine URL         such as http://127.0.0.1:8000; with a path, that of its metrics page. Of https no certificate is
                       checked: the engine is in the same pod
  --sidecar URL        such as http://127.0.0.1:9090
  --deadline-sec N     seconds until it ends whatever still runs (300); keep it below terminationGracePeriodSeconds

Prints one line. Exit codes: 0 always, 2 if a flag cannot be used.
"""

EXPORT: Final = """\
guard export DIR: write the guard into DIR as one file, enginewatch-guard.pyz, for a container with python3 and no more

DIR must exist: it is where a volume is mounted. The file has mode 0755 and is never there half; an older one is
replaced. Prints its path. `guard --version` prints the digest that the file has.

Exit codes: 0 written; 1 cannot be written; 2 called wrongly.
"""

PAGES: Final = {"": GUARD, "boot": BOOT, "live": LIVE, "ready": READY, "drain": DRAIN, "export": EXPORT}


def page(sub: str) -> str:
    """The page of a subcommand, or of all of them for an empty name."""
    return PAGES[sub]

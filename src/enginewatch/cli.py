"""The command line `enginewatch`.

`watch` is the sidecar, counted in megabytes and milliseconds: it is handed on before anything made for people
(cyclopts, rich) is imported, and reads its own flags. So is `guard`, whose parts are probes. Every other command
imports what it needs when it runs.

Exit codes: a command's own; 2 = it was called wrongly; 130 = Ctrl-C; 1 = nobody reads what it writes (rich's choice).
"""

# No `from __future__ import annotations` here: cyclopts reads the annotations of the commands, which name things that
# are imported just before, inside functions.

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError

    from enginewatch.client.diagnosis import Diagnosis
    from enginewatch.core.settings import Settings

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 1

SUMMARY = """Liveness and identity for LLM inference engines (vLLM, SGLang, TensorRT-LLM, llama.cpp).

Is this engine hung, and is it still the process I was talking to?
"""

Output = Literal["text", "json"]
if TYPE_CHECKING:
    EngineKind = str
else:
    from enginewatch.engines import KINDS

    EngineKind = Literal[KINDS]
WorkerRole = Literal["agg", "prefill", "decode"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes those of this process.

    Returns:
        The exit code. `watch --help` and bad flags of `watch` may raise SystemExit with it instead.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        handed_on = {"watch": _run_watch, "guard": _run_guard}.get(arguments[0] if arguments else "")
        code = handed_on(arguments[1:]) if handed_on else _run_for_people(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes standard output once more at its end and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return code


def complain(sentence: str) -> None:
    """Print one sentence on stderr."""
    print(f"enginewatch: {sentence}", file=sys.stderr)


def _run_watch(arguments: Sequence[str]) -> int:
    from enginewatch.sidecar.main import run_watch

    return run_watch(arguments)


def _run_guard(arguments: Sequence[str]) -> int:
    from enginewatch.guard.main import run

    return run(arguments)


def _run_for_people(arguments: list[str]) -> int:
    from cyclopts import CycloptsError

    app = _app()
    try:
        command, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        complain(_sentence(error))
        return EXIT_USAGE
    result = command(*bound.args, **bound.kwargs)
    return result if isinstance(result, int) else 0


def _app() -> "App":
    from cyclopts import App

    app = App(name="enginewatch", help=SUMMARY, version=_version)
    for add in (_add_demo, _add_watch, _add_guard, _add_doctor, _add_why, _add_sim):
        add(app)
    return app


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"enginewatch {version('enginewatch')}"
    except PackageNotFoundError:
        return "enginewatch (not installed: run from its source)"


def _sentence(error: "CycloptsError") -> str:
    """What cyclopts has to say, as one sentence that ends with where to look."""
    from cyclopts import UnknownCommandError, UnusedCliTokensError

    chain = " ".join(("enginewatch", *(error.command_chain or ())))
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"{error.unused_tokens[0]!r} is one argument too many; see {chain} --help"
    text = str(error)
    if isinstance(error, UnknownCommandError):
        text = text.partition(" Available commands:")[0]
    parts = [part.strip().rstrip(".?") for part in re.split(r"(?<=[.?])\s", text) if part.strip()]
    return "; ".join([*(part[:1].lower() + part[1:] for part in parts), f"see {chain} --help"])


# --- commands -------------------------------------------------------------------------------------------------------


def _add_watch(app: "App") -> None:
    @app.command(help_flags=())
    def watch(*tokens: str) -> int:
        """The sidecar: watch one engine and answer GET /healthz, 503 when it hangs."""
        return _run_watch(tokens)  # in practice `main` went there before


def _add_guard(app: "App") -> None:
    @app.command(help_flags=())
    def guard(*tokens: str) -> int:
        """Keep a prefill/decode router together with its engines: boot, live, ready; for engines drain; export."""
        return _run_guard(tokens)  # in practice `main` went there before


def _add_sim(app: "App") -> None:
    from dataclasses import fields, make_dataclass
    from typing import get_type_hints

    from cyclopts import Parameter

    from enginewatch.lab.sim.options import Engine, SimOptions

    # Every option of the simulation but the engine is a flag, described where it is defined.
    hints = get_type_hints(SimOptions)
    flags: Any = make_dataclass(
        "SimFlags",
        [(field.name, hints[field.name], field) for field in fields(SimOptions) if field.name != "engine"],
        kw_only=True,
    )
    flags.__doc__, flags.__module__ = SimOptions.__doc__, __name__  # what comes from "types" is not taken apart
    defaults = flags()

    @app.command
    def sim(engine: Engine, /, *, options: Annotated[flags, Parameter(name="*")] = defaults) -> int:
        """Run a simulated engine: a front end and its ranks, with faults switched over HTTP: GET /_sim lists them.

        Args:
            engine: which engine to imitate.
            options: everything else.
        """
        from enginewatch.lab.sim.supervisor import run

        try:
            checked = SimOptions(engine, **vars(options))
        except ValueError as error:
            complain(f"{error}; see enginewatch sim --help")
            return EXIT_USAGE
        return run(checked)


def _add_demo(app: "App") -> None:
    from cyclopts import Parameter

    hidden = Parameter(show=False)

    @app.command
    def demo(
        *,
        engine: Literal["vllm", "sglang", "trtllm"] = "vllm",
        keep: Annotated[bool, Parameter(negative="")] = False,
        fast: bool = True,
        svg: Annotated[str, hidden] = "",
        set_: Annotated[list[str], Parameter(name="--set", show=False, negative="")] = [],  # noqa: B006
    ) -> int:
        """The whole story on this machine in about a minute: an engine hangs and is replaced, sidecar and guard see it.

        Exit code 0 when everything was seen as expected, 1 when not.

        Args:
            engine: which engine to simulate; behind the router at the end it is vLLM with Mooncake in any case.
            keep: leave everything running at the end, and say how to play with it, until Ctrl-C.
            fast: thresholds of a few seconds; --no-fast takes the production ones and some minutes.
            svg: write a picture of the result to this file.
            set_: change a setting of the demo's sidecar: KEY=VALUE.
        """
        from enginewatch.lab.demo import DemoOptions, run_demo

        try:
            options = DemoOptions.parse(engine=engine, keep=keep, fast=fast, svg=svg, overrides=set_)
        except ValueError as error:
            complain(str(error))
            return EXIT_USAGE
        return run_demo(options)


def _add_why(app: "App") -> None:
    from cyclopts import Parameter

    @app.command
    def why(url: str, /, *, output: Annotated[Output, Parameter(alias="-o")] = "text") -> int:
        """Ask a sidecar for its verdict and explain it: every witness with its age, and what would flip it.

        Args:
            url: the sidecar's address, such as http://10.0.0.7:9090
            output: text for people, or the /verdict JSON.
        """
        from enginewatch.why import run_why

        return run_why(url, output)


def _add_doctor(app: "App") -> None:
    from cyclopts import Parameter

    @app.command
    def doctor(
        url: str,
        /,
        *,
        output: Annotated[Output, Parameter(alias="-o")] = "text",
        engine: EngineKind = "auto",
        role: WorkerRole | None = None,
        metrics_path: str = "",
        api_key_file: str = "",
        ca_file: str = "",
        trtllm_json_stats: Annotated[bool, Parameter(negative="")] = False,
        active_probe_path: str = "",
        active_probe_method: str = "",
        active_probe_body: str = "",
    ) -> int:
        """Look at a running engine from outside: what a sidecar would have to go by, what is missing, how to fix it.

        Sends canaries, one token each. Exit code 0: all well; 1: warnings; 3: critical; 4: cannot be told.

        Args:
            url: the engine's address, such as http://10.0.0.7:8000 or 10.0.0.7:8000
            output: text for people, or everything as one JSON object.
            engine: which engine it is; auto finds out.
            role: the worker's role, which decides the canary; by default what the engine says, else agg.
            metrics_path: path of the metrics page, if not the usual one.
            api_key_file: file that holds the engine's API key.
            ca_file: CA certificates for an https engine.
            trtllm_json_stats: read TensorRT-LLM's JSON statistics in place of its page; others lose what is read.
            active_probe_path: path of a canary of your own; by default ACTIVE_PROBE_PATH, else the engine's canary.
            active_probe_method: its HTTP method; by default ACTIVE_PROBE_METHOD.
            active_probe_body: its body; by default ACTIVE_PROBE_BODY.
        """
        import asyncio

        from enginewatch.client.doctor import diagnose, to_json
        from enginewatch.client.target import BadTarget, Target

        try:
            target = Target.parse(url, metrics_path=metrics_path, api_key_file=api_key_file, ca_file=ca_file)
        except BadTarget as error:
            complain(str(error))
            return EXIT_USAGE
        settings = _canary_settings(
            {
                "ACTIVE_PROBE_PATH": active_probe_path,
                "ACTIVE_PROBE_METHOD": active_probe_method,
                "ACTIVE_PROBE_BODY": active_probe_body,
            }
        )
        if settings is None:
            return EXIT_USAGE
        diagnosis = asyncio.run(
            diagnose(target, kind=engine, role=role, settings=settings, json_statistics=trtllm_json_stats)
        )
        if output == "json":
            print(to_json(diagnosis).decode())
        else:
            _show(diagnosis)
        return diagnosis.exit_code


def _canary_settings(flags: Mapping[str, str]) -> "Settings | None":
    """The settings that a sidecar would ask with, of the operator's own canary: flags over variables, by their names.

    Returns:
        None where one of them cannot be used, and it has been said which.
    """
    from enginewatch.sidecar.config import EMPTY, read_environment, settings_from

    given = {name: text if text.strip() else os.environ.get(name, "") for name, text in flags.items()}
    layer = read_environment(given)
    for problem in layer.rejected:
        name = problem.key
        shown = f"--{name.lower().replace('_', '-')}" if flags[name].strip() else name
        complain(f"{shown}: {problem.reason}; see enginewatch doctor --help")
    return None if layer.rejected else settings_from(layer, EMPTY)


def _show(diagnosis: "Diagnosis") -> None:
    """Tables on a terminal, plain text everywhere else."""
    if sys.stdout.isatty():
        from rich.console import Console

        from enginewatch.client.diagnosis_tables import render_tables

        Console(highlight=False).print(render_tables(diagnosis))
    else:
        from enginewatch.client.diagnosis_text import render_text

        print(render_text(diagnosis), end="")

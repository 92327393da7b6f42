"""The engines that programs are compared on: the real vLLM of tests/real, or a simulated one where there is none."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from beside.load import Page, asking
from enginewatch.lab.sim.process import SimProcess

if TYPE_CHECKING:
    from tests.real.engine import VllmProcess

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = 2
_MAX_MODEL_LEN = 8192
_VLLM = (*("--max-model-len", str(_MAX_MODEL_LEN)), *("--max-num-seqs", "8"), "--no-enable-prefix-caching")


class Engine(Protocol):
    """One engine with one or more data-parallel cores, each in a process that can be stopped."""

    url: str
    model: str
    version: str
    max_tokens: int

    def freeze(self, core: int) -> None:
        """SIGSTOP."""

    def thaw(self, core: int) -> None:
        """SIGCONT."""


class Engines(Protocol):
    """Where engines come from.

    Attributes:
        name: what they are, for people.
        shared: whether one engine serves all who ask: it can only be used by one at a time.
    """

    name: str
    shared: bool

    def engine(self, cores: int) -> contextlib.AbstractContextManager[Engine]:
        """An engine that serves."""

    def close(self) -> None:
        """Ends what still runs; another engine may be asked for later."""


@contextlib.contextmanager
def decoding(engine: Engine, core: int | None = None, cores: int = 1) -> Iterator[None]:
    """Keeps requests decoding: on one core or, without `core`, on each of so many."""
    with contextlib.ExitStack() as stack:
        for aimed in [core] if core is not None else range(cores):
            aim = aimed if cores > 1 else None
            stack.enter_context(asking(engine.url, engine.model, CLIENTS, max_tokens=engine.max_tokens, core=aim))
        Page(engine.url).wait_busy(1 if core is not None else cores)
        yield


# --- real -----------------------------------------------------------------------------------------------------------


class RealEngine:
    """A vLLM on this CPU."""

    def __init__(self, process: VllmProcess, max_tokens: int = _MAX_MODEL_LEN - 64) -> None:
        self.url, self.model, self.version = process.url, process.model, process.version()
        self.max_tokens = max_tokens
        self._process = process

    def freeze(self, core: int) -> None:
        self._process.stop(self._core(core))

    def thaw(self, core: int) -> None:
        self._process.cont(self._core(core))

    def _core(self, core: int) -> int:
        """With several cores the titles end in _DP and their number."""
        from tests.real.engine import descendants

        titles = descendants(self._process.pid)
        pids = self._process.pids("core")
        numbered = {int(found[1]): pid for pid in pids if (found := re.search(r"_DP(\d+)", titles.get(pid, "")))}
        return numbered[core] if numbered else pids[core]


class NoEngineError(Exception):
    """The real engine is not there; the message says how to get it."""


class RealEngines:
    """The vLLM that `make test-real` installs, with its tiny model. It runs until another number of cores is wanted."""

    name = "the real vLLM on this CPU, a model of two megabytes"
    shared = True

    def __init__(self) -> None:
        if str(ROOT) not in sys.path:
            sys.path.insert(0, str(ROOT))
        from tests.real import install_vllm

        said = os.environ.get("ENGINEWATCH_REAL_VLLM")
        self._venv = Path(said) if said else install_vllm.venv_dir()
        if not install_vllm.usable(self._venv):
            raise NoEngineError(
                f"there is no real vLLM in {self._venv}: run `python tests/real/install_vllm.py` first, or compare on "
                "simulated engines with --engine sim"
            )
        self._stack = contextlib.ExitStack()
        self._running: tuple[int, RealEngine, contextlib.ExitStack] | None = None

    @contextlib.contextmanager
    def engine(self, cores: int) -> Iterator[Engine]:
        if self._running is None or self._running[0] != cores:
            self.close()
            stack = contextlib.ExitStack()
            try:
                self._running = (cores, self._boot(cores, stack), stack)
            except BaseException:
                stack.close()
                raise
        yield self._running[1]

    def close(self) -> None:
        """Ends the engine, if one runs."""
        running, self._running = self._running, None
        if running is not None:
            running[2].close()

    def _boot(self, cores: int, stack: contextlib.ExitStack) -> RealEngine:
        from tests.real.engine import VllmProcess

        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="beside-vllm-")))
        script = ROOT / "tests" / "real" / "tiny_model.py"
        model = directory / "model"
        model.mkdir()
        subprocess.run(
            [self._venv / "bin" / "python", script, model], check=True, stdout=subprocess.DEVNULL, timeout=300
        )
        parallel = ("--data-parallel-size", str(cores)) if cores > 1 else ()
        process = VllmProcess.start(self._venv, model, directory / "vllm.log", (*_VLLM, *parallel))
        return RealEngine(stack.enter_context(process))


class Lent:
    """An engine that somebody else started and will end."""

    shared = True

    def __init__(self, engine: Engine, name: str) -> None:
        self.name = name
        self._engine = engine

    @contextlib.contextmanager
    def engine(self, cores: int) -> Iterator[Engine]:
        if cores != 1:
            raise NoEngineError(f"the engine lent has 1 core, {cores} were asked for")
        yield self._engine

    def close(self) -> None:
        """It is not ours to end."""


# --- simulated ------------------------------------------------------------------------------------------------------


class SimulatedEngine:
    """A simulated vLLM, whose ranks are processes as well."""

    max_tokens = 100_000

    def __init__(self, process: SimProcess) -> None:
        self.url, self.model, self.version = process.url, "simulated-model", "simulated 0.32.0"
        self._process = process

    def freeze(self, core: int) -> None:
        self._process.stop(core)

    def thaw(self, core: int) -> None:
        self._process.cont(core)


class SimulatedEngines:
    """A new one for everybody who asks."""

    name = "a simulated vLLM"
    shared = False

    @contextlib.contextmanager
    def engine(self, cores: int) -> Iterator[Engine]:
        with SimProcess("vllm", dp=cores, step_ms=50) as process:
            yield SimulatedEngine(process)

    def close(self) -> None:
        """Nothing runs between two uses."""

"""Every measurement still runs and prints its table. The figures are not looked at: this machine is busy testing."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "bench"
MEASUREMENTS = [path for path in sorted(BENCH.glob("*.py")) if "main(measure, __doc__)" in path.read_text()]


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    for name in ("run", "report", "machine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("run")


@pytest.mark.parametrize("script", MEASUREMENTS, ids=lambda path: path.stem)
def test_a_measurement_runs_and_prints_its_table(script: Path, tmp_path: Path) -> None:
    done = python(script, "--quick", "--json", tmp_path / "report.json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["figures"]
    for table in report["tables"]:
        assert table["title"] in done.stdout
        assert table["rows"]
        assert all(len(row) == len(table["columns"]) for row in table["rows"])


def test_everything_is_run_by_make_bench(runner: ModuleType) -> None:
    assert sorted(runner.NAMES) == [path.stem for path in MEASUREMENTS]


def test_a_name_that_is_none_is_one_sentence() -> None:
    done = python(BENCH / "run.py", "--quick", "pgae")
    assert done.returncode == 2
    assert "there is no pgae; there are page, " in done.stderr


def test_each_figure_stands_beside_its_bound_and_its_command(runner: ModuleType) -> None:
    report = runner.Report(
        [runner.Table("How long", ("what", "ms"), [("a|b", "1.0")])],
        [importlib.import_module("report").Figure("how long", 7.0, 5, "ms")],
    )
    text = runner.block([("CPU", "a machine")], [runner.Result("page", report)])
    assert "- CPU: a machine" in text
    assert "| how long | 7 ms | 5 ms | **no** | `python bench/page.py` |" in text
    assert "| a\\|b | 1.0 |" in text


def test_the_document_keeps_its_prose_and_has_new_figures(runner: ModuleType) -> None:
    document = (ROOT / "docs" / "benchmarks.md").read_text()
    prose = re.compile(rf"{re.escape(runner.BEGIN)}.*{re.escape(runner.END)}", re.DOTALL)
    once = runner.written(document, "figures of today")
    twice = runner.written(once, "figures of tomorrow")
    assert prose.sub("", twice) == prose.sub("", document)
    assert "figures of tomorrow" in twice
    assert "figures of today" not in twice


def test_a_document_without_markers_is_left_alone(runner: ModuleType) -> None:
    with pytest.raises(ValueError, match="there is no"):
        runner.written("# Benchmarks\n", "figures")

"""`python -m enginewatch.lab.sim ENGINE [options]`: one simulated engine in the foreground."""

from __future__ import annotations

import argparse
import sys
from dataclasses import MISSING, fields

from enginewatch.lab.sim.options import ENGINES, SimOptions
from enginewatch.lab.sim.supervisor import run


def parse(arguments: list[str]) -> SimOptions:
    """Options from a command line: every field of SimOptions, `--step-ms 5` for `step_ms`."""
    parser = argparse.ArgumentParser(prog="enginewatch sim", description="Run a simulated inference engine.")
    parser.add_argument("engine", choices=ENGINES)
    for field in fields(SimOptions):
        if field.default is MISSING:
            continue
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(field.default), default=field.default, metavar="X")
    values = vars(parser.parse_args(arguments))
    try:
        return SimOptions(**values)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(run(parse(sys.argv[1:])))

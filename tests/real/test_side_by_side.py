"""The comparison with other programs, on the real engine: that its freeze is one, and that its controls control."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.real.engine import VllmProcess

import side_by_side
from beside import sample as names
from beside import told
from beside.engines import Lent, RealEngine
from beside.program import OUR_NAME, OUR_PROGRAM
from beside.scenarios import RUN, Stage
from beside.setting import QUICK

pytestmark = [pytest.mark.real, pytest.mark.timeout(180, func_only=True)]

SETTING = replace(QUICK, stall_sec=5, canary_sec=2)
"""With its two seconds a canary comes back on two busy cores as well."""


@pytest.mark.parametrize("scenario", [names.FREEZE_LOAD, names.FREEZE_IDLE])
def test_ours_and_the_controls_see_of_a_real_hang_what_they_can(vllm: VllmProcess, scenario: str) -> None:
    said: list[str] = []
    programs = [OUR_PROGRAM, *side_by_side.controls(SETTING)]
    found = RUN[scenario](Stage(SETTING, programs, Lent(RealEngine(vllm), "lent"), 1, said.append))
    vllm.wait_idle()
    assert [sample.program for sample in found] == [OUR_NAME, told.HEALTH_ENDPOINT, told.SUMMING]
    assert told.broken_controls(found) == [], found
    assert told.is_right(found[0]), found[0]
    assert found[0].figures[names.RECOVERED] is not None, found[0]
    assert said
    assert OUR_NAME in said[0]

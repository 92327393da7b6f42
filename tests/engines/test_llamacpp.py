"""What the llama.cpp profile finds on its server's pages, and which of it moves when."""

from __future__ import annotations

import pytest
from tests.engines.test_samples import samples_of

from enginewatch.core.progress import Ledger
from enginewatch.engines import recognise_answer
from enginewatch.engines.llamacpp import PROFILE
from enginewatch.engines.profile import Grain

PAGES = [f"llamacpp-0c1e57098-{name}" for name in ("idle-fresh", "decoding", "long-prompt", "long-prompt-later")]


def moved_between(before: str, after: str) -> set[str]:
    ledger = Ledger(PROFILE)
    for poll, name in enumerate((before, after), start=1):
        ledger.take(samples_of(name), float(poll), float(poll), poll, recheck=False)
    return {name for name, leg in ledger.cores["0"].legs.items() if leg.moved_at is not None}


def test_a_page_without_labels_is_one_core_with_every_leg() -> None:
    ledger = Ledger(PROFILE)
    ledger.take(samples_of(PAGES[0]), 0.0, 0.0, 1, recheck=False)
    [core] = ledger.cores.values()
    assert set(core.legs) == {leg.name for leg in PROFILE.legs}
    assert core.stall_after_sec(30.0) == 120.0
    assert core.stall_after_sec(300.0) == 300.0


def test_all_legs_move_while_requests_come_and_go() -> None:
    assert moved_between(PAGES[0], PAGES[1]) == {"decodes", "prompt_tokens", "predicted_tokens"}


def test_within_a_long_prompt_only_the_number_of_decodes_moves() -> None:
    assert moved_between(PAGES[2], PAGES[3]) == {"decodes"}
    assert {leg.name for leg in PROFILE.legs if leg.grain is Grain.STEP} == {"decodes"}


@pytest.mark.parametrize(("name", "running", "waiting"), [(PAGES[0], 0, 0), (PAGES[1], 2, 2), (PAGES[2], 1, 0)])
def test_slots_at_work_and_requests_without_one_are_told(name: str, running: int, waiting: int) -> None:
    ledger = Ledger(PROFILE)
    ledger.take(samples_of(name), 0.0, 0.0, 1, recheck=False)
    core = ledger.cores["0"]
    assert (core.running(ledger.page), core.waiting(ledger.page, without_deferred=False)) == (running, waiting)


@pytest.mark.parametrize(
    "name",
    ["n_tokens_max", "prompt_tokens_cached_total", "prompt_seconds_total", "prompt_tokens_seconds"],
)
def test_what_is_no_progress_is_not_asked_for(name: str) -> None:
    assert f"llamacpp:{name}" not in PROFILE.names()


def test_its_list_of_models_names_it() -> None:
    # As /v1/models answers; a field of Ollama's stands beside OpenAI's.
    answer = {"models": [{"name": "tiny"}], "object": "list", "data": [{"id": "tiny", "owned_by": "llamacpp"}]}
    assert recognise_answer("/v1/models", answer) is PROFILE

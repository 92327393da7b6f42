"""KV engine ids of a bootstrap server: which change is a replacement, and that no server makes endless ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginewatch.core.kv_engines import ALONE, MAX_RANKS, SETTLED, KvEngines, KvNews

NOTHING, REPLACED, RETURNED, DISBELIEVED = KvNews.NOTHING, KvNews.REPLACED, KvNews.RETURNED, KvNews.DISBELIEVED


def heard(kv: KvEngines, answers: Iterable[Mapping[str, str]], *, since: float = 0.0) -> list[KvNews]:
    """What each answer says, 5 s apart, with a good page asked for right after each."""
    news = []
    for number, ids in enumerate(answers):
        t = since + 5 * number
        news.append(kv.hear(ids, t))
        kv.page_taken(t + 0.1, replaced=kv.said_before(t + 0.1))
    return news


def after(*answers: Mapping[str, str]) -> list[KvNews]:
    return heard(KvEngines(), answers)


def test_another_id_of_a_rank_seen_before_is_a_replacement() -> None:
    assert after({"0": "a"}, {"0": "a"}, {"0": "b"}, {"0": "b"}) == [NOTHING, NOTHING, REPLACED, NOTHING]


def test_a_rank_that_joins_or_is_missing_is_the_same_process() -> None:
    assert after({"0": "a"}, {"0": "a", "1": "b"}, {"1": "b"}, {"0": "a", "1": "b"}) == [NOTHING] * 4


def test_a_rank_that_was_missing_and_comes_back_with_another_id_is_a_replacement() -> None:
    assert after({"0": "a", "1": "b"}, {"0": "a"}, {"0": "a", "1": "c"})[-1] is REPLACED


def test_silence_is_nothing_however_long_and_hides_nothing() -> None:
    kv = KvEngines()
    kv.hear({"0": "a"}, 0.0)
    for _ in range(100):
        kv.silence("nobody listens")
    assert not kv.said_before(1000.0)
    assert kv.failure == "nobody listens"
    assert kv.hear({"0": "a"}, 600.0) is NOTHING
    assert kv.failure is None
    kv.silence("nobody listens")
    assert kv.hear({"0": "b"}, 700.0) is REPLACED


@pytest.mark.parametrize("polls_later", range(1, SETTLED + 1))
def test_ranks_that_change_one_after_the_other_are_one_replacement(polls_later: int) -> None:
    between = [{"0": "A", "1": "b"}] * (polls_later - 1)
    news = after({"0": "a", "1": "b"}, {"0": "A", "1": "b"}, *between, {"0": "A", "1": "B"})
    assert news.count(REPLACED) == 1


def test_a_rank_that_stayed_for_long_and_changes_then_is_another_replacement() -> None:
    news = after({"0": "a", "1": "b"}, *[{"0": "A", "1": "b"}] * (SETTLED + 1), {"0": "A", "1": "B"})
    assert news.count(REPLACED) == 2


def test_a_rank_that_loads_for_long_while_the_others_are_back_is_the_same_replacement() -> None:
    news = after({"0": "a", "1": "b"}, *[{"0": "A"}] * 50, {"0": "A", "1": "B"})
    assert news.count(REPLACED) == 1


def test_the_rank_that_changed_first_may_not_change_again_unnoticed() -> None:
    assert after({"0": "a", "1": "b"}, {"0": "A", "1": "b"}, {"0": "AA", "1": "b"}).count(REPLACED) == 2


def test_a_change_counts_with_the_first_page_asked_for_after_it() -> None:
    kv = KvEngines()
    kv.hear({"0": "a"}, 0.0)
    kv.hear({"0": "b"}, 10.0)
    assert not kv.said_before(9.9)
    kv.page_taken(9.9, replaced=False)
    assert kv.said_before(10.5), "a page asked for before may be the process before's"
    kv.page_taken(10.5, replaced=True)
    assert not kv.said_before(15.0), "and it counts once"


def test_crashes_while_it_loads_are_one_replacement_since_no_page_came_between() -> None:
    kv = KvEngines()
    for t, engine_id in enumerate("abcd"):
        kv.hear({"0": engine_id}, float(t))
        kv.interrupted()
    assert kv.said_before(10.0)
    kv.page_taken(10.0, replaced=True)
    assert not kv.said_before(11.0)


def test_ids_that_follow_what_the_page_has_told_are_the_same_replacement() -> None:
    kv = KvEngines()
    kv.hear({"0": "a", "1": "b"}, 0.0)
    kv.page_taken(5.0, replaced=True)
    assert heard(kv, [{"0": "a", "1": "b"}, {"0": "A"}, {"0": "A", "1": "B"}], since=6.0) == [NOTHING] * 3
    assert heard(kv, [{"0": "AA", "1": "B"}], since=30.0) == [REPLACED], "the next one is not"


def test_a_page_of_a_replacement_asked_for_before_the_ids_changed_settles_them_too() -> None:
    kv = KvEngines()
    kv.hear({"0": "a"}, 0.0)
    kv.hear({"0": "b"}, 5.1)
    kv.page_taken(5.0, replaced=True)
    assert not kv.said_before(10.0)


@pytest.mark.parametrize("turns", [(1, 1), (1, 2), (2, 3), (5, 5), (40, 40)])
def test_two_servers_behind_one_address_are_one_replacement_and_no_more(turns: tuple[int, int]) -> None:
    a, b = [{"0": "a"}] * turns[0], [{"0": "b"}] * turns[1]
    news = after(*(a + b) * 20)
    assert news.count(REPLACED) == 1
    assert RETURNED in news
    assert DISBELIEVED not in news


def test_behind_two_servers_a_replacement_of_one_is_still_seen() -> None:
    turns = [{"0": "a"}, {"0": "b"}] * 10
    assert after(*turns, {"0": "a"}, {"0": "c"}).count(REPLACED) == 2


@pytest.mark.parametrize("stays", [1, 3, 20])
def test_ids_that_are_always_new_are_a_few_replacements_and_then_none(stays: int) -> None:
    """With `stays` reads of each: nobody can say how long a server keeps what it makes up."""
    answers = [{"0": f"made-up-{number}"} for number in range(50) for _ in range(stays)]
    news = after(*answers)
    assert news.count(REPLACED) == ALONE
    assert DISBELIEVED in news


def test_an_engine_that_crashes_again_and_again_is_believed_every_time() -> None:
    kv = KvEngines()
    kv.hear({"0": "first"}, 0.0)
    for number in range(20):
        kv.interrupted()
        assert heard(kv, [{"0": f"start-{number}"}], since=100.0 * (number + 1)) == [REPLACED]


def test_a_server_that_makes_up_ranks_takes_no_memory_without_end() -> None:
    kv = KvEngines()
    for start in range(0, 20 * MAX_RANKS, MAX_RANKS // 2):
        kv.hear({str(rank): "x" for rank in range(start, start + MAX_RANKS // 2)}, float(start))
    assert kv.ranks == MAX_RANKS


@given(
    st.lists(
        st.tuples(
            st.permutations("0123"),
            st.lists(st.sampled_from(["register", "silent", "failed scrape", "missing"]), max_size=12),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_every_restart_is_told_once_in_whatever_order_its_ranks_register(
    starts: list[tuple[list[str], list[str], bool]],
) -> None:
    """Each start: the order in which its ranks register, what happens meanwhile, whether pages are read meanwhile."""
    kv = KvEngines()
    t = 0.0
    told = 0

    def page() -> None:
        nonlocal told
        told += kv.said_before(t)
        kv.page_taken(t, replaced=kv.said_before(t))

    kv.hear({rank: f"0-{rank}" for rank in "0123"}, t)
    for generation, (order, events, pages_come) in enumerate(starts, start=1):
        kv.interrupted()
        registered: list[str] = []
        for event in [*events, *["register"] * len(order)]:
            t += 5
            match event:
                case "register":
                    registered = order[: len(registered) + 1]
                    kv.hear({rank: f"{generation}-{rank}" for rank in registered}, t)
                case "silent":
                    kv.silence("nobody listens")
                case "failed scrape":
                    kv.interrupted()
                case _ if registered:
                    kv.hear({registered[-1]: f"{generation}-{registered[-1]}"}, t)
            if pages_come:
                page()
        page()
        assert told == generation

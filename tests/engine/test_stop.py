"""Stop strings: the first one completed, over any split into pieces, with no more held back than must be."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.stop import Found, StopSearch
from tests.engine.slow_search import SlowSearch

Piece = tuple[str, bool, bool]
"""Text, whether it is shown, whether stop strings completed in it count."""
stop_sets = st.lists(st.text("ab#", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)
shown_pieces = st.tuples(st.text("ab#", max_size=4), st.just(True), st.just(True))
any_pieces = st.tuples(st.text("ab#", max_size=4), st.booleans(), st.booleans())


def found(stops: tuple[str, ...], *pieces: str) -> Found | None:
    search = StopSearch(stops)
    return next((match for match in map(search.show, pieces) if match is not None), None)


def same_as_slow(stops: tuple[str, ...], pieces: list[Piece]) -> None:
    search, slow, num_shown = StopSearch(stops), SlowSearch(stops), 0
    for text, shown, counts in pieces:
        go_on = search.show if shown else search.hide
        match, expected = go_on(text, counts), slow.add(text, shown, counts)
        if expected is None or match is None:
            assert match is expected
        else:
            stop, begin, end = expected
            to_end = num_shown + (match.end if shown else 0)
            assert (match.stop, to_end - match.num_shown, to_end) == (stop, begin, end)
            return
        num_shown += len(text) if shown else 0
        assert search.num_held == slow.num_held()


@pytest.mark.parametrize("examples", [50, pytest.param(3000, marks=pytest.mark.long)])
def test_the_same_as_looking_at_everything_again(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(stops=stop_sets, pieces=st.lists(shown_pieces, max_size=10))
    def shown(stops: tuple[str, ...], pieces: list[Piece]) -> None:
        same_as_slow(stops, pieces)

    @settings(max_examples=examples, deadline=None)
    @given(stops=stop_sets, pieces=st.lists(any_pieces, max_size=10))
    @example(stops=("ab",), pieces=[("a", True, True), ("##", False, True), ("b", True, True)])
    @example(
        stops=("#a#bb", "bb"),
        pieces=[("b#a", True, False), ("#", False, True), ("b", True, True), ("b", True, True)],
    )
    def partly_hidden(stops: tuple[str, ...], pieces: list[Piece]) -> None:
        same_as_slow(stops, pieces)

    shown()
    partly_hidden()


def test_the_first_completed_wins_though_another_begins_before_it() -> None:
    assert found(("abcd", "c"), "ab", "cd") == Found(end=1, num_shown=1, stop="c")


def test_of_two_completed_at_once_the_one_that_begins_first() -> None:
    for stops in (("bc", "abc", "c"), ("c", "abc", "bc")):
        assert found(stops, "xab", "cd") == Found(end=1, num_shown=3, stop="abc")


def test_a_false_start_is_not_forgotten() -> None:
    assert found(("aab",), "a", "a", "a", "b") == Found(end=1, num_shown=3, stop="aab")
    assert found(("ab#ac", "b#ab"), "ab#", "ab") == Found(end=2, num_shown=4, stop="b#ab")


@pytest.mark.parametrize(
    ("text", "held"), [("x</thin", 6), ("</think ", 0), ("<<", 1), ("<</", 2), ("</think></", 2)]
)
def test_what_is_held_back_is_what_may_begin_one(text: str, held: int) -> None:
    search = StopSearch(("</think>",))
    search.show(text, counts=False)
    assert search.num_held == held


def test_what_a_stop_string_begins_with_is_held_though_it_did_not_count_itself() -> None:
    search = StopSearch(("ab", "abcd"))
    assert search.show("ab", counts=False) is None
    assert search.num_held == 2
    assert search.show("cd") == Found(end=2, num_shown=4, stop="abcd")


@pytest.mark.parametrize("piece", ["a", "a" * 97])
def test_the_cost_does_not_grow_with_the_text(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups in the automaton: two a character at most, on text that always nearly matches."""
    lookups = 0

    class Counting(dict[str, int]):
        def get(self, *arguments: object) -> int | None:  # type: ignore[override]
            nonlocal lookups
            lookups += 1
            return super().get(*arguments)  # type: ignore[call-overload]

    search = StopSearch(("a" * 100 + "b", "a" * 70 + "c"))
    automaton = search._shown._automaton
    monkeypatch.setattr(automaton, "_next", [Counting(following) for following in automaton._next])
    for _ in range(20_000 // len(piece)):
        assert search.show(piece) is None
        assert search.num_held <= 100
    assert lookups <= 2 * 20_000
    assert search.show("c") == Found(end=1, num_shown=71, stop="a" * 70 + "c")

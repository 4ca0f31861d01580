"""A regular expression matches what Python's `re.fullmatch` does, or is refused."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import warnings

import pytest

from bench.grammar import Walker
from engine import regex
from engine.grammar import Grammars
from protocol import RequestError
from tests.engine.grammar.asking import (
    asked,
    takes,
)


@pytest.mark.parametrize(
    "pattern",
    ["a|bc", "^ab?$", "(x|y){2,3}", r"\d+-\w", r"[^a]", r"\S\s\W", "a/b", r"\.\*", ".", "[a-c]?z", "(?:ab)*"],
)
def test_a_regex_matches_the_whole_output_as_python_does(
    pattern: str, grammars: Grammars, walker: Walker
) -> None:
    texts = [
        "".join(chars)
        for n in range(4)
        for chars in itertools.product("abxyz1-. /*\u00e9\u0663\u00bd\n", repeat=n)
    ]
    texts = [
        *random.Random(0).sample(texts, 150),
        "a",
        "bc",
        "ab",
        "1-a",
        "a/b",
        ".*",
        "xy",
        "abab",
        "-",
        "a -",
    ]
    right = {text for text in texts if re.fullmatch(pattern, text)}
    taken = {text for text in texts if takes(grammars, asked("regex", regex=pattern), text, walker)}
    assert taken <= right
    assert {text for text in right if text.isascii()} <= taken


ODD_PARTS = (
    *"ab-][^&~|().*+?$:k3z #{}",
    *(r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"\]", r"\-", "(?i:", "(?x:", "(?:", "\u0130", "\u00e9"),
)
ODD_TEXTS = (
    *"abkKi3z -][^&~|#:_{(,`",
    *(
        "\u0130",
        "\u0131",
        "\u00e9",
        "\u0663",
        "\u00bd",
        "\u00b2",
        "\u2001",
        "\x1c",
        "\x85",
        "\u212a",
        "\u017f",
    ),
    *("a]", "b]", "]]", "-]", "ab", "a\u0663", "\u2001a"),
)


def odd_patterns(seed: int, count: int) -> list[str]:
    """Patterns that Python reads, most of them classes: there the two syntaxes have most to disagree on."""
    rng = random.Random(seed)
    patterns: list[str] = []
    while len(patterns) < count:
        some = "".join(rng.choices(ODD_PARTS, k=rng.randint(1, 6)))
        pattern = rng.choice(["{}", "[{}]", "[^{}]", "[^{}]]", "[{}]]", "(?i:[{}])"]).replace("{}", some)
        with contextlib.suppress(re.error), warnings.catch_warnings(action="ignore"):
            re.compile(pattern)
            patterns.append(pattern)
    return patterns


KNOWN_ODD = [
    r"[^\s]+",
    r"[^\d]",
    r"[^\w]",
    r"[^\D\s]",
    "[a[b]]",
    "[^[a]]",
    "[]-a]",
    "[^--a]",
    "(?x:[^a b])",
    "(?i:[^i])",
]


def check_odd_patterns(patterns: list[str], grammars: Grammars, walker: Walker) -> None:
    kept = 0
    for pattern in patterns:
        try:
            grammars.compile(asked("regex", regex=pattern))
        except RequestError:
            continue
        kept += 1
        for text in ODD_TEXTS:
            if not re.fullmatch(pattern, text):
                assert not takes(grammars, asked("regex", regex=pattern), text, walker), (pattern, text)
    assert kept > len(patterns) // 2


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Python's, of classes that are refused here
def test_a_regex_takes_nothing_that_python_does_not(grammars: Grammars, walker: Walker) -> None:
    check_odd_patterns([*KNOWN_ODD, *odd_patterns(0, 60)], grammars, walker)
    for pattern, text in [
        (r"[^\s]+", "a1"),
        (r"[^\d]", "a"),
        (r"[^\W]", "a"),
        ("[]-a]", "`"),
        ("[]a]", "]"),
        ("(?i:yes)", "YES"),
    ]:
        assert takes(grammars, asked("regex", regex=pattern), text, walker), pattern


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_regex_takes_nothing_that_python_does_not_at_length(grammars: Grammars, walker: Walker) -> None:
    check_odd_patterns(odd_patterns(1, 3000), grammars, walker)


def test_reading_a_pattern_leaves_warnings_alone() -> None:
    """The filters belong to the process: the model's thread may warn at the same moment."""
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        inside = list(warnings.filters)
        for pattern in [*KNOWN_ODD, *odd_patterns(2, 300), "[[a]b]", "[a&&b]", "[a--b]"]:
            with contextlib.suppress(ValueError):
                regex.common(pattern)
            assert warnings.filters == inside
    assert [str(one.message) for one in warned] == []
    assert warnings.filters == before

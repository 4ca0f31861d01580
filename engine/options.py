"""Options that are a word or a switch: what there is to choose from, known without a model and without torch."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from protocol import OptionRefused

WORDS = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "kv_dtype": ("auto", "float32", "bfloat16", "float16", "int8", "fp8"),
    "quantization": ("none", "int8"),
    "admission": ("first-fit", "best-fit", "priority"),
}
_SWITCHES = ("overlap", "compile", "trust_remote_code")


def check_words(given: Mapping[str, object]) -> None:
    """Check what does not depend on the model.

    Args:
        given: options by name; those that are None, or not of these kinds, are passed over.

    Raises:
        OptionRefused: there is no such choice, or two exclude each other.
    """
    for name, words in WORDS.items():
        value = given.get(name)
        if value is not None and value not in words:
            (nearest,) = get_close_matches(str(value), words, n=1, cutoff=0)
            raise OptionRefused(f"{name} {value!r} is none of {', '.join(words)}", [{name: nearest}])
    for name in _SWITCHES:
        value = given.get(name)
        if value is not None and not isinstance(value, bool):
            raise OptionRefused(f"{name} is {value!r}", [{name: True}, {name: False}])
    if given.get("quantization") == "int8" and given.get("compile"):
        raise OptionRefused(
            "quantization int8 and compile exclude each other: int8 layers are no part of compiled code",
            [{"compile": None}, {"quantization": None}],
        )

"""Words that must not be written."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class BadWords:
    """Bars the last token of each word where the output ends with the others; the prompt does not count (as in vLLM).

    Words are found by their last token but one, so a step looks only at those that could go on here.
    """

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._always: Ids = np.array(sorted({word[0] for word in words if len(word) == 1}), dtype=np.int64)
        self._after: dict[int, list[tuple[list[int], int]]] = {}
        for *others, last in (word for word in words if len(word) > 1):
            self._after.setdefault(others[-1], []).append((others, last))
        self._tail: deque[int] = deque(maxlen=max(map(len, words), default=1) - 1)

    def push(self, token_id: int) -> None:
        """Take note of a token of the output."""
        self._tail.append(token_id)

    def barred(self) -> list[Ids]:
        """Ids that would complete a word now."""
        barred = [self._always] if len(self._always) else []
        if self._tail and self._tail[-1] in self._after:
            tail = list(self._tail)
            ends = [last for others, last in self._after[tail[-1]] if tail[-len(others) :] == others]
            barred.append(np.array(ends, dtype=np.int64))
        return barred

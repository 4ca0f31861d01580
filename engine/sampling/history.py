"""Which ids a choice has seen, and how often it wrote each.

prompt 3 3 1, output 5 5 3      ids     1  3  5
                                counts  0  1  2
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class History:
    """Distinct ids with their counts in the output, as arrays that a token changes in one place."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = sorted(set(prompt_token_ids))
        self._place = {token_id: place for place, token_id in enumerate(distinct)}
        self._ids = np.array(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.float64)

    def __bool__(self) -> bool:
        return bool(self._place)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """`[distinct]`; a view that the next push may change."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """How often each is in the output; 0 for what is in the prompt alone."""
        return self._counts[: len(self._place)]

    def push(self, token_id: int) -> None:
        """Count a token of the output. O(1) in the long run: the arrays double."""
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._ids):
            spare = max(64, place)
            self._ids = np.append(self._ids, np.zeros(spare, np.int64))
            self._counts = np.append(self._counts, np.zeros(spare))
        self._ids[place] = token_id
        self._counts[place] += 1

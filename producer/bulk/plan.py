"""In which order rows are asked: those that begin alike together, and first what writes most for what it reads.

    input    a1 c1 b1 a2 c2 b2 ...       three topics, mixed: the beginning of each is computed again and again
    asked    b1 b2 ..  a1 a2 ..  c1 ..   while a topic's KV lies in a worker's pool it is used; the long outputs of b
                                         begin early, the short ones of c fill up the end

Prompts are the leaves of a trie, and the order is a walk through it, so a worker whose pool keeps one path computes
each prefix once. Below each prefix there are

    longer prefixes            each whole; by expected output over what is still to be read, the greatest first
    rows that share no more    together, as if they were one of them; the longest expected outputs first, and of
                               equals the longest prompts, which are answered at greater length (bench/NOTES.md)

(Groups by shared prefix in the order of that ratio are BatchLLM's: Z. Zheng and others, "BatchLLM: Optimizing Large
Batched LLM Inference with Global Prefix Sharing and Throughput-oriented Token Batching", arXiv 2412.03594.)

Nobody here has a tokenizer: characters stand for tokens. How long the outputs of other rows were counts nowhere: the
same input is asked in the same order, whatever the workers do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from producer.bulk.intake import Ask
from producer.bulk.records import Record
from producer.bulk.requests import RowJob
from protocol import Job

MOST_ROWS = 20_000
"""Rows held. A short one takes 3 KB."""
MOST_BYTES = 32 << 20
"""Bytes of held lines after which no more is taken in. In memory they are three to four times as many."""
FIRST_ROWS = 2_000
"""Rows put in order before the first is asked; the next time twice as many, and so on: nobody waits for long."""
BLOCK = 64
"""Characters by which prefixes are measured: some 16 tokens, one or two KV blocks."""
UNLIMITED = 2048
"""Tokens expected of a row without a limit. Many: an output that may become long should not be among the last."""

_Weight = tuple[int, int]
"""Of a row: tokens expected of it, characters of its prompt."""


def planned(
    rows: Iterable[Ask | Record],
    most_rows: int = MOST_ROWS,
    most_bytes: int = MOST_BYTES,
    first_rows: int = FIRST_ROWS,
) -> Iterator[Ask | Record]:
    """The same rows: records at once, what is to be asked in a better order, as far as those held tell one.

        leaving   put in order the last time       ====|====>    asked, one by one
        coming    will be put in order next        =========>    two are taken in for each that is asked

    At the end of the input all that is held is put in order together, so that no long output is left for the end.
    """
    source = iter(rows)
    coming: list[Ask] = []
    leaving: list[Ask] = []
    size, wanted, ended = 0, first_rows, False
    while True:
        has_room = len(coming) + len(leaving) < most_rows and size < most_bytes
        if has_room and len(coming) < wanted and not ended:
            match next(source, None):
                case Ask() as taken:
                    coming.append(taken)
                    size += taken.size
                case Record() as record:
                    yield record
                case None:
                    coming, leaving, ended = leaving[::-1] + coming, [], True
        elif leaving:
            asked = leaving.pop()
            size -= asked.size
            wanted += 2
            yield asked
        elif coming:
            leaving, coming, wanted = in_order(coming)[::-1], [], 0
        else:
            return


def in_order(asks: Sequence[Ask]) -> list[Ask]:
    """The rows in the order of the walk."""
    texts = [prompt_text(ask.row_job) for ask in asks]
    likes = {id(ask.row_job.like): ask.row_job.like for ask in asks}  # few: rows are made by patterns
    expected = {which: _expected(like) for which, like in likes.items()}
    weights = [(expected[id(ask.row_job.like)], len(text)) for ask, text in zip(asks, texts, strict=True)]
    by_text = sorted(range(len(asks)), key=texts.__getitem__)
    shared = [_shared(texts[row], texts[after]) for row, after in pairwise(by_text)]
    return [asks[row] for row in _walk(by_text, shared, weights)]


def _walk(by_text: Sequence[int], shared: Sequence[int], weights: Sequence[_Weight]) -> list[int]:
    """The walk, by one pass over the sorted texts.

    A row hangs below the longest prefix that it shares with a neighbour. `path` leads to where the next one may hang;
    a prefix that is left behind is complete.

    Args:
        by_text: rows, their texts sorted.
        shared: blocks that each of them but the last has in common with the one after it.
        weights: of all rows.
    """
    path = [_Prefix(0)]
    before = 0
    for row, after in zip(by_text, [*shared, 0], strict=False):
        if after > before:
            path.append(_Prefix(after))
        path[-1].rows.append(row)
        while path[-1].depth > after:
            left = path.pop()
            if path[-1].depth < after:
                path.append(_Prefix(after))
            path[-1].add(left, weights)
        before = after
    return path[0].in_order(weights)


class _Prefix:
    """What many prompts begin with, in whole blocks; the root is nothing."""

    __slots__ = ("depth", "longer", "output", "rows", "to_read")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        """Blocks."""
        self.rows: list[int] = []
        """Those that share no more."""
        self.longer: list[tuple[float, int, list[int]]] = []
        """Ratio, the first row (negative, so that the earlier is the greater), and all rows, in order."""
        self.output = 0
        """Tokens expected of all rows that are in order."""
        self.to_read = 0
        """Characters of them that come after it, each shared prefix once."""

    def add(self, longer: _Prefix, weights: Sequence[_Weight]) -> None:
        """Put a complete prefix below it."""
        rows = longer.in_order(weights)
        self._put(rows, longer.output, longer.to_read + BLOCK * (longer.depth - self.depth))

    def in_order(self, weights: Sequence[_Weight]) -> list[int]:
        """All rows below it, once it is complete."""
        if self.rows:
            self.rows.sort(key=weights.__getitem__, reverse=True)
            read = sum(weights[row][1] - BLOCK * self.depth for row in self.rows)
            self._put(self.rows, sum(weights[row][0] for row in self.rows), read)
        self.longer.sort(reverse=True)
        return [row for _, _, rows in self.longer for row in rows]

    def _put(self, rows: list[int], output: int, to_read: int) -> None:
        self.longer.append((output / (to_read + 1), -rows[0], rows))
        self.output += output
        self.to_read += to_read


def _shared(one: str, other: str) -> int:
    """Whole blocks with which both begin."""
    low, high = 0, min(len(one), len(other)) // BLOCK
    while low < high:
        middle = (low + high + 1) // 2
        if other.startswith(one[low * BLOCK : middle * BLOCK], low * BLOCK):
            low = middle
        else:
            high = middle - 1
    return low


def _expected(job: Job) -> int:
    """Tokens that may come of a row."""
    return (job.params.token_limit or UNLIMITED) * job.num_choices


def prompt_text(row_job: RowJob) -> str:
    """What a row asks, as one text that begins like another's where their prompts do."""
    if row_job.messages is None:
        return row_job.prompt if isinstance(row_job.prompt, str) else str(row_job.prompt)
    pieces = [json.dumps(row_job.like.tools)] if row_job.like.tools else []
    for message in row_job.messages:
        content = message.content
        pieces += [message.role, content if isinstance(content, str) else message.text]
        if message.tool_calls:
            pieces.append(json.dumps(message.tool_calls))
    return "\n".join(pieces)

"""What the engine's counters say about the last minute: for heartbeats and for a line of log."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

WINDOW_S = 60.0
MARK_EVERY_S = 1.0
PARTS = ("schedule", "forward", "sample", "output")

Counters = Mapping[str, float]
"""`engine.interface.EngineStats` laid flat: the seconds of a step's parts go by their names."""


class Figures:
    """Keeps the counters of the last `WINDOW_S` seconds, a mark a second."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, Counters]] = deque(maxlen=int(WINDOW_S / MARK_EVERY_S) + 1)
        self._told_steps = 0.0

    @property
    def now(self) -> Counters:
        """The counters that were noted last; empty before the first."""
        return self._marks[-1][1] if self._marks else {}

    def note(self, counters: Counters) -> None:
        """The counters now."""
        self._marks.append((time.monotonic(), counters))

    def lately(self) -> dict[str, float]:
        """Shares are 0 to 1; what nothing was done for is left out.

        Returns:
            Of the last `WINDOW_S` seconds: `tokens_per_s`, written, and `read_per_s`, of prompts; `preemptions`;
            `slots_used`, of slots; `kv_used`, of the pool, now; `kv_unused`, tokens that blocks in use could hold and
            do not; `cached`, of prompt tokens; `computed_twice`, of tokens computed; `padding`, of rows computed;
            `graphs`, CUDA graphs, of steps; `step_ms`, and of that the parts.
        """
        now = time.monotonic()
        recent = [mark for mark in self._marks if now - mark[0] <= WINDOW_S]
        if len(recent) < 2:
            return {}
        (began, before), (ended, after) = recent[0], recent[-1]
        grown = {name: value - before.get(name, 0) for name, value in after.items()}
        steps = grown["steps"]
        rows = grown["prompt_tokens"] + grown["output_tokens"]
        seconds = sum(grown[part] for part in PARTS)
        shares = {
            "slots_used": (grown["slot_steps"], steps * after["slots"]),
            "kv_used": (after["kv_blocks_used"], after["kv_blocks_total"]),
            "kv_unused": (grown["kv_tokens_unused"], grown["kv_tokens_allocated"]),
            "cached": (grown["cached_tokens"], grown["cached_tokens"] + grown["prompt_tokens"]),
            "computed_twice": (grown["recomputed_tokens"], rows),
            "padding": (grown["padding_rows"], rows + grown["padding_rows"]),
            "graphs": (grown["graph_steps"], steps),
            "step_ms": (1000 * seconds, steps),
            "tokens_per_s": (grown["output_tokens"], ended - began),
            "read_per_s": (grown["prompt_tokens"] + grown["cached_tokens"], ended - began),
        } | {part: (grown[part], seconds) for part in PARTS}
        told = {name: round(part / whole, 4) for name, (part, whole) in shares.items() if whole}
        return told | {"preemptions": grown["preemptions"]}

    def line(self) -> str | None:
        """The last minute in a line; None if no step was made since the last line."""
        lately = self.lately()
        if "step_ms" not in lately or self.now["steps"] == self._told_steps:
            return None
        self._told_steps = self.now["steps"]
        parts = " ".join(f"{part} {lately.get(part, 0):.0%}" for part in PARTS)
        return (
            f"running {self.now['running']:,}, waiting {self.now['waiting']:,}: "
            f"{lately['tokens_per_s']:,.0f} tokens/s, slots {lately.get('slots_used', 0):.0%}, "
            f"KV {lately.get('kv_used', 0):.0%} ({lately.get('kv_unused', 0):.1%} unused), "
            f"cache {lately.get('cached', 0):.0%}, preempted {lately['preemptions']:,} "
            f"({lately.get('computed_twice', 0):.1%} computed twice), step {lately['step_ms']:,.1f} ms: {parts}"
        )

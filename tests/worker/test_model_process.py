"""What the parent hears of its model process, in the order in which it was said."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.interface import DeviceLost
from worker.frames import Lost, Step, encode
from worker.model_process import ModelProcess


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_last_word_behind_steps_is_heard_before_the_end_of_the_pipe(steps: int) -> None:
    async def story() -> tuple[int, str]:
        reader = asyncio.StreamReader()
        said = [Step([], [], number, 0, 0) for number in range(steps)]
        reader.feed_data(b"".join(map(encode, [*said, Lost("broken")])))
        reader.feed_eof()
        nobody: Any = None
        model = ModelProcess(nobody, reader, nobody)
        await model._listening  # all of it lies there before anybody asks
        heard: list[Step] = []
        while True:
            try:
                heard += await model.steps(5.0, lambda: None)
            except DeviceLost as lost:
                return len(heard), str(lost)

    assert asyncio.run(story()) == (steps, "broken")

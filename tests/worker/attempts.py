"""A job over several attempts, both ends of the pipe in this process.

Attempt 1   Run -> prepare -> add -> step ... Piece -> Held -> log      killed
Attempt 2   Run with what the log holds -> ...                          to the end
"""

from __future__ import annotations

import queue
from collections import defaultdict

from broker.calls import Lease
from engine.interface import EngineCore
from protocol import Job, Result, TokenEvent, decode_event
from worker.child import take_in, to_piece
from worker.frames import HEAD_BYTES, Run, Step, decode_from_model, decode_to_model, encode
from worker.held import Held
from worker.preparation import Inbox, Preparation


class Attempt:
    """One attempt at a job, with the log that it finds and leaves."""

    def __init__(self, engine: EngineCore, job: Job, number: int, log: list[bytes]) -> None:
        self.log = list(log)
        """Stays empty where nobody streams the job and it ends before anything of it was logged."""
        self.result: Result | None = None
        self._engine = engine
        self._streamed = job.stream
        payload = job.encode()
        self._held = Held(Lease(job.id, number, 0, len(log), 1_000, 2_000, payload), number)
        self._held.go_on_after(log)
        (run,) = decode_to_model(encode([Run(self._held.key, payload, self._held.written)])[HEAD_BYTES:])
        assert isinstance(run, Run)
        inbox: Inbox = queue.SimpleQueue()
        Preparation(self._engine, inbox).run(run)
        _, begun, refused = take_in(self._engine, inbox, wait=True)
        assert refused == []
        self._held.begin(*begun)

    def step(self) -> None:
        """One step of the engine, told and logged as a worker does."""
        pieces = [to_piece(delta) for delta in self._engine.step() if delta.request_id == self._held.key]
        step = decode_from_model(encode(Step([], pieces, 1, 0, 1))[HEAD_BYTES:])
        assert isinstance(step, Step)
        for piece in step.pieces:
            self._held.add(piece)
        if self._held.complete:
            self.result = Result.decode(self._held.result("succeeded", "m", "w"))
            self._take(self._held.take_end("done"))
        elif self._held.due():
            self._take(self._held.take_events())

    def drop(self) -> None:
        """The end of the process that ran it, for an engine that serves the next attempt too."""
        self._engine.abort(self._held.key)

    def hand_back(self) -> None:
        """What a worker that is told to stop does: everything is logged, the end of the job is not."""
        self._take(self._held.take_events())

    def to_the_end(self) -> Result:
        while self.result is None:
            self.step()
        return self.result

    def _take(self, taken: tuple[int, list[bytes]]) -> None:
        first, events = taken
        if first == 0:
            assert not self._streamed
            assert self.log == []
            assert self.result is not None
            return
        assert first == len(self.log) + 1, "gap or repeat"
        self.log += events


def assert_log_tells(result: Result, log: list[bytes]) -> None:
    """Joined over a choice the log is the result's choice; a choice ends once and says nothing after. Without a log
    there is nothing to compare: `Attempt` has seen that it may be so.
    """
    if not log:
        return
    *tokens, end = map(decode_event, log)
    assert end.type == "done"
    by_choice: dict[int, list[TokenEvent]] = defaultdict(list)
    for event in tokens:
        assert isinstance(event, TokenEvent)
        by_choice[event.choice].append(event)
    assert sorted(by_choice) == [choice.index for choice in result.choices]
    for choice in result.choices:
        events = by_choice[choice.index]
        assert "".join(event.text for event in events) == choice.text
        assert [token_id for event in events for token_id in event.token_ids] == choice.token_ids
        assert [one for event in events for one in event.logprobs or ()] == (choice.logprobs or [])
        assert [e.prompt_logprobs for e in events if e.prompt_logprobs] == (
            [choice.prompt_logprobs] if choice.prompt_logprobs else []
        )
        reasons = [event.finish_reason for event in events]
        assert reasons == [None] * (len(events) - 1) + [choice.finish_reason]

"""Events: what kind one is can be told without reading it."""

from __future__ import annotations

import pytest

from protocol import decode_event, encode_terminal, encode_token, is_token

EVENTS = [
    (encode_token("j", 1, 1, 0, "token", [5]), True),
    (encode_token("j", 1, 1, 0, "", [], finish_reason="stop", stop_reason="x"), True),
    (encode_terminal("j", 2, 1, "done"), False),
    (encode_terminal("j", 2, 1, "error", "engine_error", '{"type":"token"'), False),
]


@pytest.mark.parametrize(("event", "token"), EVENTS)
def test_its_kind(event: bytes, token: bool) -> None:
    assert is_token(event) == is_token(event.decode()) == token
    assert (decode_event(event).type == "token") == token

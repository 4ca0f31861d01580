"""Plain jobs are read without pydantic, and as it would read them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import Job
from protocol.plain import LARGEST_REST, read_plain

PLAIN: list[dict[str, Any]] = [
    {"id": "a", "prompt": "Hi"},
    {"id": "run.1:x@y_z-0", "prompt": "", "run": "r", "stream": False},
    {
        "id": "a",
        "prompt": 'two\n"lines"\u2028\0 of \U0001f600',
        "priority": "low",
        "tenant": "t",
        "max_retries": 0,
    },
    {"id": "a", "prompt": "Hi", "params": {"seed": 2**63}, "run": None, "model": "m", "result_ttl_s": 5},
    {
        "id": "a",
        "prompt": "Hi",
        "params": {"max_tokens": 5, "temperature": 1, "stop": "x", "seed": 0, "n": 3},
    },
    {"id": "a", "prompt": "Hi", "params": {"seed": None, "logit_bias": {"5": 1.5}, "stop_token_ids": [1]}},
    {"id": "a", "prompt": "Hi", "add_special_tokens": False, "split_special_tokens": True, "params": {}},
]
OTHERS: list[dict[str, Any]] = [
    {"id": "a", "messages": [{"role": "user", "content": "Hi"}]},
    {"id": "a", "prompt": [1, 2]},
    {"id": "a", "prompt": "Hi", "delay_s": 5},
    {"prompt": "Hi", "id": "a"},
    {"id": "a", "prompt": "Hi", "params": {"stop": "x" * LARGEST_REST}},
]
ODD = [
    *(
        b"null",
        b"1",
        b"1.0",
        b"true",
        b'"1"',
        b'""',
        b"[]",
        b"{}",
        b"-1",
        b"-0",
        b"01",
        b"1e2",
        b"NaN",
        b"1e999",
    ),
    *(
        b"18446744073709551615",
        b"18446744073709551616",
        b'"a\\n"',
        b'"a b"',
        b'"\\ud800"',
        b'"\xff"',
        b'"\x01"',
    ),
    *(b'{"seed":1}', b'{"seed":01}', b'{"seed":1,"seed":"x"}', b'{"seed":"x","seed":1}', b'{"seed":1.0}'),
    *(
        b'{"\\u0073eed":3}',
        b'{"sed":3}',
        b'{"seed":9223372036854775808,"n":129}',
        b'{"max_tokens":0,"seed":1}',
    ),
    *(b'{"min_tokens":3,"max_tokens":2,"seed":1}', b'{"seed":true}', b'{"seed":null}', b"{,}", b'{"n":1,}'),
    *(
        b'"high"',
        b'"normal"',
        b'"r"',
        b'"' + b"i" * 201 + b'"',
        b'"text\xe2\x80\xa8"',
        b'"0"',
        b"false",
        b"5.5",
    ),
]
NAMES = [*Job.model_fields, "other", "", "Id"]
ODD_PAYLOADS = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(ODD)), max_size=3)


def payload_of(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()


def agree(payload: bytes) -> bool:
    """Whether it is read as a plain job; if so, as pydantic reads it."""
    plain = read_plain(payload)
    if plain is None:
        return False
    job = Job.decode(payload)
    assert plain == job
    assert repr(plain) == repr(job)
    assert plain.model_fields_set == job.model_fields_set
    assert plain.params.model_fields_set == job.params.model_fields_set
    assert plain.encode() == job.encode()
    return True


@pytest.mark.parametrize("fields", PLAIN, ids=payload_of)
def test_plain_jobs_are_read(fields: dict[str, Any]) -> None:
    assert agree(payload_of(fields))
    assert agree(payload_of({**fields, "id": "b", "prompt": "other"}))
    job = Job.model_validate({**fields, "params": {**fields.get("params", {}), "seed": 77}})
    assert agree(job.encode())


@pytest.mark.parametrize("fields", OTHERS, ids=lambda fields: ",".join(fields))
def test_other_jobs_are_left_to_pydantic(fields: dict[str, Any]) -> None:
    assert not agree(payload_of(fields))
    assert Job.decode(payload_of(fields)).id == "a"


@settings(max_examples=120)
@given(st.sampled_from(PLAIN), ODD_PAYLOADS)
def test_odd_values_and_fields_named_twice(fields: dict[str, Any], odd: list[tuple[str, bytes]]) -> None:
    assert agree(payload_of(fields)), (
        "as it stands it is plain: a reader that reads nothing would agree with everybody"
    )
    members = [(name, payload_of(value)) for name, value in fields.items()] + odd
    agree(b"{" + b",".join(b'"%s":%s' % (name.encode(), value) for name, value in members) + b"}")


@settings(max_examples=120)
@given(st.sampled_from(PLAIN), st.data())
def test_bytes_that_are_changed(fields: dict[str, Any], data: st.DataObject) -> None:
    payload = payload_of(fields)
    assert agree(payload), "unchanged it is plain"
    at = data.draw(st.integers(0, len(payload)))
    until = data.draw(st.integers(at, min(len(payload), at + 2)))
    put = data.draw(
        st.sampled_from(
            [b"", b"\xef\xbb\xbf", b'"', b",", b"}", b"0", b"\\", b"\\u", b"\x00", b" ", b"\n", b"\xc3"]
        )
    )
    agree(payload[:at] + put + payload[until:])


def test_what_is_deep_is_left_to_pydantic() -> None:
    deep = b'{"id":"a","prompt":"Hi","params":{"n":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    assert read_plain(deep) is None


def test_jobs_share_nothing_that_says_what_was_given() -> None:
    first, second = (
        read_plain(payload_of({"id": name, "prompt": name, "params": {"n": 2}})) for name in "ab"
    )
    assert first is not None
    assert second is not None
    first.model_fields_set.add("run")
    assert second.model_fields_set == {"id", "prompt", "params"}

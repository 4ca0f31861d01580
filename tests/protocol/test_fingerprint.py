"""What two workers of one queue must agree on, and what they need not."""

from __future__ import annotations

from protocol import Fingerprint

MODEL = Fingerprint(name="m", revision="r", dtype="float32")


def test_another_kv_dtype_is_another_fingerprint_and_is_said() -> None:
    narrow = MODEL.model_copy(update={"kv_dtype": "int8"})
    assert narrow.encode() != MODEL.encode()
    assert Fingerprint.model_validate_json(narrow.encode()) == narrow
    assert str(narrow) == "m revision r float32 KV in int8"


def test_without_one_it_reads_as_it_did_before_there_were_any() -> None:
    assert MODEL.encode() == '{"name":"m","revision":"r","dtype":"float32","quantization":""}'
    assert Fingerprint.model_validate_json(MODEL.encode()) == MODEL

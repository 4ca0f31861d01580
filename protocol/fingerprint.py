"""Which model a queue serves."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Fingerprint(BaseModel):
    """What must be equal for two workers to answer the same queue."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    name: str
    revision: str = ""
    dtype: str = ""
    quantization: str = ""
    kv_dtype: str = ""
    """Dtype of the KV store, where it is not the model's."""

    def encode(self) -> str:
        """Canonical JSON: equal models give equal strings.

        `kv_dtype` is left out where it is empty, so that workers which do not know it agree with those which do.
        """
        return self.model_dump_json(exclude=None if self.kv_dtype else {"kv_dtype"})

    def __str__(self) -> str:
        parts = [self.revision and f"revision {self.revision}", self.dtype, self.quantization]
        parts.append(self.kv_dtype and f"KV in {self.kv_dtype}")
        return " ".join([self.name, *(part for part in parts if part)])

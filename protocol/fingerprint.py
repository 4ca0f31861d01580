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

    def encode(self) -> str:
        """Canonical JSON: equal models give equal strings."""
        return self.model_dump_json()

    def __str__(self) -> str:
        parts = [self.revision and f"revision {self.revision}", self.dtype, self.quantization]
        return " ".join([self.name, *(part for part in parts if part)])

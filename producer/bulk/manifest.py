"""What a run is, beside its output: the same command finds it and goes on; another one is told the difference."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ValidationError, field_serializer

from producer.bulk.wording import Wording
from producer.refusal import Refused
from protocol import SamplingParams
from protocol.validation import shortened

OutputFormat = Literal["jsonl", "parquet", "openai"]
"""How the two files are written."""
RowOrder = Literal["input", "completion"]
"""In which order: as the input has the rows, or as they finished."""
CHUNK = 1 << 20


class FileState(BaseModel):
    """What tells that a file is still the one we saw."""

    size: int
    digest: str

    @staticmethod
    def of(path: Path) -> FileState:
        """Read a file through."""
        return Seen.of(path).state


class Seen:
    """What goes through, on its way from or to a file."""

    def __init__(self) -> None:
        self._size = 0
        self._digest = hashlib.blake2b(digest_size=16)

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read a file through."""
        seen = cls()
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                seen.take(chunk)
        return seen

    def take(self, chunk: bytes | bytearray) -> None:
        """Count a piece in."""
        self._digest.update(chunk)
        self._size += len(chunk)

    @property
    def state(self) -> FileState:
        """Of a file that holds what was taken, and nothing else."""
        return FileState(size=self._size, digest=self._digest.hexdigest())


class Finished(BaseModel):
    """The files of a run that is complete."""

    source: FileState
    output: FileState
    errors: FileState
    torn: list[str] = []
    """What of the input was missing, in words."""
    failed: int = 0
    """Rows in the error file."""


class Manifest(BaseModel):
    """One run."""

    v: Literal[1] = 1
    run: str
    model: str | None
    """As the command named it."""
    worker: dict[str, str] = {}
    """Flags of the run's own worker that change what it answers."""
    params: SamplingParams
    """For rows that set none; saved as far as the command gave them."""
    rendering: dict[str, Any] = {}
    """How the text of rows that do not say it becomes tokens: fields of a job."""
    wording: Wording = Wording()
    """How columns become a question."""
    id_column: str | None = None
    """Holds the rows' own names."""
    format: OutputFormat = "jsonl"
    order: RowOrder = "input"
    created: int = 0
    """When the run began: seconds since the epoch. It stands in OpenAI's replies, so a resumed run keeps it."""
    served: str | None = None
    """The model that answered, by its own name."""
    superseded: list[str] = []
    """Runs whose place it took, and whose jobs may still be on the server."""
    finished: Finished | None = None

    @classmethod
    def new(
        cls,
        model: str | None,
        defaults: Mapping[str, Any],
        rendering: Mapping[str, Any],
        wording: Wording = Wording(),
        *,
        id_column: str | None = None,
        format: OutputFormat = "jsonl",
        order: RowOrder = "input",
        worker: Mapping[str, str] | None = None,
    ) -> Self:
        """A run that has not begun."""
        return cls(
            run=f"run-{secrets.token_hex(6)}",
            model=model,
            worker=dict(worker or {}),
            params=SamplingParams(**defaults),
            rendering=dict(rendering),
            wording=wording,
            id_column=id_column,
            format=format,
            order=order,
            created=int(time.time()),
        )

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """The manifest of an earlier run; None where there is none.

        Raises:
            Refused: it cannot be read as one.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise Refused(
                f"{path} is damaged ({error.error_count()} faults): --overwrite begins anew, "
                "--resume goes by the output file"
            ) from None

    def save(self, path: Path) -> None:
        """Replace the file in one step; durable on return."""
        write_durably(path, self.model_dump_json(indent=1).encode() + b"\n")

    def differences(self, other: Manifest) -> list[str]:
        """What the two commands ask differently, each as `name: ours, now theirs`."""
        ours, theirs = self._asked(), other._asked()
        return [
            f"{name}: {_shown(ours.get(name))}, now {_shown(theirs.get(name))}"
            for name in ours | theirs
            if ours.get(name) != theirs.get(name)
        ]

    def writes_like(self, other: Manifest) -> bool:
        """Whether both commands write the same answers into the same files."""
        return self._written() == other._written()

    def written_like(self, other: Manifest) -> Manifest:
        """This run, writing its answers as another command would."""
        return self.model_copy(update=other._written())

    def answered_by(self) -> dict[str, str | None]:
        """The model, and how the run's own worker has it: with another one every row is another question."""
        return {"model": self.model, **self.worker}

    def _written(self) -> dict[str, Any]:
        return {"format": self.format, "order": self.order, "id_column": self.id_column}

    @field_serializer("params")
    def _as_given(self, params: SamplingParams) -> dict[str, Any]:
        return params.model_dump(mode="json", exclude_unset=True)

    def _asked(self) -> dict[str, Any]:
        return {
            **self.answered_by(),
            **self.params.model_dump(),
            **self.rendering,
            **self.wording.model_dump(),
        }


def _shown(value: Any) -> str:
    return "not given" if value is None else shortened(str(value))


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file in one step; durable on return."""
    fresh = path.with_name(f"{path.name}.new")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

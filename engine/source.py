"""Where a model is: a folder, a `.gguf` file, or the hub; and whether its files are whole.

No torch here: a wrong name is told at once.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from protocol import ModelUnavailable, OptionRefused

log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
"""How llama.cpp names the parts of a GGUF file, without `.gguf`."""
HUB_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Source:
    """A model's name, understood."""

    kind: Literal["folder", "gguf", "hub"]
    place: str
    """Path of the folder or file, or the hub id."""
    name: str
    """What the model is called: the folder's name, the file's stem, the hub id."""
    revision: str | None = None
    """Branch, tag or commit on the hub; None: its main branch."""


def find(model: str, revision: str | None = None) -> Source:
    """Local files first, then the hub; the hub is asked only for what is not in the local cache.

    Args:
        model: a folder, a `.gguf` file or a hub id.
        revision: branch, tag or commit of a hub id.

    Raises:
        ModelUnavailable: there is no such model, or this is a part of one.
        OptionRefused: a revision of local files.
        ModuleNotFoundError: a hub id, and the worker extra is not installed.
    """
    path = Path(model).expanduser()
    if path.exists() and revision is not None:
        raise OptionRefused(
            f"revision {revision!r} is of a model on the hub, and {model!r} is local", [{"revision": None}]
        )
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnavailable(
                f"the folder {model} holds no model: no config.json (a .gguf is named as a file)"
            )
        return Source("folder", str(path), path.resolve().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelUnavailable(
                f"{model} is a file but no .gguf: name a .gguf file, a folder, or a hub id"
            )
        _check_not_a_part(path)
        return Source("gguf", str(path.resolve()), path.stem)
    if path.suffix == ".gguf" or not _HUB_ID.match(model):
        raise ModelUnavailable(f"no file or folder {model}, and it is no hub id (owner/name) either")
    source = Source("hub", model, model, revision)
    if cached_config(source) is None:
        ask_hub(source)
    return source


def cached_config(source: Source) -> str | None:
    """The config of a hub id in the local cache, `.../snapshots/<commit>/config.json`; None: not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source.place, "config.json", revision=source.revision)
    return found if isinstance(found, str) else None


def ask_hub(source: Source) -> None:
    """One question before a download: the download's own retries take 24 s to say that there is no network.

    Raises:
        ModelUnavailable: no such model or revision, not for this user, or no hub to ask.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    hub_id = source.place
    nowhere = f"no model {hub_id}: no file or folder here, not in the local cache, and"
    try:
        HfApi().model_info(hub_id, revision=source.revision, timeout=HUB_TIMEOUT_S)
    except GatedRepoError as error:
        raise ModelUnavailable(f"{hub_id} is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelUnavailable(f"the model {hub_id} has no revision {source.revision} on the hub") from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailable(
            f"{nowhere} the hub has none (check the name; a private one needs HF_TOKEN)"
        ) from error
    except Exception as error:  # whatever the HTTP client in use calls a failure
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelUnavailable(
            f"{nowhere} the hub cannot be reached ({said}); check the network, or name a local copy"
        ) from error


def _check_not_a_part(path: Path) -> None:
    """transformers reads the file that it is given and knows nothing of others: the rest would be missing."""
    found = _PART.search(path.stem)
    if found is None or int(found[2]) < 2:
        return
    stem = path.stem[: found.start()]
    first, whole = f"{stem}-00001-of-{found[2]}.gguf", f"{stem}.gguf"
    raise ModelUnavailable(
        f"{path.name} is one of {int(found[2])} parts of a GGUF file, and transformers reads whole files: put them "
        f"together with llama.cpp's `llama-gguf-split --merge {first} {whole}`, and name that file"
    )


def check_complete(name: str, missing: Iterable[str]) -> None:
    """transformers fills what the files lack with random numbers and says so in a log alone.

    Args:
        missing: tensors of the model that no file has.

    Raises:
        ModelUnavailable: there are some.
    """
    names = sorted(missing)
    if names:
        raise ModelUnavailable(
            f"{name} is not whole: its files lack {len(names)} of the model's tensors ({names[0]} ...)"
        )

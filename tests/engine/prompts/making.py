"""Jobs with prompts, their ids, and tokenizers to read them."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.prompts import Prompts
from engine.trial import Trial
from protocol import Job

HI = [{"role": "user", "content": "Hi"}]
SHOW_ALL = "{{ messages | tojson }}|{{ tools | tojson }}|{{ extra }}"


def make(**job: Any) -> Job:
    return Job.model_validate({"id": "job", **job})


TEMPLATES = Trial("engine.template_trial")
"""One for all tokenizers, since the process takes a second to start and knows nothing of them."""


@lru_cache(maxsize=64)
def prompts_of(tokenizer: Any) -> Prompts:
    prompts = Prompts(tokenizer)
    prompts._templates = TEMPLATES
    return prompts


def encode(tokenizer: Any, **job: Any) -> list[int]:
    (ids,) = prompts_of(tokenizer).encode(make(**job))
    return ids


def rendered(tokenizer: Any, **job: Any) -> str:
    text: str = tokenizer.decode(encode(tokenizer, **job))
    return text


def with_template(tokenizer: Any, template: Any) -> Any:
    changed = copy.copy(tokenizer)
    changed.chat_template = template
    return changed


def spaced(unigrams: list[str], **scheme: Any) -> Any:
    """A tokenizer that puts a space before a text, as Llama 2's does."""
    pieces = [(piece, -1.0) for piece in ["<unk>", *unigrams]]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**scheme)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )

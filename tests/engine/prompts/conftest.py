"""SmolLM2's prompts."""

from __future__ import annotations

from typing import Any

import pytest

from engine.prompts import Prompts
from tests.engine.prompts.making import with_template


@pytest.fixture(scope="session")
def prompts(smollm2: Any) -> Prompts:
    """SmolLM2's, with some templates by name."""
    templates = {
        "default": smollm2.chat_template,
        "trims": "{% for m in messages %}<|im_start|>{{ m.content | trim }}<|im_end|>{% endfor %}",
        "splits": "{% for m in messages %}<|im_start|>{{ m.content.split('.') | join(' ') }}<|im_end|>{% endfor %}",
    }
    return Prompts(with_template(smollm2, templates))

"""Chat templates that came with a job are rendered in a process of their own.

They run in the immutable sandbox of jinja2: nothing reaches Python, and no range is longer than 100,000. But nested
loops run for ever, one `x ** y` holds its whole process up for minutes, and `'x' * 10 ** 10` fills the memory.
"""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateSyntaxError

from engine.trial import MEMORY_BYTES, serve


def _main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    def rendered(question: Any) -> dict[str, Any]:
        chat, asked, most = question
        try:
            (text,), _ = render_jinja_template(conversations=[chat], **asked)
        except TemplateSyntaxError as error:
            return {"line": error.lineno, "fault": error.message or ""}
        except MemoryError:
            return {"fault": f"it takes more than {MEMORY_BYTES >> 30} GiB"}
        except Exception as error:  # whatever a program can raise
            return {"fault": str(error) or type(error).__name__}
        return {"text": text} if len(text) <= most else {"length": len(text)}

    serve(rendered)


if __name__ == "__main__":
    _main()

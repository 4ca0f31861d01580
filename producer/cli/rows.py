"""Options that say what the rows of a bulk run ask, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from producer.cli.flags import text_in

if TYPE_CHECKING:
    from producer.bulk.ids import OnBadIds
    from producer.bulk.inputs import Format
    from producer.bulk.manifest import OutputFormat, RowOrder
    from producer.bulk.wording import Wording

PANEL = "What a row asks"
FORMATS: tuple[Format, ...] = ("jsonl", "csv", "parquet")
OUTPUT_FORMATS: tuple[OutputFormat, ...] = ("jsonl", "parquet", "openai")
ROW_ORDERS: tuple[RowOrder, ...] = ("input", "completion")
BAD_IDS: tuple[OnBadIds, ...] = ("refuse", "rows")
OUTPUT_HELP = "Where the answers go. Rows without one go beside it: a.jsonl has a.errors.jsonl."

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="IN...",
        help="Rows: JSON lines ({prompt} or {messages}, or OpenAI's batch files), CSV or Parquet; may be gzip or "
        "zstd. Files, 'globs', URLs, - for stdin.",
    ),
]
InputFormat = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(FORMATS),
        help="What the inputs are. [default: by their names]",
        rich_help_panel=PANEL,
    ),
]
RowOrderName = Annotated[
    str,
    typer.Option(
        "--order", metavar="|".join(ROW_ORDERS), help="Answers in the order of IN, or as they finished."
    ),
]
PromptColumn = Annotated[
    str | None, typer.Option(metavar="NAME", help="Holds the prompt, or a chat.", rich_help_panel=PANEL)
]
PromptTemplate = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT|@FILE",
        help="Jinja2 with the columns as variables: 'Translate: {{ text }}'.",
        rich_help_panel=PANEL,
    ),
]
System = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="System message; prompts become a user's turn.", rich_help_panel=PANEL),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Prompts are a user's turn of a chat.", rich_help_panel=PANEL)
]
IdColumn = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Holds the rows' own names. [default: custom_id, in a batch file]",
        rich_help_panel=PANEL,
    ),
]
BadIdsName = Annotated[
    str,
    typer.Option(
        metavar="|".join(BAD_IDS),
        help="Names that are missing or not unique: refuse to begin, or make these rows errors.",
        rich_help_panel=PANEL,
    ),
]
Window = Annotated[int, typer.Option(min=1, metavar="N", help="Most rows on the queue at once.")]
Plan = Annotated[
    bool,
    typer.Option(
        "--plan/--no-plan",
        help="Ask rows that begin alike together, and long outputs early, rather than as they stand in IN.",
    ),
]


def wording(column: str | None, template: str | None, system: str | None, chat: bool) -> Wording:
    """How columns become a question; a template may be a file behind an @.

    Raises:
        typer.BadParameter: that file cannot be read.
    """
    from producer.bulk.wording import Wording

    return Wording(prompt_column=column, prompt_template=_text(template), system=system, chat=chat)


def _text(given: str | None) -> str | None:
    if given is None or not given.startswith("@"):
        return given
    return text_in("--prompt-template", Path(given[1:]))

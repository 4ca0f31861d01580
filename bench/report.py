"""Put the tables of benchmarks into a page: what stands between two marks is made anew from the figures.

python -m bench.report [--figures build/bench] [--page docs/speed.md]

<!-- table offline.speed -->      the table of that name, from offline.json; without that file it stays
<!-- table accuracy -->           likewise, from accuracy.json
<!-- end -->
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
BENCHMARKS = ("offline", "queue_overhead", "latency", "queue", "bulk", "plan", "pressure", "accuracy")
"""Names of JSON files; the module `bench.<name>` has a function `tables` that makes Markdown of its figures."""
MARKED = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def tables_in(folder: Path) -> dict[str, str]:
    """All tables whose figures are there."""
    found: dict[str, str] = {}
    for name in BENCHMARKS:
        file = folder / f"{name}.json"
        if file.exists():
            found |= import_module(f"bench.{name}").tables(json.loads(file.read_text()))
    return found


def filled(page: str, tables: Mapping[str, str]) -> str:
    """The page with its tables.

    Raises:
        SystemExit: it has no place for one of them.
    """
    if lost := set(tables) - {name for _, name, _ in MARKED.findall(page)}:
        raise SystemExit(f"the page has no marks for {', '.join(sorted(lost))}")

    def fill(mark: re.Match[str]) -> str:
        return f"{mark[1]}{tables[mark[2]]}\n{mark[3]}" if mark[2] in tables else mark[0]

    return MARKED.sub(fill, page)


def main() -> int:
    """Rewrite the page. Exit code 1 if there are no figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figures", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "speed.md")
    args = parser.parse_args()
    tables = tables_in(args.figures)
    if not tables:
        print(f"no figures in {args.figures}: run a benchmark with --json", file=sys.stderr)
        return 1
    args.page.write_text(filled(args.page.read_text(), tables))
    print(f"{args.page}: {', '.join(tables)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

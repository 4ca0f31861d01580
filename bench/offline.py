"""Output tokens a second of each engine on the same work, in one run; and how far ours is from the hardware's limit.

    python -m bench.offline                                  all that is installed here
    python -m bench.offline --python vllm=VENV/bin/python    vLLM from an environment of its own, see docs/speed.md
    python -m bench.offline --engine millstream --rows 32 --concurrency 32 --shared 0      a quick look at ours

Each engine is loaded once and answers `gsm8k-128`: 128 rows at once, then 32, then eight one after the other; and
then `shared-prefix-500`. After the first task, prompts begin with a number, so that no prefix cache knows them.
`millstream-kv16` is ours with KV in bfloat16, and everything else as `millstream` has it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import children, results, workload
from bench.children import Model, Place
from bench.engines import ENGINES
from bench.gemm_limit import Products
from bench.results import NotMeasured
from bench.workload import Row, Task

DEFAULT = ("millstream", "millstream-kv16", "vllm", "openvino", "openvino-4bit", "transformers-static")
SHARED = "shared-prefix"
FEWEST_ROWS = 8
WARM_TOKENS = 4


def main() -> int:
    """Measure and print the tables. Exit code 1 if an engine failed that was asked for by name or is installed."""
    args = _options()
    place = children.place_of(args)
    model = children.model_of(workload.model_or_default(args.model), args.dtype)
    warm, tasks = make_tasks(model.tokenizer(), args.rows, args.concurrency, args.shared)
    names = args.engine or list(DEFAULT)
    figures: dict[str, Any] = {"model": model.path.stem, "dtype": model.dtype, "engines": {}}
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        figures["engines"][name] = one = _measured(name, model, warm, tasks, place)
        if "why" in one:
            print(f"{name}: {one['why']}", file=sys.stderr, flush=True)
    figures["fewest"] = {
        task.name: workload.distinct_tokens(row.prompt_ids for row in task.rows) for task in tasks
    }
    ours = {name: one["tasks"] for name, one in figures["engines"].items() if _is_ours(name, one)}
    if ours:
        products = _products(model, place)
        figures["limits"] = {name: _limits(products, tasks, measured) for name, measured in ours.items()}
    results.save(args.json, figures)
    print("\n\n".join(tables(figures).values()))
    missing = [name for name, one in figures["engines"].items() if "why" in one]
    absent = [name for name in missing if figures["engines"][name]["why"].startswith(children.NOT_INSTALLED)]
    return int(any(name in (args.engine or ()) or name not in absent for name in missing))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", action="append", choices=list(ENGINES), help=f"default: {list(DEFAULT)}")
    parser.add_argument(
        "--rows", type=_count, default=128, help="rows of gsm8k-128, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--concurrency",
        type=_count,
        nargs="+",
        default=[128, 32, 1],
        help=f"rows handed over at once; that many rows, but at least {FEWEST_ROWS}",
    )
    parser.add_argument(
        "--shared",
        type=_count_or_none,
        default=500,
        help="rows of shared-prefix-500; 0: not measured (default: %(default)s)",
    )
    parser.add_argument(
        "--model", type=Path, help="a folder or a .gguf file (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--dtype", default="auto", help="default: what the machine computes fast")
    children.add_options(parser)
    results.add_option(parser)
    return parser.parse_args()


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows: give 1 or more")
    return int(text)


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else _count(text)


def make_tasks(
    tokenizer: Any, rows: int, concurrency: list[int], shared: int
) -> tuple[list[Row], list[Task]]:
    """What an engine warms up with, and what it is measured on."""
    all_rows = workload.load(tokenizer, rows)

    def salt(number: int) -> list[int]:
        ids: list[int] = tokenizer.encode(str(number), add_special_tokens=False)
        return ids

    tasks = []
    for number, at_once in enumerate(concurrency):
        some = all_rows[: max(at_once, FEWEST_ROWS)]
        tasks.append(
            Task(gsm8k(at_once), at_once, [row.salted(salt(number)) for row in some] if number else some)
        )
    if shared:
        tasks.append(Task(SHARED, shared, workload.shared_prefix(tokenizer, shared)))
    warm = [Row(row.prompt_ids, WARM_TOKENS).salted(salt(len(tasks))) for row in all_rows[:2]]
    return warm, tasks


def gsm8k(at_once: int) -> str:
    """The name of a task."""
    return f"gsm8k-{at_once}"


def _is_ours(name: str, one: dict[str, Any]) -> bool:
    """Whether it is ours, and was measured."""
    return ENGINES[name].is_ours and "tasks" in one


def _measured(name: str, model: Model, warm: list[Row], tasks: list[Task], place: Place) -> dict[str, Any]:
    """An engine's figures, or why there are none."""
    asked = [task for task in tasks if task.name != SHARED or ENGINES[name].reuses_prefixes]
    try:
        return children.run(name, model, warm, asked, place)
    except NotMeasured as why:
        return {"why": str(why)}


def _products(model: Model, place: Place) -> Products:
    """Measured in a process of its own too, on what the engine has left warm."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "products.json"
        command = [place.python("millstream"), "-m", "bench.gemm_limit", "--model", str(model.folder)]
        command += ["--dtype", model.dtype, "--json", str(file)]
        subprocess.run(command, cwd=children.ROOT, stdout=subprocess.DEVNULL, check=True)
        found = json.loads(file.read_text())
    return Products(found["sizes"], found["layers"], found["head"])


def _limits(products: Products, tasks: list[Task], ours: dict[str, Any]) -> dict[str, Any]:
    """Seconds that the products alone would take, by task of an engine of ours."""
    groups = {
        task.name: [
            task.rows[first : first + task.at_once] for first in range(0, len(task.rows), task.at_once)
        ]
        for task in tasks
    }
    return {
        name: {
            "same_steps": products.steps(ours[name]["steps"]),
            "perfect": sum(products.perfect(group) for group in groups[name]),
        }
        for name in groups
    }


# Tables


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """By the name of each."""
    about = f"{figures['machine']}; {figures['model']}, {figures['dtype']}." if "machine" in figures else ""
    found = {"offline.speed": _speed(figures), "offline.shared": _shared(figures)}
    if "limits" in figures:
        found["offline.limit"] = _limit(figures)
    return {name: f"{about}\n\n{text}".strip() for name, text in found.items() if text}


def _speed(figures: dict[str, Any]) -> str:
    sizes = _sizes(figures)
    head = ["engine", "KV in", *(f"{size} at once, tok/s" for size in sizes), "ms a token, alone", "load, s"]
    head.append("what")
    rows = []
    for name, one in figures["engines"].items():
        if "why" in one:
            rows.append([name, *["-"] * (len(head) - 2), one["why"]])
            continue
        speeds = [f"{_rate(one['tasks'][gsm8k(size)]):,.1f}" for size in sizes]
        alone = f"{1000 / _rate(one['tasks'][gsm8k(1)]):.1f}" if 1 in sizes else "-"
        what = ", ".join(filter(None, (one["versions"], one["note"])))
        rows.append([name, one["kv_dtype"], *speeds, alone, f"{one['load_seconds']:.0f}", what])
    return results.table(head, rows) if sizes else ""


def _limit(figures: dict[str, Any]) -> str:
    head = ["engine", "KV in", "rows at once", "tok/s", "products of the same steps", "share"]
    head += ["perfect schedule", "share", "KV allocated and unused"]
    rows = []
    for name, limits in figures["limits"].items():
        one = figures["engines"][name]
        for size in _sizes(figures):
            ours, limit = one["tasks"][gsm8k(size)], limits[gsm8k(size)]
            row = [name, one["kv_dtype"], str(size), f"{_rate(ours):,.1f}"]
            for seconds in (limit["same_steps"], limit["perfect"]):
                row += [f"{ours['output_tokens'] / seconds:,.1f}", f"{seconds / ours['seconds']:.0%}"]
            rows.append([*row, f"{ours['kv_tokens_unused'] / ours['kv_tokens_allocated']:.1%}"])
    return results.table(head, rows)


def _shared(figures: dict[str, Any]) -> str:
    head = ["engine", "rows", "seconds", "output tok/s", "prompt tokens", "computed", "fewest possible"]
    head.append("saved of what can be")
    rows = []
    for name, one in figures["engines"].items():
        found = one.get("tasks", {}).get(SHARED)
        if found is None:
            continue
        total, fewest = found["prompt_tokens"], figures["fewest"][SHARED]
        cached = found["cached_tokens"]
        computed = ["not told", f"{fewest:,}", "-"]
        if cached is not None:
            computed = [f"{total - cached:,}", f"{fewest:,}", f"{cached / (total - fewest):.0%}"]
        rows.append(
            [
                name,
                str(found["rows"]),
                f"{found['seconds']:.1f}",
                f"{_rate(found):,.1f}",
                f"{total:,}",
                *computed,
            ]
        )
    return results.table(head, rows) if rows else ""


def _rate(task: dict[str, Any]) -> float:
    return float(task["output_tokens"] / task["seconds"])


def _sizes(figures: dict[str, Any]) -> list[int]:
    """The numbers of rows at once, as they were measured."""
    first: dict[str, Any] = next((one["tasks"] for one in figures["engines"].values() if "tasks" in one), {})
    return [task["at_once"] for name, task in first.items() if name != SHARED]


if __name__ == "__main__":
    sys.exit(main())

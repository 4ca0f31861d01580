"""From figures to a page's tables."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from bench import latency, offline, pressure, queue_overhead, report, results
from bench.workload import Row
from tests.bench.doubles import offline_figures

QUEUE = {
    "machine": "2 CPUs",
    "model": "a-model",
    "dtype": "float32",
    "rows": 32,
    "output_tokens": 1000,
    "threads": {"1": {"alone": 10.0, "queue": 10.4}, "2": {"alone": 8.0, "queue": 10.0}},
}
LATENCY = {
    "machine": "2 CPUs",
    "model": "a-model",
    "rounds": 2,
    "max_tokens": 8,
    "at_once": {"4": {"first": 100.4, "first_p95": 200.0, "gap": 30.0, "gap_p95": 45.6}},
}
PRESSURE = {
    "rows": 12,
    "least": 1000,
    "policies": {
        policy: {
            "needed": 40,
            "pools": {
                "60%": {
                    "blocks": 24,
                    "steps": 7,
                    "computed": 2200,
                    "prefilled": 1500,
                    "preemptions": 3,
                    "recomputed": 200,
                    "mean_running": 5.25,
                    "waste": 0.125,
                }
            },
        }
        for policy in ("first-fit", "best-fit")
    },
}


def cells(table: str, name: str) -> list[str]:
    """The first row of a Markdown table that begins with a name."""
    line = next(line for line in table.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_speed_of_each_engine_and_why_there_is_none() -> None:
    table = offline.tables(offline_figures())["offline.speed"]
    assert table.startswith(
        "2 CPUs, a processor; a-model, float32.\n\n| engine | KV in | 32 at once, tok/s | 1 at"
    )
    assert cells(table, "millstream")[1:] == ["float32", "100.0", "12.5", "80.0", "3", "millstream 1"]
    assert cells(table, "millstream-kv16")[1:] == ["bfloat16", "125.0", "12.5", "80.0", "4", "millstream 1"]
    assert cells(table, "openvino")[1:] == ["8 bits", "50.0", "25.0", "40.0", "5", "openvino 2, 16-bit"]
    assert cells(table, "vllm") == ["vllm", "-", "-", "-", "-", "-", "not installed: no module vllm"]


def test_share_of_the_limit_and_wasted_memory() -> None:
    table = offline.tables(offline_figures())["offline.limit"]
    assert cells(table, "millstream")[1:] == [
        "float32",
        "32",
        "100.0",
        "133.3",
        "75%",
        "200.0",
        "50%",
        "2.5%",
    ]
    assert cells(table, "millstream-kv16")[1:] == [
        "bfloat16",
        "32",
        "125.0",
        "166.7",
        "75%",
        "200.0",
        "62%",
        "2.0%",
    ]


def test_prompt_tokens_computed_beside_the_fewest_possible() -> None:
    table = offline.tables(offline_figures())["offline.shared"]
    assert cells(table, "millstream")[4:] == ["1,000", "400", "250", "80%"]
    assert cells(table, "openvino")[4:] == ["1,000", "not told", "250", "-"]


def test_a_part_of_the_figures_makes_a_part_of_the_tables() -> None:
    figures = offline_figures()
    figures["engines"] = {"openvino": figures["engines"]["openvino"]}
    del figures["engines"]["openvino"]["tasks"]["shared-prefix"], figures["limits"]
    assert list(offline.tables(figures)) == ["offline.speed"]


def test_what_the_queue_costs() -> None:
    table = queue_overhead.tables(QUEUE)["queue_overhead"]
    assert cells(table, "1") == ["1", "100.0", "96.2", "+4.0%"]
    assert cells(table, "2") == ["2", "125.0", "100.0", "+25.0%"]


def test_latency() -> None:
    table = latency.tables(LATENCY)["latency"]
    assert cells(table, "4") == ["4", "100", "200", "30", "46"]


def test_what_a_small_pool_costs() -> None:
    tables = pressure.tables(PRESSURE)
    assert list(tables) == ["pressure-first-fit", "pressure-best-fit"]
    table = tables["pressure-first-fit"]
    assert table.startswith(
        "12 rows, first-fit; all of them at once need 40 blocks of 8 tokens; 1,000 prompt tokens"
    )
    assert cells(table, "60%")[1:] == ["24", "7", "5.2", "2,200", "1.50", "10.0%", "3", "12.5%"]


def test_the_simulation_fills_the_table() -> None:
    """Twenty short rows: the smaller the pool, the more is computed twice, and nothing is lost on the way."""
    rows = [Row([10 * number + place for place in range(20)], 30) for number in range(20)]
    found = pressure.measure(rows, "first-fit")
    assert list(found["pools"]) == ["100%", "60%", "30%", "15%"]
    steps = [pool["steps"] for pool in found["pools"].values()]
    assert steps == sorted(steps)
    assert found["pools"]["100%"]["preemptions"] == 0
    figures = {"rows": 20, "least": 400, "policies": {"first-fit": found}}
    assert cells(pressure.tables(figures)["pressure-first-fit"], "15%")[1] == str(int(found["needed"] * 0.15))


def test_the_page_has_a_place_for_every_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, figures = tmp_path / "speed.md", tmp_path / "figures"
    text = (report.ROOT / "docs" / "speed.md").read_text()
    page.write_text(text)
    monkeypatch.setattr(sys, "argv", ["report", "--page", str(page), "--figures", str(figures)])
    assert report.main() == 1
    assert page.read_text() == text
    measured = {
        "offline": offline_figures(),
        "queue_overhead": QUEUE,
        "latency": LATENCY,
        "pressure": PRESSURE,
    }
    for name, found in measured.items():
        results.save(figures / f"{name}.json", found)
    assert report.main() == 0
    filled = page.read_text()
    places = {name for _, name, _ in report.MARKED.findall(text)}
    assert places >= set(report.tables_in(figures))
    for table in report.tables_in(figures).values():
        assert table in filled
    assert re.sub(report.MARKED, r"\1\3", filled) == re.sub(report.MARKED, r"\1\3", text)
    assert "docs/speed.md" not in capsys.readouterr().out


def test_what_was_not_measured_again_stays() -> None:
    page = "<!-- table a -->\nold a\n<!-- end -->\nprose\n<!-- table b -->\nold b\n<!-- end -->\n"
    filled = report.filled(page, {"b": "new b"})
    assert filled == page.replace("old b", "new b")
    assert report.filled(filled, {"b": "new b"}) == filled
    with pytest.raises(SystemExit, match="no marks for c"):
        report.filled(page, {"c": "lost"})


def test_figures_say_what_they_were_measured_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("model name\t: Some 9000 CPU\nflags\t: sse avx2 amx_bf16\n")
    results.save(tmp_path / "new" / "figures.json", {"speed": 1})
    saved = json.loads((tmp_path / "new" / "figures.json").read_text())
    assert saved["speed"] == 1
    assert re.fullmatch(r"\d+ CPUs, Some 9000 CPU, avx2, amx_bf16", saved["machine"])

"""Run the benchmarks, then write the tables of docs/benchmarks.md from their result files.

python -m benchmarks                 all of them
python -m benchmarks sum             only this one
python -m benchmarks --tables        no measurement, only the tables
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import BUSY, RESULTS

NAMES = ("launch", "census", "sum", "scaling", "memory", "batch_size", "step", "grading")
ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Written by `make bench` from `benchmarks/results/*.json`: do not edit. Each is the median of
interleaved runs, with the quartiles in brackets (a single number: the fastest of some runs).
Your machine will give other numbers.
"""


def _three_digits(value: float) -> str:
    """Three digits, and never an exponent: 0.621, 60.1, 1820."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(NAMES)}")
    parser.add_argument("--tables", action="store_true", help="measure nothing, write the tables")
    args = parser.parse_args()
    unknown = set(args.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    # A failed benchmark does not stop the others.
    failed = [] if args.tables else [name for name in args.names or NAMES if not run(name)]
    PAGE.write_text(page(), encoding="utf-8")
    print(f"tables: docs/{PAGE.name}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(name: str) -> bool:
    """Run one benchmark in a fresh interpreter, so that none warms anything up for the next."""
    print(f"== {name}", flush=True)
    return (
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}_bench"], cwd=ROOT).returncode == 0
    )


def page() -> str:
    parts = [HEAD]
    for name in NAMES:
        path = RESULTS / f"{name}.json"
        if path.is_file():
            parts.append(section(name, json.loads(path.read_text(encoding="utf-8"))))
        else:
            parts.append(f"## {name}\n\nNot measured.\n")
    return "\n".join(parts)


def section(name: str, results: dict) -> str:
    lines = [f"## {results.get('title') or results.get('what') or name}", ""]
    if results.get("table"):
        head, rows = results["table"]["head"], results["table"]["rows"]
        lines += [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    else:
        rows = [line for line in timings(results) if line]
        if not rows:
            raise ValueError(f"benchmarks/results/{name}.json holds no timing for a table")
        lines += ["| | time |", "|---|---:|", *rows]
    lines += ["", results["note"]] if results.get("note") else []
    if results.get("targets"):
        lines += ["", "| promise | wanted | measured | kept |", "|---|---|---|---|"]
        for t in results["targets"]:
            kept = "yes" if t["met"] else "**no**"
            lines.append(f"| {t['what']} | {t['wanted']} | {t['measured']} | {kept} |")
    lines += ["", describe(results), ""]
    return "\n".join(lines)


def timings(found: object, path: tuple[str, ...] = ()) -> Iterator[str]:
    """A table line for every timing in a result file, wherever it stands in it."""
    if isinstance(found, list):
        for item in found:
            yield from timings(item, path)
    elif isinstance(found, dict):
        for unit, scale in (("s", 1000.0), ("ms", 1.0)):
            if f"median_{unit}" in found:
                yield line(found, path, unit, scale)
                return
        for key, value in found.items():
            if isinstance(value, (int, float)) and path and path[-1].endswith("_ms"):
                yield f"| {path[-1][:-3]}: {key} | {_three_digits(value)} ms |"
            else:
                yield from timings(value, path if key in ("rows", "calls") else (*path, key))


def line(found: dict, path: tuple[str, ...], unit: str, scale: float) -> str:
    what = found.get("what") or ": ".join(path)
    if "outcome" in found:
        what += f" ({found['outcome']})"
    quartiles = found.get(f"quartiles_{unit}")
    low, high = quartiles or (found[f"low_{unit}"], found[f"high_{unit}"])
    numbers = (_three_digits(scale * value) for value in (found[f"median_{unit}"], low, high))
    return "| {} | {} ms ({}–{}) |".format(what, *numbers)


def describe(results: dict) -> str:
    machine = results["machine"]
    packages = machine.get("packages") or results.get("versions") or {}
    parts = [
        f"Measured {machine.get('date') or results['date']} on {machine['cpu']}",
        f"{machine['cores']} cores",
        f"{machine['ram_gib']} GiB RAM" if "ram_gib" in machine else "",
        ", ".join(machine["gpus"]) or "no GPU",
        machine.get("os") or machine.get("system", ""),
        f"Python {machine['python']}" if "python" in machine else "",
        *(f"{name} {version}" for name, version in packages.items()),
    ]
    text = ", ".join(part for part in parts if part) + "."
    others = machine.get("other_work_percent")
    if others is None:
        return text
    if others > BUSY:
        return f"{text} **Other programs used {others:.0f} % of the cores meanwhile.**"
    return f"{text} Other programs used {others:.0f} % of the cores."


if __name__ == "__main__":
    sys.exit(main())

"""census() against GPUtil's call, taking turns on this machine.

    python benchmarks/census_bench.py        # prints a table, writes results/census.json

Three machines are measured: this one as it is; this one with an `nvidia-smi` on PATH that
answers at once (two GPUs, made up: what is measured is each tool's own cost, a real
nvidia-smi adds its own 0.1 to 2 s); and this one with an `nvidia-smi` that fails as a stub
driver's does. Times are in ms, the median and the quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from course_utils import _gpus  # noqa: E402
from course_utils.devices import census  # noqa: E402

ANSWERS = """#!/bin/sh
case "$1" in
*uuid,memory.total*)  # census: the fields it asks for
    for i in 0 1; do echo "$i, GPU-a$i, 81559, 1, 81558, 0, H100"; done;;
*)  # GPUtil's
    m="Enabled, Enabled"
    for i in 0 1; do echo "$i, GPU-a$i, 0, 81559, 1, 81558, 580.65, H100, 123, $m, 40"; done;;
esac
"""
FAILS = """#!/bin/sh
echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'
exit 9
"""


def outcome(fn: Callable) -> str:
    """What a call comes to, in a word or two."""
    try:
        found = fn()
    except Exception as e:  # a peer that raises is a result, not a fault of the benchmark
        return f"raises {type(e).__name__}"
    gpus = found.gpus if hasattr(found, "gpus") else found
    return f"{len(gpus)} GPUs"


def compare(calls: dict[str, Callable], rounds: int) -> dict[str, dict]:
    """Each call once a round, in turns, so that a slow spell of the machine hits all."""
    runs: dict[str, list[float]] = {name: [] for name in calls}
    results = {name: outcome(fn) for name, fn in calls.items()}  # warms up, too
    for _ in range(rounds):
        for name, fn in calls.items():
            begin = time.perf_counter()
            outcome(fn)
            runs[name].append((time.perf_counter() - begin) * 1e3)
    out = {}
    for name, ms in runs.items():
        low, median, high = statistics.quantiles(ms, n=4)
        out[name] = {"outcome": results[name], "median_ms": round(median, 3)}
        out[name] |= {"quartiles_ms": [round(low, 3), round(high, 3)], "runs": rounds}
    return out


def fresh_census():
    """Without the memory of an earlier failure: what the first census of a process costs."""
    _gpus._failed.clear()
    return census()


def import_ms(statement: str, runs: int = 15) -> float:
    """Time of an import in a fresh interpreter, in ms: the least disturbed of some runs."""
    code = f"import time; t = time.perf_counter()\n{statement}\nprint(time.perf_counter() - t)"
    with tempfile.TemporaryDirectory() as cache:  # compiled once, as in any installation
        env = os.environ | {"PYTHONPYCACHEPREFIX": cache}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-c", code]
        times = [
            float(
                subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True).stdout
            )
            for _ in range(runs)
        ]
    return round(min(times) * 1e3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/census.json")
    options = parser.parse_args()
    import GPUtil

    calls = {"census()": census, "census(), nothing remembered": fresh_census}
    calls["GPUtil.getGPUs()"] = GPUtil.getGPUs
    here = census()
    machines = {"this machine": compare(calls, options.rounds)}
    if not here.gpus:  # with a real driver NVML answers before any nvidia-smi
        with tempfile.TemporaryDirectory() as folder:
            smi = Path(folder, "nvidia-smi")
            path = os.environ["PATH"]
            os.environ["PATH"] = folder + os.pathsep + path
            for name, script in (("made-up nvidia-smi", ANSWERS), ("failing nvidia-smi", FAILS)):
                smi.write_text(script)
                smi.chmod(0o755)
                machines[name] = compare(calls, options.rounds)
            os.environ["PATH"] = path
    imports = {
        "course_utils": import_ms("import course_utils"),
        "course_utils.devices": import_ms("import course_utils.devices"),
        "of which the standard library's dataclasses": import_ms("import dataclasses"),
        "GPUtil": import_ms("import GPUtil"),
        "pynvml": import_ms("import pynvml"),
    }
    report = {
        "what": "census() against GPUtil.getGPUs(), in turns; ms",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {
            "cpu": here.cpu.name,
            "cores": len(here.cpu.cores),
            "gpus": [g.name for g in here.gpus],
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {"python": platform.python_version()}
        | {p: metadata.version(p) for p in ("GPUtil", "nvidia-ml-py", "psutil")},
        "calls": machines,
        "import_ms": imports,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    for machine, results in machines.items():
        print(machine)
        for name, r in results.items():
            low, high = r["quartiles_ms"]
            print(f"  {name:30} {r['median_ms']:9.2f} ms ({low:.2f}–{high:.2f})  {r['outcome']}")
    print("import:", ", ".join(f"{k} {v} ms" for k, v in imports.items()))
    print("written:", os.path.relpath(options.out))


if __name__ == "__main__":
    main()

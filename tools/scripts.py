"""Run lessons as plain scripts: `python source/lessons/NN_name.py`, unguarded, figures to files.

python tools/scripts.py          every lesson
python tools/scripts.py 00 02    only these
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEADLINE = 180  # seconds a script; a lesson takes 40 on two idle cores


@dataclass
class Run:
    """What one script left behind."""

    name: str
    seconds: float
    output: str
    problems: list[str]
    ledger: str = ""
    figures: list[str] = field(default_factory=list)


def run(script: Path, deadline: float = DEADLINE) -> Run:
    """Run one script in an empty folder. Never raises for what the script does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures, ledger = folder / "figures", folder / "ledger.jsonl"
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "COURSE_FIGURES": str(figures),
            "COURSE_LAUNCH_LEDGER": str(ledger),
            "MPLBACKEND": "Agg",
        }
        start = time.monotonic()
        # Files, not pipes: a process that outlives the script would hold a pipe open.
        with open(folder / "output", "w+b") as output:
            process = subprocess.Popen(
                [sys.executable, str(script.resolve())],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that the deadline ends its ranks as well
            )
            problems = _wait(process, deadline)
            output.seek(0)
            text = output.read().decode("utf-8", "replace")
        made = sorted(path.name for path in figures.glob("*")) if figures.exists() else []
        if not problems:
            problems += _figure_problems(script.read_text(encoding="utf-8"), made)
        return Run(
            script.name,
            time.monotonic() - start,
            text,
            problems,
            ledger.read_text() if ledger.exists() else "",
            made,
        )


def _wait(process: subprocess.Popen, deadline: float) -> list[str]:
    try:
        code = process.wait(deadline)
        return [f"ended with exit code {code}"] if code else []
    except subprocess.TimeoutExpired:
        return [f"not finished after {deadline:g} s"]
    finally:
        if process.poll() is None:  # the deadline, or Ctrl-C here
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _figure_problems(source: str, made: list[str]) -> list[str]:
    """Each `name=` of a plots.show in the source must be a file now."""
    shown = len(re.findall(r"\bshow\(", source))
    names = re.findall(r"\bshow\([^#]*?\bname=\"([\w-]+)\"", source)
    missing = [name for name in names if f"{name}.png" not in made]
    if missing:
        return [f"figure {missing[0]}.png was not written"]
    return ["it shows figures, but wrote none"] if shown and not made else []


def main(arguments: list[str] | None = None) -> int:
    """Command line. 0: every script ran; 1: one did not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", metavar="NN", help="only these, like 02")
    options = parser.parse_args(arguments)
    scripts = sorted((ROOT / "source/lessons").glob("*.py"))
    chosen = [s for s in scripts if not options.numbers or s.name[:2] in options.numbers]
    if not chosen:
        parser.error(f"no lesson has the number {' or '.join(options.numbers)}")
    failed = 0
    for script in chosen:
        print(f"{script.name:<36}", end=" ", flush=True)
        done = run(script)
        made = f"{len(done.figures)} figures"
        print(f"{done.seconds:5.1f} s, {made}" if not done.problems else done.problems[0])
        if done.problems:
            failed += 1
            print("\n".join(f"    {line}" for line in done.output.splitlines()[-30:]))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m course_utils census|doctor``: look at this machine from a shell.

Exit codes. census: 0. doctor: 0 nothing found, 1 something found. Wrong usage: 2.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m course_utils",
        description="What this machine has, and what is wrong with this installation.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("census", "the devices of this machine and the course's tier; exit code 0"),
        ("doctor", "problems and their cures; exit code 0: nothing found, 1: something found"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="for programs to read")
    options = parser.parse_args(words)
    return {"census": _census, "doctor": _doctor}[options.command](options.json)


def _census(as_json: bool) -> int:
    from course_utils.devices import census

    found = census()
    extra = {"tier": found.tier, "notes": found.notes}
    print(json.dumps(asdict(found) | extra, indent=2) if as_json else found)
    return 0


def _doctor(as_json: bool) -> int:
    from course_utils.doctor import diagnose, report

    findings = diagnose()
    print(json.dumps([asdict(f) for f in findings], indent=2) if as_json else report(findings))
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())

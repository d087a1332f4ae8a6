"""Checks of the course itself: each takes a notebook (or a folder) and returns problems in words.

tests/test_course.py runs them on the course, and on small broken notebooks: a check that
finds nothing there is no check.

    python tools/checks.py            run all of them
    python tools/checks.py --write    write what is generated: the lesson table of README.md,
                                      docs/then_now.md, docs/tensorflow_and_pytorch.md
"""

from __future__ import annotations

import base64
import html.parser
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as `python tools/checks.py`
    sys.path.insert(0, str(ROOT))

import nbformat  # noqa: E402
from nbformat import NotebookNode  # noqa: E402

from tools import dictionary, then_now  # noqa: E402

COMPARED = "NBVAL_CHECK_OUTPUT"
COMPARED_TAG = "nbval-check-output"
FIGURE_LIMIT = 100 * 1024  # bytes of an image as stored
MARKS = ("<!-- lessons -->", "<!-- /lessons -->")


class Html(html.parser.HTMLParser):
    """Images, links and anchors of a piece of HTML, or of Markdown with HTML in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[dict[str, str]] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if tag == "img":
            self.images.append(found)
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        self.anchors |= {found[name] for name in ("id", "name") if name in found}


def prose(text: str) -> str:
    """Markdown without its code: what stands in code is no link, image or heading."""
    text = re.sub(r"^(```|~~~).*?^\1[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]+`", "`code`", text)


def headings(notebook: NotebookNode) -> list[tuple[int, str]]:
    """(level, text) of every heading, in order."""
    return [
        (len(found[1]), found[2].strip())
        for cell in notebook.cells
        if cell.cell_type == "markdown"
        for found in re.finditer(r"^(#{1,6}) +(.+?)#*$", prose(cell.source), re.MULTILINE)
    ]


def check_headings(notebook: NotebookNode) -> list[str]:
    """One H1, first of all, and no level skipped."""
    found = headings(notebook)
    levels = [level for level, _ in found]
    problems = [] if levels.count(1) == 1 else [f"{levels.count(1)} H1 headings, not one"]
    if levels and levels[0] != 1:
        problems.append(f"the first heading is no H1: {found[0][1]!r}")
    for (above, _), (level, text) in zip(found, found[1:], strict=False):
        if level > above + 1:
            problems.append(f"heading {text!r} skips from level {above} to {level}")
    return problems


def check_executed(notebook: NotebookNode) -> list[str]:
    """Stored as it was executed: every cell, from 1 on, in order, without an error."""
    code = [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]
    problems = []
    if [c.execution_count for c in code] != list(range(1, len(code) + 1)):
        problems.append("not executed from top to bottom: the counts are not 1, 2, 3, …")
    for number, cell in enumerate(notebook.cells, 1):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                problems.append(f"cell {number} holds an error output: {output.ename}")
    return problems


def check_compared(notebook: NotebookNode, least: int) -> list[str]:
    """At least so many cells whose stored text nbval compares."""
    compared = 0
    for cell in notebook.cells:
        marked = COMPARED in cell.source or COMPARED_TAG in cell.metadata.get("tags", [])
        texts = [
            o.get("text") or o.get("data", {}).get("text/plain") for o in cell.get("outputs", [])
        ]
        # nbval skips a cell without a count, and compares no picture.
        compared += bool(marked and cell.get("execution_count") and any(texts))
    return [] if compared >= least else [f"{compared} compared cells, at least {least} wanted"]


def _texts(notebook: NotebookNode) -> Iterable[tuple[int, str, str]]:
    """(cell number, kind, text) of everything that is shown as Markdown or HTML."""
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "markdown":
            yield number, "markdown", prose(cell.source)
        for output in cell.get("outputs", []):
            if "text/html" in output.get("data", {}):
                yield number, "html", output["data"]["text/html"]


def check_images(notebook: NotebookNode, path: Path) -> list[str]:
    """Alt text on every image, and no image over the limit."""
    problems = []
    for number, cell in enumerate(notebook.cells, 1):
        for output in cell.get("outputs", []):
            if any(kind.startswith("image/") for kind in output.get("data", {})):
                problems.append(f"cell {number}: an image without alt text; use plots.show")
    for number, kind, text in _texts(notebook):
        images = [(i.get("alt", ""), i.get("src", "")) for i in Html(text).images]
        if kind == "markdown":
            images += re.findall(r"!\[([^\]]*)\]\(([^)\s]+)", text)
        for alt, address in images:
            if not alt.strip():
                problems.append(f"cell {number}: an image without alt text: {address[:40]}")
            if (size := _image_size(address, path)) > FIGURE_LIMIT:
                problems.append(f"cell {number}: an image of {size // 1024} KiB, at most 100")
    return problems


def _image_size(address: str, path: Path) -> int:
    if address.startswith("data:"):
        return len(base64.b64decode(address.partition(",")[2]))
    file = path.parent / unquote(address)
    return file.stat().st_size if "://" not in address and file.is_file() else 0


def slug(heading: str) -> str:
    """The anchor that Jupyter and GitHub both give to a heading of plain words."""
    return re.sub(r"\s+", "-", re.sub(r"[`*]", "", heading.strip()))


def anchors(text: str, found: Iterable[str]) -> set[str]:
    """Anchors of a file, in lower case: GitHub's are, Jupyter's keep the capitals."""
    return {name.lower() for name in Html(text).anchors} | {slug(name).lower() for name in found}


def check_links(notebook: NotebookNode, path: Path) -> list[str]:
    """Every link to a file or a heading of the course leads somewhere."""
    problems = []
    for number, kind, text in _texts(notebook):
        parsed = Html(text)
        links = parsed.links + [i.get("src", "") for i in parsed.images]
        if kind == "markdown":
            links += re.findall(r"\]\(<?([^)\s>]+)", text)
            links += re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, re.MULTILINE)
        for link in links:
            if re.match(r"[a-z]+:", link):  # https:, data:, mailto:
                continue
            name, _, anchor = link.partition("#")
            file = (path.parent / unquote(name)) if name else path
            if name and not file.exists():
                problems.append(f"cell {number}: the link {link!r} leads to no file")
            elif anchor and anchor.lower() not in _anchors_of(file, notebook if not name else None):
                problems.append(f"cell {number}: the link {link!r} leads to no heading")
    return problems


def _anchors_of(file: Path, notebook: NotebookNode | None) -> set[str]:
    if file.suffix == ".ipynb":
        notebook = notebook or nbformat.read(file, as_version=4)
        text = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
        return anchors(text, [name for _, name in headings(notebook)])
    text = file.read_text(encoding="utf-8")
    return anchors(text, re.findall(r"^#+ +(.+)$", prose(text), re.MULTILINE))


def check_machine(notebook: NotebookNode) -> list[str]:
    """No output shows a path or the name of the machine on which it was built."""
    from tools.execute import machine_specific

    problems = []
    for number, cell in enumerate(notebook.cells, 1):
        for output in cell.get("outputs", []):
            if found := machine_specific(json.dumps(output)):
                problems.append(f"cell {number} shows {found!r}, which is one machine's own")
    return problems


def check_scores(notebook: NotebookNode) -> list[str]:
    """In a solution every test cell scored all its points, and wrote nothing to stderr."""
    return [
        f"{cell.metadata.nbgrader.grade_id} scored {scored}, not {cell.metadata.nbgrader.points}"
        for cell in notebook.cells
        if cell.metadata.get("nbgrader", {}).get("grade")
        and (scored := score(cell.outputs)) != cell.metadata.nbgrader.points
    ]


def score(outputs: list[NotebookNode]) -> float | str:
    """The points that nbgrader reads from a test cell, or in words why it can read none."""
    for output in outputs:
        if output.output_type == "error" or output.get("name") == "stderr":
            return f"0 ({output.get('ename', 'output on stderr')})"
        if output.output_type == "execute_result":
            return float(output["data"]["text/plain"])
    return "nothing"


def check_devices(ledger: str, wanted: int) -> list[str]:
    """A ledger of `launch` shows so many distinct devices at work in one successful launch."""
    if wanted < 2:
        return []
    launches = [json.loads(line) for line in ledger.splitlines()]
    for launch in launches:
        # A slot's name repeats when ranks share a device (oversubscribe=True).
        if launch["ok"] and min(len(set(launch["ranks"])), len(set(launch["slots"]))) >= wanted:
            return []
    return [f"{len(launches)} launches, none with {wanted} devices at work, as its header says"]


def seed_rows(folder: Path = ROOT) -> dict[str, dict]:
    """docs/seed_rows.toml: {row id: {title, lessons, planned}}."""
    return tomllib.loads((folder / "docs/seed_rows.toml").read_text(encoding="utf-8"))["rows"]


def check_rows(headers: dict[str, dict], rows: dict[str, dict]) -> list[str]:
    """Lesson headers and the table of rows say the same, for every lesson that exists."""
    problems = []
    for row, entry in rows.items():
        for number in entry["lessons"]:
            if number in headers and row not in headers[number]["rows"]:
                problems.append(f"seed_rows.toml: {row} is in lesson {number}; its header lacks it")
        planned = set(entry.get("planned", []))
        for number in sorted(planned & set(headers)):
            problems.append(f"seed_rows.toml: {row} is planned for lesson {number}, which exists")
        for number in sorted(set(entry["lessons"]) - set(headers)):
            problems.append(f"seed_rows.toml: {row} names lesson {number}, which does not exist")
        if not entry["lessons"] and not planned:
            problems.append(f"seed_rows.toml: no lesson carries {row}")
    for number, header in headers.items():
        for row in header["rows"]:
            if number not in rows.get(row, {}).get("lessons", []):
                problems.append(f"lesson {number} names row {row}; seed_rows.toml does not agree")
    return problems


def lessons(folder: Path = ROOT) -> dict[str, tuple[Path, NotebookNode]]:
    """Built lessons by number."""
    found = sorted((folder / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    return {path.name[:2]: (path, nbformat.read(path, as_version=4)) for path in found}


def lesson_table(folder: Path = ROOT) -> str:
    """The README's table of lessons, from the built notebooks' headers."""
    lines = ["| | lesson | minutes | devices | path |", "|---|---|---|---|---|"]
    for number, (path, notebook) in lessons(folder).items():
        course, title = notebook.metadata.course, headings(notebook)[0][1]
        minutes = course.minutes
        total = sum(minutes.values()) if isinstance(minutes, dict) else minutes
        task = folder / "exercises" / path.name
        more = f" · [exercise](exercises/{path.name})" if task.exists() else ""
        link = f"[{title}](notebooks/{path.name}){more}"
        lines.append(f"| {number} | {link} | {total} | {course.devices} | {course.path} |")
    return "\n".join(lines)


def check_readme(folder: Path = ROOT, write: bool = False) -> list[str]:
    """The table between the marks in README.md is what the lessons' headers give."""
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    if any(text.count(mark) != 1 for mark in MARKS):
        return [f"README.md: the lesson table stands between {MARKS[0]} and {MARKS[1]}, once each"]
    start, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    if write:
        readme.write_text(f"{text[:start]}\n{lesson_table(folder)}\n{text[end:]}", encoding="utf-8")
    elif text[start:end].strip() != lesson_table(folder):
        return ["README.md: the lesson table is out of step: python tools/checks.py --write"]
    return []


def check_addresses(folder: Path, repository: str) -> list[str]:
    """The course's own address stands in pyproject.toml and in what the build stamps, only."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    problems = []
    # Before an address is known there is nothing to look for but a badge of any kind.
    own = re.escape(repository) if repository else r"(?!)"
    pattern = re.compile(rf"{own}|colab\.research\.google\.com/github/|kaggle\.com/kernels/welcome")
    for name in filter(None, names):
        stamped = name.endswith(".ipynb") and name.split("/")[0] in _BUILT and repository
        if stamped or name in ("pyproject.toml", "tools/stamp.py") or not (folder / name).is_file():
            continue
        text = (folder / name).read_bytes().decode("utf-8", "ignore")
        for number, line in enumerate(text.splitlines(), 1):
            if (found := pattern.search(line)) and not name.startswith("tests/"):
                problems.append(
                    f"{name}:{number}: {found.group()!r} belongs in [tool.course] alone"
                )
    return problems


_BUILT = ("notebooks", "exercises", "solutions")


def notebook_problems(path: Path) -> list[str]:
    """All checks of one built notebook, by the folder that it is in."""
    notebook, folder = nbformat.read(path, as_version=4), path.parent.name
    problems = check_headings(notebook) + check_images(notebook, path)
    problems += check_links(notebook, path) + check_machine(notebook)
    if folder != "exercises":
        problems += check_executed(notebook)
        problems += check_compared(notebook, least=3 if folder == "notebooks" else 1)
    if folder == "solutions":
        problems += check_scores(notebook)
    return [f"{folder}/{path.name}: {problem}" for problem in problems]


def course_problems(folder: Path = ROOT) -> list[str]:
    """Every check that needs no kernel, on the whole course."""
    from tools.build import Course, check

    course = Course.here(folder)
    problems = check(course)
    for name in _BUILT:
        for path in sorted((folder / name).glob("*.ipynb")):
            problems += notebook_problems(path)
    headers = {
        number: notebook.metadata.course for number, (_, notebook) in lessons(folder).items()
    }
    problems += check_rows(headers, seed_rows(folder))
    problems += check_readme(folder) + then_now.check(folder) + dictionary.check(folder)
    return problems + check_addresses(folder, course.repository)


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        left = check_readme(write=True) + then_now.check(write=True) + dictionary.check(write=True)
        sys.exit("\n".join(left) or 0)
    found = course_problems()
    print("\n".join(found) or "no problem found")
    sys.exit(bool(found))

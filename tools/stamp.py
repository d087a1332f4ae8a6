"""Cells that the build adds once it knows where the repository lives: badges, set-up on Colab."""

from __future__ import annotations

from nbformat import NotebookNode, v4

SETUP = """\
# Colab and Kaggle lack this course's package. Nothing preinstalled there may change:
# every installed version becomes a constraint, and pip gives up rather than break one.
import importlib.util
import os


def install_course():
    import re, subprocess, sys, tempfile
    from importlib.metadata import distributions

    versions = {{}}
    for found in distributions():  # the first of a name is the one that Python imports
        if found.metadata["Name"] and re.fullmatch(r"\\d[\\w.!+]*", found.version):
            versions.setdefault(found.metadata["Name"], found.version)
    for own in ("course-utils", "course_utils"):  # the course itself may be newer now
        versions.pop(own, None)
    with tempfile.TemporaryDirectory() as folder:
        constraints = os.path.join(folder, "constraints.txt")
        with open(constraints, "w") as file:
            file.writelines(f"{{name}}=={{version}}\\n" for name, version in versions.items())
        command = [sys.executable, "-m", "pip", "install", "-c", constraints]
        course = "{requirement}"
        done = subprocess.run([*command, course], capture_output=True, text=True)
    if done.returncode:
        said = done.stdout[-2000:] + done.stderr[-2000:]
        raise RuntimeError(f"the course was not installed, nothing was changed:\\n{{said}}")


on_colab = importlib.util.find_spec("google") and importlib.util.find_spec("google.colab")
if on_colab or "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
    install_course()"""


def badges(repository: str, branch: str, name: str) -> str:
    """Markdown of the two badges that open notebook `name` on Colab and on Kaggle."""
    colab = f"https://colab.research.google.com/github/{repository}/blob/{branch}/{name}"
    raw = f"https://github.com/{repository}/blob/{branch}/{name}"
    return (
        f"[![Open this notebook in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
        f"({colab})\n"
        f"[![Open this notebook in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)]"
        f"(https://kaggle.com/kernels/welcome?src={raw})"
    )


def setup(repository: str, branch: str, extras: list[str]) -> str:
    """Source of the cell that installs the package on Colab and Kaggle, and nowhere else."""
    wanted = f"[{','.join(extras)}]" if extras else ""
    return SETUP.format(
        requirement=f"course-utils{wanted} @ git+https://github.com/{repository}@{branch}"
    )


def stamped(
    cells: list[NotebookNode], repository: str, branch: str, name: str, extras: list[str]
) -> list[NotebookNode]:
    """`cells` with the badges under the title and the set-up cell before the first code."""
    made = {"metadata": {"generated": True}}
    first_code = next(i for i, cell in enumerate(cells) if cell.cell_type == "code")
    return [
        cells[0],
        v4.new_markdown_cell(badges(repository, branch, name), **made),
        *cells[1:first_code],
        v4.new_code_cell(setup(repository, branch, extras), **made),
        *cells[first_code:],
    ]

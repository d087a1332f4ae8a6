"""pyproject.toml, constraints.txt and environment.yml agree, and the pins resolve."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
NAMED = {"jupyterlab", "tensorflow", "torch", "gputil", "torchsummary", "nbval", "matplotlib"}
JUPYTER = {"ipykernel", "ipython", "jupyterlab", "jupyter-client", "notebook", "ipywidgets"}


def pins() -> dict[str, str]:
    """{package: version} of constraints.txt; every line is an exact pin."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert version, f"constraints.txt: {line!r} is no exact pin"
            assert canonicalize_name(name) not in found, f"constraints.txt names {name} twice"
            found[canonicalize_name(name)] = version
    return found


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements() -> list[Requirement]:
    """What pyproject.toml asks for: the package's dependencies and every extra's."""
    lists = [project()["dependencies"], *project()["optional-dependencies"].values()]
    return [Requirement(line) for lines in lists for line in lines]


def environment() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def pip_section() -> list[str]:
    (section,) = [part["pip"] for part in environment()["dependencies"] if isinstance(part, dict)]
    return section


def test_every_requirement_is_pinned_to_a_version_it_allows():
    for requirement in requirements():
        version = pins()[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} against {version}"


def test_the_package_only_sets_lower_bounds_and_needs_no_jupyter():
    for requirement in requirements():
        assert [s.operator for s in requirement.specifier] == [">="], str(requirement)
    for line in project()["dependencies"]:
        assert canonicalize_name(Requirement(line).name) not in JUPYTER


def test_pins_carry_no_local_version():
    # torch==2.13.0+cpu would exist on no GPU machine and in no ordinary registry.
    assert not [version for version in pins().values() if "+" in version]


def test_environment_yml_asks_for_the_same_extras_and_pins():
    section = pip_section()
    assert "-c constraints.txt" in section
    extras = ",".join(project()["optional-dependencies"])
    assert f"-e .[{extras}]" in section
    named = [Requirement(line) for line in section if not line.startswith("-")]
    assert NAMED <= {canonicalize_name(requirement.name) for requirement in named}
    for requirement in named:
        assert str(requirement.specifier) == "==" + pins()[canonicalize_name(requirement.name)]


def test_environment_yml_takes_the_python_of_the_tested_set():
    (python,) = [p for p in environment()["dependencies"] if str(p).startswith("python=")]
    assert python == "python=3.11"
    assert Requirement(f"x{project()['requires-python']}").specifier.contains("3.11")


@pytest.mark.slow
def test_pip_section_of_environment_yml_resolves_to_what_is_installed(tmp_path):
    """pip reads the section as conda hands it over, and finds every package in place.

    Installed are the tested versions, so a section that asks for anything else makes pip
    plan a download. The line for the course itself is checked by its metadata.
    """
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("the tested set is what `make test` installs")
    section = tmp_path / "requirements.txt"
    lines = [
        line.replace("-c ", f"-c {ROOT}/").replace("-e .", f"-e {ROOT}") for line in pip_section()
    ]
    section.write_text("\n".join(lines))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--dry-run"]
    plan = subprocess.run([*pip, "-r", section], capture_output=True, text=True, timeout=240)
    assert plan.returncode == 0, plan.stderr
    would = [line for line in plan.stdout.splitlines() if line.startswith("Would install")]
    assert [line.split()[2:] for line in would] in ([], [["course-utils-" + project()["version"]]])

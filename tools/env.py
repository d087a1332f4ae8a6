"""Make the course's environment, .venv, or bring it up to date; fast when nothing changed.

    python tools/env.py [--torch cpu] [--tf-gpu] [--dry-run]

`make lab`, `make test` and the others call this first. It needs nothing but Python. The file
is written in the syntax of Python 3.6, so that an old Python reads it far enough to say what
is wrong.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTORCH_CPU = "https://download.pytorch.org/whl/cpu"
STAMP = ".course-stamp"  # sha256 of what was installed from; written last, so only when all is well
SETUP = ".course-setup.json"  # how it was set up; written first
GIB = 1024**3


def fail(sentence):
    sys.exit("make: " + sentence)


def check_python():
    """Stop with one sentence where this Python cannot carry the course."""
    found = "{}.{}".format(*sys.version_info[:2])
    if sys.version_info < (3, 11):  # noqa: UP036
        fail(
            "the course needs Python 3.11, 3.12 or 3.13, and only found Python "
            + found
            + ": install one from python.org or your package manager (for example "
            "`sudo apt-get install python3.11 python3.11-venv`, `brew install python@3.11`), "
            "then run the same command again."
        )
    if sys.version_info >= (3, 14):
        fail(
            "Python " + found + " is newer than the course's tested set: install Python 3.11, "
            "3.12 or 3.13 beside it, then run the same command again."
        )
    if sys.platform == "darwin" and platform.machine() == "x86_64":
        fail(
            "PyTorch and TensorFlow no longer make builds for Macs with Intel processors: "
            "use Colab, or a Linux machine."
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        fail(
            "this Python " + found + " comes without its venv module: install it "
            "(Debian, Ubuntu: `sudo apt-get install python" + found + "-venv`), "
            "then run the same command again."
        )


def check_disk(torch_choice, tf_gpu):
    """Stop with one sentence where the installation would not fit."""
    # Measured: 4 GiB installed with CPU builds, downloads included. CUDA builds bring
    # several GiB of NVIDIA libraries, which stand in pip's cache a second time.
    gpu_build = tf_gpu or (sys.platform == "linux" and torch_choice != "cpu")
    need = 12 if gpu_build else 6
    free = shutil.disk_usage(str(ROOT)).free
    if free < need * GIB:
        advice = (
            " (without a GPU, `make lab TORCH=cpu` needs only 6 GiB)"
            if gpu_build and not tf_gpu
            else ""
        )
        fail(
            f"installing needs {need} GiB of free disk space and there are {free / GIB:.1f} GiB: "
            f"free some{advice}, then run the same command again."
        )


def pin(name):
    """The line `name==version` of constraints.txt."""
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.lower().startswith(name.lower() + "=="):
            return line.strip()
    fail("constraints.txt has no pin for " + name + ": the checkout is damaged, clone it again.")


def fingerprint():
    """sha256 of pyproject.toml followed by constraints.txt."""
    both = (ROOT / "pyproject.toml").read_bytes() + (ROOT / "constraints.txt").read_bytes()
    return hashlib.sha256(both).hexdigest()


def venv_python(venv):
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def read(path):
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def state(venv, torch_choice):
    """("good" | "update" | "create", why in words)."""
    if not venv.exists():
        return "create", "there is none yet"
    stamp, setup = read(venv / STAMP), read(venv / SETUP)
    if setup and not stamp:
        return "create", "the last installation did not finish"
    if not venv_python(venv).exists():
        return "create", "its Python is gone"
    options = json.loads(setup) if setup else {}
    if options.get("root", str(ROOT)) != str(ROOT):
        return "create", "the course's folder has moved"
    if torch_choice and options and options["torch"] != torch_choice:
        return "create", "it was made with another build of PyTorch"
    if stamp != fingerprint():
        return "update", "pyproject.toml or constraints.txt has changed"
    return "good", ""


def run(command):
    """Run a command; on failure stop with a sentence."""
    code = subprocess.call([str(part) for part in command], cwd=str(ROOT))
    if code:
        fail(
            f"installing stopped (exit status {code}); the lines above say why. Nothing is lost: "
            "mend the cause (often the network) and run the same command again."
        )


def install_commands(venv, torch_choice):
    pip = [venv_python(venv), "-m", "pip", "install", "--disable-pip-version-check"]
    pip += ["-c", "constraints.txt"]
    pip.append("--no-compile")  # pip does it on one core; compile_command on all
    if venv.name == ".venv-tf-gpu":
        # No torch here: its CUDA wheels and TensorFlow's overwrite each other's cuDNN.
        tensorflow = pin("tensorflow").replace("==", "[and-cuda]==")
        install = pip + [tensorflow, pin("ipykernel"), "-e", ".[tensorflow]"]
        return [install, compile_command(venv)]
    if torch_choice == "cpu":
        pip += ["--extra-index-url", PYTORCH_CPU]
    install = pip + [pin("torch"), "-e", ".[torch,tensorflow,peers,experiment,grade,lab,dev]"]
    return [install, compile_command(venv)]


def compile_command(venv):
    code = "import compileall, sysconfig; "
    # Some packages ship files for other Pythons: that these do not compile is no error.
    code += "compileall.compile_dir(sysconfig.get_path('purelib'), quiet=2, workers=0)"
    return [venv_python(venv), "-c", code]


def kernel_command(venv):
    """Register .venv-tf-gpu's Python as a kernel that `make lab` offers."""
    command = [venv_python(venv), "-m", "ipykernel", "install", "--prefix", ROOT / ".venv"]
    command += ["--name", "tensorflow-gpu", "--display-name", "TensorFlow (GPU)"]
    return command + ["--env", "COURSE_TF_GPU", "1"]


def ensure(venv, torch_choice="", dry_run=False):
    """Create or update `venv` where needed. Returns True if something was (or would be) done."""
    verdict, why = state(venv, torch_choice)
    if verdict == "good":
        return False
    torch_choice = torch_choice or json.loads(read(venv / SETUP) or "{}").get("torch", "default")
    # Asked from inside a virtual environment (perhaps the one about to be replaced), the
    # Python that made that one makes ours.
    base = getattr(sys, "_base_executable", None) or sys.executable
    commands = [] if verdict == "update" else [[base, "-m", "venv", venv]]
    commands += install_commands(venv, torch_choice)
    if dry_run:
        for command in commands:
            print(" ".join(str(part) for part in command))
        return True
    tf_gpu = venv.name == ".venv-tf-gpu"
    if verdict == "create":
        if venv.exists():
            shutil.rmtree(str(venv))
        check_disk(torch_choice, tf_gpu)
        print(f"Setting up {venv.name} ({why}): a few minutes, once.", flush=True)
        venv.mkdir()
    else:
        print(f"Bringing {venv.name} up to date ({why}).", flush=True)
        if (venv / STAMP).exists():
            (venv / STAMP).unlink()
    options = {"root": str(ROOT), "torch": torch_choice}
    (venv / SETUP).write_text(json.dumps(options), encoding="utf-8")
    for command in commands:
        run(command)
    (venv / STAMP).write_text(fingerprint(), encoding="utf-8")
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", default="", help="cpu: PyTorch's public CPU builds")
    parser.add_argument("--tf-gpu", action="store_true", help="also .venv-tf-gpu and its kernel")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    options = parser.parse_args()
    check_python()
    if options.torch not in ("", "cpu", "default"):
        fail("TORCH is cpu or default, not " + options.torch + ".")
    if options.tf_gpu and sys.platform != "linux":
        fail("TensorFlow uses GPUs on Linux only (on Windows: inside WSL 2).")
    ensure(ROOT / ".venv", options.torch, options.dry_run)
    tf_gpu = ROOT / ".venv-tf-gpu"
    if options.tf_gpu:
        ensure(tf_gpu, "", options.dry_run)
    spec = ROOT / ".venv/share/jupyter/kernels/tensorflow-gpu/kernel.json"
    # A new .venv forgets the kernel of a .venv-tf-gpu that is still good.
    if options.tf_gpu or ((tf_gpu / STAMP).exists() and not spec.exists()):
        if options.dry_run:
            print(" ".join(str(part) for part in kernel_command(tf_gpu)))
        else:
            run(kernel_command(tf_gpu))
            print('In JupyterLab (`make lab`), choose the kernel "TensorFlow (GPU)".')


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nmake: interrupted; the same command starts the installation again.")

"""The learner's own copies of the notebooks, under work/, and JupyterLab on them.

    python tools/learner.py lab [JUPYTER OPTIONS]    copy what is missing, open JupyterLab
    python tools/learner.py reset 02                 fresh copies of 02; yours are kept aside
    python tools/learner.py edit [JUPYTER OPTIONS]   for authors: JupyterLab on the originals

A copy is never overwritten: what a learner wrote stays, whatever happens to the original.
COURSE_WORK names another folder than work/.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("notebooks", "exercises", "solutions")
FIRST = "notebooks/00_start_here.ipynb"


def originals(root: Path = ROOT) -> list[str]:
    """Every file that a learner gets, as "folder/name", in order."""
    return sorted(
        path.relative_to(root).as_posix()
        for folder in FOLDERS
        for path in (root / folder).rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.parts[-2:])
    )


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def copy(source: Path, target: Path) -> None:
    """Copy all or nothing: an interrupted copy must not pass for the learner's own."""
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_name("." + target.name + ".half")
    shutil.copyfile(source, half)
    os.replace(half, target)


class Copies:
    """The folder work/ and its record of which original each copy was taken from."""

    def __init__(self, work: Path, root: Path = ROOT) -> None:
        self.work, self.root = work, root
        self.record = work / ".originals.json"
        try:
            self.taken = json.loads(self.record.read_text()) if self.record.exists() else {}
        except ValueError:
            sys.exit(f"{self.record} is damaged: delete it and run the same command again.")

    def save(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        half = self.record.with_suffix(".half")
        half.write_text(json.dumps(self.taken, indent=1, sort_keys=True))
        os.replace(half, self.record)

    def sync(self) -> list[str]:
        """Copy what is missing. Returns the names whose original is newer than the copy."""
        newer = []
        for name in originals(self.root):
            source, target = self.root / name, self.work / name
            now = digest(source)
            if not target.exists():
                copy(source, target)
                self.taken[name] = now
            elif self.taken.setdefault(name, now) != now and digest(target) != now:
                newer.append(name)
        self.save()
        return newer

    def reset(self, what: str) -> list[str]:
        """Fresh copies of lesson `what` ("02", or "exercises/02"). Returns lines to print."""
        folder, _, number = what.rpartition("/")
        names = [
            name
            for name in originals(self.root)
            if name.split("/")[-1].startswith(number + "_")
            and (not folder or name.startswith(folder + "/"))
        ]
        if not number or not names:
            known = sorted({n.split("/")[-1][:2] for n in originals(self.root)})
            sys.exit(f"make reset: there is no lesson {what!r}; there are {', '.join(known)}.")
        lines = []
        for name in names:
            source, target = self.root / name, self.work / name
            line = f"{name}: fresh copy"
            if target.exists() and digest(target) != digest(source):
                backup = free_name(target)
                os.replace(target, backup)
                line += f"; yours is kept as {backup.name}"
            copy(source, target)
            self.taken[name] = digest(source)
            lines.append(line)
        self.save()
        return lines


def free_name(path: Path) -> Path:
    """02_x.ipynb -> 02_x.bak.ipynb, or .bak2, .bak3: no backup replaces another."""
    count = 1
    while True:
        name = f"{path.stem}.bak{count if count > 1 else ''}{path.suffix}"
        if not path.with_name(name).exists():
            return path.with_name(name)
        count += 1


def jupyter(root: Path, options: list[str], config: tuple[str, ...]) -> None:
    """Become JupyterLab with `root` as its folder and lesson 00 open; does not return."""
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={root}"]
    command.append(f"--LabApp.default_url=/lab/tree/{FIRST}")
    if hasattr(os, "geteuid") and os.geteuid() == 0 and "--allow-root" not in options:
        print("You are root: JupyterLab is told to accept that (--allow-root).", flush=True)
        command.append("--allow-root")
    # `!torchrun` in a cell means this environment's; and of two kernels called python3 this
    # environment's comes before one in the user's home.
    os.environ["PATH"] = str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    # Settings of the course come before the user's: no question about news at the first start,
    # none of nbgrader's buttons, and jupytext for authors alone.
    paths = [str(ROOT / "tools" / folder) for folder in config]
    paths += [path for path in [os.environ.get("JUPYTER_CONFIG_PATH")] if path]
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(paths)
    if os.name == "nt":  # exec would hand the terminal back while JupyterLab still runs
        sys.exit(subprocess.call(command + options))
    os.execv(command[0], command + options)


def main(words: list[str]) -> None:
    work = Path(os.environ.get("COURSE_WORK") or ROOT / "work").resolve()
    action, rest = (words[0], words[1:]) if words else ("", [])
    if action == "lab":
        for name in Copies(work).sync():
            number = name.split("/")[-1][:2]
            print(
                f"{name} has a newer original: `make reset {number}` takes it and keeps your copy."
            )
        jupyter(work, rest, ("jupyter/learner", "jupyter"))
    elif action == "reset" and len(rest) == 1:
        print("\n".join(Copies(work).reset(rest[0])))
        print("Open in JupyterLab? Then reload it there (File, Reload Notebook from Disk).")
    elif action == "edit":
        os.chdir(ROOT)
        pairing = f"--config={ROOT / 'tools/jupyter_edit.py'}"
        jupyter(ROOT, [pairing, *rest], ("jupyter",))
    elif action == "reset":
        sys.exit("make reset: say which lesson, for example `make reset 02`.")
    else:
        sys.exit((__doc__ or "").strip())


if __name__ == "__main__":
    main(sys.argv[1:])

"""course-grade: collecting a class, giving exercises out, and a run that is killed and stopped."""

import csv
import io
import json
import os
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

from course_utils.grading import cli, collect, marking
from course_utils.grading.collect import CollectError, find
from course_utils.grading.marking import Mark
from course_utils.grading.release import ReleaseError, release
from course_utils.grading.sandbox import Bubblewrap
from course_utils.grading.submission import MAX_BYTES, BadNotebook, load

ROOT = Path(__file__).resolve().parent.parent
ESC = "\x1b[2J\x1b[31m"


def notebook(word="", number="13"):
    """A small notebook of exercise `number`, which says `word`."""
    cells = [
        {
            "cell_type": "code",
            "source": f"# {word}",
            "metadata": {"nbgrader": {"grade_id": f"{number}-staleness", "solution": True}},
        }
    ]
    return json.dumps({"cells": cells, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}).encode()


def word_of(handed):
    return load(handed.path)[0]["source"][2:]


def words(handed):
    """{student: what their notebook says}"""
    return {one.student: word_of(one) for one in handed}


def make_zip(path, members):
    """members: {name: bytes}, or a list of (name or ZipInfo, bytes)."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items() if isinstance(members, dict) else members:
            archive.writestr(name, data)
    return path


def zip_bytes(members):
    return make_zip(io.BytesIO(), members).getvalue()


def put(folder, files):
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


# --- collect: names -----------------------------------------------------------------------------

PLATFORMS = {
    "moodle folders": {
        "Doe Jane_12345_assignsubmission_file_/x.ipynb": "Doe Jane",
        "O'Neil Pat_777_assignsubmission_file_/13_parameter_server.ipynb": "O'Neil Pat",
        "김 철수_888_assignsubmission_file/x.ipynb": "김 철수",
    },
    "moodle files": {
        "Doe Jane_12345_assignsubmission_file_x.ipynb": "Doe Jane",
        "Roe Jim_777_assignsubmission_file_x_y.ipynb": "Roe Jim",
    },
    "canvas": {
        "doejane_12345_67890_05_ddp.ipynb": "doejane",
        "roejim_LATE_23456_67891_05_ddp-1.ipynb": "roejim",
    },
    "blackboard": {
        "Exercise 13_jdoe_attempt_2026-11-21-10-00-00_x.ipynb": "jdoe",
        "Exercise 13_jroe_attempt_2026-11-20-10-00-00_my_work.ipynb": "jroe",
    },
    "brightspace": {
        "123-456 - Jane Doe - Nov 21, 2026 1000 AM - x.ipynb": "Jane Doe",
        "124-456 - Jim Roe - Nov 21, 2026 959 PM - a - b.ipynb": "Jim Roe",
    },
    "brightspace folders": {
        "123-456 - Jane Doe - Nov 21, 2026 1000 AM/x.ipynb": "Jane Doe",
        "124-456 - Jim Roe - Nov 21, 2026 959 PM/x.ipynb": "Jim Roe",
    },
    "nbgrader": {
        "submitted/jdoe/exercise-13/13_parameter_server.ipynb": "jdoe",
        "submitted/jroe/exercise-13/13_parameter_server.ipynb": "jroe",
    },
    "nbgrader, one student": {"submitted/jdoe/exercise-13/13_parameter_server.ipynb": "jdoe"},
    "folders": {"jane/x.ipynb": "jane", "jim/mine/x.ipynb": "jim"},
    "files": {"jane.ipynb": "jane", "hw_2026_1121_jim.IPYNB": "hw_2026_1121_jim"},
    "files like canvas's": {
        "hw_2026_1121_jane.ipynb": "hw_2026_1121_jane",
        "hw_2026_1121_jim.ipynb.txt": "hw_2026_1121_jim",
    },
    "an outer folder": {"week 3/jane.ipynb": "jane", "week 3/jim.ipynb": "jim"},
    "two sections": {
        "A/doejane_12345_67890_x.ipynb": "doejane",
        "B/roejim_12346_67891_x.ipynb": "roejim",
    },
}


def test_the_platforms_own_numbers_are_kept(tmp_path):
    """A gradebook knows people by them; a name says nothing to it."""
    for platform, numbers in {
        "moodle folders": {"Doe Jane": "12345", "O'Neil Pat": "777", "김 철수": "888"},
        "canvas": {"doejane": "12345", "roejim": "23456"},
        "brightspace": {"Jane Doe": "123-456", "Jim Roe": "124-456"},
        "blackboard": {"jdoe": "", "jroe": ""},  # these are the users' names there
    }.items():
        files = {name: notebook(student) for name, student in PLATFORMS[platform].items()}
        handed, _ = find(put(tmp_path / platform, files), None, tmp_path / "into")
        assert {one.student: one.id for one in handed} == numbers


@pytest.mark.parametrize("form", ["folder", "zip", "zip in a folder"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_platforms_names(tmp_path, platform, form):
    files = {name: notebook(student) for name, student in PLATFORMS[platform].items()}
    if form == "folder":
        path = put(tmp_path / "class", files)
    else:
        (tmp_path / "class").mkdir()
        path = make_zip(tmp_path / "class" / "export.zip", files)
        path = path if form == "zip" else tmp_path / "class"
    if form == "zip in a folder" and len(files) == 1:
        pytest.skip("a folder with one zip with one notebook: it may as well be one student's")
    handed, notes = find(path, None, tmp_path / "into")
    assert words(handed) == {student: student for student in PLATFORMS[platform].values()}
    assert [one.student for one in handed] == sorted(one.student for one in handed)
    late = [note for note in notes if "late" in note]
    assert len(late) == (platform == "canvas") and len(notes) == len(late), notes
    assert all(one.path.parent == tmp_path / "into" for one in handed)


def test_single_files_and_several_paths(tmp_path):
    put(tmp_path, {"jane/x.ipynb": notebook("1"), "jim/x.ipynb": notebook("2")})
    into = tmp_path / "into"
    handed, _ = find(tmp_path / "jane/x.ipynb", None, into)
    assert words(handed) == {"x": "1"}
    handed, _ = find([tmp_path / "jane/x.ipynb", tmp_path / "jim/x.ipynb"], None, into)
    assert words(handed) == {"jane": "1", "jim": "2"}, "same file name, two students"
    handed, _ = find([tmp_path / "jane", tmp_path / "jim", tmp_path / "jane"], None, into)
    assert words(handed) == {"jane": "1", "jim": "2"}


def test_several_exports(tmp_path):
    one = make_zip(tmp_path / "a.zip", {"doejane_12345_67890_x.ipynb": notebook("old")})
    two = {"doejane_12345_99999_x.ipynb": notebook("new"), "roejim_12346_88888_x.ipynb": notebook()}
    handed, notes = find([one, make_zip(tmp_path / "b.zip", two)], None, tmp_path / "into")
    assert words(handed) == {"doejane": "new", "roejim": ""}
    assert len(notes) == 1 and "2 notebooks" in notes[0]


def test_a_zip_of_a_student_is_no_export(tmp_path):
    """Names inside a student's own folder or zip say nothing about who it is."""
    inner = zip_bytes({"roejim_12346_99999_x.ipynb": notebook("jane's")})
    files = {
        "doejane_12345_67890_work.zip": inner,
        "roejim_12346_67891_x.ipynb": notebook("jim's"),
    }
    for path in (put(tmp_path / "class", files), make_zip(tmp_path / "class.zip", files)):
        handed, _ = find(path, None, tmp_path / "into")
        assert words(handed) == {"doejane": "jane's", "roejim": "jim's"}
    files = {"jane.zip": inner, "jim/x.ipynb": notebook("jim's")}
    handed, _ = find(put(tmp_path / "other", files), None, tmp_path / "into")
    assert words(handed) == {"jane": "jane's", "jim": "jim's"}


# --- collect: which one counts --------------------------------------------------------------------


@pytest.mark.parametrize(
    "early, later",
    [
        ("doejane_12345_9999_x.ipynb", "doejane_LATE_12345_67890_x.ipynb"),
        (
            "E_jdoe_attempt_2026-11-21-10-00-00_x.ipynb",
            "E_jdoe_attempt_2026-11-21-10-00-01_a.ipynb",
        ),
        (
            "1-2 - J D - Nov 21, 2026 1159 AM - x.ipynb",
            "1-2 - J D - Nov 21, 2026 1200 PM - a.ipynb",
        ),
        (
            "1-2 - J D - Nov 21, 2026 110 AM - x.ipynb",
            "1-2 - J D - Nov 21, 2026 1000 AM - a.ipynb",
        ),
    ],
)
def test_the_latest_attempt_counts(tmp_path, early, later):
    others = {"jim": notebook("jim")}
    name = later.replace("doejane_LATE_12345", "roejim_777").replace("jdoe", "jroe")
    files = {early: notebook("early"), later: notebook("later")}
    files[name.replace("1-2 - J D", "3-2 - J R")] = others["jim"]
    handed, notes = find(put(tmp_path / "class", files), None, tmp_path / "into")
    found = words(handed)
    assert sorted(found.values()) == ["jim", "later"]
    assert any("2 notebooks" in note and later in note for note in notes)
    assert any("late," in note for note in notes) == ("LATE" in later)


@pytest.mark.parametrize(
    "his, hers",
    [
        (
            "E_jdoe_attempt_2026-11-21-10-00-00_x_jroe_attempt_2030-01-01-00-00-00.ipynb",
            "E_jroe_attempt_2026-11-20-10-00-00_x.ipynb",
        ),
        (
            "J Doe_12_assignsubmission_file_J Roe_34_assignsubmission_file_.ipynb",
            "J Roe_34_assignsubmission_file_x.ipynb",
        ),
    ],
)
def test_nobody_hands_in_for_another(tmp_path, his, hers):
    """By a file whose own name looks like the platform's."""
    files = {his: notebook("his"), hers: notebook("hers")}
    handed, _ = find(put(tmp_path / "class", files), None, tmp_path / "into")
    assert sorted(words(handed).values()) == ["hers", "his"]
    theirs = next(name for name, word in words(handed).items() if word == "hers")
    assert "oe" in theirs and "roe" in theirs.lower().replace(" ", "")


def test_the_exercise_comes_before_the_time(tmp_path):
    files = {
        "jane/right.ipynb": notebook("right"),
        "jane/other.ipynb": notebook("other", "02"),
        "jane/broken.ipynb": b"{",
        "jim/x.ipynb": notebook("jim"),
        "joe/x.ipynb": notebook("joe"),
    }
    put(tmp_path / "class", files)
    for number, name in enumerate(("right", "other", "broken")):
        os.utime(tmp_path / f"class/jane/{name}.ipynb", (1e9 + number, 1e9 + number))
    handed, notes = find(tmp_path / "class", "13", tmp_path / "into")
    assert words(handed)["jane"] == "right" and "of exercise 13" in notes[0]
    handed, notes = find(tmp_path / "class", None, tmp_path / "into")
    assert words(handed)["jane"] == "other" and "--exercise" in notes[0]


def test_several_exercises_of_a_class_need_a_word(tmp_path):
    files = {
        f"submitted/{who}/{number}/x.ipynb": notebook(who, number)
        for who in ("jane", "jim")
        for number in ("02", "13")
    }
    put(tmp_path / "class", files)
    with pytest.raises(CollectError, match="--exercise 13"):
        find(tmp_path / "class", None, tmp_path / "into")
    handed, _ = find(tmp_path / "class", "02", tmp_path / "into")
    assert words(handed) == {"jane": "jane", "jim": "jim"}


def test_two_students_of_one_name(tmp_path):
    files = {
        "Doe Jane_1_assignsubmission_file_/x.ipynb": notebook("one"),
        "Doe Jane_2_assignsubmission_file_/x.ipynb": notebook("two"),
    }
    handed, notes = find(put(tmp_path / "class", files), None, tmp_path / "into")
    assert words(handed) == {"Doe Jane (1)": "one", "Doe Jane (2)": "two"}
    assert sum("same name" in note for note in notes) == 2


def test_names_that_differ_by_case_only(tmp_path):
    files = {"jane.ipynb": notebook("small"), "Jane.ipynb": notebook("large")}
    handed, _ = find(make_zip(tmp_path / "x.zip", files), None, tmp_path / "into")
    assert words(handed) == {"jane": "small", "Jane": "large"}
    assert len({one.path.name.casefold() for one in handed}) == 2


def test_who_handed_in_no_notebook_has_a_mark_all_the_same(tmp_path):
    files = {
        "doejane_12345_67890_x.pdf": b"%PDF",
        "roejim_12346_67891_x.zip": zip_bytes({"x.html": b""}),
        "poejoe_12347_67892_x.ipynb": notebook("joe"),
        "index.html": b"",
    }
    handed, notes = find(put(tmp_path / "class", files), None, tmp_path / "into")
    assert [one.student for one in handed] == ["doejane", "poejoe", "roejim"]
    for one, file in (
        (handed[0], "doejane_12345_67890_x.pdf, which is"),
        (
            handed[2],
            "x.html, which is",
        ),
    ):
        assert one.path is None and one.problem == f"handed in {file} no notebook"
        assert f"{one.student}: {one.problem}" in notes
    assert len(list((tmp_path / "into").iterdir())) == 1, "no empty notebooks"
    path = make_zip(tmp_path / "class.zip", files)
    (one, _, two), _ = find(path, None, tmp_path / "into")
    assert two.problem == "handed in roejim_12346_67891_x.zip, which holds no notebook"
    assert any(note.startswith("index.html: not a notebook") for note in notes)
    files = {"jane/x.pdf": b"", "jim/x.ipynb": notebook("jim")}
    handed, _ = find(put(tmp_path / "folders", files), None, tmp_path / "into")
    assert [one.student for one in handed] == ["jane", "jim"]


def test_what_programs_leave_behind_is_no_submission(tmp_path):
    files = {
        "jane/x.ipynb": notebook("jane"),
        "jane/.ipynb_checkpoints/x-checkpoint.ipynb": notebook("old"),
        "__MACOSX/jane/._x.ipynb": b"\0",
        "jane/._x.ipynb": b"\0",
        "jim/x.ipynb": notebook("jim"),
    }
    for path in (put(tmp_path / "class", files), make_zip(tmp_path / "class.zip", files)):
        handed, notes = find(path, None, tmp_path / "into")
        assert words(handed) == {"jane": "jane", "jim": "jim"} and not notes


# --- collect: what must not happen ----------------------------------------------------------------


def everything(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_names_that_lead_out_of_the_folder(tmp_path):
    members = {
        "../../escaped.ipynb": notebook("up"),
        f"{tmp_path}/absolute.ipynb": notebook("absolute"),
        "..\\..\\windows.ipynb": notebook("windows"),
        "jane/../../jim.ipynb": notebook("jim"),
    }
    inner = [("../../../deep.ipynb", notebook("deep"))]
    members["joe.zip"] = zip_bytes(inner)
    path = make_zip(tmp_path / "in.zip", members)
    before = everything(tmp_path)
    handed, notes = find(path, None, tmp_path / "a" / "b" / "into")
    new = set(everything(tmp_path)) - set(before)
    assert new == {one.path for one in handed} and len(new) == len(members)
    assert all(one.parent == tmp_path / "a" / "b" / "into" for one in new)
    assert sum("odd name" in note for note in notes) == len(members)


def test_links_are_not_followed(tmp_path):
    """Neither to the solution, nor to anything else that the instructor can read."""
    secret = put(tmp_path, {"solution.ipynb": notebook("solution")}) / "solution.ipynb"
    folder = put(tmp_path / "class", {"jim.ipynb": notebook("jim"), "joe/x.ipynb": notebook("joe")})
    (folder / "jane.ipynb").symlink_to(secret)
    (folder / "eve").symlink_to(tmp_path)
    os.mkfifo(folder / "fifo.ipynb")
    handed, notes = find(folder, None, tmp_path / "into")
    assert words(handed) == {"jim": "jim", "joe": "joe"}
    assert sum("a link" in note for note in notes) == 2
    assert any("fifo.ipynb" in note for note in notes)
    link = zipfile.ZipInfo("jane.ipynb")
    link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    path = make_zip(tmp_path / "x.zip", [(link, str(secret)), ("jim.ipynb", notebook("jim"))])
    handed, notes = find(path, None, tmp_path / "into")
    assert words(handed) == {"jim": "jim"} and "link" in notes[0]


def peak(function):
    """What `function` returns, and the most bytes that Python had for it."""
    import tracemalloc

    tracemalloc.start()
    try:
        return function(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_bombs(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "MAX_STUDENT", 50 * 2**20)
    large = bytes(100 * 2**20)
    files = {
        "doejane_12345_67890_x.ipynb": large,  # says what it is
        "roejim_12346_67891_x.zip": zip_bytes({f"{n}.ipynb": bytes(MAX_BYTES) for n in range(8)}),
        "poejoe_12347_67892_x.zip": zip_bytes({"x.zip": zip_bytes({"x.ipynb": large})}),
        "noeann_12348_67893_x.ipynb": notebook("ann"),
    }
    del large
    path = make_zip(tmp_path / "class.zip", files)
    (handed, notes), most = peak(lambda: find(path, None, tmp_path / "into"))
    assert most < 200 * 2**20
    assert [one.student for one in handed] == ["doejane", "noeann", "poejoe", "roejim"]
    assert word_of(handed[1]) == "ann", "the others are not touched by it"
    for number in (0, 2):
        with pytest.raises(BadNotebook, match="larger than 20 MiB"):
            load(handed[number].path)
    assert any(note.startswith("roejim: the files are larger than 50 MiB") for note in notes)
    assert sum(path.stat().st_size for path in everything(tmp_path / "into")) < 70 * 2**20


def test_a_students_zip_of_countless_files_is_not_even_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "MAX_MEMBERS", 50)
    crowd = zip_bytes({f"{number}.ipynb": notebook("no") for number in range(51)})
    files = {
        "doejane_12345_67890_x.zip": crowd,
        "noeann_12348_67893_x.ipynb": notebook("ann"),
    }
    (handed, notes) = find(make_zip(tmp_path / "class.zip", files), None, tmp_path / "into")
    assert "doejane: doejane_12345_67890_x.zip has over 50 files; it was not opened" in notes
    assert [one.student for one in handed] == ["doejane", "noeann"] and word_of(handed[1]) == "ann"


def test_a_size_that_is_a_lie(tmp_path):
    """The headers say 100 bytes, the data unpack to 60 MiB."""
    data = bytearray(zip_bytes({"jane.ipynb": bytes(60 * 2**20), "jim.ipynb": notebook("jim")}))
    for marker, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = data.index(marker) + offset
        assert struct.unpack_from("<I", data, at)[0] == 60 * 2**20
        struct.pack_into("<I", data, at, 100)
    (tmp_path / "x.zip").write_bytes(data)
    (handed, notes), most = peak(lambda: find(tmp_path / "x.zip", None, tmp_path / "into"))
    assert most < 20 * 2**20
    assert word_of(handed[1]) == "jim" and "damaged" in notes[0]
    assert handed[0].path is None and "cannot be read" in handed[0].problem


def test_damaged_and_odd_archives(tmp_path):
    good = zip_bytes({"x.ipynb": notebook("good")})
    locked = bytearray(good)
    for marker, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        locked[locked.index(marker) + offset] |= 1  # "encrypted"
    deep = good
    for _ in range(5):
        deep = zip_bytes({"x.zip": deep})
    day0 = bytearray(good)
    struct.pack_into("<H", day0, day0.index(b"PK\x01\x02") + 14, 0)  # the 0th of month 0
    files = {
        "a_100_1000_x.zip": b"no zip",
        "b_101_1001_x.zip": bytes(locked),
        "c_102_1002_x.zip": good[:-30],
        "d_103_1003_x.zip": deep,
        "e_104_1004_x.zip": bytes(day0),
        "f_105_1005_x.zip": b"",
        "g_106_1006_x.ipynb": notebook("good"),
        "h_107_1007_x.zip": good,
    }
    for path in (put(tmp_path / "class", files), make_zip(tmp_path / "class.zip", files)):
        handed, notes = find(path, None, tmp_path / "into")
        assert [one.student for one in handed] == list("abcdefgh")
        for one in handed:
            if one.student in "egh":
                assert word_of(one) == "good"
            else:
                assert one.path is None and ", which" in one.problem
                begins = f"{one.student}_", f"{one.student}:"
                assert any(note.startswith(begins) for note in notes)
    (tmp_path / "bad.zip").write_bytes(b"no zip")
    with pytest.raises(CollectError, match=r"bad.zip cannot be read"):
        find(tmp_path / "bad.zip", None, tmp_path / "into")


def test_nobody_floods_the_notes(tmp_path):
    """A thousand odd names, damaged members and other files are a few lines."""
    odd = {f"../{n}.ipynb": b"" for n in range(1000)}
    nested = {f"{n}.zip": b"no zip" for n in range(1000)}
    files = {
        "doejane_12345_67890_x.zip": zip_bytes(odd),
        "roejim_12346_67891_x.zip": zip_bytes(nested),
        "poejoe_LATE_12347_67892_x.ipynb": notebook("joe"),
        **{f"noeann_12348_67893_{n}.pdf": b"" for n in range(1000)},
    }
    for path in (put(tmp_path / "class", files), make_zip(tmp_path / "class.zip", files)):
        _, notes = find(path, None, tmp_path / "into")
        assert len(notes) < 40 and "poejoe: late, says the file's name" in notes
        assert sum("(and 999 more), which is no notebook" in note for note in notes) == 1


ODD = ["=cmd()", f"{ESC}red", "a\nb", "<b>x", "[red]x[/red]", "CON ", "x" * 200, "‮evil", "-rf"]


def test_odd_names(tmp_path):
    files = {f"{name}.ipynb": notebook(str(number)) for number, name in enumerate(ODD)}
    handed, _ = find(make_zip(tmp_path / "x.zip", files), None, tmp_path / "into")
    assert sorted(words(handed).values()) == sorted(map(str, range(len(ODD))))
    for path in (tmp_path / "into").iterdir():
        assert re.fullmatch(r"\w[\w .,'()@+-]*\.ipynb", path.name) and len(path.name) < 120
    folder = tmp_path / "class"
    folder.mkdir()
    (folder / os.fsdecode(b"b\xff.ipynb")).write_bytes(notebook("bytes"))
    (handed,), _ = find(folder, None, tmp_path / "other")
    assert handed.student.encode() and word_of(handed) == "bytes"


# --- release --------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_zip", [False, True])
def test_release_holds_blank_exercises_and_nothing_else(tmp_path, as_zip):
    target = release(tmp_path / "week", ["13", "02"], as_zip, ROOT)
    if as_zip:
        assert target == tmp_path / "week.zip"
        with zipfile.ZipFile(target) as archive:
            found = {name: archive.read(name) for name in archive.namelist()}
        assert all(name.startswith("week/") for name in found)
        found = {name.removeprefix("week/"): data for name, data in found.items()}
    else:
        found = {path.name: path.read_bytes() for path in target.iterdir()}
    blank = ["02_two_devices_one_sum.ipynb", "13_parameter_server.ipynb"]
    assert sorted(found) == [*blank, "README.md"]
    for name in blank:
        assert found[name] == (ROOT / "exercises" / name).read_bytes()
    everything = b"".join(found.values()).decode()
    assert "BEGIN SOLUTION" not in everything and "def expected" not in everything
    text = found["README.md"].decode()
    for word in ("How to hand in", "20 MiB", "13_parameter_server.ipynb`: 3 tasks, 16 points"):
        assert word in text


def test_release_of_all(tmp_path):
    target = release(tmp_path / "all", [], False, ROOT)
    names = {path.name for path in (ROOT / "exercises").glob("*.ipynb")}
    assert {path.name for path in target.iterdir()} == names | {"README.md"}


def test_release_refuses_what_is_not_blank(tmp_path):
    course = tmp_path / "course"
    shutil.copytree(ROOT / "exercises", course / "exercises")
    path = course / "exercises" / "13_parameter_server.ipynb"
    clean = path.read_text()
    edited = clean.replace("    raise NotImplementedError()", "    return []", 1)
    assert edited != clean
    path.write_text(edited)
    with pytest.raises(ReleaseError, match="13-staleness was edited"):
        release(tmp_path / "out", ["13"], False, course)
    release(tmp_path / "out", ["02"], False, course)
    shutil.copy(ROOT / "solutions" / path.name, path)
    with pytest.raises(ReleaseError, match="make build"):
        release(tmp_path / "other", ["13"], False, course)
    assert not (tmp_path / "other").exists()
    with pytest.raises(ReleaseError, match="exists already"):
        release(tmp_path / "out", ["02"], False, course)
    with pytest.raises(ReleaseError, match="there is no exercise 99"):
        release(tmp_path / "none", ["99"], False, course)


# --- the command: what is typed wrongly -----------------------------------------------------------

COMMANDS = ("release", "collect", "run", "report", "export", "selftest")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_and_exit_codes(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert re.search(r"^examples?:$", text, re.M) and f"  course-grade {command}" in text
    assert "3 no sandbox" in text and "130" in text


def test_the_examples_in_help_can_be_typed():
    parser = cli._parser()
    commands = next(action.choices for action in parser._actions if action.choices)
    lines = [
        line.split()[1:]
        for one in (parser, *commands.values())
        for line in one.epilog.splitlines()
        if line.startswith("  course-grade ")
    ]
    assert len(lines) > 12
    for words in lines:
        assert parser.parse_args(words).command


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A class of one notebook, as the working folder."""
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "class", {"jane.ipynb": notebook("jane")})
    return tmp_path


def fails(code, *words, capsys):
    """The one sentence that a command prints before it ends with `code`."""
    try:
        got = cli.main(list(words))
    except SystemExit as stop:  # argparse
        got = stop.code
    said = capsys.readouterr()
    assert got == code, said
    assert "Traceback" not in said.err + said.out and said.err.strip()
    return said.err


def test_wrong_usage_is_said_in_words(work, capsys):
    run = ("run", "class", "--unsafe-local")
    put(work, {"short": b"abc", "list.json": b"[1]", "no.json": b"{", "x.txt": b""})
    put(work, {"task.json": b'{"13-none": [1]}', "empty.json": b'{"13-staleness": []}'})
    put(work, {"form.json": b'{"13-staleness": [[7]]}', "results/run.json": b'{"results": []}'})
    broken = [dict.fromkeys(cli.all_tasks()["13-staleness"].inputs(0), [7])]
    put(work, {"broken.json": json.dumps({"13-staleness": broken}).encode()})
    for said, words in {
        "no exercise 99": (*run, "--exercise", "99"),
        "'0' is no whole number": (*run, "-j", "0"),
        "'-3' is no number above 0": (*run, "--limit=-3"),
        "'nan' is no number above 0": (*run, "--memory", "nan"),
        "short must hold a secret": (*run, "--seed-file", "short"),
        "none: No such file": (*run, "--seed-file", "none"),
        "no.json is not JSON": (*run, "--private", "no.json"),
        "list.json must hold": (*run, "--private", "list.json"),
        "there is no task 13-none": (*run, "--private", "task.json"),
        "must have a list of inputs": (*run, "--private", "empty.json"),
        "form.json: case 1 of 13-staleness must be": (*run, "--private", "form.json"),
        "broken.json: case 1 of 13-staleness cannot": (*run, "--private", "broken.json"),
        "lies in class": (*run, "--out", "class/out"),
        "new lies in class": ("collect", "class", "--out", "class/new"),
        "choose a folder": (*run, "--out", "x.txt"),
        "missing does not exist": ("run", "missing", "--unsafe-local"),
        "is no notebook": ("run", "x.txt", "--unsafe-local"),
        "not allowed with": (*run, "--sandbox", "docker"),
        "invalid choice": ("run", "class", "--sandbox", "chroot"),
        "class is not empty": ("collect", "class", "--out", "class"),
        "is no folder of results": ("report", "class"),
        "is no folder of results:": ("export", "none"),
        "no exercise 77": ("release", "--exercise", "77", "--out", "new"),
        "no exercise 78": ("selftest", "--exercise", "78"),
        "required: COMMAND": (),
    }.items():
        assert said in fails(2, *words, capsys=capsys), words
    assert not (work / "graded" / "secret").exists() and not (work / "new").exists()
    put(work, {"nothing/x.txt": b""})
    assert "there is no notebook" in fails(1, "run", "nothing", "--unsafe-local", capsys=capsys)
    assert "nothing is graded yet" in fails(1, "report", "results", capsys=capsys)


def test_without_a_sandbox_it_refuses_and_says_what_to_do(work, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(work))
    said = fails(3, "run", "class", capsys=capsys)
    assert "apt-get install bubblewrap" in said and "--unsafe-local" in said
    for name in ("podman", "docker", "bubblewrap"):
        assert f"{name}: not installed" in said
        one = fails(3, "run", "class", "--sandbox", name, capsys=capsys)
        assert f"{name}: not installed" in one
    assert "apt-get install bubblewrap" in fails(3, "selftest", capsys=capsys)
    assert not (work / "graded" / "results").exists()


def test_a_fault_of_ours_is_one_sentence(work, capsys, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError(f"oh {ESC}")

    monkeypatch.setattr(cli, "find", broken)
    said = fails(1, "collect", "class", "--out", "new", capsys=capsys)
    assert "fault of the grader: ZeroDivisionError" in said and "\x1b" not in said
    monkeypatch.setenv("COURSE_GRADE_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        cli.main(["collect", "class", "--out", "new"])


def test_without_rich_it_says_what_to_install(work, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    said = fails(2, "run", "class", "--unsafe-local", capsys=capsys)
    assert "pip install" in said and "rich" in said


def test_collect_makes_a_folder_that_run_reads(work, capsys):
    files = {f"doejane_LATE_12345_67890_{ESC}.ipynb": notebook(), f"{ESC}.ipynb": notebook("odd")}
    files["roejim_12346_67891_x.ipynb"] = notebook("jim")
    assert cli.main(["collect", str(put(work / "in", files)), "--out", "new"]) == 0
    said = capsys.readouterr().out
    assert "doejane: late" in said and "3 notebooks in new" in said and "\x1b" not in said
    handed, _ = find(work / "new", None, work / "into")
    assert len(handed) == 3 and words(handed)["doejane"] == ""


# --- a class of four, for real --------------------------------------------------------------------

HERE = bool(os.environ.get("CI")) or not Bubblewrap.problem()  # in CI there must be one
KIND = ["--sandbox", "bubblewrap"] if HERE else ["--unsafe-local"]
SOLUTION = (ROOT / "solutions" / "13_parameter_server.ipynb").read_text()


def edited(old, new):
    """The solution with one text replaced in its first place."""
    found = json.loads(SOLUTION)
    for cell in found["cells"]:
        source = "".join(cell["source"])
        if old in source and cell["metadata"].get("nbgrader", {}).get("solution"):
            cell["source"] = source.replace(old, new, 1)
            return json.dumps(found).encode()
    raise AssertionError(f"the solution has no {old}")


def slow(seconds):
    """The solution, whose last task sleeps once."""
    head = "def simulate(rate, curvature, delay, steps, start):\n"
    return edited(
        head,
        f"{head}    import time\n    if not hasattr(time, 'slept'):\n"
        f"        time.slept = True\n        time.sleep({seconds})\n",
    )


@pytest.fixture
def four(tmp_path):
    """anna: right, ben: blank, carl: right and slow, and a name that is no name."""
    files = {
        "anna.ipynb": SOLUTION.encode(),
        "ben.ipynb": (ROOT / "exercises" / "13_parameter_server.ipynb").read_bytes(),
        "carl.ipynb": slow(3),
        f"dora{ESC}\n=1+1.ipynb": SOLUTION.encode(),
    }
    return put(tmp_path / "class", files)


def course_grade(*words, **options):
    command = [sys.executable, "-m", "course_utils.grading", *map(str, words)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def finish(process, seconds=120):
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        raise
    assert "Traceback" not in err, err
    assert "\x1b" not in out + err
    return process.returncode, out, err


def results(out):
    """{student: Mark} of what is written so far, and when each was written."""
    files = list((out / "results").glob("*.json"))
    marks = [Mark.from_json(json.loads(path.read_text())) for path in files]
    return {mark.student[:4]: mark for mark in marks}, {p.name: p.stat().st_mtime_ns for p in files}


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
    return found


def sleeping_on_carl(process, out):
    """Wait until two are done and the third is in its sandbox; returns all processes."""
    wait_for(lambda: len(list((out / "results").glob("*.json"))) == 2)
    parent = psutil.Process(process.pid)
    time.sleep(1)
    return wait_for(lambda: parent.children(recursive=True))


def all_gone(processes, seconds=1.0):
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_killed_in_the_middle_and_resumed(four, tmp_path):
    out = tmp_path / "out"
    words = ("run", four, "--out", out, *KIND)
    process = course_grade(*words)
    family = sleeping_on_carl(process, out)
    process.kill()
    process.wait()
    assert KIND == ["--unsafe-local"] or all_gone(family, 2)
    marks, written = results(out)
    assert set(marks) == {"anna", "ben"}
    process.communicate()
    secret = (out / "secret").read_text()

    code, text, _ = finish(course_grade(*words))
    assert code == 0 and "2 of 4 had been graded before" in text
    marks, later = results(out)
    assert {name: mark.score for name, mark in marks.items()} == {
        "anna": 16, "ben": 0, "carl": 16, "dora": 16,
    }  # fmt: skip
    assert {name: later[name] for name in written} == written, "done is done"
    assert (out / "secret").read_text() == secret
    assert stat.S_IMODE((out / "secret").stat().st_mode) == 0o600
    said = json.loads((out / "run.json").read_text())
    assert said["exercise"] == "13" and len(said["results"]) == 4 and said["course"]["tasks"]
    for path in everything(out):
        assert path.name == "secret" or secret not in path.read_text(), path

    code, text, _ = finish(course_grade("report", out))
    assert code == 0 and "anna" in text and "report.html" in text
    pages = list((out / "feedback").glob("*.html"))
    assert len(pages) == 4 and (out / "report.html").stat().st_size > 1000
    code, text, _ = finish(course_grade("export", out, "--assignment", "week 3"))
    assert code == 0
    rows = list(csv.DictReader(io.StringIO((out / "grades.csv").read_text())))
    assert [float(row["score"]) for row in rows] == [16, 0, 16, 16]
    assert {row["assignment"] for row in rows} == {"week 3"}
    assert not any(row["student_id"].startswith("=") or "\x1b" in str(row) for row in rows)
    scores = [
        json.loads(path.read_text())["score"] for path in out.glob("gradescope/*/results.json")
    ]
    assert sorted(scores) == [0, 16, 16, 16]
    for path in everything(out):
        assert path.name == "secret" or secret not in path.read_text(), path


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KIND, ["--unsafe-local"]], ids=["sandbox", "local"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_no_process_and_no_mark(four, tmp_path, kind, number):
    out = tmp_path / "out"
    (four / "carl.ipynb").write_bytes(slow(600))
    process = course_grade("run", four, "--out", out, *kind, "--limit", "600")
    family = sleeping_on_carl(process, out)
    process.send_signal(number)
    code, _, err = finish(process, 30)  # it does not wait for carl
    assert code == 130 and "stopped" in err
    assert all_gone(family)
    marks, _ = results(out)
    assert set(marks) == {"anna", "ben"}, "a stopped submission is no crash"
    assert not list(out.rglob("*.part"))


@pytest.mark.slow
def test_private_cases_seed_file_and_changes(four, tmp_path):
    """A new notebook or rule is graded again; tampering and odd names are said, and harmless."""
    (four / "carl.ipynb").unlink()
    tampered = SOLUTION.replace('check(\\"13-staleness\\")', 'check(\\"13-mine\\")').encode()
    put(four, {"anna.ipynb": tampered, f"dora{ESC}\n=1+1.ipynb": tampered})
    (four / "ben.ipynb").write_bytes(b"{")
    (tmp_path / "seed").write_text("a secret of mine\n")
    out = tmp_path / "out"
    words = ["run", four, "--out", out, *KIND, "--seed-file", tmp_path / "seed", "-j", "2"]
    code, text, _ = finish(course_grade(*words, "--limit", "20", "--memory", "1000"))
    marks, written = results(out)
    assert code == 0 and not (out / "secret").exists()
    for name in ("anna", r"dora\x1b[2J\x1b[31m =1+1"):
        assert f"{name}: tampered: the test cell 13-staleness-test was edited" in text
    assert marks["anna"].score == 16, "of the tests, ours count"
    assert marks["ben"].status == "bad_notebook" and marks["ben"].points == 16
    said = json.loads((out / "run.json").read_text())
    assert said["limits"] == {"seconds": 20, "MiB": 1000} and "secret of mine" not in str(said)

    cases = {"13-staleness": [cli.all_tasks()["13-staleness"].inputs(5)]}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    words += ["--limit", "20", "--memory", "1000", "--private", tmp_path / "cases.json"]
    code, text, _ = finish(course_grade(*words))
    _, later = results(out)
    assert code == 0 and "graded before" not in text
    assert all(later[name] != written[name] for name in written)

    code, _, err = finish(course_grade(*words, "--exercise", "2"))
    assert code == 2 and "2 of 3 notebooks are of exercise 13, not 02" in err
    assert len(err.splitlines()) == 1, "a name cannot begin a line"


@pytest.mark.slow
def test_late_ones_join_and_a_damaged_result_is_made_again(four, tmp_path):
    out, late = tmp_path / "out", tmp_path / "late"
    (four / "carl.ipynb").unlink()
    assert finish(course_grade("run", four, "--out", out, *KIND))[0] == 0
    before, _ = results(out)
    put(late, {"emil.ipynb": SOLUTION.encode()})
    assert finish(course_grade("run", late, "--out", out, *KIND))[0] == 0
    (path,) = (out / "results").glob("anna-*.json")
    path.write_text('{"key": ')
    code, text, _ = finish(course_grade("run", four, "--out", out, *KIND))
    assert code == 0 and "2 of 3 had been graded before" in text
    code, text, _ = finish(course_grade("report", out))
    assert code == 0 and all(name in text for name in ("anna", "ben", "emil"))
    after, _ = results(out)
    assert set(after) == {*before, "emil"} and after["anna"].score == 16


# --- several runs into one folder: whose row it is, and which notebook counts ---------------------

BLANK = (ROOT / "exercises" / "13_parameter_server.ipynb").read_bytes()
MOODLE = "{}_assignsubmission_file_/13_parameter_server.ipynb"
PARTLY = edited("return ", "return 0 * ")


def export(path, files, time=(2026, 11, 20, 10, 0, 0)):
    """An export of Moodle: {"Ann_501": notebook}; other names as they are."""
    members = []
    for name, data in files.items():
        name = MOODLE.format(name) if "/" not in name else name
        members.append((zipfile.ZipInfo(name, time), data))
    return make_zip(path, members)


@pytest.fixture
def grade(tmp_path, monkeypatch, capsys):
    """A function that runs `course-grade run` here, into "out", and returns what it prints.

    A mark is made without running anything: 16 for the solution, 0 for the blank, 7 for others.
    """
    scores = {SOLUTION.encode(): 16, BLANK: 0}

    def mark_file(one, sandbox, rules, course, exercise=None):
        if one.path is None:
            return real(one, sandbox, rules, course, exercise)
        score = scores.get(one.path.read_bytes(), 7)
        grade.runs += 1
        tasks = [marking.TaskMark("13-staleness", "a title", "ok", score, 16)]
        return Mark(one.student, one.file, "13", "ok", tasks, [], 0.1)

    def grade(*paths, code=0):
        words = ["run", *map(str, paths), "--out", str(tmp_path / "out"), "--unsafe-local"]
        got = cli.main(words)
        said = capsys.readouterr()
        assert got == code, said
        return said.out if code == 0 else said.err

    real = marking.mark_file
    grade.runs = 0
    monkeypatch.setattr(marking, "mark_file", mark_file)
    return grade


def rows(out):
    """{number or name: score}, as they reach the report, the pages and the table."""
    found, missing = cli._marks(out)
    assert not missing and len(found) == len(list((out / "results").glob("*.json")))
    assert cli.main(["report", str(out)]) == cli.main(["export", str(out)]) == 0
    assert {path.stem for path in (out / "feedback").iterdir()} == set(found)
    table = list(csv.DictReader(io.StringIO((out / "grades.csv").read_text())))
    scores = {row["student_id"]: float(row["score"]) for row in table}
    assert len(table) == len(scores) == len(found)
    return scores


NAMESAKES = {"Max Meyer_507": SOLUTION.encode(), "Max Meyer_508": BLANK}


def test_namesakes_in_two_runs_have_two_rows(tmp_path, grade):
    one, two = NAMESAKES.items()
    grade(export(tmp_path / "a.zip", dict([one])))
    said = grade(export(tmp_path / "b.zip", dict([two])))
    assert "→" not in said and "kept" not in said
    assert rows(tmp_path / "out") == {"507": 16, "508": 0}
    shown = {mark.student for mark in cli._marks(tmp_path / "out")[0].values()}
    assert shown == {"Max Meyer (507)", "Max Meyer (508)"}
    copies = {path.read_bytes() for path in (tmp_path / "out" / "submissions").iterdir()}
    assert copies == set(NAMESAKES.values())


def test_a_late_one_of_two_namesakes_is_no_third(tmp_path, grade):
    """One run calls him "Max Meyer (508)", the other "Max Meyer"."""
    both = export(tmp_path / "a.zip", NAMESAKES)
    grade(both)
    late = {"Max Meyer_508": SOLUTION.encode()}
    said = grade(export(tmp_path / "late.zip", late, (2026, 11, 21, 10, 0, 0)))
    assert "Max Meyer (508): 0 → 16, replaced by the later notebook" in said
    assert rows(tmp_path / "out") == {"507": 16, "508": 16}
    said = grade(both)
    assert "Max Meyer (508): kept: the earlier notebook was not graded again" in said
    assert rows(tmp_path / "out") == {"507": 16, "508": 16} and grade.runs == 3
    assert {p.read_bytes() for p in (tmp_path / "out" / "submissions").iterdir()} == {
        SOLUTION.encode()
    }, "the copy is of what counts"


def test_by_hand_one_of_two_namesakes(tmp_path, grade):
    grade(export(tmp_path / "a.zip", NAMESAKES))
    put(tmp_path, {"Max Meyer (508).ipynb": PARTLY, "Max Meyer.ipynb": SOLUTION.encode()})
    said = grade(tmp_path / "Max Meyer (508).ipynb")
    assert "Max Meyer (508): 0 → 7" in said
    said = grade(tmp_path / "Max Meyer.ipynb")
    assert "note: Max Meyer: 2 students have this name" in said and "(507).ipynb" in said
    assert rows(tmp_path / "out") == {"507": 16, "508": 7, "Max Meyer": 16}
    assert "have this name" not in grade(tmp_path / "Max Meyer.ipynb"), "it has its row by now"
    assert len(rows(tmp_path / "out")) == 3


def test_a_mended_notebook_by_name_keeps_number_and_mark(tmp_path, grade):
    files = {"Eva Lind_504": BLANK, "Ann Ohm_505": BLANK}
    path = export(tmp_path / "a.zip", files)
    grade(path)
    put(tmp_path, {"Eva Lind.ipynb": SOLUTION.encode()})
    os.utime(tmp_path / "Eva Lind.ipynb")
    said = grade(tmp_path / "Eva Lind.ipynb")
    assert "Eva Lind (504): 0 → 16, replaced by the later notebook" in said
    assert rows(tmp_path / "out") == {"504": 16, "505": 0}
    for _ in range(2):
        assert "Eva Lind (504): kept: the earlier" in grade(path)
        assert rows(tmp_path / "out") == {"504": 16, "505": 0}
    assert grade.runs == 3
    assert "1 of 1 had been graded before" in grade(tmp_path / "Eva Lind.ipynb")


def test_a_row_without_a_number_gets_it_later(tmp_path, grade):
    put(tmp_path, {"Eva Lind.ipynb": BLANK})
    os.utime(tmp_path / "Eva Lind.ipynb", (1e9, 1e9))
    grade(tmp_path / "Eva Lind.ipynb")
    said = grade(export(tmp_path / "a.zip", {"Eva Lind_504": SOLUTION.encode()}))
    assert "Eva Lind (504): 0 → 16" in said
    assert rows(tmp_path / "out") == {"504": 16}


def test_canvas_numbers_of_attempts_come_before_times(tmp_path, grade):
    """Its zips give every file the time of the download."""

    def canvas(name, attempt, data, day):
        names = (f"doejane_12345_{attempt}_x.ipynb", "roejim_12346_500_x.ipynb")
        files = [zipfile.ZipInfo(name, (2026, 11, day, 0, 0, 0)) for name in names]
        return make_zip(tmp_path / name, zip(files, (data, BLANK), strict=True))

    grade(canvas("late.zip", 1000, PARTLY, 20))
    assert "doejane (12345): kept" in grade(canvas("early.zip", 999, BLANK, 21))
    put(tmp_path, {"doejane.ipynb": SOLUTION.encode()})
    os.utime(tmp_path / "doejane.ipynb", (time.mktime((2026, 11, 22, 0, 0, 0, 0, 0, -1)),) * 2)
    assert "7 → 16" in grade(tmp_path / "doejane.ipynb")
    again = canvas("again.zip", 1000, PARTLY, 25)  # downloaded after the mend, the same in it
    assert "doejane (12345): kept" in grade(again)
    earlier = canvas("earlier.zip", 998, edited("return ", "return 1 * "), 26)
    assert "doejane (12345): kept" in grade(earlier), "the mended one stands for the attempt 1000"
    assert "16 → 0" in grade(canvas("new.zip", 1001, BLANK, 25))
    assert rows(tmp_path / "out") == {"12345": 0, "12346": 0}


def test_an_earlier_notebook_that_comes_later_does_not_count(tmp_path, grade):
    def of(day, data):
        files = {"Ann Ohm_505": data}
        return export(tmp_path / f"{day}.zip", files, (2026, 11, day, 10, 0, 0))

    grade(of(21, SOLUTION.encode()))
    assert "Ann Ohm (505): kept" in grade(of(20, BLANK))
    assert "16 → 7" in grade(of(22, PARTLY))
    assert rows(tmp_path / "out") == {"505": 7} and grade.runs == 2


def test_another_exercise_needs_another_folder(tmp_path, grade):
    grade(export(tmp_path / "a.zip", {"Ann Ohm_505": BLANK}))
    other = export(tmp_path / "b.zip", {"Ann Ohm_505": notebook("", "12")})
    for words in ((), ("--exercise", "12")):
        assert "holds marks of exercise 13: choose" in grade(other, *words, code=2)


def test_without_times_the_one_given_later_counts_once(tmp_path, grade):
    def undated(name, data):
        blob = bytearray(zip_bytes([(zipfile.ZipInfo(MOODLE.format("Ann Ohm_505")), data)]))
        struct.pack_into("<H", blob, blob.index(b"PK\x01\x02") + 14, 0)  # the 0th of month 0
        (tmp_path / name).write_bytes(blob)
        return tmp_path / name

    first, second = undated("a.zip", BLANK), undated("b.zip", SOLUTION.encode())
    grade(first)
    assert "1 of 1 had been graded before" in grade(first), "the same file twice"
    assert "0 → 16" in grade(second)
    assert "kept" in grade(first)
    assert rows(tmp_path / "out") == {"505": 16} and grade.runs == 2


def test_a_file_that_is_no_notebook_replaces_none(tmp_path, grade):
    pdf = {"Eva Lind_504_assignsubmission_file_/13.pdf": b"%PDF", "Ann Ohm_505": BLANK}
    path = export(tmp_path / "a.zip", pdf, (2026, 11, 22, 0, 0, 0))
    said = grade(path, "--exercise", "13")
    assert "note: Eva Lind: handed in 13.pdf, which is no notebook" in said
    mark = next(m for m in cli._marks(tmp_path / "out")[0].values() if m.id == "504")
    assert mark.notes == ["handed in 13.pdf, which is no notebook"] and mark.points == 16
    said = grade(export(tmp_path / "b.zip", {"Eva Lind_504": SOLUTION.encode()}))
    assert "Eva Lind (504): 0 → 16, replaced by a notebook of this exercise" in said
    said = grade(path)
    assert "Eva Lind (504): kept: what is no notebook of this exercise was not graded" in said
    assert rows(tmp_path / "out") == {"504": 16, "505": 0}


def test_collect_counts_notebooks_only(tmp_path, capsys):
    pdf = {"Eva Lind_504_assignsubmission_file_/13.pdf": b"%PDF", "Ann Ohm_505": BLANK}
    path = export(tmp_path / "a.zip", pdf)
    assert cli.main(["collect", str(path), "--out", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out
    assert "1 notebook in" in said and "1 student without a notebook" in said
    (one,) = (tmp_path / "new").iterdir()
    assert one.stat().st_mtime == time.mktime((2026, 11, 20, 10, 0, 0, 0, 0, -1)), "its own time"


def test_a_folder_has_one_secret(tmp_path, grade, capsys):
    path = export(tmp_path / "a.zip", {"Ann Ohm_505": BLANK})
    put(tmp_path, {"s1": b"first secret", "s2": b"second secret", "s3": b"first secret\n"})
    first, second = ("--seed-file", tmp_path / "s1"), ("--seed-file", tmp_path / "s2")
    assert "sandbox: unsafe-local" in grade(path, *first)
    out = tmp_path / "out"
    text = (out / "run.json").read_text()
    assert "first secret" not in text and '"sandbox": "unsafe-local"' in text
    assert f"another secret than that in {tmp_path}/s2" in grade(path, *second, code=2)
    assert "give it with --seed-file FILE" in grade(path, code=2)
    assert not (out / "secret").exists() and (out / "run.json").read_text() == text
    grade(path, "--seed-file", tmp_path / "s3")
    shutil.rmtree(out)
    grade(path)
    assert "leave out --seed-file" in grade(path, *first, code=2)
    (out / "secret").write_text("quite another")
    assert "put that one back" in grade(path, code=2)
    (out / "secret").unlink()
    assert "--out" in grade(path, code=2) and grade.runs == 2


def test_another_exercise_than_the_one_named(tmp_path, grade, capsys):
    files = {"Ann Ohm_505": BLANK, "Eva Lind_504": BLANK, "Joe Poe_506": notebook("", "12")}
    path = export(tmp_path / "a.zip", files)
    said = grade(path, "--exercise", "12", code=2)
    words = "2 of 3 notebooks are of exercise 13, not 12 (Ann Ohm, Eva Lind)"
    assert f"{words}: type --exercise 13" in said
    assert not (tmp_path / "out").exists()
    said = grade(path, "--exercise", "13")
    assert "note: 1 of 3 notebooks is of exercise 12, not 13 (Joe Poe)" in said
    assert cli.main(["collect", str(path), "--exercise", "12", "--out", str(tmp_path / "n")]) == 0
    assert "2 of 3 notebooks are of exercise 13, not 12" in capsys.readouterr().out


def test_of_two_zips_the_note_names_the_one_that_counts(tmp_path):
    early = export(tmp_path / "b.zip", {"Ann Ohm_505": BLANK})
    same = export(tmp_path / "a.zip", {"Ann Ohm_505": SOLUTION.encode()})
    late = export(tmp_path / "c.zip", {"Ann Ohm_505": PARTLY}, (2026, 11, 21, 0, 0, 0))
    name = "13_parameter_server.ipynb"
    _, (note,) = find([early, same], None, tmp_path / "into")
    assert note.endswith(f"{name} in b.zip (given first; {name} in a.zip has the same time)")
    _, (note,) = find([early, late], None, tmp_path / "into")
    assert note.endswith(f"of exercise 13: {name} in c.zip")

"""Marks as people and other programs get them; what students wrote is text in all of them."""

import csv
import io
import json
import re
import sys
import unicodedata
from html.parser import HTMLParser

import pytest

from course_utils.grading import all_tasks, export, get_task, report
from course_utils.grading.marking import STATUSES, Mark, TaskMark

VOID = {"meta", "br", "link", "img", "input", "hr", "base"}
HOSTILE = [
    "<script>alert(1)</script>",
    "</title></style></svg><img src=x onerror=alert(1)>",
    "\" onmouseover='alert(1)' x=\"",
    "javascript:alert(1)",
    "<b>&amp;&lt;i&gt;&#60;u&#62;",
    "\x1b[31mred\x1b[0m \x1b]8;;http://example.invalid\x07link\x1b]8;;\x07 \x9b31m",
    "[red]marked up[/red] [link=file:///etc/passwd]x[/link] [/]",
    "=cmd|'/c calc'!A0",
    "+1-1",
    "-2+3",
    "@SUM(A1)",
    "\t=1+1",
    "\r=1+1",
    "\n=1+1",
    "doe;=1+1",
    'doe",=1+1',
    "\uff1d1+1",
    "abc\u202edcba\u202c \u2066x\u2069 \u200f\u061c",
    "שלום עולם",
    "line one\nline two\u2028three\x00\x07\x08",
    "half \ud83d of a character",
    "x" * 100_000,
    "e" + "\u0301" * 5000,
    "",
]


def task(name="13-staleness", status="ok", score=4.0, why="", findings=None, points=4.0):
    return TaskMark(name, "the staleness of a schedule", status, score, points, why, findings or [])


def finding(text, points, why=""):
    return {"text": text, "points": points, "why": why}


def mark(student="Ann", tasks=None, notes=(), status="ok", file="13.ipynb", exercise="13"):
    tasks = [task()] if tasks is None else tasks
    return Mark(student, file, exercise, status, tasks, list(notes), 1.25, "key-of-the-result")


def every_status():
    """A student for each status, with findings where the grader has some."""
    found = [finding("a worker alone", 1), finding("three workers", 3, "too large")]
    marks = []
    for status in STATUSES:
        score = {"ok": 4.0, "wrong": 1.0}.get(status, 0.0)
        findings = found if status in ("ok", "wrong") else []
        one = task(status=status, score=score, why=f"why of {status}", findings=findings)
        marks.append(mark(f"student {status}", [one]))
    return marks


def hostile():
    """Every hostile text in every place that a student can write to."""
    marks = []
    for text in HOSTILE:
        wrong = task(
            status="wrong",
            score=1.0,
            why=text,
            findings=[finding("a worker alone", 1), finding("three workers", 3, text or "x")],
        )
        broken = task(status="error", score=0.0, why=f"line 3 in {text}: ValueError: {text}")
        marks.append(mark(text, [wrong, broken], [text], file=text))
        marks.append(mark(text, [], [text], "bad_notebook", file=text, exercise=""))
    return marks


class Page(HTMLParser):
    """What a browser would make of a page; asserts that elements are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = [], [], "", []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text += data


OURS = {
    "html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "p", "strong", "small",
    "bdi", "br", "div", "table", "caption", "thead", "tbody", "tr", "th", "td", "ul", "li", "span",
    "svg", "rect", "details", "summary", "code",
}  # fmt: skip


def check_page(text):
    """It is HTML of ours alone, with nothing that runs, loads or steers a terminal."""
    page = Page(text)
    assert set(page.tags) <= OURS
    allowed = {"class", "lang", "charset", "name", "content", "http-equiv", "scope"}
    allowed |= {"aria-hidden", "viewbox", "x", "width", "height"}
    assert {name for _, name, _ in page.attributes} <= allowed
    assert "url(" not in text and "@import" not in text
    assert ("meta", "content", report._POLICY) in page.attributes
    assert report._POLICY.startswith("default-src 'none'; ")
    heads = [scope for tag, name, scope in page.attributes if tag == "th" and name == "scope"]
    assert len(heads) == page.tags.count("th") and set(heads) <= {"row", "col"}
    assert page.tags.count("caption") == page.tags.count("table")
    assert page.tags.count("h1") == 1
    check_plain(text)
    return page


def check_plain(text):
    """No control character but line ends, no mark that turns the direction of writing."""
    odd = {letter for letter in text if unicodedata.category(letter) in ("Cc", "Cf", "Cs")}
    assert odd <= set("\n" + report._JOINERS), odd
    assert not odd & set("\u202e\x1b")
    text.encode("utf-8")


def terminal(marks, width=140, **options):
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, **options)
    console.print(report.table(marks))
    return console.file.getvalue()


# --- text ---------------------------------------------------------------------------------


def test_shown_is_one_line_of_plain_text():
    assert report.shown("\x1b[31mred") == "\\x1b[31mred"
    assert report.shown("abc\u202edef") == "abc\\u202edef"
    assert report.shown("a\nb\u00a0c\td\u2028e") == "a b c d e"
    assert report.shown("\ud83d") == "\\ud83d"
    assert report.shown("x" * 400) == "x" * 300 + "…" and report.shown("x" * 300) == "x" * 300
    assert report.shown("Zoë 山田 שלום नमस्ते می\u200cخواهم") == "Zoë 山田 שלום नमस्ते می\u200cخواهم"


def test_every_status_has_words():
    assert set(report.WORDS) == set(STATUSES)
    assert set(report.ADVICE) == set(STATUSES) - {"ok"}
    assert report.state(task(status="wrong", score=1)) == "partly right"
    assert report.state(task(status="wrong", score=0)) == "not right yet"


# --- the instructor's page ----------------------------------------------------------------


@pytest.mark.parametrize("marks", [[], every_status(), hostile()], ids=["none", "all", "hostile"])
def test_report_is_html_of_ours_alone(marks):
    page = check_page(report.html(marks))
    for one in marks:
        assert report.shown(one.student, 60) in page.text


def test_empty_class_is_said():
    assert "nothing was graded" in report.html([])
    assert "nothing was graded" in terminal([])
    assert export.nbgrader_csv([], "ps1") == ",".join(export.COLUMNS) + "\n"


def test_distribution_of_a_task():
    """Counts by kind, the mean, and how many students have which score."""
    kinds = [("ok", 4, 3), ("wrong", 1, 2), ("error", 0, 1), ("not_attempted", 0, 1)]
    marks = [
        mark(f"{status}{number}", [task(status=status, score=score)])
        for status, score, students in kinds
        for number in range(students)
    ]
    text = report.html(marks)
    row = re.search(r'<tr><th scope="row">13-staleness.*?</tr>', text).group(0)
    cells = re.findall(r'<td class="number">([^<]*)</td>', row)
    assert cells == ["4", "2.0", "3", "2", "1", "1"]
    assert "4\u202f×\u202f3, 1\u202f×\u202f2, 0\u202f×\u202f2" in row
    assert [float(w) for w in re.findall(r'width="([\d.]+)"', row)] == pytest.approx(
        [200 * n / 7 - 1 for n in (3, 2, 1, 1)], abs=0.06
    )
    assert "7 submissions, 4 points to reach: mean 2.0, median 1, lowest 0, highest 4." in text


def test_commonest_wrong_answers_are_counted_by_the_first_property_that_failed():
    def wrong(student, *failed):
        findings = [finding(text, 1, f"why {student}" if text in failed else "") for text in "abc"]
        return mark(student, [task(status="wrong", score=1, why="…", findings=findings)])

    def error(student, line):
        why = f"line {line} in staleness: TypeError: no number"
        return mark(student, [task(status="error", score=0, why=why)])

    marks = [wrong("A", "b", "c"), wrong("B", "c"), wrong("C", "b"), error("D", 1), error("E", 9)]
    marks += [error("F", 2), mark("G"), mark("H", [task(status="not_attempted", score=0)])]
    assert report.commonest(marks) == [
        ("13-staleness", "raised an error", "TypeError: no number", [], ["D", "E", "F"]),
        ("13-staleness", "not right yet", "b", ["why A", "why C"], ["A", "C"]),
        ("13-staleness", "not right yet", "c", ["why B"], ["B"]),
    ]
    rows = re.findall(r'<tr><td class="number">(\d+)</td>', report.html(marks))
    assert rows == ["3", "2", "1"]
    again = [*marks, wrong("C", "b")]  # who failed in the same way for the same reason
    assert report.commonest(again)[0][3:] == (["why C", "why A"], ["A", "C", "C"])
    shown = Page(report.html(again)).text
    assert "bwhy C (and 1 other reason)" in shown and "cwhy BB" in shown, "reason, then students"
    assert "No wrong answers" in report.html([mark()])


def test_files_that_could_not_be_read_have_a_place_of_their_own():
    bad = mark("Bea", [], ["the file is not a notebook"], "bad_notebook", exercise="")
    page = check_page(report.html([bad, mark("Ann")]))
    assert page.text.index("Exercise 13") < page.text.index("Files that could not be read")
    assert page.text.index("could not be read") < page.text.index("the file is not a notebook")
    assert "could not be read" in terminal([bad])


# --- the terminal -------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("colours", [True, False])
def test_terminal_obeys_no_student(width, colours):
    printed = terminal(hostile(), width, force_terminal=colours)
    # rich's own styles are the only commands: colours and weights of its own heads.
    own = re.sub(r"\x1b\[[\d;]*m", "", printed)
    check_plain(own)
    assert "\x1b[31m" not in printed and "\x1b]8" not in printed
    if width == 200:
        assert "\\x1b[31mred" in own and "[red]marked" in own


def test_terminal_shows_every_status_and_the_mean():
    printed = re.sub(r"\s+", " ", terminal(every_status(), 160))
    for status in set(STATUSES) - {"ok", "wrong"}:
        assert report.WORDS[status].split()[-1] in printed
    assert "partly right" in printed and "0.5" in printed  # 5 points of 11 students


def test_without_rich_the_table_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ModuleNotFoundError, match="pip install rich"):
        report.table([mark()])


# --- feedback -----------------------------------------------------------------------------


@pytest.mark.parametrize("one", every_status(), ids=lambda one: one.student)
def test_feedback_says_the_status_in_words_and_what_to_do(one):
    page = check_page(report.feedback(one))
    status = one.tasks[0].status
    assert report.state(one.tasks[0]) in page.text
    assert f"{one.score:g} of 4 points" in page.text
    if status == "ok":
        assert "details" not in page.tags
        return
    assert page.tags.count("details") == 3
    assert report.ADVICE[status] in page.text or status == "wrong"
    for hint in get_task("13-staleness").hints:
        assert hint.replace("`", "") in page.text
    assert (f"why of {status}" in page.text) == (status != "not_attempted")


def test_feedback_names_the_first_failure_and_what_holds():
    findings = [finding("one", 1), finding("two", 2, "too small"), finding("three", 1, "no list")]
    wrong = task(status="wrong", score=1, why="two: too small", findings=findings)
    page = check_page(report.feedback(mark(tasks=[wrong], notes=["tampered: a secret"])))
    assert "Fails first: two: too small" in page.text and "1 more property fails. Mend" in page.text
    assert "one (1)" in page.text and "no list" not in page.text
    assert "tampered" not in page.text, "notes are for the instructor"
    assert "key-of-the-result" not in page.text


@pytest.mark.parametrize("one", hostile(), ids=range(2 * len(HOSTILE)))
def test_feedback_is_html_of_ours_alone(one):
    check_page(report.feedback(one))
    assert len(report.feedback(one)) < 20_000


def test_feedback_for_a_file_that_could_not_be_read():
    bad = mark("Bea", [], ["it is not JSON in UTF-8"], "bad_notebook", exercise="")
    page = check_page(report.feedback(bad))
    assert "it is not JSON in UTF-8" in page.text and "that .ipynb file." in page.text
    none = mark("Bea", [], ["handed in x.pdf, which is no notebook"], "bad_notebook", file="")
    assert "<p><bdi>Bea</bdi></p>" in report.feedback(none)


def test_feedback_of_every_task_of_the_course():
    """Hints hold backticks, < and &; a task that the course no longer has gets none."""
    for name, known in all_tasks().items():
        page = check_page(report.feedback(mark(tasks=[task(name, "not_attempted", 0)])))
        assert page.tags.count("details") == 3
        assert page.text.count("Hint 1 of 3") == 1 and known.hints[0].split("`")[0] in page.text
    gone = mark(tasks=[task("98-gone", "not_attempted", 0)])
    assert "details" not in check_page(report.feedback(gone)).tags


# --- nbgrader -----------------------------------------------------------------------------


def test_csv_has_a_line_for_each_student_in_nbgraders_columns():
    marks = [mark("Ann", [task(), task("13-partition", "wrong", 2.5, points=6.0)])]
    marks.append(mark("Bea", [], ["not a notebook"], "bad_notebook", exercise=""))
    rows = list(csv.DictReader(io.StringIO(export.nbgrader_csv(marks, "ps1"))))
    assert tuple(rows[0]) == export.COLUMNS
    shared = {"assignment": "ps1", "duedate": "", "timestamp": "", "last_name": ""}
    shared |= {"first_name": "", "email": "", "late_submission_penalty": "0.0", "max_score": "10.0"}
    assert rows == [
        {**shared, "student_id": "Ann", "raw_score": "6.5", "score": "6.5"},
        {**shared, "student_id": "Bea", "raw_score": "0.0", "score": "0.0"},
    ]


def test_csv_has_the_number_by_which_the_platform_knows_a_student():
    numbered, by_name = mark("Doe Jane"), mark("jim")
    numbered.id = "12345"
    rows = csv.DictReader(io.StringIO(export.nbgrader_csv([numbered, by_name], "ps1")))
    assert [(r["student_id"], r["last_name"]) for r in rows] == [("12345", "Doe Jane"), ("jim", "")]


def test_csv_computes_nothing():
    text = export.nbgrader_csv(hostile(), "=ps1")
    check_plain(text)
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == 2 * len(HOSTILE) and None not in rows[0]
    for delimiter in ",;\t":  # some spreadsheets split at others than commas
        for row in csv.reader(io.StringIO(text), delimiter=delimiter):
            for cell in row:
                assert not re.match(r"\s*[=+\-@\t\r\uff1d]", cell), cell
    assert {row["assignment"] for row in rows} == {"'=ps1"}
    given = ["+1-1", "doe;=1+1", "\t=1+1", "\tx", "\rx"]
    text = export.nbgrader_csv([mark(student) for student in given], "ps1")
    students = [row["student_id"] for row in csv.DictReader(io.StringIO(text))]
    assert students == ["'+1-1", "doe;'=1+1", "'=1+1", "'x", "'x"]
    plain = export.nbgrader_csv([mark("Anne-Marie O'Neil, jr. (a+b@c.org)")], "ps1")
    assert "Anne-Marie O'Neil, jr. (a+b@c.org)" in plain, "a harmless name stays as it is"


# --- Gradescope ---------------------------------------------------------------------------

VISIBILITY = {"hidden", "after_due_date", "after_published", "visible"}
TOP = {
    "score": float, "execution_time": float, "output": str, "output_format": str,
    "visibility": str, "stdout_visibility": str, "tests": list,
}  # fmt: skip
TEST = {
    "score": float, "max_score": float, "status": str, "name": str, "number": str, "output": str,
    "output_format": str, "visibility": str,
}  # fmt: skip


def check_gradescope(data):
    """The format of results.json: known keys, their types, the values that are allowed."""
    assert {key: type(value) for key, value in data.items()} == TOP
    for part in (data, *data["tests"]):
        assert part["visibility"] in VISIBILITY
        assert part["output_format"] == "text", "in HTML a student's text would be markup"
        check_plain(part["output"])
    assert data["stdout_visibility"] in VISIBILITY
    for number, test in enumerate(data["tests"], 1):
        assert {key: type(value) for key, value in test.items()} == TEST
        assert test["status"] in ("passed", "failed") and test["number"] == str(number)
        assert 0 <= test["score"] <= test["max_score"]
        check_plain(test["name"])
    if data["tests"]:
        assert data["score"] == sum(test["score"] for test in data["tests"])
    assert json.loads(json.dumps(data, allow_nan=False)) == data


@pytest.mark.parametrize("one", [*every_status(), *hostile()], ids=lambda one: one.student[:12])
def test_gradescope_results_are_valid(one):
    data = export.gradescope(one)
    check_gradescope(data)
    assert len(data["tests"]) == len(one.tasks)
    assert "key-of-the-result" not in json.dumps(data)


def test_gradescope_says_passed_only_of_a_complete_task():
    tests = [export.gradescope(one)["tests"][0] for one in every_status()]
    assert [test["status"] for test in tests] == ["passed"] + ["failed"] * (len(STATUSES) - 1)
    assert tests[1]["output"].startswith("13-staleness: partly right.\nwhy of wrong\n")
    assert tests[0]["output"] == "13-staleness: complete."


def test_gradescope_of_a_file_that_could_not_be_read():
    bad = mark("Bea", [], ["it is not JSON"], "bad_notebook", exercise="")
    data = export.gradescope(bad)
    assert data["score"] == 0 and "it is not JSON" in data["output"]


# --- how it looks -------------------------------------------------------------------------


def test_no_column_of_the_instructors_page_is_cut_off_or_one_word_wide():
    """What a browser showed at 1000 and at 400 pixels; its rules stand in the style and classes."""
    page = report.html([*every_status(), *hostile()])
    (heads,) = re.findall(r"How each task went</caption><thead>(.*?)</thead>", page)
    assert "nowrap" not in heads and 'class="id"' not in heads, "wider than a window of 1000 pixels"
    assert ".words { min-width: 12rem }" in page and "bdi { overflow-wrap: anywhere }" in page
    for text in re.findall(r"<td[^>]*>(?=.*?</td>)[^/]*?<bdi>", page):
        assert text.startswith('<td class="words">'), "a student's text breaks between any letters"

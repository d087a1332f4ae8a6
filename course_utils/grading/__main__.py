"""``python -m course_utils.grading``: the same as the command `course-grade`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())

# The image in which `course-grade` runs submissions with podman or docker.
#
# It holds Python and the tested set of packages, and nothing of the course: no task, no solution.
# `course-grade` lends it, read-only, a copy of the course's package without the answers.
# Build it as docs/instructors.md says; what was tried of it, and what not, stands there too.
FROM python:3.11-slim

WORKDIR /install
COPY pyproject.toml constraints.txt ./

# What pyproject.toml asks for, in the versions of constraints.txt; PyTorch without CUDA, because
# no submission ever gets a GPU.
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; more = p['optional-dependencies']; print(*p['dependencies'], *more['torch'], *more['tensorflow'], sep='\n')" > requirements.txt \
    && python -m pip install --no-cache-dir --disable-pip-version-check \
        --constraint constraints.txt --requirement requirements.txt \
        --extra-index-url https://download.pytorch.org/whl/cpu

RUN useradd --uid 61000 --no-create-home student
USER student
WORKDIR /tmp

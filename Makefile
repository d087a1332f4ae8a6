# The course's commands; `make` alone lists them.
#   make lab ARGS="--no-browser --port 9000"   options after ARGS= go to the tool
#   make lab TORCH=cpu                         PyTorch's CPU build, on a Linux laptop
#   make lab PYTHON=python3.12                 another Python to make .venv with

PYTHON ?= python3.11 python3.12 python3.13 python3 python
ifeq ($(OS),Windows_NT)
PY := .venv/Scripts/python
else
PY := .venv/bin/python
endif
ENV_OPTIONS = $(if $(TORCH),--torch $(TORCH)) $(if $(DRY_RUN),--dry-run)

# `make reset 02`: the word after reset is no goal of its own.
ifeq (reset,$(firstword $(MAKECMDGOALS)))
NN ?= $(wordlist 2,9,$(MAKECMDGOALS))
$(eval $(wordlist 2,9,$(MAKECMDGOALS)):;@:)
endif

.DEFAULT_GOAL := help
.PHONY: help setup lab reset test check edit build scripts bench lab-tf-gpu clean $(filter-out reset,$(NN))

help:  ## list these commands
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

# The first Python that can carry the course makes .venv. Where none can, any Python 3 runs
# tools/env.py, which says in one sentence what to do.
define with_python
	@for p in $(PYTHON); do \
	  if $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; \
	  then exec $$p tools/env.py $(1); fi; done; \
	for p in $(PYTHON); do \
	  if $$p -c 'import sys; sys.exit(sys.version_info < (3, 6))' >/dev/null 2>&1; \
	  then exec $$p tools/env.py $(1); fi; done; \
	echo "make: there is no Python 3 here: install Python 3.11 from python.org or your package manager, then run the same command again." >&2; \
	exit 1
endef

setup:  ## make or update .venv, without starting anything
	$(call with_python,$(ENV_OPTIONS))

lab: setup  ## JupyterLab on your own copies of the lessons, under work/
	@$(PY) tools/learner.py lab $(ARGS)

reset: setup  ## make reset 02: fresh copies of lesson 02; yours are kept beside them
	@$(PY) tools/learner.py reset $(NN)

test: setup  ## every test, every notebook (about 20 minutes)
	@$(PY) -m pytest $(ARGS)

check: setup  ## for authors, under a minute: lint, built = source, fast tests
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) tools/build.py --check
	@$(PY) -m pytest tests -m "not slow" $(ARGS)

edit: setup  ## for authors: JupyterLab on the originals, paired with source/
	@$(PY) tools/learner.py edit $(ARGS)

build: setup  ## for authors: rebuild the notebooks whose source changed
	@$(PY) tools/build.py $(ARGS)

scripts: setup  ## for authors: run every lesson as a plain script
	@$(PY) tools/scripts.py $(ARGS)

bench: setup  ## the benchmarks; results go to benchmarks/results/
	@$(PY) -m benchmarks $(ARGS)

lab-tf-gpu:  ## a second environment and a kernel for TensorFlow on GPUs (Linux)
	$(call with_python,--tf-gpu $(ENV_OPTIONS))

clean:  ## remove the environments and caches; work/ stays
	rm -rf .venv .venv-tf-gpu .venv-colab .pytest_cache .ruff_cache build dist figures *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

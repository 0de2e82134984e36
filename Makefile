# Two commands on a fresh machine: `make demo` and `make test`. Everything else is for those who work on shoal.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: setup demo test check lint types policies format bench bench-peers simulate clean

setup: $(READY)

# Without compiling all 11,000 files of the packages, which takes half a minute; the few that are imported are, when they are.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python -m benchmarks.demo

# Real processes on a shared machine: what failed runs once more, alone, and both reports stand. A test that needs that is a bug
# to be found, in the test or in shoal; what fails twice fails.
test: $(READY)
	$(BIN)/python -m pytest -n logical --dist loadfile || { \
		echo; echo "What failed above, once more and alone:"; \
		$(BIN)/python -m pytest --last-failed --last-failed-no-failures none; }

check: lint types policies

lint: $(READY)
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/ruff check src tests examples benchmarks

types: $(READY)
	$(BIN)/mypy

policies: $(READY)
	$(BIN)/python -m pytest tests/policies

format: $(READY)
	$(BIN)/ruff format src tests examples benchmarks
	$(BIN)/ruff check --fix src tests examples benchmarks

# All of it takes hours; what a package alone can measure, a minute: shoal bench ps
bench: $(READY)
	$(BIN)/shoal bench ps
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# Against the peers that pip can install, each in an environment of its own under .peers/: a gigabyte or two the first time.
bench-peers: $(READY)
	$(BIN)/python -m benchmarks peers $(PEERS_ARGS)

# Seeded schedules of a simulated cluster under every fault, on all cores: make simulate SEEDS=100000
SEEDS ?= 20000
simulate: $(READY)
	PYTHONPATH=tests $(BIN)/python -m simulation --seeds $(SEEDS)

clean:
	rm -rf $(VENV) .peers .mypy_cache .ruff_cache .pytest_cache .hypothesis runs out

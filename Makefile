# Two commands on a fresh machine: `make demo` and `make test`. Everything else is for those who work on shoal.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Tests start hundreds of interpreters. Where Python is told to keep no bytecode, each of them compiles torch again: seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup kernels demo docs release test test-fast test-engines matrix check lint types policies format bench bench-peers simulate clean

setup: $(READY)

# Without compiling all 11,000 files of the packages, which takes half a minute; the few that are imported are, when they are.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python -m benchmarks.demo

# Compiled loops, once for this machine: test processes that begin side by side would each compile them, a minute of a core.
kernels: $(READY)
	$(BIN)/python .ci/kernels

# Half as many test processes again as there are cores: tests of jobs wait for deaths, deadlines and each other.
TEST_PROCESSES ?= $(shell echo $$(( ($$(nproc) * 3 + 1) / 2 )))

# The whole suite. Files in their own order, not those with few tests last: among these are the slow ones, and the last
# of them would have a core to itself while the others idle.
test: $(READY)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# The inner loop: unit tests that start no process: two minutes of processor time (ADR 33).
test-fast: $(READY)
	$(BIN)/python -m pytest -n logical --dist loadfile -m "not slow" \
		--ignore tests/processes --ignore tests/simulation --ignore tests/policies

# Real engines: mpirun and slurm from Debian's packages where this is root, the others from pip into an environment of their own
# on top of the usual one, so that `make test` never finds them.
ENGINES_READY := .engines/.ready
$(ENGINES_READY): $(READY) pyproject.toml constraints.txt .ci/engines
	PYTHON=$(BIN)/python .ci/engines
	touch $(ENGINES_READY)

test-engines: $(ENGINES_READY)
	SHOAL_TEST_ENGINES=1 .engines/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -o cache_dir=.pytest_cache/engines tests/engines

# The documentation as a site, in out/site; broken links fail it. Its packages lie apart, like those of the engines.
DOCS_READY := .docs/.ready
$(DOCS_READY): $(READY) constraints.txt
	$(BIN)/python -m venv --without-pip .docs
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib")); print("$(CURDIR)/src")' \
		>$$(.docs/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	PIP_CONSTRAINT=constraints.txt .docs/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		mkdocs-material mkdocstrings-python
	touch $(DOCS_READY)

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 .docs/bin/python -m mkdocs build --quiet

# Wheel and sdist in dist/, and what a user does with the wheel in an environment that has never seen the repository.
release: $(READY)
	.ci/release

# What `make test` and `make test-engines` leave out: every model under every strategy at 2, 3 and 4 workers, every fault in a job of its own, and
# other cases that differ from one that it runs in numbers only. Scripts before a migration, too, with peers that it installs under .peers/.
matrix: $(READY) $(ENGINES_READY)
	SHOAL_WHOLE_MATRIX=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m matrix
	SHOAL_WHOLE_MATRIX=1 SHOAL_TEST_ENGINES=1 .engines/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m matrix tests/engines

check: lint types policies

lint: $(READY)
	$(BIN)/ruff format --check src tests examples benchmarks docs
	$(BIN)/ruff check src tests examples benchmarks docs

types: $(READY)
	$(BIN)/mypy

policies: $(READY)
	$(BIN)/python -m pytest tests/policies

format: $(READY)
	$(BIN)/ruff format src tests examples benchmarks docs
	$(BIN)/ruff check --fix src tests examples benchmarks docs

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
	rm -rf $(VENV) .peers .engines .docs .mypy_cache .ruff_cache .pytest_cache .hypothesis runs out

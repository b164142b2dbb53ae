# `make demo` and `make test` do everything on a fresh machine. What they install, etcd included, goes into
# .venv and nowhere else.

# The Python to make the virtual environment from, and the torch to put into it. `make TORCH=torch` takes
# the newest one; a wheel's path or URL works too.
PYTHON ?= python3
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -qq

# Tests run in so many processes at once; most of them wait for something.
WORKERS ?= $(shell expr 3 '*' `nproc`)
PYTEST := $(BIN)/python -m pytest
AT_ONCE := --numprocesses $(WORKERS) --dist worksteal

.DELETE_ON_ERROR:
.PHONY: help install demo soak soak-live soak-nodes soak-etcd test test-all tests all-tests test-gpu test-pods test-slurm test-frameworks test-frameworks-all framework-runs framework-tests matrix matrix-torch explore mutants lint format docs \
	bench clean distclean

help:
	@echo "make demo       a real training run survives an exception, killed ranks and a hang; the dead come back;"
	@echo "                with live state no step is done again"
	@echo "make soak       ranks are killed and stopped, and started again, for ten minutes"
	@echo "make soak-live  the same with live state: no step is done again"
	@echo "make soak-nodes the same on two nodes, of which one is lost now and again"
	@echo "make soak-etcd  the same on three nodes that meet in etcd: any of them is lost, and members of etcd"
	@echo "make test       lint, documentation and all tests but the nightly ones"
	@echo "make test-all   the nightly ones too, but those of SLURM and pods"
	@echo "make test-gpu   what one GPU shows, shared by two ranks, or two GPUs; a table of it at the end"
	@echo "make test-slurm faults in jobs of a real SLURM; as root, on a machine with SLURM's programs"
	@echo "make test-pods  faults in pods: namespaces of this machine; as root"
	@echo "make test-frameworks  FSDP2, Lightning, Hugging Face and others through faults, in $(FRAMEWORKS)"
	@echo "make test-frameworks-all  the same, ten runs of each"
	@echo "make matrix     every fault in every place, of which make test runs a part"
	@echo "make matrix-torch  the tests of processes on other versions of torch, which it installs (gigabytes)"
	@echo "make explore    simulated jobs with random faults, then nodes that meet, leave and are lost"
	@echo "make mutants    one-line mistakes in the code, each of which the simulations have to find"
	@echo "make lint       ruff, mypy and import-linter alone"
	@echo "make format     ruff puts the code in order"
	@echo "make docs       the documentation, in docs/_build/html"
	@echo "make bench      the benchmarks"
	@echo "make install    only the virtual environment, in $(VENV)"
	@echo "make clean      removes what was built; make distclean: the virtual environment too"

install: $(INSTALLED)

# torch goes first and by itself: so it is this version, and no other requirement replaces it.
$(INSTALLED): pyproject.toml
	@echo "installing into $(VENV) (only when pyproject.toml has changed)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) "$(TORCH)"
	@$(PIP_INSTALL) --editable ".[dev]"
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/python examples/demo.py

soak: $(INSTALLED)
	@$(BIN)/python tests/soak/kill_and_rejoin.py --ranks 6 --minutes 10 --every 2.5

soak-live: $(INSTALLED)
	@$(BIN)/python tests/soak/kill_and_rejoin.py --ranks 6 --minutes 10 --every 2.5 --live

soak-nodes: $(INSTALLED)
	@$(BIN)/python tests/soak/kill_nodes.py --minutes 10

soak-etcd: $(INSTALLED)
	@$(BIN)/python tests/soak/kill_nodes.py --etcd --minutes 10

# The tests start hundreds of Pythons, each of which would compile the package.
unexport PYTHONDONTWRITEBYTECODE

# Lint and documentation are made while the tests run, most of which wait for something.
test: $(INSTALLED)
	$(MAKE) --jobs 3 lint docs tests

# Tests that measure time run by themselves, after all others.
test-all: $(INSTALLED)
	$(MAKE) --jobs 3 lint docs all-tests
	$(PYTEST) -m alone

tests: $(INSTALLED)
	$(PYTEST) $(AT_ONCE) -m "not nightly"

all-tests: $(INSTALLED)
	$(PYTEST) $(AT_ONCE) -m "not alone" --ignore tests/product/pods --ignore tests/product/slurm

# One at a time: they look at the device's memory and at the time.
test-gpu: $(INSTALLED)
	$(PYTEST) -m "" tests/gpu

# One at a time: pods that share the processors with others are taken for lost.
test-pods: $(INSTALLED)
	$(PYTEST) -m "" tests/product/pods

# One SLURM, one job at a time. On Debian: apt-get install munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins
test-slurm: $(INSTALLED)
	$(PYTEST) -m "" tests/product/slurm

# In a virtual environment of their own; torch goes first again.
FRAMEWORKS := .venv-frameworks
RUNS ?= 2

$(FRAMEWORKS)/.installed: pyproject.toml
	@echo "installing into $(FRAMEWORKS) (only when pyproject.toml has changed)"
	@$(PYTHON) -m venv $(FRAMEWORKS)
	@$(FRAMEWORKS)/bin/python -m pip --disable-pip-version-check install -qq "$(TORCH)"
	@$(FRAMEWORKS)/bin/python -m pip --disable-pip-version-check install -qq --editable ".[dev,frameworks]"
	@touch $@

test-frameworks: $(FRAMEWORKS)/.installed
	$(MAKE) --jobs 2 --output-sync framework-runs framework-tests

framework-runs:
	$(FRAMEWORKS)/bin/python tests/frameworks/framework_runs.py --runs $(RUNS) --docs docs/frameworks.md

framework-tests:
	$(FRAMEWORKS)/bin/python -m pytest -m frameworks tests/frameworks

test-frameworks-all:
	$(MAKE) test-frameworks RUNS=10

matrix: $(INSTALLED)
	$(PYTEST) $(AT_ONCE) -m "" tests/process/faults

# A version may say which Python to take: make matrix-torch TORCHES="2.15.0=/usr/bin/python3.13".
TORCHES ?= 2.6.0 2.15.0

matrix-torch: $(INSTALLED)
	$(BIN)/python tests/outside/torch_matrix.py $(TORCHES)

explore: $(INSTALLED)
	$(BIN)/python -m tests.explorer --random 100000 --processes 2
	$(BIN)/python tests/simulation/rendezvous/explore.py --random 2000 --processes 2

mutants: $(INSTALLED)
	$(BIN)/python -m tests.simulation.mutants --processes 2

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED)
	$(BIN)/python -m sphinx -b html -W -E --keep-going -q docs docs/_build/html

bench: $(INSTALLED)
	$(BIN)/python benchmarks/goodput.py
	$(BIN)/python benchmarks/restart_latency.py
	$(BIN)/python benchmarks/replace_rank.py
	$(BIN)/python benchmarks/first_step.py
	$(BIN)/python benchmarks/lost_work.py
	$(BIN)/python benchmarks/live_transfer.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/store_operations.py
	$(BIN)/python benchmarks/nccl_abort.py
	$(BIN)/python benchmarks/scale.py

clean:
	rm -rf build dist docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

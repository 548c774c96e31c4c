# `make demo` and `make test` need python3 (3.11 or later) and a package index, nothing else.

# The first of these that runs and is new enough; `make PYTHON=... test` overrides it.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; \
	done)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed-from-lock
WORKERS ?= 2
PYTEST_ARGS ?=
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The lower bound of JAX, and the releases of Python after the one that `make test` has.
OLDEST_JAX = $(shell sed -n 's/^  "jax>=\([0-9.]*\),.*/\1/p' pyproject.toml)
LATER_PYTHONS := 3.12 3.13 3.14

GOLDEN_TESTS := tests/autopar/cli/test_cli_commands.py tests/examples/test_golden_plans.py \
	tests/autopar/reports/test_table.py tests/autopar/plans/test_stages.py \
	tests/autopar/cli/test_cli_remat.py tests/autopar/*/test_golden_*.py \
	tests/autopar/*/stages/test_golden_*.py tests/solver/*/test_golden_*.py

.PHONY: help demo test test-cluster test-ray golden lint format docs wheel-check jax-versions python-versions lock clean

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make demo         plan a GPT's training step, train it on 8 simulated devices
demo: $(INSTALLED)
	$(BIN)/autopar demo

## make test         run the test suite (WORKERS=2, PYTEST_ARGS=...; ALL=1: all cases of slow tests)
test: $(INSTALLED)
	$(if $(ALL),AUTOPAR_ALL_TESTS=1) $(PYTEST) -m "not cluster" $(PYTEST_ARGS)

## make test-cluster run the tests of several processes and of shaped links
test-cluster: $(INSTALLED)
	$(PYTEST) -m cluster $(PYTEST_ARGS)

## make test-ray     a run of several processes on a real Ray cluster, some minutes
test-ray: $(INSTALLED)
	AUTOPAR_TEST_RAY=1 $(BIN)/python -m pytest -n 0 tests/autopar/backends/test_ray_run.py

## make golden       write the golden files in tests/golden anew; review their difference
golden: $(INSTALLED)
	AUTOPAR_UPDATE_GOLDEN=1 $(BIN)/python -m pytest -n 0 $(GOLDEN_TESTS)

## make lint         ruff, pyright and the layers
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/pyright --pythonpath $(BIN)/python

## make format       let ruff mend what it can
format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

## make docs         build the site in build/site; any warning is an error
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

## make wheel-check  build the wheel and use it outside the source tree
wheel-check: $(INSTALLED)
	$(BIN)/python scripts/check_wheel.py

## make jax-versions     a short run under the oldest and the newest JAX that pyproject.toml allows
jax-versions: $(INSTALLED)
	for jax in $(OLDEST_JAX) newest; do \
		$(BIN)/uv venv --quiet --clear --python $(BIN)/python build/jax-$$jax && \
		$(BIN)/uv pip install --quiet --python build/jax-$$jax/bin/python . \
			$$(test $$jax = newest || echo jax==$$jax jaxlib==$$jax) && \
		(cd build && jax-$$jax/bin/python ../scripts/smoke.py) || exit 1; \
	done

## make python-versions  types and dependencies under the later releases of Python
python-versions: $(INSTALLED)
	for python in $(LATER_PYTHONS); do \
		$(BIN)/uv pip compile --quiet pyproject.toml --group dev --python-version $$python --output-file /dev/null \
			|| exit 1; \
	done
	echo $(LATER_PYTHONS) | xargs -n 1 -P 2 $(BIN)/pyright --pythonpath $(BIN)/python --pythonversion

## make lock         resolve requirements.lock again; UPGRADE=1 takes newer versions
lock: $(INSTALLED)
	$(BIN)/uv pip compile pyproject.toml --group dev --group docs --extra fast --extra ray --universal \
		--python-version 3.11 --fork-strategy fewest --generate-hashes --no-annotate \
		--custom-compile-command "make lock" $(if $(UPGRADE),--upgrade) \
		--quiet --output-file requirements.lock

## make clean        remove the virtual environment and whatever was built
clean:
	rm -rf $(VENV) dist build *.egg-info .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The project itself is installed without its dependencies: the lock has them all, the build's too.
$(INSTALLED): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "autopar needs Python 3.11 or later: make PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

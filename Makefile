# `make` alone lists the targets. Everything here sets up what it needs and is quick the second time.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory

# Found before .venv comes onto the path: it is what makes .venv.
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell command -v python3)
endif
STEP := $(PYTHON) scripts/step.py
ENVIRONMENTS := $(PYTHON) scripts/environments.py
# Tools come from this clone's own environment, whatever else is active.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH

RUST_SOURCES := $(shell find rust -name '*.rs' -o -name Cargo.toml) Cargo.toml $(wildcard Cargo.lock)
PYTHON_SOURCES := $(shell find python -name '*.py' -o -name '*.pyi' -o -name py.typed)
EXTENSION := .cache/built-extension
WHEEL := .cache/built-wheel

# nextest where it is installed, cargo's own runner elsewhere.
ifneq ($(shell command -v cargo-nextest 2>/dev/null),)
CARGO_TEST := cargo nextest run --locked --no-fail-fast --all-features
CHECKED := --cargo-profile checked
else
CARGO_TEST := cargo test --locked --no-fail-fast --all-features --lib --bins --tests
CHECKED := --profile checked
endif

PYTEST := python -m pytest
QUICK := -m "not real and not gpu"

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' Makefile

.PHONY: tools
tools:
	@for tool in cargo cc; do command -v $$tool >/dev/null || { \
	  echo "set-up failed: $$tool is missing (Rust brings cargo; on Debian, build-essential brings cc)" >&2; \
	  exit 1; }; done

.PHONY: environment
environment: tools ## make .venv, with vLLM for the CPU and every tool
	@$(ENVIRONMENTS) install main

$(EXTENSION): $(RUST_SOURCES) pyproject.toml requirements/main.txt | environment
	@$(STEP) "build ecpool in release mode" $(ENVIRONMENTS) edit main
	@mkdir -p $(@D) && touch $@

.PHONY: build
build: environment $(EXTENSION) ## build ecpool into .venv; Python files are used where they lie

$(WHEEL): $(RUST_SOURCES) $(PYTHON_SOURCES) pyproject.toml README.md LICENSE | environment
	@rm -rf dist
	@$(STEP) "build the wheel" maturin build --quiet --release --out dist
	@mkdir -p $(@D) && touch $@

.PHONY: wheel
wheel: $(WHEEL) ## build the wheel into dist/
	@ls dist/*.whl

.PHONY: demo
demo: build ## real vLLM over a few dozen images twice, with and without the pool
	@PYTHONPATH=tests python -m demo

.PHONY: demo-host
demo-host: build ## two real vLLM engines share one pool; one is killed and comes back
	@PYTHONPATH=tests python -m demo.host

.PHONY: test
test: test-rust test-python test-real ## every test that needs no accelerator

.PHONY: test-rust
test-rust: tools ## cargo tests, also in release mode with debug assertions and overflow checks
	@$(STEP) "cargo tests" $(CARGO_TEST)
	@$(STEP) "cargo documentation tests" cargo test --locked --doc --all-features --quiet
	@$(STEP) "cargo tests, optimised, with every check" $(CARGO_TEST) $(CHECKED)

.PHONY: test-python
test-python: build ## pytest without engines
	@$(STEP) "pytest" $(PYTEST) $(QUICK)

.PHONY: test-real
test-real: build ## pytest with real vLLM engines on the CPU
	@$(STEP) "real vLLM" $(PYTEST) -m real -v tests/real

.PHONY: test-gpu
test-gpu: build ## pytest on an accelerator
	@$(STEP) "pytest on the accelerator" $(PYTEST) -m gpu -v tests/gpu

.PHONY: kill
kill: build ## 1,000 processes killed at random moments and inside critical sections
	@python scripts/kill.py --kills 1000 --crash-points

.PHONY: kill-host
kill-host: build ## 10,000 kills of four clients on one pool
	@python scripts/kill.py --kills 10000 --clients 4

.PHONY: simulate
simulate: build ## a million steps of vLLM's loop, simulated
	@python scripts/simulate.py --steps 1000000

.PHONY: fuzz
fuzz: tools ## random bytes as files, index contents and operations (nightly Rust for the guided kind)
	@$(PYTHON) scripts/fuzz.py

.PHONY: sanitize
sanitize: tools ## core tests under AddressSanitizer and ThreadSanitizer (nightly Rust)
	@$(PYTHON) scripts/sanitize.py

.PHONY: test-wheel
test-wheel: wheel ## the wheel in an empty environment with a newer Python, torch, and no vLLM
	@$(STEP) "the wheel elsewhere" $(PYTHON) scripts/wheel_test.py dist/*.whl

.PHONY: compat
compat: wheel ## real-vLLM tests on every supported vLLM (ONLY=NAME: on one); writes README's table
	@$(ENVIRONMENTS) install all
	@$(PYTHON) scripts/compat.py dist/*.whl $(ONLY)

BENCH_PLOTS := .cache/bench-plots

$(BENCH_PLOTS): requirements/bench.txt | environment
	@uv=$$($(ENVIRONMENTS) uv) && $$uv venv --quiet --allow-existing --python .venv/bin/python .venvs/bench && \
	  $$uv pip install --quiet --python .venvs/bench/bin/python --requirement $<
	@mkdir -p $(@D) && touch $@

.PHONY: bench
bench: build $(BENCH_PLOTS) ## ecpool beside vLLM's own classes; writes benches/results
	@python -m benches

.PHONY: lint
lint: build ## formatting, clippy, ruff, mypy, and the stubs against the module
	@$(STEP) "cargo fmt" cargo fmt --all --check
	@$(STEP) "cargo clippy" cargo clippy --locked --workspace --all-targets --all-features --quiet -- -D warnings
	@$(STEP) "ruff check" ruff check --quiet
	@$(STEP) "ruff format" ruff format --check --quiet
	@$(STEP) "mypy" mypy
	@$(STEP) "stubtest" stubtest ecpool._native --concise --allowlist tests/stubtest-allowlist.txt --ignore-unused-allowlist

.PHONY: format
format: environment ## let cargo fmt and ruff rewrite the files
	@cargo fmt --all
	@ruff check --fix --quiet
	@ruff format --quiet

.PHONY: ci
ci: lint test test-wheel ## everything that a change must pass

.PHONY: lock
lock: ## resolve requirements/*.txt anew
	@$(ENVIRONMENTS) lock

.PHONY: clean
clean: ## remove what was built; environments stay
	@rm -rf target dist .cache/built-* .cache/models python/ecpool/*.so .mypy_cache .pytest_cache .ruff_cache

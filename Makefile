# Fleetkeeper. `make help` lists every target.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest

.PHONY: help setup setup-engine check fmt generate lock test test-unit test-cluster test-engine test-e2e clean

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  %-22s %s\n", $$1, $$2}'

setup: ## Make the virtual environment for the operator and the tests
	@$(PYTHON) scripts/setup.py dev

setup-engine: ## Make the virtual environment with torch and vLLM for CPU (6 GB)
	@$(PYTHON) scripts/setup.py engine

check: setup ## Format, lint, types, layers, generated files (under 2 minutes)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python scripts/generate.py --check

fmt: setup ## Format and mend what ruff can mend
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix-only .

generate: setup ## Write the generated files (CRD, reference) anew
	@$(BIN)/python scripts/generate.py

lock: ## Pin the dependencies anew, with hashes
	@$(PYTHON) scripts/setup.py lock

test: check test-unit test-cluster test-engine test-e2e ## Everything

test-unit: setup ## Pure tests
	@$(PYTEST) tests/unit

test-cluster: setup ## Tests on a real API server (etcd, kube-apiserver, controller-manager, kwok)
	@$(PYTEST) tests/cluster

test-engine: setup setup-engine ## Tests on a real vLLM for CPU
	@$(PYTEST) tests/engine

test-e2e: setup setup-engine ## Tests on a real node: containers, Helm, Prometheus, router, load
	@$(PYTEST) tests/e2e

clean: ## Remove what was built in this checkout (caches outside it stay)
	rm -rf .venv .venv-engine .mypy_cache .ruff_cache .pytest_cache dist build out

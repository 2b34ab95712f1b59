# Fleetkeeper. `make help` lists every target.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# Most tests wait for other processes. The node and real engines have a worker each (tests/conftest.py).
WORKERS ?= 4
# A lane is a selection of the tests (docs/development.md). `.ci/run` has that of `make test` and a slice of the long lane.
TESTS := tests/fault tests/unit tests/cluster tests/gateway tests/router tests/simulated tests/engine tests/e2e
FAST := -m "not slow and not exhaustive" --hypothesis-profile=dev
USUAL := -m "not exhaustive"
# SLICE=auto adds the slice of the commit; a number adds that one.
MERGE = $(PYTEST) -n $(WORKERS) $(if $(SLICE),--slice=$(SLICE),$(USUAL)) --processor-bound=$(MAX_PROCESSOR_S) $(TESTS)
# Printed beside what a run took, not enforced: a processor that is shared or slow fails no test.
MAX_PROCESSOR_S := 2000
VLLMS_OWN := api_options_in_vllm death drain fault limits memory_cap progress seeds serve start_stages tiers usage usage_in_vllm usage_port
EVERYTHING := --hypothesis-profile=exhaustive
LOCAL := $(BIN)/python -m fleetkeeper_local
DEMO_ENGINE = $(if $(ENGINE), --engines "$(ENGINE)")
CACHE := $(or $(FLEETKEEPER_CACHE),$(HOME)/.cache/fleetkeeper)

.PHONY: help setup setup-engine check vet-all fmt generate lock programs demo-programs images push release up down demo demo-down test test-command test-fast test-slice test-all test-unit test-cluster test-gateway test-fault test-simulated test-engine test-engine-previous test-e2e clean clean-caches

help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  %-22s %s\n", $$1, $$2}'

setup: ## Make the virtual environment for the operator and the tests
	@$(PYTHON) scripts/setup.py dev

setup-engine: ## Make the virtual environment with torch and vLLM for CPU (6 GB)
	@$(PYTHON) scripts/setup.py engine

check: setup ## Format, lint, types, layers, generated files, promises, locks
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python scripts/generate.py --check
	@cd scripts && ../$(BIN)/python -m lanes.check
	@$(BIN)/python scripts/check_go.py
	@$(PYTHON) scripts/setup.py check-lock
	@if [ -f charts/fleetkeeper/Chart.yaml ]; then \
		$$($(LOCAL) program helm) lint --quiet --strict charts/fleetkeeper; fi

vet-all: setup ## Run go vet on the modules with dependencies too (a quarter of an hour the first time)
	@$(BIN)/python scripts/check_go.py --all

fmt: setup ## Format, and apply the fixes of ruff
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix-only .

generate: setup ## Write the generated files: CRD, reference, text catalogue
	@$(BIN)/python scripts/generate.py

lock: ## Pin the dependencies again, with hashes: uv.lock and the requirements of the images
	@$(PYTHON) scripts/setup.py lock

programs: setup ## Build what the tests use from Go modules (22 minutes of a core, once)
	@$(LOCAL) build

demo-programs: setup
	@$(LOCAL) build --demo

images: setup setup-engine programs ## Build the images (operator, router, gateway, engine: for CPU and to inject) for the local node
	@$(LOCAL) images

push: setup setup-engine ## Push the images to your registry: make images push REGISTRY=registry.example.com/fleetkeeper
	@test -n "$(REGISTRY)" || { echo "say where to: make images push REGISTRY=registry.example.com/fleetkeeper" >&2; exit 2; }
	@$(LOCAL) push "$(REGISTRY)" $(if $(TAG),--tag "$(TAG)") $(PUSH_FLAGS)

release: setup setup-engine ## Publish a release: make release VERSION=x.y.z REGISTRY=registry.example.com/fleetkeeper
	@test -n "$(VERSION)" -a -n "$(REGISTRY)" || { echo "say what and where to: make release VERSION=x.y.z REGISTRY=registry.example.com/fleetkeeper" >&2; exit 2; }
	@$(LOCAL).release "$(VERSION)" "$(REGISTRY)" $(foreach image,$(UPSTREAM),--upstream "$(image)") \
		$(if $(SIGN_KEY),--sign-key "$(SIGN_KEY)") $(if $(SIGN_KEYLESS),--sign-keyless)

up: setup ## Start a real single-node Kubernetes on this machine (root)
	@$(LOCAL) up

down: setup ## Remove that Kubernetes
	@$(LOCAL) down

demo: setup $(if $(DEMO_KUBECONFIG),,$(if $(filter simulated,$(ENGINE)),,setup-engine) demo-programs) ## The whole product on real parts: install, load, faults, a page and a figure (ENGINE=simulated: twenty simulated H100; DEMO_KUBECONFIG: on your cluster)
	@$(BIN)/python -m fleetkeeper_local.demo up$(DEMO_ENGINE)

demo-down: setup ## Remove what the demo made
	@$(BIN)/python -m fleetkeeper_local.demo down

test-fast: setup ## Pure tests without the slow ones: after each change
	@$(PYTEST) -q -n 2 $(FAST) tests/unit

test: check setup-engine programs ## Every promise on real parts, in one run of pytest: before a merge
	@$(MERGE)

test-command: # Print what `make test` runs once all is set up; .ci/run executes it, so that pytest's line is its last
	@echo '$(MERGE)'

test-slice: setup setup-engine programs ## One slice of the exhaustive tests: make test-slice N=2 (default: that of the commit)
	@$(PYTEST) -n $(WORKERS) -m exhaustive --slice=$(or $(N),auto) $(TESTS)

test-all: check setup-engine programs ## Every test: also soaks, whole crash matrices, the local cluster and the demo
	@$(PYTEST) -n $(WORKERS) $(EVERYTHING) $(TESTS)

test-unit: setup ## Pure tests
	@$(PYTEST) -n $(WORKERS) $(USUAL) tests/unit

test-cluster: setup programs ## Tests on a real API server (etcd, kube-apiserver, controller-manager, kwok)
	@$(PYTEST) -n $(WORKERS) $(USUAL) tests/cluster

test-gateway: setup ## Tests of the gateway's processes with a real Redis
	@$(PYTEST) -n $(WORKERS) $(USUAL) tests/gateway

test-fault: setup setup-engine programs ## The long fault campaign: API faults, hostile tenants, pods and clients (20 minutes)
	@FLEETKEEPER_CAMPAIGN=long $(PYTEST) tests/fault tests/engine/test_hostile_client.py tests/cluster/isolation/test_size.py -s

test-simulated: setup ## Tests on simulated engines under the real supervisor
	@$(PYTEST) -n $(WORKERS) $(USUAL) tests/simulated

test-engine: setup setup-engine ## Tests on a real vLLM for CPU
	@$(PYTEST) $(USUAL) tests/engine

test-engine-previous: setup ## What depends on vLLM's own code, on the previous vLLM (another 6 GB in the cache)
	@$(PYTHON) scripts/setup.py engine-previous
	@FLEETKEEPER_TEST_ENGINE=.venv-engine-previous $(PYTEST) --hypothesis-profile=exhaustive $(addprefix tests/engine/test_,$(addsuffix .py,$(VLLMS_OWN)))

test-e2e: setup setup-engine programs ## Tests on a real node: containers, Helm, Prometheus, router, load
	@$(PYTEST) $(USUAL) tests/e2e

clean: ## Remove what was built in this checkout (caches outside it stay)
	rm -rf .venv .venv-engine .venv-engine-previous .mypy_cache .ruff_cache .pytest_cache dist build out

clean-caches: setup ## End the clusters of this machine and remove what they and the tests keep outside this checkout
	@$(LOCAL) down --purge
	@$(LOCAL) down --purge --dir "$(CACHE)/e2e-node"
	rm -rf --one-file-system "$(CACHE)"

# Everything there is to do here; `make` alone lists it. Linux only.

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
BIN := .venv/bin

# Every cluster is a dozen processes that import the same modules: they keep them compiled.
unexport PYTHONDONTWRITEBYTECODE

# Once set up for GPUs, a checkout stays so.
PROFILE := $(if $(GPU),gpu,$(if $(wildcard .venv/ready-gpu),gpu,cpu))
READY := .venv/ready-$(PROFILE)

.PHONY: help setup serve test test-cluster lint bench bench-engines bench-prefixes

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s  %s\n", $$1, $$2}' Makefile

setup: $(READY) ## A .venv with everything in it; GPU=1 for NVIDIA GPUs
	@:

serve: $(READY) ## The cluster, in the foreground; options as in ARGS="--port 8123 --replicas 2"
	@exec $(BIN)/kvroute serve $(ARGS)

test: $(READY) ## All tests on one host; options of pytest as in ARGS="-k mirror"
	@exec $(BIN)/python -m pytest $(ARGS)

test-cluster: $(READY) ## Nodes that fail, on hosts made of namespaces; as root, takes minutes
	@exec $(BIN)/python -m pytest -m nodes -rP $(ARGS)

bench: $(READY) ## What a decision, an index and a request's way cost; options as in ARGS="--help"
	@$(BIN)/python -W ignore -m tests.bench $(ARGS)

bench-engines: $(READY) ## Policies side by side on real engines; takes about a quarter of an hour
	@$(BIN)/python -W ignore -m tests.bench.engines

bench-prefixes: $(READY) ## What a named prefix is worth on real engines; takes some minutes
	@$(BIN)/python -W ignore -m tests.bench.prefixes

lint: $(READY) ## Formatting, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

$(READY): requirements-$(PROFILE).lock pyproject.toml scripts/setup.sh
	@scripts/setup.sh $(PROFILE)

# Everything there is to do here; `make` alone lists it. Linux only.

.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
BIN := .venv/bin

# Every cluster is a dozen processes that import the same modules: they keep them compiled.
unexport PYTHONDONTWRITEBYTECODE

# Once set up for GPUs, a checkout stays so.
PROFILE := $(if $(GPU),gpu,$(if $(wildcard .venv/ready-gpu),gpu,cpu))
# What kvroute needs to run, and what its tests and developers need besides.
READY := .venv/ready-$(PROFILE)
DEV := .venv/ready-dev
LOCKS := $(wildcard $(addprefix requirements/,$(PROFILE).lock build.lock torch-$(PROFILE).txt))

# The tests of the core, which `make test FEATURE=NAME` runs with those of one feature.
CORE_TESTS := tests/unit tests/redis tests/cluster tests/vllm
# Two processes, each with one folder or module of tests at a time: see tests/support/order.py.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder

.PHONY: help setup serve check unit test test-all test-cluster lint docs licences site ui-picture wheel-check release image-test sbom lock system chaos fuzz bench bench-policies bench-engines bench-prefixes bench-tenants gpu-check

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s  %s\n", $$1, $$2}' Makefile

setup: $(DEV) ## A .venv with everything in it; GPU=1 for NVIDIA GPUs
	@:

serve: $(READY) ## The cluster, in the foreground; options as in ARGS="--port 8123 --replicas 2"
	@exec $(BIN)/kvroute serve $(ARGS)

check: $(DEV) ## Unit tests, formatting, lint and types; takes two minutes
	@$(MAKE) -j2 --output-sync=target unit lint

unit: $(DEV)
	@$(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile tests/unit tests/features $(ARGS)

test: $(DEV) ## Lint, types, and the tests of every main promise; takes ten minutes. ARGS="-k mirror", FEATURE=seats
	@$(MAKE) lint
	@exec $(PYTEST) $(if $(FEATURE),$(CORE_TESTS) tests/features/$(FEATURE)) $(ARGS)

test-all: $(DEV) ## All tests, in parts; goes on where it stopped; takes hours. PART=clients, AGAIN=1, ARGS=--list
	@exec $(BIN)/python -W ignore -m tests.parts $(PART) $(if $(AGAIN),--again) $(ARGS)

test-cluster: $(DEV) ## Nodes that fail, on hosts made of namespaces; as root, takes minutes
	@exec $(BIN)/python -m pytest -m nodes -rP tests/slow/nodes $(ARGS)

chaos: $(DEV) ## Faults one by one and two at a time; takes ten minutes, and root for a full disk
	@$(BIN)/python -W ignore -m tests.chaos $(ARGS)

fuzz: $(DEV) ## 24,000 requests of every shape to every route; takes some minutes
	@exec $(BIN)/python -W ignore -m tests.parts --again fuzz fuzz-vllm fuzz-keys

bench: $(DEV) ## What a decision, an index and a request's way cost; options as in ARGS="--help"
	@$(BIN)/python -W ignore -m tests.bench $(ARGS)

bench-policies: $(DEV) ## kvroute against the best rival on many traces, engines and loads; takes half an hour
	@$(BIN)/python -W ignore -m tests.bench.matrix $(ARGS)

bench-engines: $(DEV) ## Policies side by side on real engines; takes about a quarter of an hour
	@$(BIN)/python -W ignore -m tests.bench.engines $(ARGS)

bench-prefixes: $(DEV) ## What a named prefix is worth on real engines; takes some minutes
	@$(BIN)/python -W ignore -m tests.bench.prefixes

bench-tenants: $(DEV) ## Whether a tenant's first tokens tell what others have asked; takes some minutes
	@$(BIN)/python -W ignore -m tests.bench.tenants $(ARGS)

gpu-check: $(DEV) ## Measures kvroute on this machine's GPUs, with random weights; on CPUs: ARGS=--cpu
	@$(BIN)/python -W ignore -m tests.gpu_check $(ARGS)

docs: $(DEV) ## The generated tables and dashboards, written anew
	@$(BIN)/python -m tests.support.tables
	@$(BIN)/python -m dashboards.build

licences: $(DEV) ## docs/licences.md, from the metadata of every locked package; takes some minutes
	@$(BIN)/python scripts/licences.py

site: | .venv/bin/uv ## The documents as a website with search, in site/; fails at a broken link
	@NO_MKDOCS_2_WARNING=1 $(BIN)/uvx --quiet --from mkdocs --with-requirements requirements/site.lock \
		mkdocs build --strict
	@echo "site: in site/; to read it: python3 -m http.server --directory site"

ui-picture: $(DEV) ## docs/ui.png, from a running cluster; takes six minutes
	@$(BIN)/python -W ignore -m tests.picture $(ARGS)

lint: $(DEV) ## Formatting, lint and types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

wheel-check: $(READY) ## Builds the wheel, installs it in a clean environment, runs kvroute there
	@scripts/check_wheel.sh $(ARGS)

release: $(DEV) ## All files of a release, in dist/, after all tests; publishes nothing. ARGS=--try without tests
	@exec scripts/release.sh $(ARGS)

image-test: $(DEV) ## The container image, built and run with podman; as root, takes 15 minutes
	@exec $(BIN)/python -m pytest -rP tests/slow/image $(ARGS)

sbom: | .venv/bin/uv ## dist/sbom.cdx.json, all parts of an image; another one as in SOURCE=podman:NAME
	@scripts/sbom.sh $(or $(SOURCE),docker:kvroute) dist/sbom.cdx.json

lock: | .venv/bin/uv ## Writes requirements/*.lock from pyproject.toml; options of uv as in ARGS="--upgrade"
	@scripts/lock.sh $(ARGS)

system: ## What tests need besides Python: Prometheus, Chromium, debootstrap, podman; Debian and Ubuntu, as root
	@scripts/system.sh

$(READY): $(LOCKS) pyproject.toml scripts/setup.sh
	@scripts/setup.sh $(PROFILE)

$(DEV): $(LOCKS) requirements/dev.lock pyproject.toml scripts/setup.sh
	@scripts/setup.sh $(PROFILE) dev

.venv/bin/uv:
	@scripts/setup.sh $(PROFILE) dev

# Every command a developer or CI needs. Python 3.11 and git are enough to start.
PYTHON ?= python3.11
SHELL := bash
.SHELLFLAGS := -o pipefail -c
export OMP_WAIT_POLICY = PASSIVE

LIGHT = .venv/.installed
ENGINES = .venv-engines/.installed
VLLM = .venv-engines/.installed-vllm
MOTLEY = MOTLEY_HOME=$(CURDIR)/.motley MOTLEY_ENGINES_PYTHON=$(CURDIR)/.venv-engines/bin/python .venv/bin/motley

.PHONY: help env env-vllm quickstart smollm2 two-regions ppo-regions down lint test test-light test-engines test-all test-browser test-system audit clean

help:  ## List the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

env: $(LIGHT) $(ENGINES)  ## Install both environments (Airflow and tools; engines)

env-vllm: env $(VLLM)  ## Add vLLM to the engines' environment

$(LIGHT): pyproject.toml constraints/airflow-py311.txt scripts/install.sh
	PYTHON=$(PYTHON) scripts/install.sh light

$(ENGINES): pyproject.toml constraints/engines-py311.txt scripts/install.sh
	PYTHON=$(PYTHON) scripts/install.sh engines

$(VLLM): $(ENGINES)
	PYTHON=$(PYTHON) scripts/install.sh vllm

quickstart: env  ## Train a small model in a real Airflow on this machine, then stop everything
	scripts/quickstart.sh

smollm2: env-vllm  ## Train SmolLM2-135M with vLLM on grade-school arithmetic
	$(MOTLEY) run --job examples/smollm2-gsm/job.yaml --cluster examples/smollm2-gsm/cluster.yaml

two-regions: env  ## Train over two regions: namespaces, S3 servers and a shaped link on this machine (root; else proxies)
	.venv/bin/python -m scripts.regions.example --folder .two-regions

ppo-regions: env  ## Train SmolLM2-135M by PPO on three machines in two regions on this machine (root; else proxies)
	.venv/bin/python -m scripts.regions.example --name ppo-regions --folder .ppo-regions

down:  ## Stop what quickstart or a run left running
	$(MOTLEY) down

lint: $(LIGHT)  ## ruff, mypy, import contracts
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy plans storage stages plugins cli
	.venv/bin/lint-imports

test: env-vllm lint  ## The default tests: light and engine tiers, side by side
	$(MAKE) --no-print-directory --jobs 2 test-light test-engines

# Whole lines only, since both tiers print at a time.
test-light: $(LIGHT)  ## Tests without engines
	.venv/bin/pytest -m "not system and not gpu and not slow and not engines and not vllm and not browser" | sed -u ''

test-engines: env-vllm  ## Tests of the engines and of vLLM
	.venv-engines/bin/python -m pytest -o cache_dir=.pytest_cache/engines -m "(engines or vllm) and not gpu and not slow and not system" \
		| sed -u '/^=/!s/^/engines | /'

test-system: env-vllm  ## Tests with a real Airflow deployment
	MOTLEY_ENGINES_PYTHON=$(CURDIR)/.venv-engines/bin/python .venv/bin/pytest -m "system and not slow"

test-browser: $(LIGHT)  ## The pages in a headless Chromium
	scripts/install.sh browser
	.venv/bin/pytest -s -m browser

test-all: test test-browser test-system  ## Everything that a CPU machine can do
	.venv/bin/pytest -m "slow and not gpu and not engines and not system and not browser"
	.venv-engines/bin/python -m pytest -m "slow and (engines or vllm) and not gpu"

audit: $(LIGHT)  ## Look the pinned packages up among known vulnerabilities (needs the network)
	scripts/audit.sh constraints/airflow-py311.txt constraints/engines-py311.txt

clean: down  ## Remove the environments and the local deployment
	rm -rf .venv .venv-engines .motley .two-regions .ppo-regions

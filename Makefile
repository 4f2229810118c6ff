# On a fresh machine with Python 3.11 to 3.13, two commands are enough: `make demo` and `make test`. Each builds .venv if missing.
.PHONY: help install demo demo-short leaderboard test test-all test-trackers test-emulated gpu-check test-vllm-omni install-vllm-omni test-vllm install-vllm check constraints wheels test-wheels site

help: ## List the targets
	@sed -n 's/^\([a-z-]*\): ## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

install: ## Build .venv; all other targets do so if needed
	scripts/env true

demo: ## Train the included small Qwen-Image to spell, on the CPU; ARGS="--train-steps 20" changes settings, ENGINE=vllm-omni selects the engine
	UV_NO_DEV=1 scripts/env scripts/demo $(ARGS)

demo-short: ## Run three steps of the demonstration
	rm -rf runs/demo-short
	UV_NO_DEV=1 scripts/env scripts/demo --name demo-short --train-steps 3 --eval.every 3

leaderboard: ## Train the algorithms missing from the leaderboard (takes hours), and write docs/evidence/leaderboard.md; ARGS="--again --only nft" repeats one
	scripts/env python scripts/leaderboard.py $(ARGS)

test: ## Run the tests that need no accelerator, with a sample of similar cases; tests of the report use Chromium
	scripts/chromium
	scripts/env pytest -q -n 2 --dist worksteal $(ARGS)

test-all: ## Run the same tests, with all similar cases
	scripts/chromium
	scripts/env pytest -q -n 2 --dist worksteal -m "not gpu"

test-trackers: ## Run only the tests of the trackers, with their libraries in a separate environment
	scripts/env pytest -q tests/rl/test_rl_sinks.py

test-emulated: ## Run only the tests of the emulated accelerator; they need g++
	scripts/env pytest -q tests/emulated

gpu-check: ## Measure speed, memory and exactness on this machine's accelerator, for at most TIME=25m; a second run continues
	scripts/env python scripts/gpu_check.py --time $(or $(TIME),25m) $(ARGS)

install-vllm-omni: ## Build .venv-vllm-omni with the vLLM-Omni engine, for a machine without an accelerator
	scripts/env scripts/install_vllm_omni

test-vllm-omni: ## Run the tests of the vLLM-Omni engine, in its own environment
	ENGINE=vllm-omni scripts/env pytest -q -n 2 --dist loadfile tests/vllm_engine

install-vllm: ## Build .venv-vllm with vLLM and its CPU kernels, for a machine without an accelerator
	scripts/env scripts/install_vllm

test-vllm: ## Run the tests of the vLLM engine for language models, in its own environment
	ENGINE=vllm scripts/env pytest -q tests/vllm_tokens

check: ## Check lint, format, types and import rules, and that constraints/ is up to date
	scripts/env scripts/check

constraints: ## Update constraints/; ARGS=--upgrade takes the newest versions
	scripts/env scripts/release/constraints $(ARGS)

wheels: ## Build a wheel of each package in dist/; ARGS="--repository URL" adds the URL of the sources to the metadata
	UV_NO_DEV=1 scripts/env python scripts/release/wheels.py $(ARGS)

test-wheels: ## Install each wheel with pip in a clean environment, and run the examples in its README
	UV_NO_DEV=1 scripts/env python scripts/release/try_wheels.py

site: ## Build the documentation site in build/site, in its own environment; REPOSITORY=URL links to the sources
	ONLY_GROUP=site scripts/env python scripts/release/site_pages.py
	NO_MKDOCS_2_WARNING=1 ONLY_GROUP=site scripts/env mkdocs build

# Two commands on a fresh machine with Python 3.11 to 3.13: `make demo` and `make test`. Both build .venv when it is missing.
.PHONY: help install demo demo-short leaderboard test test-all test-trackers test-emulated gpu-check test-vllm-omni install-vllm-omni test-vllm install-vllm check constraints wheels test-wheels site

help: ## List the targets
	@sed -n 's/^\([a-z-]*\): ## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

install: ## Build .venv, which every other target does too
	scripts/env true

demo: ## Teach the shipped Qwen-Image-shaped model to spell, on the CPU; ARGS="--train-steps 20" changes settings, ENGINE=vllm-omni the engine
	UV_NO_DEV=1 scripts/env scripts/demo $(ARGS)

demo-short: ## The same, three steps
	rm -rf runs/demo-short
	UV_NO_DEV=1 scripts/env scripts/demo --name demo-short --train-steps 3 --eval.every 3

leaderboard: ## Train the algorithms that the leaderboard's data lack (hours) and write docs/evidence/leaderboard.md; ARGS="--again --only nft" repeats one
	scripts/env python scripts/leaderboard.py $(ARGS)

test: ## The tests that need no accelerator, of similar cases some; those of the report draw it in a Chromium
	scripts/chromium
	scripts/env pytest -q -n 2 --dist worksteal $(ARGS)

test-all: ## The same with all similar cases
	scripts/chromium
	scripts/env pytest -q -n 2 --dist worksteal -m "not gpu"

test-trackers: ## Those of the trackers alone, which `make test` has too; their libraries are in an environment of their own
	scripts/env pytest -q tests/rl/test_rl_sinks.py

test-emulated: ## Those of the emulated accelerator alone, which `make test` has too; they need g++
	scripts/env pytest -q tests/emulated

gpu-check: ## Speed, memory and exactness on the accelerator of this machine, in TIME=25m; called again it goes on
	scripts/env python scripts/gpu_check.py --time $(or $(TIME),25m) $(ARGS)

install-vllm-omni: ## Build .venv-vllm-omni with the vLLM-Omni engine, for a machine without an accelerator
	scripts/env scripts/install_vllm_omni

test-vllm-omni: ## The tests of the vLLM-Omni engine, in its own environment; ENGINE=vllm-omni-next takes a newer version
	ENGINE=$(or $(ENGINE),vllm-omni) scripts/env pytest -q -n 2 --dist loadfile tests/vllm_engine

install-vllm: ## Build .venv-vllm with vLLM and its CPU kernels, for a machine without an accelerator
	scripts/env scripts/install_vllm

test-vllm: ## The tests of the vLLM engine of language models, in its own environment
	ENGINE=vllm scripts/env pytest -q tests/vllm_tokens

check: ## Lint, format, types, floor rules, and that constraints/ is up to date
	scripts/env scripts/check

constraints: ## Write constraints/cpu-py311.txt anew
	scripts/env scripts/constraints

wheels: ## Build a wheel of each package into dist/; ARGS="--repository URL" has their READMEs and metadata name the sources
	UV_NO_DEV=1 scripts/env python scripts/wheels.py $(ARGS)

test-wheels: ## Install each wheel with plain pip in a clean environment, and run its README's examples there
	UV_NO_DEV=1 scripts/env python scripts/try_wheels.py

site: ## Build the documentation site into build/site, in an environment of its own; REPOSITORY=URL links to the sources
	ONLY_GROUP=site scripts/env python scripts/site_pages.py
	NO_MKDOCS_2_WARNING=1 ONLY_GROUP=site scripts/env mkdocs build

# Two commands on a fresh machine with Python 3.11: `make demo` and `make test`. Both build .venv when it is missing.
.PHONY: demo demo-short leaderboard test test-all test-vllm-omni install-vllm-omni check constraints

demo: ## Teaches the shipped Qwen-Image-shaped model to spell, on the CPU: ARGS="--steps 20" changes settings, ENGINE=vllm-omni the engine
	scripts/env scripts/demo $(ARGS)

demo-short: ## The same, three steps
	rm -rf runs/demo-short
	scripts/env scripts/demo --name demo-short --steps 3 --eval-every 3

leaderboard: ## Trains every algorithm on tiny-signs with three seeds (hours) and writes docs/leaderboard.md: ARGS="--only nft" chooses
	scripts/env python scripts/leaderboard.py $(ARGS)

test: ## All tests that need no accelerator; those of the report draw it in a Chromium
	scripts/chromium
	scripts/env pytest -q

test-all: ## The same, and those that are one of many alike
	scripts/chromium
	scripts/env pytest -q -m "not gpu"

install-vllm-omni: ## Builds .venv-vllm-omni with the vLLM-Omni engine, for a machine without an accelerator
	scripts/env scripts/install_vllm_omni

test-vllm-omni: ## The tests of the vLLM-Omni engine, in its own environment
	ENGINE=vllm-omni scripts/env pytest -q tests/vllm_engine

check: ## Lint, format, types, floor rules, and that constraints/ is up to date
	scripts/env scripts/check

constraints: ## Writes constraints/cpu-py311.txt anew
	scripts/env scripts/constraints

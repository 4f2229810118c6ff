# Two commands on a fresh machine with Python 3.11: `make demo` and `make test`. Both build .venv when it is missing.
.PHONY: demo demo-short test check constraints

demo: ## Teaches the shipped Qwen-Image-shaped model to spell, on the CPU: ARGS="--steps 20" changes settings
	scripts/env scripts/demo $(ARGS)

demo-short: ## The same, three steps
	rm -rf runs/demo-short
	scripts/env scripts/demo --name demo-short --steps 3 --eval-every 3

test: ## All tests that need no accelerator
	scripts/env pytest -q

check: ## Lint, format, types, floor rules, and that constraints/ is up to date
	scripts/env scripts/check

constraints: ## Writes constraints/cpu-py311.txt anew
	scripts/env scripts/constraints

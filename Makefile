# Five words for people and for CI. Each makes .venv first, which is quick when it is there.
# More arguments: make test ARGS="-k pool -x", make demo ARGS=--json, make bench ARGS="index --quick".
.PHONY: setup setup-tests demo test check stress bench
.SUFFIXES:
ARGS ?=
BIN := .venv/bin

demo: setup ## two model workers share a prompt: the whole system in a minute
	@$(BIN)/shmcache demo $(ARGS)

setup: ## .venv with everything in it, and the demo's model
	@bash .ci/setup

setup-tests: ## the same, and the servers that tests talk to
	@bash .ci/setup tests

test: setup-tests ## all tests, the real model included
	$(BIN)/python -m pytest $(ARGS)

check: setup ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

stress: setup-tests ## the long runs: kills, races, fuzzing; the last line is JSON
	$(BIN)/python -m pytest -m stress --timeout 0 $(ARGS)
	$(BIN)/python tests/stress

bench: setup ## measurements beside their peers
	$(BIN)/python -m bench $(ARGS)

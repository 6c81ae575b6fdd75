# A newcomer's two commands are `make demo` and `make test`; both install what they need into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-slow check fuzz bench clean

demo: $(INSTALLED)  ## the same training over the same thin link: 1F1B without codecs, then by Isthmus
	$(BIN)/python examples/demo.py

test: check  ## style, types and all tests but the slow ones
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow"

test-slow: $(INSTALLED)  ## what takes long: trees of processes, every family over a wire, long properties
	$(BIN)/pytest -n 2 --dist worksteal -m slow

check: $(INSTALLED)  ## style, types, the rooms' import contracts, and the size of the package
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python benchmarks/size.py --no-run --check

fuzz: $(INSTALLED)  ## properties on cases that no run has had before; outside CI
	$(BIN)/pytest -n 2 --dist worksteal --hypothesis-profile=fuzz

bench: $(INSTALLED)  ## every claim of docs/results.md, measured again
	$(BIN)/python benchmarks/emulator.py
	$(BIN)/python benchmarks/link.py
	$(BIN)/python benchmarks/schedule.py
	$(BIN)/python benchmarks/plan_speed.py
	$(BIN)/python benchmarks/prediction.py
	$(BIN)/python benchmarks/plan_on_cpu.py
	$(BIN)/python benchmarks/memory_prediction.py
	$(BIN)/python benchmarks/codec_speed.py
	$(BIN)/python benchmarks/codec_auto.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[train,dev]'
	touch $@

clean:
	rm -rf .venv build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# A newcomer's two commands are `make demo` and `make test`; both install what they need into .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
CORPORA ?= corpora
DATA ?= runs/bench-data

.PHONY: demo test test-slow check fuzz bench bench-gpu clean

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

bench: $(INSTALLED)  ## every claim of docs/results.md, measured again; those of GPUs where there is one
	$(BIN)/python benchmarks/emulator.py
	$(BIN)/python benchmarks/link.py
	$(BIN)/python benchmarks/turns.py --rounds 3 'link.py --quick'
	$(BIN)/python benchmarks/schedule.py
	$(BIN)/python benchmarks/plan_speed.py
	$(BIN)/python benchmarks/when_it_pays.py
	$(BIN)/python benchmarks/prediction.py
	$(BIN)/python benchmarks/plan_on_cpu.py
	$(BIN)/python benchmarks/memory_prediction.py --device cpu
	$(BIN)/python benchmarks/codec_speed.py --no-stage
	$(BIN)/python benchmarks/fixed_bottleneck.py
	$(BIN)/python benchmarks/codec_auto.py
	$(BIN)/python benchmarks/kill_ranks.py
	$(BIN)/python benchmarks/kill_clouds.py
	$(BIN)/python benchmarks/data_parallel_soak.py --seeds 40
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.accelerator.is_available())'; \
	then $(MAKE) bench-gpu; else echo 'there is no GPU here: make bench-gpu on a machine that has one'; fi

bench-gpu: $(INSTALLED)  ## the claims about GPUs; CORPORA is a folder of texts, DATA keeps what is made of them
	$(BIN)/python benchmarks/codec_speed.py --no-cpu --no-demo
	$(BIN)/python benchmarks/prediction.py --gpu
	$(BIN)/python benchmarks/memory_prediction.py --models llama gpt2 bert
	$(BIN)/python benchmarks/stage_speed.py --rounds 3 --no-autocast
	$(BIN)/python benchmarks/codec_quality.py --prepare $(CORPORA) --data $(DATA)
	$(BIN)/python benchmarks/recompute.py --prepare $(CORPORA) --data $(DATA)
	$(BIN)/python benchmarks/recompute.py --data $(DATA) --steps 14
	$(BIN)/python benchmarks/codec_quality.py --data $(DATA) --out runs/quality
	$(BIN)/python benchmarks/codec_quality.py --data $(DATA) --score runs/quality/hypotheses.jsonl
	$(BIN)/python benchmarks/codec_quality.py --report runs/quality/quality.jsonl runs/quality/scores.jsonl

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[train,dev]'
	touch $@

clean:
	rm -rf .venv build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# pagestride: `make demo` and `make test` are all a new user needs; `make help` lists the rest.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
OUT    ?= out

.DEFAULT_GOAL := help
.PHONY: help demo test check format train score soak conformance conformance-record vllm-peers bench figures clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# A stamp for each set of packages: the second run installs nothing and needs no network.
$(VENV)/.stamp-run: pyproject.toml constraints.txt
	$(PYTHON) tools/check_python.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,jax,run]'
	touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,jax,run,dev]'
	# jax_triton imports it to lower for CUDA; without its dependencies, as no GPU is needed for that
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps jax-cuda13-plugin
	touch $@

demo: $(VENV)/.stamp-run ## draw digits with both engines in all six layouts
	@mkdir -p $(OUT)
	$(BIN)/pagestride run --backend torch_cuda --out $(OUT)/digits-torch_cuda.png
	$(BIN)/pagestride run --backend jax_gpu --out $(OUT)/digits-jax_gpu.png
	$(BIN)/pagestride compare --out $(OUT)/compare.png --json $(OUT)/compare.json

test: $(VENV)/.stamp-dev ## run the tests
	$(BIN)/python -m pytest

check: $(VENV)/.stamp-dev ## ruff, mypy --strict, the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/layering

format: $(VENV)/.stamp-dev ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

train: $(VENV)/.stamp-run ## train the digits model again (seeded; under half an hour on 2 cores)
	$(BIN)/python -m diffusion_runner.digits.train

score: $(VENV)/.stamp-run ## let an independent classifier read 500 generated digits
	$(BIN)/pagestride score --backend torch_cuda --json bench/results/score-torch_cuda.json
	$(BIN)/pagestride score --backend jax_gpu --json bench/results/score-jax_gpu.json

soak: $(VENV)/.stamp-dev ## a million operations on the block manager, watched by a model
	$(BIN)/python -m bench.soak

conformance: $(VENV)/.stamp-dev ## compare with the real vLLM 0.29.0 and 0.32.0 (4 GB of environment each)
	$(BIN)/python tools/conformance.py run --cases 3000

conformance-record: $(VENV)/.stamp-dev ## the same over 20,000 cases, recorded in bench/results
	$(BIN)/python tools/conformance.py run --cases 20000 --seed 1 --record

vllm-peers: $(VENV)/.stamp-dev ## time the core and the manager beside vLLM 0.29.0, recorded in bench/results
	$(BIN)/python tools/conformance.py bench 0.29.0 --record

bench: $(VENV)/.stamp-dev ## time the core, the manager and both engines; ratios, not seconds
	$(BIN)/python -m bench.core_bench
	$(BIN)/python -m bench.manager_bench
	$(BIN)/python -m bench.cpu_attention --json bench/results/cpu_attention.json
	$(BIN)/python -m bench.jax_attention --json bench/results/jax_attention.json

figures: ## write the README's figures from bench/results
	python3 tools/readme_figures.py

clean: ## remove the environment and the pictures
	rm -rf $(VENV) $(OUT) build dist

# pagestride: `make demo` and `make test` are all a new user needs; `make help` lists the rest.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
OUT    ?= out

INTERPRETED := $(foreach suite,steps isolation quantised blocks,tests/engines/test_suite_$(suite).py)

.DEFAULT_GOAL := help
.PHONY: help demo test compile check format train score soak conformance conformance-record gpu vllm-peers bench figures \
        docs interpret pictures check-page clean

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

test: $(VENV)/.stamp-dev ## run the tests, but for those of `make compile`
	$(BIN)/python -m pytest --ignore=tests/kernels/test_compiled.py

compile: $(VENV)/.stamp-dev ## compile the GPU kernels ahead of time for sm_80, sm_90, sm_100, and look at what comes out
	$(BIN)/python -m pytest -q --floors never tests/kernels/test_compiled.py

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

conformance: $(VENV)/.stamp-dev ## compare with the real vLLM 0.29, 0.30 (and vLLM-Omni), 0.32 (4 GB of environment each)
	$(BIN)/python tools/conformance.py run --cases 3000

conformance-record: $(VENV)/.stamp-dev ## the same over 20,000 cases, recorded in bench/results
	$(BIN)/python tools/conformance.py run --cases 20000 --seed 1 --record

gpu: ## what only a GPU can prove, in the environment of PYTHON; SLICE=name for one slice, results in bench/results
	$(PYTHON) tools/gpu.py $(if $(SLICE),--slice $(SLICE))

vllm-peers: $(VENV)/.stamp-dev ## time core and attention beside vLLM 0.29.0, recorded in bench/results
	$(BIN)/python tools/conformance.py bench 0.29.0 --record

bench: $(VENV)/.stamp-dev ## time everything, recorded in bench/results; ratios, not seconds
	$(BIN)/pagestride bench --json bench/results/cpu.json --plot docs/images/bench.png
	$(BIN)/python -m bench.diffusers_bench --json bench/results/diffusers.json

figures: ## write the README's figures from bench/results
	python3 tools/readme_figures.py

$(VENV)/.stamp-docs: $(VENV)/.stamp-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,jax,run,dev,docs]'
	touch $@

interpret: $(VENV)/.stamp-dev ## the shared suite with the GPU kernels in the interpreter, both engines (about an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.engines.interpreted_jax -q $(INTERPRETED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.engines.interpreted -q $(INTERPRETED)

docs: $(VENV)/.stamp-docs ## build the documentation into site/; a warning fails it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pictures: $(VENV)/.stamp-run ## draw the pictures of docs/images again
	$(BIN)/python -m tools.draw_masks
	$(BIN)/pagestride explain --out docs/images/layouts.svg
	$(BIN)/pagestride explain --layers 4 --groups 2 --page-size-padded 2304 --layout LBHNC --layout BLHNC --out docs/images/overlay.svg
	$(BIN)/pagestride explain --diff LBHNC LBNHC --out docs/images/diff.svg

check-page: $(VENV)/.stamp-run ## ask the page of pagestride explain 20,000 questions in a headless Chromium
	$(BIN)/python tools/check_page.py

clean: ## remove the environment and the pictures
	rm -rf $(VENV) $(OUT) site build dist

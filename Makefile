# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := ./packages/core ./packages/backend_veomni ./packages/backend_mindspeed ./packages/algo_t2v ./packages/algo_gui_agent
EDITABLE := $(foreach package,$(PACKAGES),-e $(package))

.PHONY: demo test bench bench-head ablations install toy-assets gui-assets clean

demo: $(VENV)/.installed  ## post-train the tiny text-to-video model and show the result
	$(BIN)/crossrl run demo $(ARGS)

test: $(VENV)/.installed  ## everything that a machine without an accelerator can test
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

bench: $(VENV)/.installed  ## framework overhead and scaling, as JSON
	$(BIN)/python -m tests.bench.iteration --scaling $(ARGS)

bench-head: $(VENV)/.installed  ## peak memory and time of the log-prob head beside the others
	$(BIN)/python -m tests.bench.head $(ARGS)

ablations: $(VENV)/.installed  ## the field's lessons on the toy world, three seeds each: docs/lessons
	$(BIN)/python -m tests.bench.ablations $(ARGS)

install: $(VENV)/.installed

$(VENV)/.installed: constraints.txt $(wildcard packages/*/pyproject.toml)
	@echo "installing into $(VENV): some minutes, several GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch torchvision
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(EDITABLE) -r requirements-dev.txt
	touch $@

ASSETS := packages/algo_t2v/src/crossrl_t2v/toy/assets/wan_tiny
toy-assets: $(VENV)/.installed  ## train the toy model's VAE and base again (about ten minutes)
	$(BIN)/python -m crossrl_t2v.toy.build runs/toy_init --seed 0 --vae-steps 900
	$(BIN)/crossrl sft toy_base seed=0
	$(BIN)/crossrl export toy_base resume=auto --slot ema --out runs/toy_exported
	cp -r runs/toy_init/. $(ASSETS)/ && cp runs/toy_exported/transformer/* $(ASSETS)/transformer/

GUI_ASSETS := packages/algo_gui_agent/src/crossrl_gui_agent/assets/tiny
gui-assets: $(VENV)/.installed  ## build the tiny Qwen3-VL and its warm start again (about three minutes, needs Chromium)
	$(BIN)/python -m crossrl_gui_agent.tiny.build runs/tiny_init --seed 0
	$(BIN)/crossrl sft gui_agent model=runs/tiny_init run_dir=runs/tiny_sft
	mkdir -p $(GUI_ASSETS) && cp runs/tiny_sft/model/* $(GUI_ASSETS)/ && chmod 644 $(GUI_ASSETS)/*

clean:
	rm -rf $(VENV) runs outputs

# Everything a fresh machine needs: `make conformance` gives the verdict, `make test` the tests.

PYTHON  ?= python3
TORCH   ?= torch==2.13.0
BACKEND ?= reference
ARGS    ?=
# A worker takes up to 2 GB: more than eight of them would need a large machine.
CORES   ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 8 ? n : 8)))

VENV := .venv
BIN  := $(VENV)/bin
TORCH_STAMP := $(VENV)/.$(subst =,-,$(TORCH))

.PHONY: conformance matrix test test-browser chromium test-vllm vllm-environment lint format \
	fixtures clean

ifeq ($(BACKEND),vllm)
conformance: vllm-environment
	.venv-vllm/bin/mone-ref conform --backend=vllm $(ARGS)
else ifeq ($(BACKEND),transformers)
conformance: $(VENV)/.transformers
	$(BIN)/mone-ref conform --backend=transformers $(ARGS)
else
conformance: $(VENV)/.conformance
	$(BIN)/mone-ref conform --backend=$(BACKEND) $(ARGS)
endif

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(CORES) --dist loadfile tests $(ARGS)

test-browser: chromium $(VENV)/.dev
	$(BIN)/python -m pytest -m browser tests/test_report_browser.py $(ARGS)

chromium:
	@for program in chromium chromedriver; do \
		command -v $$program > /dev/null || { echo "error: $$program is not installed" \
		"(Debian: apt-get install chromium chromium-driver fonts-dejavu-core)" >&2; exit 1; }; \
	done

test-vllm: vllm-environment
	.venv-vllm/bin/python -m pytest -m vllm tests/test_backend_vllm.py tests/test_backend_server.py \
		tests/test_diagnosis_vllm.py tests/test_findings_vllm.py \
		tests/test_rewritten_models.py $(ARGS)

vllm-environment:
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" sh conformance/engines/setup-vllm.sh .venv-vllm

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	! grep -n '@@' README.md

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

matrix: $(VENV)/.conformance
	$(BIN)/mone-ref matrix $(ARGS)

fixtures: $(VENV)/.dev
	$(BIN)/mone-ref fixtures check

$(TORCH_STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	touch $@

$(VENV)/.conformance: pyproject.toml $(TORCH_STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[conformance]"
	touch $@

$(VENV)/.transformers: $(VENV)/.conformance
	$(BIN)/python -m pip install --quiet --editable ".[conformance,transformers]"
	touch $@

$(VENV)/.dev: $(VENV)/.conformance
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-vllm build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

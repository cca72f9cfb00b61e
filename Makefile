# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0

SHELL := bash
BIN := .venv/bin
CSRC = $$(find csrc_rocm -name '*.h' -o -name '*.cc' -o -name '*.cu' | sort)
# What the command line hands to pytest or to the demo: make test ARGS="-k page", make demo ARGS="--no-convert".
ARGS ?=
# These want vLLM, whose own environment runs them.
VLLM_TESTS = tests/rocm_tests/vllm
ENGINES = $(addprefix $(VLLM_TESTS)/test_,served.py models.py demo.py)

.PHONY: help demo demo-vllm test lint format venv rocm aiter aiter-sources vllm vllm-engines clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: venv ## prefill on standard pages, hand over through NIXL, decode on shuffled pages; fails unless identical
	@$(BIN)/python -m flashinfer handoff $(ARGS)

demo-vllm: ## the same with two vLLM servers and a proxy, on the CPU; fails unless identical
	@scripts/setup_vllm_venv
	@.venv-vllm/bin/python -W ignore -m flashinfer handoff-vllm $(ARGS)

test: venv rocm aiter-sources lint vllm ## lint and the tests, AMD compilation included
	@$(BIN)/python -m pytest --timeout 900 --ignore=$(VLLM_TESTS) $(ARGS)

aiter: venv rocm ## of these, those that compile AITER's own cache kernels for gfx942 and gfx950
	@scripts/setup_aiter
	@$(BIN)/python -m pytest tests/rocm_tests/gfx/test_aiter_build.py $(ARGS)

aiter-sources: venv
	@scripts/setup_aiter || echo "aiter: no sources of AITER; tests that need them say so"

vllm: ## the tests of what vLLM runs of this, real engines included, in an environment of their own
	@scripts/setup_vllm_venv
	@.venv-vllm/bin/python -m pytest -q --timeout 300 $(VLLM_TESTS)

vllm-engines: ## those with real engines alone: prefill and decoder in processes of their own, two servers and a proxy
	@scripts/setup_vllm_venv
	@.venv-vllm/bin/python -m pytest -q $(ENGINES)

lint: venv ## ruff, mypy, clang-format
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/clang-format --dry-run -Werror $(CSRC)

format: venv ## rewrite the sources as lint wants them
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/clang-format -i $(CSRC)

venv: ## create or refresh .venv from the pins
	@scripts/setup_venv

rocm: venv ## make the ROCm compile environment, where this machine can
	@scripts/rocm_env setup || echo "rocm: no AMD compile environment; tests that need it say so"

clean: ## remove .venv, builds and caches of the tools
	@rm -rf .venv .venv-vllm .aiter build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

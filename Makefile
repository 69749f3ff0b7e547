# ummunotify: see README.md. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
MAKEFLAGS += --no-print-directory

# Oldest Rust that builds this (rust-version in Cargo.toml).
RUST_MIN := 1.95
# Debian packages: what a build needs, and what the tests drive besides.
BUILD_PACKAGES := gcc libc6-dev libclang1
# A client in Go is tested where `go` is: 450 MB are too many to install for one test.
TEST_PACKAGES := python3 gdb libjemalloc2 libtcmalloc-minimal4 libucx0 libfabric-dev libopenmpi3 strace xz-utils musl-tools valgrind
# What the feature `rdma` is built with: rdma-core's library and headers, and what its Rust bindings are made by.
RDMA_PACKAGES := cmake pkg-config libclang-14-dev libnl-3-dev libnl-route-3-dev libibverbs-dev ibverbs-providers
# Other interception, to compare with.
PEER_PACKAGES := libucx0 libfabric-dev
# Where `make report` writes, and the rounds of its measurements.
REPORTS := benches/reports
REPORT_ROUNDS := 15
# Rounds of each race in `make race`; `make test` runs a twentieth or less.
RACE_ROUNDS := 1000000
# Schedules of each kind in `make shuttle`; `make test` tries a tenth.
SCHEDULES := 20000
# Processes in `make load`; `make test` starts eight.
LOAD_ROUNDS := 1000
# Rounds of the re-validation race in `make revalidate`; `make test` runs a hundredth.
REVALIDATE_ROUNDS := 1000000
# Attaches and detaches of each program in `make attach`; `make test` makes five.
ATTACH_CYCLES := 100
# Random steps in `make differential`; `make conformance` takes 5,000.
DIFFERENTIAL_STEPS := 100000
# Moves between emulator and module in `make switch`; `make test` and `make conformance` take 100.
SWITCHES := 1000

TARGET := $(or $(CARGO_TARGET_DIR),target)
REPORT := $(TARGET)/nextest/default/report.xml
SKIPS := $(TARGET)/skipped.txt
GUEST := $(wildcard kmod-compat/Makefile)

.PHONY: help build release demo doctor test lint race revalidate load conformance differential switch bench bench-peers bench-guest bench-cache peers report verbs shuttle install-deps install-build-deps clean rust

help:
	@echo 'make            build everything (debug)'
	@echo 'make release    build the binary to hand out: target/release/ummunotify'
	@echo 'make demo       build, and show the accident that the device prevents'
	@echo 'make doctor     build, and try what this host allows'
	@echo 'make test       build, and run all tests; says what was skipped and why'
	@echo 'make lint       formatting and clippy'
	@echo 'make bench      what interception costs here, as ratios to native; a page with plots'
	@echo 'make bench-cache  what the registration cache costs; patterns of MPI programs replayed'
	@echo 'make bench-peers  the same beside UCX and libfabric'
	@echo 'make bench-guest  in a guest, instructions: the kernel module against the emulator, beside the limits'
	@echo 'make report     all of that beside the limits, written to $(REPORTS) (REPORT_ROUNDS=n; half an hour)'
	@echo 'make race       the address-reuse race and the re-validation race, bare and of the registration cache, $(RACE_ROUNDS) rounds each'
	@echo 'make revalidate the re-validation race by every kind of call under trace, inline, and with userfaultfd, $(REVALIDATE_ROUNDS) rounds'
	@echo 'make load       first opens of the device under load, $(LOAD_ROUNDS) processes'
	@echo 'make attach     running programs attached to and detached from, $(ATTACH_CYCLES) times each, while everything goes wrong'
	@echo 'make conformance   in a guest, the kernel module as judge of the emulator (KERNELS="6.1 6.12", LAYERS)'
	@echo 'make differential  in a guest, $(DIFFERENTIAL_STEPS) random operations on both at once (SEED=n)'
	@echo 'make switch        in a guest, $(SWITCHES) moves of a busy program between emulator and module'
	@echo 'make verbs         in a guest, on soft-RoCE: the accident, and the registration cache that prevents it'
	@echo 'make shuttle       the registration cache under a model checker, $(SCHEDULES) schedules of each kind'
	@echo 'make install-deps   what the above need from Debian (as root; else prints the command)'

# A host that can't do it gets a sentence instead of a page of compiler errors.
rust:
	@if [ "$$(uname -sm)" != "Linux x86_64" ]; then \
	    echo "ummunotify: this needs x86-64 Linux, and here is $$(uname -sm)" >&2; \
	    exit 1; \
	fi; \
	have=$$(rustc --version 2>/dev/null | sed -n 's/^rustc \([0-9]*\.[0-9]*\).*/\1/p') || true; \
	if [ -z "$$have" ] || ! command -v cargo >/dev/null; then \
	    echo "ummunotify: no Rust found; install Rust $(RUST_MIN) or newer from https://rustup.rs (Debian 12's own is too old)" >&2; \
	    exit 1; \
	fi; \
	if [ "$$(printf '%s\n' $(RUST_MIN) "$$have" | sort -V | head -n 1)" != $(RUST_MIN) ]; then \
	    echo "ummunotify: Rust $$have is too old; install Rust $(RUST_MIN) or newer from https://rustup.rs, then put it first in PATH" >&2; \
	    exit 1; \
	fi

# $(call need,PACKAGES,WORD): installs what is missing if it can; otherwise says what to run, and goes on if
# WORD is optional.
define need
	@missing=; \
	if ! command -v dpkg-query >/dev/null; then \
	    echo "ummunotify: not a Debian system: make sure that these or their like are installed: $(1)"; exit 0; \
	fi; \
	for package in $(1); do \
	    [ "$$(dpkg-query -W -f '$${db:Status-Status}' $$package 2>/dev/null)" = installed ] || missing+=" $$package"; \
	done; \
	[ -n "$$missing" ] || exit 0; \
	install="apt-get install -y --no-install-recommends$$missing"; \
	if [ "$$(id -u)" != 0 ]; then \
	    echo "ummunotify: missing packages; run: sudo $$install" >&2; \
	    [ $(2) = optional ]; exit; \
	fi; \
	echo "installing:$$missing"; \
	export DEBIAN_FRONTEND=noninteractive; \
	apt-get -o DPkg::Lock::Timeout=500 -qq update || true; \
	if ! apt-get -o DPkg::Lock::Timeout=500 -qq install -y --no-install-recommends $$missing >/dev/null; then \
	    echo "ummunotify: could not be installed:$$missing; run: $$install" >&2; \
	    [ $(2) = optional ]; exit; \
	fi
endef

install-build-deps:
	$(call need,$(BUILD_PACKAGES),required)

install-deps: install-build-deps
	$(call need,$(TEST_PACKAGES) $(RDMA_PACKAGES),optional)

build: rust install-build-deps
	cargo build --workspace

release: rust install-build-deps
	cargo build --release -p ummunotify

demo: build
	@$(TARGET)/debug/ummunotify demo

doctor: build
	@$(TARGET)/debug/ummunotify doctor

# The tests drive the workspace's own binary, which cargo builds for no other package's tests: build first.
# The last line counts every test, those of the kernel module too, for people and for whatever reads the output.
test: rust install-deps
	@mkdir -p $(TARGET); rm -f $(SKIPS) $(REPORT); touch $(SKIPS); failed=; start=$$SECONDS; \
	stage() { echo; echo "== $$1"; }; \
	stage 'build'; cargo build --workspace --all-targets; \
	if cargo nextest --version >/dev/null 2>&1; then \
	    stage 'documentation tests'; cargo test --workspace --doc --quiet || failed+=' documentation'; \
	    stage 'tests'; cargo nextest run --workspace --test-threads $$(($$(nproc) + 1)) || failed+=' tests'; \
	    counts=$$(sed -n 's/^<testsuites.* tests="\([0-9]*\)".* failures="\([0-9]*\)" errors="\([0-9]*\)".*/\1 \2 \3/p' $(REPORT) | \
	        awk '{ print $$1 - $$2 - $$3, $$2 + $$3 }') || counts=; \
	    grep -oh 'SKIPPED[^<]*' $(REPORT) | sed "s/&apos;/'/g; s/&quot;/\"/g; s/&lt;/</g; s/&gt;/>/g; s/&amp;/\&/g" >> $(SKIPS) || true; \
	else \
	    stage 'tests'; cargo test --workspace --no-fail-fast -- --show-output 2>&1 | tee $(TARGET)/tests.log || failed+=' tests'; \
	    counts=$$(awk '/^test result:/ { p += $$4; f += $$6 } END { print p + 0, f + 0 }' $(TARGET)/tests.log); \
	    grep -oh 'SKIPPED.*' $(TARGET)/tests.log >> $(SKIPS) || true; \
	fi; \
	stage 'the registration cache under a model checker'; \
	RUSTFLAGS='--cfg shuttle' CARGO_TARGET_DIR=$(TARGET)/shuttle cargo test -p ummunotify-cache --test interleavings 2>&1 | \
	    tee $(TARGET)/shuttle.log || failed+=' shuttle'; \
	counts+=$$(awk '/^test result:/ { p += $$4; f += $$6 } END { print "", p + 0, f + 0 }' $(TARGET)/shuttle.log); \
	if [ -n '$(GUEST)' ]; then \
	    stage 'the registration cache on verbs'; \
	    if command -v cmake >/dev/null && [ -e /usr/include/infiniband/verbs.h ] && [ -e /usr/include/libnl3/netlink/netlink.h ]; then \
	        cargo test -p ummunotify-cache --features rdma --lib verbs && \
	            cargo build -p ummunotify --features rdma --example verbs_accident || failed+=' verbs'; \
	    else \
	        echo 'SKIPPED verbs: cmake, or the headers of libibverbs or libnl-3, are missing (Debian: $(RDMA_PACKAGES))' | tee -a $(SKIPS); \
	        rm -f $(TARGET)/debug/examples/verbs_accident; \
	    fi; \
	    stage 'the kernel module in a guest'; \
	    $(MAKE) -C kmod-compat guest-test 2>&1 | tee $(TARGET)/guest.log || failed+=' guest'; \
	    stage 'the module as judge of the emulator'; \
	    { GUEST_TIMEOUT=700 LAYERS=inline,notify tests/guest/conformance.sh walk rules differential switch verbs || [ $$? -eq 77 ]; } 2>&1 | tee -a $(TARGET)/guest.log || failed+=' conformance'; \
	    grep -oh 'SKIPPED.*' $(TARGET)/guest.log >> $(SKIPS) || true; \
	    counts+=$$(sed -nE 's/^(conformance: )?([0-9]+) passed, ([0-9]+) failed, [0-9]+ skipped$$/ \2 \3/p' \
	        $(TARGET)/guest.log | tr -d '\n'); \
	else \
	    echo 'SKIPPED guest: this checkout has no kmod-compat/Makefile' >> $(SKIPS); \
	fi; \
	echo; echo "== summary after $$((SECONDS - start)) s"; \
	sort -u $(SKIPS); \
	[ -z "$$failed" ] || echo "FAILED:$$failed"; \
	read -r passed wrong <<< "$$(awk '{ for (i = 1; i < NF; i += 2) { p += $$i; f += $$(i + 1) } } END { print p + 0, f + 0 }' <<< "$$counts")"; \
	[ -z "$$failed" ] || [ "$$wrong" -gt 0 ] || wrong=1; \
	echo "$$passed passed, $$wrong failed, $$(sort -u $(SKIPS) | wc -l) skipped"; \
	[ "$$wrong" -eq 0 ] && [ "$$passed" -gt 0 ]

lint: rust install-build-deps
	@cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1 || \
	    { echo 'ummunotify: lint needs rustfmt and clippy; run: rustup component add rustfmt clippy' >&2; exit 1; }
	cargo fmt --all --check
	cargo fmt --manifest-path shim/Cargo.toml --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo clippy --manifest-path shim/Cargo.toml --release -- -D warnings

race: rust install-build-deps
	cargo build --workspace --all-targets --release
	UMMUNOTIFY_RACE_ROUNDS=$(RACE_ROUNDS) cargo test --release -p ummunotify-tests --test race -- --nocapture
	UMMUNOTIFY_RACE_ROUNDS=$(RACE_ROUNDS) cargo test --release -p ummunotify-tests --test cache -- --nocapture the_cache_gives_out

revalidate: rust install-build-deps
	cargo build --workspace --all-targets --release
	UMMUNOTIFY_REVALIDATE_ROUNDS=$(REVALIDATE_ROUNDS) cargo test --release -p ummunotify-tests --test race -- \
	    --nocapture stays_stale_under
	UMMUNOTIFY_RACE_ROUNDS=$(REVALIDATE_ROUNDS) cargo test --release -p ummunotify-tests --test fault -- --nocapture \
	    what_is_registered_again_too_early_stays_stale a_cache_entry_is_stale_after_a_request_of_a_ring

# The device opened for the first time, and libc patched, while eight threads map and unmap.
load: rust install-build-deps
	cargo build --workspace --all-targets --release
	UMMUNOTIFY_LOAD_ROUNDS=$(LOAD_ROUNDS) cargo test --release -p ummunotify-tests --test inline -- --nocapture under_load

# A cache on verbs needs rdma-core to build; without it everything else builds.
verbs: build
	$(call need,$(RDMA_PACKAGES),required)
	cargo build -p ummunotify --features rdma --example verbs_accident
	tests/guest/conformance.sh verbs || [ $$? -eq 77 ]

shuttle: rust install-build-deps
	UMMUNOTIFY_SCHEDULES=$(SCHEDULES) RUSTFLAGS='--cfg shuttle' CARGO_TARGET_DIR=$(TARGET)/shuttle \
	    cargo test -p ummunotify-cache --test interleavings

bench-cache: rust install-build-deps
	cargo build --release -p ummunotify -p ummunotify-benches
	@$(TARGET)/release/ummunotify-cache-bench micro
	@echo; echo 'with the emulated device:'; \
	$(TARGET)/release/ummunotify run --backend emulated -- $(TARGET)/release/ummunotify-cache-bench micro --device --entries 1000 --threads 1
	@for pattern in halo temporary all-to-all; do \
	    echo; echo "the pattern $$pattern:"; \
	    $(TARGET)/release/ummunotify-cache-bench generate $$pattern >$(TARGET)/$$pattern.trace; \
	    $(TARGET)/release/ummunotify run --backend emulated -- $(TARGET)/release/ummunotify-cache-bench replay $(TARGET)/$$pattern.trace; \
	done

# The report stays in target/.
# Programs that run, under load, attached to and detached from; attaches that are killed; two at a time.
attach: rust install-deps
	cargo build --workspace --all-targets
	UMMUNOTIFY_ATTACH_CYCLES=$(ATTACH_CYCLES) cargo test -p ummunotify-tests --test attach -- --nocapture

bench: rust install-build-deps
	cargo build --release -p ummunotify
	@$(TARGET)/release/ummunotify bench --json $(TARGET)/bench.json --html $(TARGET)/bench.html $(BENCH)

# Libraries that make a process one whose mapping calls are intercepted by others (benches/peers/build.sh says which).
peers:
	$(call need,$(PEER_PACKAGES),optional)
	@benches/peers/build.sh $(TARGET)/peers

bench-peers: rust install-build-deps peers
	cargo build --release -p ummunotify
	@peers=$$(cat $(TARGET)/peers/list); \
	if [ -z "$$peers" ]; then echo 'skipped: peers: none is there, see above'; exit 0; fi; \
	$(TARGET)/release/ummunotify bench --rounds 51 --against notify --against inline,notify $${peers//peer /--peer } \
	    --work munmap --work free --work madvise --work raw-munmap --regions 0

# In a guest whose clock counts instructions: minutes. Without a guest: skipped, which isn't failed.
bench-guest: release peers
	cargo build --release -p ummunotify-benches
	@peers=$$(cat $(TARGET)/peers/list); code=0; \
	benches/guest/count.sh $(TARGET)/bench-guest.json $${peers//peer /} || code=$$?; \
	[ $$code -ne 77 ] || exit 0; \
	[ $$code -eq 0 ] && $(TARGET)/release/ummunotify-report --guest $(TARGET)/bench-guest.json

# Every figure beside its limit. What can't be had is named in the report.
report: release peers
	cargo build --release -p ummunotify-benches
	cargo build --release -p ummunotify-engine --example figures
	@ROUNDS=$(REPORT_ROUNDS) benches/report.sh $(REPORTS)

# Without a guest: skipped, which isn't failed.
conformance: release
	cargo build --release -p ummunotify --example switch_itself
	LAYERS="$${LAYERS:-notify inline,notify trace}" UMMUNOTIFY=$(TARGET)/release/ummunotify tests/guest/conformance.sh || [ $$? -eq 77 ]

differential: release
	UMMUNOTIFY=$(TARGET)/release/ummunotify DIFFERENTIAL_STEPS=$(DIFFERENTIAL_STEPS) GUEST_TIMEOUT=3000 \
	    tests/guest/conformance.sh differential || [ $$? -eq 77 ]

switch: release
	cargo build --release -p ummunotify --example switch_itself
	UMMUNOTIFY=$(TARGET)/release/ummunotify SWITCHES=$(SWITCHES) GUEST_TIMEOUT=3000 \
	    tests/guest/conformance.sh switch || [ $$? -eq 77 ]

clean:
	cargo clean
	rm -rf shim/target

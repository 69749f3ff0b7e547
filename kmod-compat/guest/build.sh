#!/bin/bash
# build.sh KERNEL...: builds the module and the guest's test programs for each kernel, in the cache.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
one_at_a_time

# The tree is built in a copy: one source, several kernels, and nothing of theirs in the source folder.
build_module() {
	local kernel=$1 build=$cache/build/$1 tree=$cache/kernels/$1 kv
	kv=$(cat "$tree/version")
	mkdir -p "$build/module"
	# Built by a newer compiler, a kernel may ask for an alignment option that the host's doesn't have.
	local without=()
	if ! "${CC:-gcc}" -fmin-function-alignment=16 -E -x c /dev/null >/dev/null 2>&1; then
		without+=(CONFIG_CC_HAS_MIN_FUNCTION_ALIGNMENT=)
	fi
	(cd "$kmod_dir" && cp -up --parents ./*.c ./*.h Kbuild compat/* include/linux/*.h guest/pause/* "$build/module")
	# Debian's headers name the compiler that built the kernel; type information would need its vmlinux.
	quietly "$cache/logs/build-$kernel.log" make -C "$tree/usr/src/linux-headers-$kv" M="$build/module" \
		CC="${CC:-gcc}" CONFIG_DEBUG_INFO_BTF_MODULES= UMN_PAUSE=m "${without[@]}" modules || die "the module doesn't build for $kv"
	# Only what the sources cause counts, not that the kernel was built by another compiler.
	if grep -i 'warning' "$cache/logs/build-$kernel.log" | grep -vE '(the compiler|pahole version) differs' >&2; then
		die "the module builds with warnings for $kv"
	fi
}

mkdir -p "$cache/build/tests"
quietly "$cache/logs/build-tests.log" make -C "$guest_dir/tests" OUT="$cache/build/tests" ||
	die "the guest's test programs don't build"
for kernel in "$@"; do build_module "$kernel"; done

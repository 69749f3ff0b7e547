#!/bin/bash
# conformance.sh [PART...]: the module as judge of the emulator, in one guest for each of KERNELS (default 6.1).
#
#   walk           the operations walk on the module and emulated: every exact row must be reported alike
#   interface      the interface suite on the module and emulated
#   differential   DIFFERENTIAL_STEPS (5000) random steps on both at once; SEED names the sequence
#   switch         contexts that move between the two under load, SWITCHES (100) times
#
# Without PART all four. UMMUNOTIFY names the binary (default target/debug/ummunotify). What the programs print
# is left in target/conformance/KERNEL; here come the differences and a line a part.
# Exit code: 0, 1 where something differs, 77 where no guest can be had.
set -euo pipefail
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$top"
here=tests/guest
binary=${UMMUNOTIFY:-${CARGO_TARGET_DIR:-target}/debug/ummunotify}
parts=${*:-walk differential switch interface}
build=target/conformance
mkdir -p "$build"
[ -x "$binary" ] || { echo "conformance: no $binary; run make first" >&2; exit 1; }
example=$(dirname "$binary")/examples/switch_itself
case " $parts " in
*" switch "*) [ -x "$example" ] || { echo "conformance: no $example; build it with cargo build --examples" >&2; exit 1; } ;;
esac

flags=(-std=gnu11 -O1 -g -Wall -Wextra -Werror -pthread -I kmod-compat/include -I tests/c)
cc "${flags[@]}" tests/c/operations/{walk,device,area,calls,rows_*}.c -o "$build/walk"
cc "${flags[@]}" -shared -fPIC tests/c/operations/plugin.c -o "$build/walk-plugin.so"
cc "${flags[@]}" tests/c/differential/differential.c -o "$build/differential"
cc "${flags[@]}" tests/c/interface/*.c -o "$build/interface"
cc "${flags[@]}" tests/c/switch/switching.c -o "$build/switching"

passed=0 failed=0 skipped=0
verdict() {
	if [ "$1" = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
}

for kernel in ${KERNELS:-6.1}; do
	results=$build/$kernel
	rm -rf "$results"
	mkdir -p "$results"
	rc=0
	KERNEL=$kernel GUEST_DISK=1 GUEST_NUMA=1 GUEST_TIMEOUT=${GUEST_TIMEOUT:-900} kmod-compat/guest/run.sh \
		"$here/in_guest.sh '$binary' '$build' '$results' '${DIFFERENTIAL_STEPS:-5000}' '${SEED:-$RANDOM$RANDOM}' '${SWITCHES:-100}' $parts" \
		>"$results/guest" || rc=$?
	if [ $rc -eq 77 ]; then
		echo "SKIPPED conformance on $kernel: no guest can be had here (the reason stands above)"
		skipped=$((skipped + 1))
		continue
	fi
	if [ $rc -ne 0 ]; then
		echo "kernel $kernel: the guest's run ended with $rc (output: $results/guest)"
		tail -n 5 "$results/guest"
		failed=$((failed + 1))
	fi
	for part in $parts; do
		rc=0
		# The guest ended before this part did: that is counted, and told, above.
		if ! ls "$results/$part"*.code >/dev/null 2>&1; then
			echo "kernel $kernel: $part: not run"
			verdict 1
			continue
		fi
		case $part in
		walk)
			for side in module emulated; do
				grep -B 4 '^FAIL' "$results/walk-$side" || true
				echo "kernel $kernel: walk, $side: $(tail -n 1 "$results/walk-$side")"
				[ "$(cat "$results/walk-$side.code")" = 0 ] || rc=1
			done
			echo -n "kernel $kernel: walk: "
			awk -f $here/compare.awk "$results/walk-module" "$results/walk-emulated" >"$results/walk-compared" || rc=1
			tail -n 1 "$results/walk-compared"
			head -n -1 "$results/walk-compared"
			;;
		interface)
			for side in module emulated; do
				[ -e "$results/interface-$side.code" ] || { rc=1; continue; }
				grep '^FAIL' "$results/interface-$side" || true
				echo "kernel $kernel: interface, $side: $(tail -n 1 "$results/interface-$side")"
				[ "$(cat "$results/interface-$side.code")" = 0 ] || rc=1
			done
			# What was found to hold, check by check: the same names on both sides, however often.
			for side in module emulated; do
				grep -E '^(ok|FAIL) ' "$results/interface-$side" | sort -u >"$results/checks-$side"
			done
			if ! diff --suppress-common-lines -y -W 160 "$results/checks-module" "$results/checks-emulated" >"$results/interface-compared"; then
				echo "kernel $kernel: interface: checks that one side alone made (module left, emulated right):"
				cat "$results/interface-compared"
				rc=1
			fi
			;;
		differential | switch)
			sed "s/^\(ok\|FAIL\) /kernel $kernel: $part: &/" "$results/$part"
			[ "$(cat "$results/$part.code")" = 0 ] || rc=1
			;;
		esac
		verdict $rc
	done
done
echo "conformance: $passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ] || exit 1
[ $passed -gt 0 ] || exit 77

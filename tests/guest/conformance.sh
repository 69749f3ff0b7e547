#!/bin/bash
# conformance.sh [PART...]: the module as judge of the emulator, in one guest for each of KERNELS (default 6.1).
#
#   walk           the operations walk on the module and emulated: exact rows must be reported alike, covered rows
#                  at least as on the module, and what the coverage table calls unseen must not be reported
#   interface      the interface suite on the module and emulated
#   rules          of that the numbered rules alone, for a quick look
#   differential   DIFFERENTIAL_STEPS (5000) random steps on both at once; SEED names the sequence
#   switch         contexts that move between the two under load, SWITCHES (100) times
#   yama           an ordinary user's client under Yama's ptrace_scope, by each layer whatever LAYERS says
#   verbs          the registration cache on a soft-RoCE adapter: the accident, and the cure on both
#
# Without PART walk, differential, switch, interface and yama. LAYERS are the sets of layers that the emulator is run with
# (default: notify), separated by spaces: each is compared. UMMUNOTIFY names the binary (default: the debug build).
# What the programs print is left in target/conformance/KERNEL; here come the differences and a line a part.
# Exit code: 0; 1 where something differs or couldn't be run to its end; 77 where no guest can be had.
set -euo pipefail
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
here=$top/tests/guest
target=$(realpath -m "${CARGO_TARGET_DIR:-$top/target}")
binary=$(realpath -m "${UMMUNOTIFY:-$target/debug/ummunotify}")
# The program that runs a command in the guest; another one stands in for it in the tests of this script.
run=${GUEST_RUN:-$top/kmod-compat/guest/run.sh}
parts=${*:-walk differential switch interface yama}
layers=${LAYERS:-notify}
kept=$target/conformance
# Seconds for a guest.
timeout=${GUEST_TIMEOUT:-$((1800 * $(wc -w <<<"$layers")))}
cd "$top"

for part in $parts; do
	[[ $part =~ ^(walk|interface|rules|differential|switch|yama|verbs)$ ]] || { echo "conformance: no part '$part'" >&2; exit 2; }
done
# Skipping this part skips no other.
modules=overlay
case " $parts " in
*' verbs '*)
	example=$(dirname "$binary")/examples/verbs_accident
	why=
	if [ ! -x "$example" ]; then
		why="no $example; make verbs builds it"
	elif [ -z "${GUEST_RUN:-}" ]; then
		why=$("$top/kmod-compat/guest/fetch.sh" verbs 2>&1 >/dev/null) && why= ||
			why=$(sed -n 's/^guest: SKIPPED: //p' <<<"$why" | tail -n 1)
	fi
	if [ -n "$why" ]; then
		echo "SKIPPED the cache on verbs: $why"
		parts=$(sed 's/ verbs / /; s/^ //; s/ $//' <<<" $parts ")
		[ -n "$parts" ] || exit 77
	else
		modules+=" rdma_rxe ib_uverbs ?crc32_generic"
	fi
	;;
esac
[ -x "$binary" ] || { echo "conformance: no $binary; run make first" >&2; exit 1; }
for set in $layers; do
	"$binary" doctor --coverage --trap "$set" >/dev/null || { echo "conformance: LAYERS: no set '$set'" >&2; exit 1; }
done

# What the guest needs lies in a folder that it sees and can write to, wherever the build's folder is.
stage=$(realpath -m "${GUEST_CACHE:-$top/guest-cache}")/conformance-$$
mkdir -p "$stage" "$kept"
trap 'rm -rf "$stage"' EXIT
cp "$binary" "$stage/ummunotify"
# build NAME FLAG... SOURCE...
build() {
	local name=$1
	shift
	cc -std=gnu11 -O1 -g -Wall -Wextra -Werror -pthread -I "$top/kmod-compat/include" -I "$top/tests/c" "$@" -o "$stage/$name"
}
for part in $parts; do
	case $part in
	walk)
		build walk "$top"/tests/c/operations/{walk,coverage,device,area,calls,rows_*}.c
		build walk-plugin.so -shared -fPIC "$top/tests/c/operations/plugin.c"
		;;
	interface | rules) build interface "$top"/tests/c/interface/*.c ;;
	yama) build open_once "$top/tests/c/badly_used/open_once.c" ;;
	differential) build differential "$top/tests/c/differential/differential.c" ;;
	switch)
		build switching "$top/tests/c/switch/switching.c"
		example=$(dirname "$binary")/examples/switch_itself
		[ -x "$example" ] || { echo "conformance: no $example; build it with cargo build --examples" >&2; exit 1; }
		cp "$example" "$stage/switch_itself"
		;;
	verbs) cp "$(dirname "$binary")/examples/verbs_accident" "$stage" ;;
	esac
done

passed=0 failed=0 skipped=0
reasons=
# verdict CODE WHAT
verdict() {
	if [ "$1" = 0 ]; then
		passed=$((passed + 1))
	else
		failed=$((failed + 1))
		reasons+="${reasons:+, }$2"
	fi
}

# ended NAME: says how a program ended; fails unless it was with success.
ended() {
	local code
	code=$(cat "$results/$1.code" 2>/dev/null) || { echo "kernel $kernel: $1: not run"; return 1; }
	if [ "$code" != 0 ]; then
		echo "kernel $kernel: $1: exit code $code; its last lines:"
		tail -n 3 "$results/$1" | sed 's/^/    /'
		return 1
	fi
}

# compare_walks NAME: both backends' walks, and then one with the other.
compare_walks() {
	local name=$1 side bad=0
	for side in module $layers; do
		# What the walk says of a difference stands in front of the row.
		[ ! -e "$results/$name-$side" ] || awk '/^     /{ why = why $0 "\n"; next } /^FAIL/{ printf "%s%s\n", why, $0 } { why = "" }' "$results/$name-$side"
		ended "$name-$side" || bad=1
		[ ! -e "$results/$name-$side" ] || echo "kernel $kernel: $name, $side: $(tail -n 1 "$results/$name-$side")"
	done
	for side in $layers; do
		[ -e "$results/$name-module" ] && [ -e "$results/$name-$side" ] || { bad=1; continue; }
		awk -f "$here/compare.awk" "$results/$name-module" "$results/$name-$side" >"$results/$name-compared-$side" || bad=1
		head -n -1 "$results/$name-compared-$side"
		echo "kernel $kernel: $name, module and $side: $(tail -n 1 "$results/$name-compared-$side")"
	done
	return $bad
}

# compare_checks NAME: both backends' runs of the interface suite; the same checks were made on both, however often.
compare_checks() {
	local name=$1 side bad=0
	for side in module $layers; do
		[ -e "$results/$name-$side" ] || { echo "kernel $kernel: $name-$side: not run"; bad=1; continue; }
		grep '^FAIL' "$results/$name-$side" || true
		ended "$name-$side" || bad=1
		echo "kernel $kernel: $name, $side: $(tail -n 1 "$results/$name-$side")"
		# The tests of what only an emulated device has are named so.
		{ grep -E '^(ok|FAIL) ' "$results/$name-$side" || true; } | grep -vE '^[a-zA-Z]+ emulated_' | sort -u >"$results/checks-$side" || true
	done
	[ $bad = 0 ] || return 1
	for side in $layers; do
		diff --suppress-common-lines -y -W 160 "$results"/checks-{module,"$side"} && continue
		echo "kernel $kernel: $name: the checks above were made on one side alone (module left, $side right)"
		bad=1
	done
	return $bad
}

# The inline layer needs a processor with XSAVE; else it isn't used, and the traps are compared once more.
[[ $layers != *inline* ]] || export GUEST_CPU=${GUEST_CPU:-max}
seed=${SEED:-$RANDOM$RANDOM}
for kernel in ${KERNELS:-6.1}; do
	results=$stage/results
	rm -rf "$results"
	mkdir -p "$results"
	rc=0
	# Memory: mlockall populates all that the emulator has mapped.
	KERNEL=$kernel GUEST_MEM=2G GUEST_DISK=1 GUEST_NUMA=1 GUEST_MODULES="$modules" GUEST_APPEND="syscall.x32=y ${GUEST_APPEND:-}" \
		GUEST_TIMEOUT=$timeout "$run" \
		"'$here/in_guest.sh' '$stage' '${DIFFERENTIAL_STEPS:-5000}' '$seed' '$layers' '${SWITCHES:-100}' $parts" \
		>"$results/guest" 2>"$results/guest-errors" || rc=$?
	cat "$results/guest-errors" >&2
	said=$(sed -nE 's/^guest: (SKIPPED|error): //p' "$results/guest-errors" | tail -n 1)
	rm -rf "${kept:?}/$kernel"
	cp -r "$results" "$kept/$kernel"
	results=$kept/$kernel
	if [ $rc -eq 77 ]; then
		echo "SKIPPED conformance on $kernel: ${said:-no guest can be had here, and nothing was said}"
		skipped=$((skipped + 1))
		continue
	fi
	if [ $rc -ne 0 ]; then
		case $rc in
		70) why="the guest died, or took longer than $timeout s" ;;
		71) why="the kernel's log holds a warning" ;;
		*) why="no guest could be run, or its script failed ($rc)${said:+: $said}" ;;
		esac
		echo "kernel $kernel: $why; what it said last (all: $results/guest):"
		tail -n 5 "$results/guest" | sed 's/^/    /'
		verdict 1 "$kernel: $why"
	fi
	for part in $parts; do
		rc=0
		case $part in
		walk)
			compare_walks walk || rc=1
			compare_walks stacked || rc=1
			;;
		interface | rules) compare_checks $part || rc=1 ;;
		differential)
			for set in $layers; do
				cat "$results/differential-$set" 2>/dev/null || true
				ended "differential-$set" || rc=1
			done
			;;
		switch)
			for set in $layers; do
				sed "s/^\(ok\|FAIL\) /kernel $kernel: $part, $set: &/" "$results/$part-$set" 2>/dev/null || true
				ended "switch-$set" || rc=1
			done
			;;
		yama)
			sed "s/^\(ok\|FAIL\|skip\)/kernel $kernel: $part: &/" "$results/$part" 2>/dev/null || true
			ended $part || rc=1
			;;
		verbs)
			sed "s/^/kernel $kernel: $part: /" "$results/$part" 2>/dev/null || true
			ended verbs || rc=1
			;;
		esac
		verdict $rc "$kernel: $part"
	done
done
[ $failed -eq 0 ] || echo "conformance: not as it must be: $reasons"
echo "conformance: $passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ] || exit 1
[ $passed -gt 0 ] || exit 77

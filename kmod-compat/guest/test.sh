#!/bin/bash
# test.sh: builds the module for each of KERNELS (default 6.1) and runs all its tests in a guest.
# GUEST_FULL=1 runs the long version: a minute of stress with 100 reloads, and a million regions.
# What the programs print goes to guest-cache/logs/test-KERNEL.log; here come a line each and the sum.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [ "${GUEST_FULL:-0}" = 1 ]; then
	settings="UMN_REGIONS=1000000 UMN_STRESS_SECONDS=60 UMN_STRESS_ROUNDS=100"
	limit=3000
else
	settings="UMN_REGIONS=200000 UMN_STRESS_SECONDS=10 UMN_STRESS_ROUNDS=10"
	limit=600
fi

passed=0 failed=0 skipped=0
for kernel in ${KERNELS:-6.1}; do
	log=$cache/logs/test-$kernel.log
	mkdir -p "$cache/logs"
	rc=0
	"$guest_dir/fetch.sh" "$kernel" || rc=$?
	if [ $rc -eq $EXIT_SKIPPED ]; then
		skipped=$((skipped + 1))
		continue
	fi
	if [ $rc -ne 0 ] || ! "$guest_dir/build.sh" "$kernel"; then
		echo "kernel $kernel: not built"
		failed=$((failed + 1))
		continue
	fi
	kv=$(cat "$cache/kernels/$kernel/version")
	echo "kernel $kv: built without warnings, testing in the guest"
	passed=$((passed + 1))
	rc=0
	KERNEL=$kernel GUEST_LOAD=0 GUEST_TIMEOUT=$limit "$guest_dir/run.sh" \
		"$settings '$guest_dir/tests/all.sh' '$cache/build/tests'" >"$log" || rc=$?
	grep -E '^ *[a-z]+: [0-9]+ passed|FAILED' "$log" | sed 's/^ */  /' || true
	if [ $rc -eq 0 ]; then
		echo "  kernel log: clean"
		passed=$((passed + 1))
	elif [ $rc -eq $EXIT_SKIPPED ]; then
		skipped=$((skipped + 1))
		continue
	else
		# The programs' own failures are counted below; what else went wrong is one more.
		[ $rc -eq 1 ] && grep -q ' [1-9][0-9]* failed' "$log" || failed=$((failed + 1))
		echo "  exit code $rc; the whole output: guest-cache/logs/test-$kernel.log"
	fi
	read -r p f s < <(sed -nE 's/^ *[a-z]+: ([0-9]+) passed, ([0-9]+) failed, ([0-9]+) skipped$/\1 \2 \3/p' "$log" |
		awk '{ p += $1; f += $2; s += $3 } END { print p + 0, f + 0, s + 0 }')
	passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ] || exit 1
[ $passed -gt 0 ] || exit $EXIT_SKIPPED

#!/bin/bash
# report.sh FOLDER: measures everything that there is a limit for, and writes FOLDER/DATE-KERNEL.md and .json. `make report`
# builds what it needs.
#
#   ROUNDS      rounds of each measurement (default 15)
#   NO_GUEST=1  leaves the guest out
#
# What can't be had here is said, and named in the report. Exit code 1 if something that can be had went wrong.
set -euo pipefail
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=$(realpath -m "${CARGO_TARGET_DIR:-$top/target}")
[ $# -eq 1 ] && [[ $1 != -* ]] || { echo 'usage: report.sh FOLDER' >&2; exit 2; }
rounds=${ROUNDS:-15}
[[ $rounds =~ ^[0-9]+$ ]] && [ "$rounds" -ge 3 ] || { echo "report.sh: ROUNDS: a number from 3; not '$rounds'" >&2; exit 2; }
folder=$(realpath -m "$1")
binary=$target/release/ummunotify
parts=$target/report
mkdir -p "$folder" "$parts"
rm -f "$parts"/*
for program in "$binary" "$binary-report" "$target/release/examples/figures"; do
	[ -x "$program" ] || { echo "report.sh: no $program; run make report" >&2; exit 1; }
done
# What only a program that is started tells of, and what only one in whose libc something is let go.
peers=() peers_of_one=()
while read -r _ peer; do
	[[ $peer == bare-exec=* ]] || peers+=(--peer "$peer")
	[[ $peer == bare-flags=* || $peer == bare-gate=* ]] || peers_of_one+=(--peer "$peer")
done < <(cat "$target/peers/list" 2>/dev/null)
[ ${#peers[@]} -gt 0 ] || echo 'SKIPPED peers: none is built'
against=(--against notify --against inline,notify)
[ ! -e /dev/ummunotify ] || against+=(--against kmod)
say() { echo "== $(date +%H:%M:%S) $*"; }

# works NAME...
works=()
take() {
	works=()
	local name
	for name in "$@"; do works+=(--work "$name"); done
}
programs=()
for program in cc python3; do
	command -v $program >/dev/null && programs+=($program) || echo "SKIPPED $program: it isn't installed"
done

say "in turns, $rounds rounds"
take getppid read write mmap raw-mmap raw-munmap thread exec exec-bare malloc "${programs[@]}" run-true counter contexts-8 register register-random events-1 events-100 munmap hit munmap-64k hit-64k madvise free
"$binary" bench --rounds "$rounds" "${against[@]}" "${peers[@]}" "${works[@]}" --regions 0 --regions 10 --regions 64 \
	--regions 1000000 --json "$parts/bench.json" >"$parts/bench.txt"
# In processes of their own: once somebody may poll the descriptor, each read keeps it in order for good.
take waited-hit epoll-hit
"$binary" bench --rounds "$rounds" "${against[@]}" "${works[@]}" --json "$parts/polled.json" >"$parts/polled.txt"
say 'the same with everything on one processor'
take thread exec exec-bare raw-munmap munmap hit
"$binary" bench --one-processor --rounds "$rounds" "${against[@]}" "${peers_of_one[@]}" "${works[@]}" --regions 0 \
	--json "$parts/one-processor.json" >"$parts/one-processor.txt"
say 'the table'
"$target/release/examples/figures" >"$parts/engine.txt"

# calls LAYERS FIRST TIMES: calls that the filter traps in a shell that opens the device, does FIRST, and starts so many programs.
calls() {
	local log=$parts/calls.log
	rm -f "$log"
	"$binary" run --backend emulated --trap "$1" --stats --log-file "$log" -- \
		sh -c "exec 3</dev/ummunotify; $2; n=0; while [ \$n -lt $3 ]; do /bin/true; n=\$((n + 1)); done"
	# It ends after the last process.
	timeout 30 sh -c "until grep -q 'the filter trapped' '$log'; do sleep 0.1; done" || { cat "$log" >&2; return 1; }
	sed -n 's/.*the filter trapped \([0-9]*\) calls.*/\1/p' "$log"
}
say 'notified calls, and memory'
for layers in notify inline,notify; do
	for first in : 'unset LD_PRELOAD'; do
		without=$(calls $layers "$first" 0)
		with=$(calls $layers "$first" 100)
		name=exec
		[ "$first" = : ] || name=exec-bare
		echo "calls-$name $layers $(awk "BEGIN { print ($with - $without) / 100 }")" >>"$parts/numbers.txt"
	done
done
if command -v python3 >/dev/null; then
	"$binary" run --backend emulated --trap inline,notify -- python3 "$top/benches/memory.py" >>"$parts/numbers.txt"
fi

sources=(--bench "$parts/bench.json" --bench "$parts/polled.json" --one-processor "$parts/one-processor.json" --engine "$parts/engine.txt"
	--numbers "$parts/numbers.txt")
if [ "${NO_GUEST:-0}" = 1 ]; then
	echo 'SKIPPED guest: NO_GUEST is set'
else
	say 'instructions in the guest'
	code=0
	"$top/benches/guest/count.sh" "$parts/guest.json" $(sed -n 's/^peer //p' "$target/peers/list" 2>/dev/null) || code=$?
	case $code in
	0) sources+=(--guest "$parts/guest.json") ;;
	77) ;;
	*) exit 1 ;;
	esac
fi
say 'the report'
"$binary-report" "${sources[@]}" --out "$folder/$(date +%F)-$(uname -r)"
"$binary-report" "${sources[@]}"

#!/bin/bash
# count.sh FILE [NAME=LIBRARY]...: instructions that calls cost in a guest, with the kernel module and emulated, as JSON in FILE.
#
# One processor, whose clock counts instructions (see kmod-compat/guest/run.sh): exact where times are noise, but blind to
# caches and wake-ups, so it flatters what switches between processes. Each library is preloaded into a process without
# the device, and counted under that name.
#
#   UMMUNOTIFY   the binary (default: the release build)
#   LAYERS       sets of layers to count (default: notify inline,notify)
#   REGIONS      numbers of regions elsewhere (default: 10 1000 1000000); without the inline layer only the first
#   KERNEL       the guest's kernel (default 6.1)
#
# Exit code: 0; 1 where something couldn't be counted; 2 for bad use; 77 where no guest can be had.
set -euo pipefail
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
here=$top/benches/guest
target=$(realpath -m "${CARGO_TARGET_DIR:-$top/target}")
binary=$(realpath -m "${UMMUNOTIFY:-$target/release/ummunotify}")
# The program that runs a command in the guest; another one stands in for it in the tests of this script.
run=${GUEST_RUN:-$top/kmod-compat/guest/run.sh}
layers=${LAYERS:-notify inline,notify}
regions=${REGIONS:-10 1000 1000000}
kernel=${KERNEL:-6.1}

[ $# -ge 1 ] && [[ $1 != -* ]] || { echo "usage: count.sh FILE [NAME=LIBRARY]..." >&2; exit 2; }
report=$(realpath -m "$1")
shift
[[ $regions =~ ^[0-9]+(\ [0-9]+)*$ ]] || { echo "count.sh: REGIONS: numbers separated by spaces; not '$regions'" >&2; exit 2; }
for peer in "$@"; do
	[[ $peer == ?*=* ]] && [ -e "${peer#*=}" ] || { echo "count.sh: NAME=LIBRARY of a file that is there is asked for; not '$peer'" >&2; exit 2; }
done
[ -x "$binary" ] || { echo "count.sh: no $binary; run make release first" >&2; exit 1; }
for set in $layers; do
	"$binary" doctor --coverage --trap "$set" >/dev/null || { echo "count.sh: LAYERS: no set '$set'" >&2; exit 2; }
done
: >"$report"

# What the guest needs lies in a folder that it sees and can write to.
stage=$(realpath -m "${GUEST_CACHE:-$top/guest-cache}")/count-$$
mkdir -p "$stage/peers"
trap 'rm -rf "$stage"' EXIT
cp "$binary" "$stage/ummunotify"
cc -std=gnu11 -O2 -Wall -Wextra -Werror -pthread -I "$top/kmod-compat/include" "$here/count.c" -o "$stage/count" -ldl
# A program that is started there, with its loader and library: the host would be asked for others.
echo 'int main(void) { return 0; }' | cc -O2 -x c - -o "$stage/true" -Wl,--dynamic-linker=/tmp/lib/ld.so -Wl,-rpath,/tmp/lib
mkdir "$stage/lib"
cp "$(cc -print-file-name=ld-linux-x86-64.so.2)" "$stage/lib/ld.so"
cp "$(cc -print-file-name=libc.so.6)" "$stage/lib"
for peer in "$@"; do cp "${peer#*=}" "$stage/peers/${peer%%=*}.so"; done

rc=0
# The inline layer needs a processor with XSAVE.
KERNEL=$kernel GUEST_CPU=max GUEST_ICOUNT=1 GUEST_MEM=2G GUEST_TIMEOUT=${GUEST_TIMEOUT:-1500} "$run" \
	"'$here/in_guest.sh' '$stage' '$layers' '$regions'" >"$stage/said" 2>"$stage/errors" || rc=$?
cat "$stage/errors" >&2
if [ $rc -eq 77 ]; then
	echo "SKIPPED instruction counts in the guest: $(sed -nE 's/^guest: (SKIPPED|error): //p' "$stage/errors" | tail -n 1)"
	exit 77
fi
failed=
[ $rc -eq 0 ] || failed="the guest ended with $rc"
for counts in "$stage"/*.counts; do
	[ -e "$counts" ] || { failed="${failed:-nothing was counted}"; break; }
	name=$(basename "$counts" .counts)
	# Layers that can't be had as they were asked for are complained of, and others are used: their figures would mislead.
	[ "$(cat "$stage/$name.code")" = 0 ] && [ ! -s "$stage/$name.errors" ] && continue
	failed+="${failed:+, }$name"
	sed "s/^/$name: /" "$stage/$name.errors" >&2
done
if [ -n "$failed" ]; then
	tail -n 5 "$stage/said" >&2
	echo "count.sh: not counted: $failed" >&2
	exit 1
fi
# Lines of names and numbers alone.
awk -v kernel="$(sed -n 's/^kernel //p' "$stage/said" | tr -d '\r' | tail -n 1)" -v began="$(date +%s)" '
	BEGIN { printf "{\n  \"began\": %d,\n  \"kernel\": \"%s\",\n  \"counts\": [", began, kernel }
	FNR == 1 { name = FILENAME; sub(/.*\//, "", name); sub(/\.counts$/, "", name) }
	{
		printf "%s\n    {\"contender\": \"%s\", \"work\": \"%s\", \"regions\": %s, \"layouts\": [", comma, name, $1, $2 == "-" ? "null" : $2
		for (n = 3; n <= NF; n++) printf "%s%.0f", n == 3 ? "" : ", ", $n
		printf "]}"
		comma = ","
	}
	END { print "\n  ]\n}" }' "$stage"/*.counts >"$report"
echo "instruction counts are in $report"

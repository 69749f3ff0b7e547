#!/bin/sh
# in_guest.sh BINARY BUILD RESULTS STEPS SEED SWITCHES PART...: the guest's half of conformance.sh. Leaves in RESULTS what
# each program printed, and its exit code; judges nothing.
set -u
top=$PWD binary=$1 build=$PWD/$2 results=$PWD/$3 steps=$4 seed=$5 switches=$6
shift 6
case $binary in /*) ;; *) binary=$top/$binary ;; esac

# record NAME COMMAND...
record() {
	name=$1
	shift
	started=$(date +%s)
	"$@" >"/tmp/$name" 2>&1
	echo $? >"$results/$name.code"
	cp "/tmp/$name" "$results/$name"
	echo "$name: $(($(date +%s) - started)) s, exit code $(cat "$results/$name.code")"
}

cp "$binary" /tmp/ummunotify
cp "$build/walk" "$build/walk-plugin.so" /tmp/disk
echo 8 >/proc/sys/vm/nr_hugepages
export LD_LIBRARY_PATH=/tmp/disk
cd /tmp/disk || exit 70
emulated() { /tmp/ummunotify run --backend emulated -- "$@"; }
for part in "$@"; do
	case $part in
	walk)
		record walk-module ./walk --module --records
		record walk-emulated emulated ./walk --records
		;;
	interface)
		record interface-module "$build/interface"
		record interface-emulated emulated "$build/interface"
		;;
	differential)
		record differential emulated "$build/differential" "$steps" "$seed"
		;;
	switch)
		cp "$(dirname "$binary")/examples/switch_itself" /tmp
		record switch "$top/tests/guest/switch.sh" /tmp/ummunotify /tmp "$build" "$switches"
		;;
	esac
done

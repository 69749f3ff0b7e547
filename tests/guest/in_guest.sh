#!/bin/sh
# in_guest.sh STAGE STEPS SEED LAYERS SWITCHES PART...: the guest's half of conformance.sh. STAGE is a folder of the host's with
# the programs; LAYERS are sets of layers, separated by spaces. Leaves in STAGE/results what each program printed, and
# its exit code; judges nothing.
set -u
stage=$1 steps=$2 seed=$3 layers=$4 switches=$5
shift 5
# Programs are 3 to 15 times slower here than on the host, by what else it does.
patience=10

# record NAME COMMAND...
record() {
	output=$1
	shift
	started=$(date +%s)
	"$@" >"/tmp/$output" 2>&1
	echo $? >"$stage/results/$output.code"
	cp "/tmp/$output" "$stage/results/$output"
	echo "$output: $(($(date +%s) - started)) s, exit code $(cat "$stage/results/$output.code")"
}

# on LAYERS COMMAND...: on the emulated device.
on() {
	set_of_layers=$1
	shift
	/tmp/ummunotify run --backend emulated --trap "$set_of_layers" -- "$@"
}

# walk FOLDER NAME ARGUMENTS...: the walk by each backend in that folder, as walk-NAME.
walk() {
	folder=$1 name=$2
	shift 2
	cd "$folder" || exit 70
	record "$name-module" /tmp/disk/walk --module --records "$@"
	for set in $layers; do
		record "$name-$set" on "$set" /tmp/disk/walk --coverage "/tmp/coverage-$set" --records "$@"
	done
}

cp "$stage/ummunotify" /tmp/ummunotify
for set in $layers; do
	/tmp/ummunotify doctor --coverage --trap "$set" >"/tmp/coverage-$set" || exit 70
done
# For the walk: huge pages, swap space, a disk file system and one that is stacked on it.
if [ -e "$stage/walk" ]; then
	cp "$stage/walk" "$stage/walk-plugin.so" /tmp/disk
	export LD_LIBRARY_PATH=/tmp/disk
	echo 16 >/proc/sys/vm/nr_hugepages
	dd if=/dev/zero of=/tmp/disk/swap bs=1M count=16 2>/dev/null
	chmod 600 /tmp/disk/swap
	busybox mkswap /tmp/disk/swap >/dev/null && busybox swapon /tmp/disk/swap || exit 70
	mkdir /tmp/disk/files /tmp/disk/lower /tmp/disk/upper /tmp/disk/work /tmp/disk/stacked
	mount -t overlay -o lowerdir=/tmp/disk/lower,upperdir=/tmp/disk/upper,workdir=/tmp/disk/work overlay /tmp/disk/stacked ||
		exit 70
fi
for part in "$@"; do
	case $part in
	walk)
		walk /tmp/disk/files walk
		walk /tmp/disk/stacked stacked --table disk
		;;
	interface | rules)
		names=
		[ $part = interface ] || names=rule_
		record $part-module "$stage/interface" --patience $patience $names
		for set in $layers; do
			record "$part-$set" on "$set" "$stage/interface" --emulated --patience $patience $names
		done
		;;
	differential)
		for set in $layers; do
			record "differential-$set" on "$set" "$stage/differential" "$steps" "$seed"
		done
		;;
	verbs)
		record verbs "$(dirname "$0")/verbs.sh" /tmp/ummunotify "$stage/verbs_accident" "$(dirname "$stage")/tools" "$layers"
		;;
	switch)
		for set in $layers; do
			record "switch-$set" env "UMMUNOTIFY_TRAP=$set" "$(dirname "$0")/switch.sh" /tmp/ummunotify "$stage" "$stage" "$switches"
		done
		;;
	yama)
		# Where an ordinary user may read them.
		cp "$stage/open_once" /tmp/open_once
		record yama "$(dirname "$0")/yama.sh" /tmp/ummunotify /tmp/open_once
		;;
	esac
done

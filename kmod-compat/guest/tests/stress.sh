#!/bin/sh
# stress.sh PROGRAM SECONDS ROUNDS: in the guest. The stress program runs for SECONDS in all; between its
# rounds the module is unloaded and loaded. Afterwards no kernel object may be left that wasn't there.
set -u
program=$1 seconds=$2 rounds=$3
bad=0

fail() {
	echo "    $*"
	bad=1
}

# Objects in use of the caches that a lost context would keep: its owner's address space, its file.
objects() {
	for cache in mm_struct filp; do
		echo 1 >/sys/kernel/slab/$cache/shrink 2>/dev/null
	done
	sleep 1
	awk '$1 == "mm_struct" || $1 == "filp" { print $1, $2 }' /proc/slabinfo
}

grow() { echo "$1" | awk -v name="$2" '$1 == name { print $2 }'; }

# One round first, for what the kernel allocates once.
insmod "$UMN_MODULES/ummunotify.ko" && "$program" 1 >/dev/null; rmmod ummunotify
modules=$(lsmod | wc -l)
before=$(objects)
slice=$(awk "BEGIN { print $seconds / $rounds }")
round=0
while [ $round -lt "$rounds" ]; do
	round=$((round + 1))
	insmod "$UMN_MODULES/ummunotify.ko" || { fail "round $round: the module doesn't load"; break; }
	"$program" "$slice" $round >/tmp/stress.log 2>&1 || { cat /tmp/stress.log; fail "round $round failed"; }
	awk '{ print $2, $7 }' /tmp/stress.log >>/tmp/stress.sums
	# The last file of a killed process may be closed by the kernel a moment after its death.
	tries=0
	until rmmod ummunotify 2>/tmp/rmmod.log; do
		tries=$((tries + 1))
		[ $tries -lt 50 ] || { cat /tmp/rmmod.log; fail "round $round: the module doesn't unload"; break 2; }
		sleep 0.1
	done
	! grep -q '^umn_region' /proc/slabinfo || fail "round $round: the regions' cache is still there"
done
after=$(objects)
[ "$(lsmod | wc -l)" = "$modules" ] || fail "modules were $modules, are $(lsmod | wc -l)"
for cache in mm_struct filp; do
	old=$(grow "$before" $cache) new=$(grow "$after" $cache)
	echo "    $cache: $old objects before, $new after"
	# The caches are counted by whole slabs; a leak would be one for each process or more.
	[ $((new - old)) -le 48 ] || fail "$cache objects leaked"
done
awk '{ p += $1; o += $2 } END { printf "    %d processes of 8 threads, %d operations\n", p, o }' /tmp/stress.sums
[ $bad = 0 ] && echo "stress: 1 passed, 0 failed, 0 skipped" || echo "stress: 0 passed, 1 failed, 0 skipped"
exit $bad

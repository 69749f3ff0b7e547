#!/bin/sh
# all.sh PROGRAMS: in the guest, every test of the module, one after the other.
# UMN_REGIONS, UMN_STRESS_SECONDS and UMN_STRESS_ROUNDS say how long the long ones take.
set -u
programs=$1
here=$(dirname "$0")
bad=0

run() {
	echo "$*" | sed "s#$programs/##"
	"$@" || bad=1
}

load() {
	insmod "$UMN_MODULES/ummunotify.ko" "$@" || { echo "load: 0 passed, 1 failed, 0 skipped"; exit 1; }
}

load
run "$programs/conform"
run "$programs/hostile"
insmod "$UMN_MODULES/guest/pause/umn_pause.ko" || bad=1
run "$programs/afterhit"
# With too few slots for the invalidations under way nothing may be missed either.
for slots in 1 0; do
	rmmod ummunotify || bad=1
	load inflight_slots=$slots
	echo "inflight_slots=$slots"
	run "$programs/afterhit" slots closing
done
rmmod umn_pause && rmmod ummunotify || bad=1
run "$here/stress.sh" "$programs/stress" "${UMN_STRESS_SECONDS:-10}" "${UMN_STRESS_ROUNDS:-10}"
exit $bad

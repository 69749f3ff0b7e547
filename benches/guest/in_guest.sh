#!/bin/sh
# in_guest.sh STAGE LAYERS REGIONS: the guest's half of count.sh. Leaves in STAGE NAME.counts, what `count` printed of each
# contender, NAME.errors, what it complained of, and NAME.code, its exit code; judges nothing.
set -u
stage=$1 layers=$2 regions=$3

# counted NAME COMMAND...
counted() {
	name=$1
	shift
	"$@" >"/tmp/$name.counts" 2>"/tmp/$name.errors"
	echo $? >"$stage/$name.code"
	cp "/tmp/$name.counts" "/tmp/$name.errors" "$stage"
}

# preloaded LIBRARY COMMAND...
preloaded() {
	library=$1
	shift
	LD_PRELOAD=$library "$@"
}

echo "kernel $(uname -r)"
# The same addresses each time.
echo 0 >/proc/sys/kernel/randomize_va_space
# What lies on the shared folder would be read anew.
cp "$stage/ummunotify" "$stage/count" "$stage/true" /tmp || exit 70
cp -r "$stage/peers" "$stage/lib" /tmp || exit 70
# Each loader asks for an ld.so.preload.
mkdir /tmp/etc && cp /etc/ld.so.cache /tmp/etc && mount --bind /tmp/etc /etc || exit 70
cd /tmp || exit 70
counted native ./count plain
counted crowded ./count crowded
counted kmod ./ummunotify run --backend kmod -- ./count device $regions
for set in $layers; do
	# Where each call is trapped it takes minutes, and the regions are the least of it.
	case $set in
	*inline*) among=$regions ;;
	*) among=${regions%% *} ;;
	esac
	counted "$set" ./ummunotify run --backend emulated --trap "$set" -- ./count device $among
done
for library in peers/*.so; do
	[ ! -e "$library" ] || counted "$(basename "$library" .so)" preloaded "/tmp/$library" ./count plain
done

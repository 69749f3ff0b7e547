#!/bin/sh
# verbs.sh BINARY EXAMPLE TOOLS LAYERS, all but the last absolute: in the guest, the stale registration on a soft-RoCE
# adapter: the accident, then the cache with the module and on the emulated device, moves between the two while it is
# used, and an adapter that goes away. TOOLS is where fetched packages were unpacked. Exit code 1 if a part failed.
set -u
binary=$1 example=$2 tools=$3 layers=$4
bad=0

export LD_LIBRARY_PATH="$tools/usr/lib/x86_64-linux-gnu:$tools/lib/x86_64-linux-gnu"
export PATH="$PATH:$tools/bin:$tools/sbin:$tools/usr/bin:$tools/usr/sbin"
# libibverbs finds its driver beside itself, or where this says.
for folder in /usr/lib/x86_64-linux-gnu "$tools/usr/lib/x86_64-linux-gnu"; do
	for driver in "$folder"/libibverbs/librxe-rdmav*.so; do
		[ ! -e "$driver" ] || export IBV_DRIVERS="${driver%-rdmav*}"
	done
done

part() {
	name=$1
	shift
	echo "== $name"
	"$@" 2>&1 || { echo "FAIL $name"; bad=1; }
}

emulated() {
	set_of_layers=$1
	shift
	"$binary" run --backend emulated --trap "$set_of_layers" -- "$@"
}

# The cache goes on while its context moves between emulator and module.
moving() {
	"$binary" run --backend emulated -- "$example" with rxe0 150 >/tmp/moving &
	client=$!
	while ! grep -q receive /tmp/moving; do
		kill -0 $client 2>/dev/null || break
		sleep 0.1
	done
	"$binary" switch $client kmod --times 9 || return 1
	wait $client || { cat /tmp/moving; return 1; }
	tail -n 2 /tmp/moving
}

# As an ordinary user, whom limits bind; the adapter is removed in the middle.
removed() {
	rm -f /tmp/input
	mkfifo /tmp/input
	chmod 666 /dev/infiniband/*
	setpriv --reuid=65534 --regid=65534 --clear-groups env HOME=/nowhere \
		"$binary" run --backend emulated -- "$example" removed rxe0 </tmp/input >/tmp/removed 2>&1 &
	client=$!
	exec 4>/tmp/input
	while ! grep -q ready /tmp/removed; do
		kill -0 $client 2>/dev/null || break
		sleep 0.1
	done
	# Some kernels take the adapter away from its users, others wait for them.
	rdma link delete rxe0 &
	deleting=$!
	sleep 3
	echo go on >&4
	exec 4>&-
	code=0
	wait $client || code=$?
	cat /tmp/removed
	[ $code = 0 ] || return $code
	wait $deleting
}

# The driver works in bursts; two processors of a slow guest are enough.
rdma link add rxe0 type rxe netdev lo || exit 1
part 'nobody tells the cache' "$example" without rxe0
part 'kernel module' "$binary" run --backend kmod -- "$example" with rxe0
for set in $layers; do part "emulated ($set)" emulated "$set" "$example" with rxe0; done
part 'between emulator and module' moving
part 'errors, and the adapter removed' removed
exit $bad

#!/bin/sh
# switch.sh BINARY EXAMPLES BUILD SWITCHES, all absolute: in the guest, contexts that move between emulator and module under load.
# A line a part; exit code 1 if one failed.
set -u
binary=$1 examples=$2 build=$3 switches=$4
bad=0

part() {
	name=$1
	shift
	if "$@" >/tmp/part 2>&1; then
		echo "ok $name: $(tail -n 2 /tmp/part | head -n 1)"
	else
		echo "FAIL $name"
		grep -v ^round /tmp/part
		bad=1
	fi
}

emulated() { "$binary" run --backend emulated -- "$@"; }

# Every supervisor, and with it the last reference to the module, ends with its last client.
nothing_left() {
	for _ in $(seq 100); do
		[ "$(cat /sys/module/ummunotify/refcnt)" = 0 ] && [ -z "$(supervisors)" ] && return
		sleep 0.1
	done
	echo "module references: $(cat /sys/module/ummunotify/refcnt), supervisors: $(supervisors)"
	return 1
}

supervisors() { grep -lx ummunotify-sup /proc/[0-9]*/comm 2>/dev/null | tr -dc '0-9\n'; }

# start WHAT: `switching WHAT` in the background, as $client; its input is descriptor 4.
start() {
	rm -f /tmp/input /tmp/output
	mkfifo /tmp/input
	"$binary" run --backend emulated -- "$build/switching" "$1" </tmp/input >/tmp/output &
	client=$!
	exec 4>/tmp/input
	while ! grep -q process /tmp/output; do sleep 0.1; done
}

# The program is killed in the middle of moves, wherever it is then.
killed() {
	for pause in 0.3 0.5; do
		start load
		"$binary" switch $client kmod || return 1
		"$binary" switch $client emulated --times 1000 2>/tmp/moves &
		mover=$!
		sleep $pause
		kill -9 $client
		! wait $mover || return 1
		cat /tmp/moves
		nothing_left || return 1
	done
	echo 'twice, and nothing left'
	echo
}

# order WORD: given to the program, and carried out.
order() {
	lines=$(wc -l </tmp/output)
	echo "$1" >&4
	while [ "$(wc -l </tmp/output)" = "$lines" ]; do sleep 0.1; done
}

# Back to the emulator only when no thread is inside a call that nobody but the module has recorded.
inside() {
	start obedient
	"$binary" switch $client kmod || return 1
	order hang
	sleep 0.5
	! "$binary" switch $client emulated --deadline 1 2>/tmp/refusal || return 1
	cat /tmp/refusal
	grep -q 'every thread outside.*ETIMEDOUT' /tmp/refusal || return 1
	[ "$("$binary" switch $client kmod)" = "process $client: 1 context on kmod already" ] || return 1
	order release
	"$binary" switch $client emulated || return 1
	# And there such a call is recorded, so it is none to wait for on the way to the module.
	order hang
	"$binary" switch $client kmod || return 1
	"$binary" switch $client emulated || return 1
	order release
	exec 4>&-
	wait $client || { cat /tmp/output; return 1; }
	echo 'waited for a thread inside'
	echo
}

# A thread whose last call only the module has recorded, and that has made none since, is stopped for a moment.
computing() {
	start obedient
	"$binary" switch $client kmod || return 1
	order compute
	"$binary" switch $client emulated || return 1
	"$binary" switch $client kmod || return 1
	order rest
	exec 4>&-
	wait $client || { cat /tmp/output; return 1; }
	echo 'moved under a thread that computes'
	echo
}

# What stands at the device's path in the client's view doesn't know the call by which a counter is taken over.
other_device() {
	start obedient
	mv /dev/ummunotify /dev/ummunotify-real && ln -s null /dev/ummunotify
	"$binary" switch $client kmod 2>/tmp/refusal
	code=$?
	mv /dev/ummunotify-real /dev/ummunotify
	cat /tmp/refusal
	[ $code = 1 ] && grep -q 'ENOTTY.*ADOPT_COUNTER' /tmp/refusal || return 1
	"$binary" switch $client kmod || return 1
	exec 4>&-
	wait $client || { cat /tmp/output; return 1; }
	echo 'refused, and taken when it was the right one'
	echo
}

# The supervisor is killed while its client is on the module.
orphan() {
	start obedient
	"$binary" switch $client kmod || return 1
	kill -9 $(supervisors)
	while [ -n "$(supervisors)" ]; do sleep 0.1; done
	echo orphan >&4
	wait $client || { cat /tmp/output; return 1; }
	echo 'everything was reported once'
	echo
}

# Some rounds on the module without a move, which would wake whoever should have been woken before; then moves.
cat >/tmp/moves.sh <<END
rounds() { grep -c ^round /tmp/part; }
for phase in 1 2; do
	'$binary' switch \$1 kmod || exit 1
	until=\$((\$(rounds) + 4))
	while [ \$(rounds) -lt \$until ]; do sleep 0.1; done
	'$binary' switch \$1 emulated || exit 1
done
exec '$binary' switch \$1 kmod --times \$2
END

cd /tmp || exit 1
part load emulated "$build/switching" load sh /tmp/moves.sh PID "$switches"
part waiters emulated "$build/switching" waiters sh /tmp/moves.sh PID $((switches / 5))
part 'load, ended on the module' emulated "$build/switching" load "$binary" switch PID kmod --times 21
part API emulated "$examples/switch_itself" $((switches / 10))
part 'API, direct' "$binary" run --backend kmod -- "$examples/switch_itself" direct
part inside inside
part computing computing
part 'another device' other_device
part orphan orphan
part killed killed
part 'nothing left' nothing_left
exit $bad

#!/bin/sh
# yama.sh BINARY CLIENT, both absolute: in the guest, as an ordinary user, under each of Yama's ptrace_scope that can be
# taken back (3 can't). A line a check; exit code 1 if one failed.
set -u
binary=$1 client=$2
scope=/proc/sys/kernel/yama/ptrace_scope
bad=0
[ -w $scope ] || { echo "skip: this kernel has no Yama"; exit 0; }

# check SCOPE LAYERS CODE WORDS: how the client ends, and what is said.
check() {
	echo "$1" >$scope
	setpriv --reuid 65534 --regid 65534 --clear-groups env HOME=/tmp \
		"$binary" run --backend emulated --trap "$2" -- "$client" >/tmp/said 2>&1
	code=$?
	if [ $code = "$3" ] && grep -q "$4" /tmp/said; then
		echo "ok ptrace_scope $1, $2"
	else
		echo "FAIL ptrace_scope $1, $2: exit code $code, expected $3 and '$4'"
		cat /tmp/said
		bad=1
	fi
}

for layers in notify trace inline,notify; do
	check 0 $layers 0 '^open: ok$'
	# The supervisor is no ancestor of its client, which names it as its tracer.
	check 1 $layers 0 '^open: ok$'
done
check 2 trace 125 'kernel.yama.ptrace_scope forbids it'
check 2 auto 0 '^open: ok$'
echo 0 >$scope
exit $bad

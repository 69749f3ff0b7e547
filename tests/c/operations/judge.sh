#!/bin/sh
# judge.sh: runs the operations walk on the real module, in the guest of kmod-compat. The module is the judge of
# the table: every row must come out as it stands there. KERNEL names the kernel (5.10, 6.1, 6.12 or 7.3).
set -eu
top=$(cd "$(dirname "$0")/../../.." && pwd)
folder=$top/target/judge
mkdir -p "$folder"
cd "$top/tests/c/operations"
flags="-std=gnu11 -O1 -g -Wall -Wextra -Werror -pthread -I $top/kmod-compat/include -I $top/tests/c"
# shellcheck disable=SC2086
cc $flags walk.c device.c area.c calls.c rows_*.c -o "$folder/walk"
# shellcheck disable=SC2086
cc $flags -shared -fPIC plugin.c -o "$folder/walk-plugin.so"
export KERNEL="${KERNEL:-6.1}" GUEST_DISK=1 GUEST_NUMA=1 GUEST_TIMEOUT="${GUEST_TIMEOUT:-300}"
exec "$top/kmod-compat/guest/run.sh" "
	cp $folder/walk $folder/walk-plugin.so /tmp/disk && cd /tmp/disk || exit 70
	echo 8 >/proc/sys/vm/nr_hugepages
	LD_LIBRARY_PATH=. ./walk --module"

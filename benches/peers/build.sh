#!/bin/bash
# build.sh FOLDER: builds those peers that this host has the packages for into FOLDER, and writes FOLDER/list: a line
# `peer NAME=LIBRARY` for each. Says what is missing, and why; that isn't failed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -eq 1 ] || { echo 'usage: build.sh FOLDER' >&2; exit 2; }
folder=$(realpath -m "$1")
mkdir -p "$folder"
: >"$folder/list"

# peer NAME SOURCE FLAG...: one that can't be built, or doesn't do what it is for, is left out.
peer() {
	local name=$1 library=$folder/$1.so
	shift
	rm -f "$library"
	if ! cc -O2 -Wall -Wextra -shared -fPIC "$@" -o "$library" 2>"$folder/$name.log"; then
		echo "SKIPPED $name as a peer: it isn't built: $(grep -m 1 -E 'error|cannot find' "$folder/$name.log" || tail -n 1 "$folder/$name.log")"
	elif ! LD_PRELOAD=$library sh -c : 2>"$folder/$name.log"; then
		echo "SKIPPED $name as a peer: $(tail -n 1 "$folder/$name.log")"
	else
		echo "peer $name=$library" >>"$folder/list"
	fi
}

# libfabric MONITOR: out of the objects of its archive.
libfabric() {
	peer "$1" "-DMONITOR=\"$1\"" "$here/libfabric.c" -l:libfabric.a -Wl,-z,defs \
		"-Wl,--version-script=$here/libfabric.map" -pthread -ldl
}

peer bare "$here/bare.c"
for kind in FLAGS GATE EXEC; do peer "bare-${kind,,}" "-D$kind" "$here/bare.c" -ldl; done
peer ucx "$here/ucx.c" -ldl
libfabric memhooks
libfabric userfaultfd

#!/bin/bash
# run.sh COMMAND: boots a guest with the module loaded and runs one shell command in it.
#
# The guest sees the host's files: everything read-only, the project's folder (and so what the command
# writes there) read-write. The command runs as root in the caller's folder; its output comes to this
# script's, its exit code is this script's. /tmp is the guest's own. The kernel's log is kept in
# guest-cache/logs; a warning in it is a failure. Several guests may run at once.
#
#   KERNEL          5.10, 6.1 (default), 6.12 or 7.3
#   GUEST_TIMEOUT   seconds until the guest is ended (default 600)
#   GUEST_MEM, GUEST_SMP          memory (1G) and processors (2)
#   GUEST_MODULES   further kernel modules to load, with what they depend on; ?NAME only if the kernel has it
#   GUEST_LOAD=0    doesn't load ummunotify (the command may: $UMN_MODULES is the folder of the .ko files)
#   GUEST_NUMA=1    two memory nodes, of half the memory each
#   GUEST_DISK=1    an empty ext4 file system on /tmp/disk, on a virtual disk
#   GUEST_ICOUNT=1  one processor that executes one instruction a nanosecond: CLOCK_MONOTONIC counts them
#   GUEST_CPU       the processor's model, as QEMU names it
#   GUEST_APPEND    more for the kernel's command line
#
# Exit code: the command's; 77 nothing was run, the reason is said; 70 the guest died or took too long;
# 71 the command passed but the kernel's log holds a warning.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

[ $# -eq 1 ] && [ -n "$1" ] || die "usage: run.sh COMMAND (one argument)"
command=$1
kernel=${KERNEL:-6.1}
folder=$PWD

"$guest_dir/fetch.sh" "$kernel"
"$guest_dir/build.sh" "$kernel"

tree=$cache/kernels/$kernel
kv=$(cat "$tree/version")
modules=$cache/build/$kernel/module
run=$cache/runs/$kernel-$$
rm -rf "$run"
mkdir -p "$run/root"/{bin,modules,proc,sys,dev,host} "$cache/logs"
trap 'rm -rf "$run"' EXIT

image=$tree/boot/vmlinuz-$kv
[ -e "$image" ] || image=$tree/lib/modules/$kv/vmlinuz

# add_modules NAME...: puts modules and what they need into the initramfs, in the order of loading.
add_modules() {
	local name path base
	for name in "$@"; do
		if ! with_tools modprobe -S "$kv" -d "$tree" --show-depends "${name#\?}" >"$run/depends" 2>/dev/null; then
			[ "$name" = "${name#\?}" ] || continue
			die "kernel $kv has no module $name"
		fi
		base=
		while read -r kind path _; do
			[ "$kind" = insmod ] || continue
			base=$(basename "$path")
			base=${base%.xz}
			[ ! -e "$run/root/modules/$base" ] || continue
			case $path in
			*.xz) xz -dc "$path" >"$run/root/modules/$base" ;;
			*) cp "$path" "$run/root/modules/$base" ;;
			esac
			echo "$base" >>"$run/root/modules/order"
		done <"$run/depends"
		# What a module would merely like to have (a faster checksum) may not fit this processor.
		[ -z "${base:-}" ] || echo "$base" >>"$run/root/modules/needed"
	done
}

qemu=(-accel tcg -M pc -m "${GUEST_MEM:-1G}" -nodefaults -no-user-config -display none -no-reboot)
append="console=ttyS0 panic=-1 quiet loglevel=4 numa_balancing=disable mitigations=off slab_nomerge cryptomgr.notests ${GUEST_APPEND:-}"
wanted=(virtio_pci 9pnet_virtio 9p)
if [ "${GUEST_ICOUNT:-0}" = 1 ]; then
	qemu[1]=tcg,thread=single
	qemu+=(-smp 1 -icount shift=0,sleep=off)
	append+=" init_on_alloc=0"
else
	# A socket each: a node of its own for a processor, where nodes are asked for.
	qemu+=(-smp "${GUEST_SMP:-2},sockets=${GUEST_SMP:-2},cores=1,threads=1")
fi
[ -z "${GUEST_CPU:-}" ] || qemu+=(-cpu "$GUEST_CPU")
if [ "${GUEST_NUMA:-0}" = 1 ]; then
	half=$(numfmt --from=iec "${GUEST_MEM:-1G}")
	half=$((half / 2))
	qemu+=(-object "memory-backend-ram,id=m0,size=$half" -object "memory-backend-ram,id=m1,size=$half"
		-numa node,cpus=0,memdev=m0 -numa node,cpus=1,memdev=m1)
fi
if [ "${GUEST_DISK:-0}" = 1 ]; then
	truncate -s 64M "$run/disk"
	quietly "$cache/logs/mke2fs.log" with_tools mke2fs -q -t ext4 -F "$run/disk"
	qemu+=(-drive "file=$run/disk,if=virtio,format=raw")
	# The checksum that ext4 asks for by name: the plain one runs on every processor, QEMU's default among them.
	wanted+=(virtio_blk crc32c_generic ext4)
fi
add_modules "${wanted[@]}" ${GUEST_MODULES:-}

# share TAG FOLDER OPTION: a folder of the host for the guest to mount.
share() {
	qemu+=(-fsdev "local,id=$1,path=$2,security_model=none,multidevs=remap$3"
		-device "virtio-9p-pci,fsdev=$1,mount_tag=$1")
}
share root / ,readonly=on
share top "$top_dir" ""
share cache "$cache" ""

cp "$(PATH=$PATH:$tools/bin command -v busybox)" "$run/root/bin/busybox"
cp "$guest_dir/init" "$run/root/init"
printf '%s\n' "$command" >"$run/command"
cat >"$run/root/parameters" <<PARAMETERS
top='$top_dir'
cache='$cache'
run='$run'
folder='$folder'
modules='$modules'
load='${GUEST_LOAD:-1}'
disk='${GUEST_DISK:-0}'
PARAMETERS
(cd "$run/root" && find . | with_tools busybox cpio -o -H newc 2>/dev/null | gzip -1) >"$run/initrd.gz"

firmware=()
[ -d "$tools/usr/share/seabios" ] && firmware=(-L "$tools/usr/share/seabios" -L "$tools/usr/share/qemu")
console=$run/console
rc=0
LD_LIBRARY_PATH=$tools/usr/lib/x86_64-linux-gnu:$tools/lib/x86_64-linux-gnu \
	timeout -k 5 "${GUEST_TIMEOUT:-600}" \
	"$(PATH=$PATH:$tools/usr/bin command -v qemu-system-x86_64)" "${firmware[@]}" "${qemu[@]}" \
	-serial "file:$console" -chardev stdio,id=out,signal=off -serial chardev:out \
	-kernel "$image" -initrd "$run/initrd.gz" -append "$append" </dev/null || rc=$?

cp "$console" "$cache/logs/console-$kernel.log" 2>/dev/null || true
exit_code=$(tr -d '\r' <"$console" 2>/dev/null | sed -n 's/^ummunotify-guest: exit \([0-9]*\)$/\1/p' | tail -n 1)
if [ -z "$exit_code" ]; then
	say "kernel $kv: the guest ended without a result (qemu: $rc; 124 is the time limit)"
	tail -n 30 "$console" >&2 || true
	exit 70
fi
log=$cache/logs/kernel-$kernel.log
[ ! -e "$run/dmesg" ] || mv "$run/dmesg" "$log"
[ "$exit_code" -eq 0 ] || exit "$exit_code"
# What a kernel prints when something went wrong in it; a module from outside taints it, that is no fault.
if grep -E 'WARNING:|BUG[: ]|Oops|Call Trace|\[ *cut here|lockup|hung_task|blocked for more|rcu.*stall|general protection|UBSAN|KASAN|KFENCE|refcount_t|scheduling while atomic|sleeping function|Objects remaining|Bad page' "$log" >&2; then
	say "kernel $kv: the kernel's log holds the lines above (guest-cache/logs/kernel-$kernel.log)"
	exit 71
fi

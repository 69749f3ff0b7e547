#!/bin/bash
# fetch.sh KERNEL...: fetches what the guest needs and the cache lacks: QEMU and a few small tools where
# the host has none, and for each kernel (5.10, 6.1, 6.12, 7.3) Debian's image and headers of one version.
# In place of a kernel `verbs` may stand: what a soft-RoCE adapter in the guest needs, from the host's release.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
one_at_a_time

# The guest is x86-64 under software emulation; another host would need a cross compiler too.
[ "$(uname -m)" = x86_64 ] || skip "the guest is built on x86-64 hosts alone, this is $(uname -m)"
for tool in gcc make ld xz; do
	command -v $tool >/dev/null || skip "no $tool here, so no kernel module can be built"
done

# fetch_tools [PROGRAM]=PACKAGE...: those that the host lacks, unpacked into the cache.
fetch_tools() {
	local -A package="($*)"
	local missing=() name deb
	for name in "${!package[@]}"; do
		[ -x "$(PATH=$PATH:/usr/sbin:/sbin command -v "$name")" ] && continue
		compgen -G "/usr/lib/x86_64-linux-gnu/libibverbs/$name-*.so" >/dev/null && continue
		[ -e "$tools/have-$name" ] || missing+=("$name")
	done
	[ ${#missing[@]} -gt 0 ] || return 0
	apt_refresh host
	say "fetching ${missing[*]} (unpacked into the cache, not installed)"
	local packages=()
	for name in "${missing[@]}"; do packages+=("${package[$name]}"); done
	quietly "$cache/logs/tools.log" apt_private host apt-get -qy --no-install-recommends \
		--download-only install "${packages[@]}" ||
		skip "these packages can't be fetched: ${packages[*]} (log: guest-cache/logs/tools.log)"
	mkdir -p "$tools"
	for deb in "$cache"/apt/host/cache/archives/*.deb; do dpkg-deb -x "$deb" "$tools"; done
	rm -f "$cache"/apt/host/cache/archives/*.deb
	# The package's links point at /bin/kmod of the root; kmod acts by the name it is called by.
	[ ! -x "$tools/bin/kmod" ] || for name in modprobe depmod; do ln -sfn kmod "$tools/bin/$name"; done
	for name in "${missing[@]}"; do touch "$tools/have-$name"; done
}

# The headers' own build tools are programs of the kernel's release: on an older host they lack their C
# library. They get that release's, beside them, and a wrapper that starts them with it.
fetch_libraries() {
	local tree=$1 suite=${2%-backports} lib=$1/host-libraries program lacking=()
	for program in "$tree"/usr/lib/linux-kbuild-*/{scripts,tools}/{,*/}*; do
		[ -f "$program" ] && [ -x "$program" ] || continue
		[[ $(ldd "$program" 2>&1) != *"not found"* ]] || lacking+=("$program")
	done
	[ ${#lacking[@]} -gt 0 ] || return 0
	apt_refresh "$suite"
	mkdir -p "$lib"
	(
		cd "$lib"
		quietly "$cache/logs/libraries-$suite.log" apt_private "$suite" apt-get -q download \
			libc6 libelf1t64 zlib1g libzstd1
		for deb in ./*.deb; do dpkg-deb -x "$deb" .; done
		rm ./*.deb
	) || skip "the libraries that $suite's build tools need can't be fetched"
	for program in "${lacking[@]}"; do
		mv "$program" "$program.program"
		printf '#!/bin/sh\nexec "%s" --library-path "%s" "%s" "$@"\n' \
			"$(find "$lib" -name 'ld-linux-x86-64.so.2' -print -quit)" \
			"$lib/usr/lib/x86_64-linux-gnu:$lib/lib/x86_64-linux-gnu" "$program.program" >"$program"
		chmod +x "$program"
	done
}

fetch_kernel() {
	local kernel=$1 suite tree kv headers image packages
	suite=$(kernel_suite "$kernel")
	tree=$cache/kernels/$kernel
	# The headers are patched with their place (below): a cache that was moved is filled anew.
	if [ -e "$tree/version" ] && grep -qF "$tree/" "$tree/usr/src/linux-headers-$(cat "$tree/version")/Makefile"; then
		return
	fi
	apt_refresh "$suite"
	# The newest image whose headers the suite has too; -cloud and -rt variants lack 9p or differ in locking.
	kv=$(apt_private "$suite" apt-cache pkgnames "linux-headers-$kernel" |
		sed -n 's/^linux-headers-//p' | grep -E -- "^$kernel[.+-].*-amd64\$" | grep -vE 'cloud|-rt-' |
		sort -V | tail -n 1) || true
	[ -n "$kv" ] || skip "the suite $suite of this mirror has no kernel $kernel with headers"
	headers=$(apt_private "$suite" apt-cache show "linux-headers-$kv" |
		awk '/^Depends:/ && !n++' | grep -oE 'linux-(headers|kbuild)-[^ ,]+')
	# Newer packagings split the image from its modules.
	image=$(apt_private "$suite" apt-cache show "linux-image-$kv" |
		awk '/^Depends:/ && !n++' | grep -oE 'linux-(base|binary|modules)-[0-9][^ ,]+') || true
	packages="linux-image-$kv linux-headers-$kv $headers $image"
	say "fetching $kv: image and headers"
	rm -rf "$tree" && mkdir -p "$tree/debs"
	(
		cd "$tree/debs"
		quietly "$cache/logs/fetch-$kernel.log" apt_private "$suite" apt-get -q download $packages
	) || skip "the packages of kernel $kv can't be fetched (log: guest-cache/logs/fetch-$kernel.log)"
	for deb in "$tree"/debs/*.deb; do dpkg-deb -x "$deb" "$tree"; done
	rm -rf "$tree/debs"
	[ -e "$tree/lib/modules/$kv" ] || [ ! -e "$tree/usr/lib/modules/$kv" ] || ln -sfn usr/lib "$tree/lib"
	# The headers expect to lie under the root: their Makefile names the common part by absolute path.
	sed -i "s#\(^\|[ =]\)/usr/src/#\1$tree/usr/src/#" "$tree/usr/src/linux-headers-$kv/Makefile"
	fetch_libraries "$tree" "$suite"
	with_tools depmod -b "$tree" "$kv"
	echo "$kv" >"$tree/version"
}

fetch_tools [qemu-system-x86_64]=qemu-system-x86 [busybox]=busybox-static [modprobe]=kmod
for kernel in "$@"; do
	case $kernel in
	verbs) fetch_tools [rdma]=iproute2 [librxe]=ibverbs-providers ;;
	*) fetch_kernel "$kernel" ;;
	esac
done

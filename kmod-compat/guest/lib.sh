# Sourced by the guest's scripts: where things lie, how to say what happened, and the private apt.
# Everything that is fetched or built lands in the cache folder; the host's own packages stay as they are.

set -euo pipefail

guest_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
kmod_dir=$(dirname "$guest_dir")
top_dir=$(dirname "$kmod_dir")
cache=${GUEST_CACHE:-$top_dir/guest-cache}
tools=$cache/tools

EXIT_SKIPPED=77

say() { printf 'guest: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# What this host can't offer isn't a failure of the module, and must not look like a success either.
skip() {
	say "SKIPPED: $*"
	exit $EXIT_SKIPPED
}

# Runs a command quietly; shows what it printed only if it fails.
quietly() {
	local log=$1
	shift
	mkdir -p "$(dirname "$log")"
	"$@" >"$log" 2>&1 && return
	local rc=$?
	say "failed ($rc): $*"
	tail -n 25 "$log" >&2
	return $rc
}

# Several guests may be started at once; only one fills the cache.
one_at_a_time() {
	mkdir -p "$cache"
	exec 9>"$cache/lock"
	flock 9
}

# kernel_suite 6.1: the Debian suite that carries this kernel.
kernel_suite() {
	case $1 in
	5.10) echo bullseye ;;
	6.1) echo bookworm ;;
	6.12) echo bookworm-backports ;;
	7.3) echo trixie-backports ;;
	*) die "KERNELS: no Debian suite known for '$1' (5.10, 6.1, 6.12, 7.3)" ;;
	esac
}

# The mirror comes from the host's own apt sources: the first that carries a plain Debian suite.
debian_mirror() {
	apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(SITE)' 'Created-By: Packages' 2>/dev/null |
		awk '$1 ~ /^(bullseye|bookworm|trixie|forky|sid|oldstable|stable|testing|unstable)$/ && $2 == "main" { print $3; exit }'
}

# apt_private SUITE COMMAND...: apt with sources, lists and archives of its own, so that neither root
# nor a change of the host's configuration is needed.
apt_private() {
	local suite=$1 state=$cache/apt/$1
	shift
	"$1" -o Dir::Etc::sourcelist="$state/sources.list" -o Dir::Etc::sourceparts=/dev/null \
		-o Dir::State="$state" -o Dir::State::lists="$state/lists" -o Dir::State::status="$state/status" \
		-o Dir::Cache="$state/cache" -o Dir::Cache::archives="$state/cache/archives" \
		-o APT::Architecture=amd64 -o APT::Sandbox::User= -o Acquire::Languages=none \
		-o Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false \
		-o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false \
		-o Debug::NoLocking=true "${@:2}"
}

# apt_refresh SUITE: reads the suite's index once a day at most.
apt_refresh() {
	local suite=$1 state=$cache/apt/$1 mirror keyring=/usr/share/keyrings/debian-archive-keyring.gpg signed=
	[ -n "$(find "$state/fresh" -mtime -1 2>/dev/null)" ] && return
	command -v apt-get >/dev/null || skip "no apt-get here, so Debian's kernel for the guest can't be fetched"
	mirror=$(debian_mirror)
	[ -n "$mirror" ] || skip "apt's sources name no Debian mirror, so the guest's kernel can't be fetched"
	mkdir -p "$state/lists/partial" "$state/cache/archives/partial"
	# The tools are resolved against what the host has, kernels against nothing.
	if [ "$suite" = host ]; then
		cp /var/lib/dpkg/status "$state/status"
		suite=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
		[ -n "$suite" ] || skip "the host's Debian release can't be told from /etc/os-release"
	else
		: >"$state/status"
	fi
	[ -f "$keyring" ] && signed="[signed-by=$keyring]"
	echo "deb $signed $mirror $suite main" >"$state/sources.list"
	quietly "$cache/logs/apt-$1.log" apt_private "$1" apt-get -q update ||
		skip "the mirror's index of $suite can't be read (log: guest-cache/logs/apt-$1.log)"
	# apt calls a missing suite a warning and goes on.
	[ -n "$(find "$state/lists" -maxdepth 1 -name '*_Packages*')" ] ||
		skip "the mirror doesn't carry $suite (log: guest-cache/logs/apt-$1.log)"
	touch "$state/fresh"
}

# with_tools COMMAND...: runs a program of the host, or else the one unpacked into the cache.
with_tools() {
	local name=$1 path
	shift
	if path=$(PATH=$PATH:/usr/sbin:/sbin command -v "$name"); then
		"$path" "$@"
		return
	fi
	for path in "$tools"/{usr/bin,usr/sbin,bin,sbin}/"$name"; do
		[ -x "$path" ] || continue
		LD_LIBRARY_PATH=$tools/usr/lib/x86_64-linux-gnu:$tools/lib/x86_64-linux-gnu "$path" "$@"
		return
	done
	die "$name is neither installed nor in the cache"
}

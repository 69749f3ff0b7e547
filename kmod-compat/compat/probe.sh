#!/bin/sh
# SPDX-License-Identifier: GPL-2.0-only
# probe.sh SNIPPETS OUTPUT COMPILER FLAGS...: writes a header with HAVE_NAME for each snippet name.c that
# compiles against the kernel's headers. An undeclared function must count as a failure.
set -eu
snippets=$1 output=$2
shift 2
scratch=$output.probe
trap 'rm -f "$scratch".*' EXIT

compiles() {
	"$@" -Werror -Werror=implicit-function-declaration -DMODULE -DKBUILD_BASENAME='"probe"' \
		-DKBUILD_MODNAME='"probe"' -D__KBUILD_MODNAME=kmod_probe -DKBUILD_MODFILE='"probe"' \
		-c -o "$scratch.o" "$snippet" 2>"$scratch.log"
}

snippet=$snippets/baseline.c
if ! compiles "$@"; then
	cat "$scratch.log" >&2
	echo "ummunotify: this kernel's headers can't be compiled against (above), or lack mmu notifiers" >&2
	exit 1
fi

{
	echo "/* Made by compat/probe.sh. */"
	for snippet in "$snippets"/*.c; do
		name=$(basename "$snippet" .c)
		[ "$name" != baseline ] || continue
		macro=HAVE_$(printf %s "$name" | tr '[:lower:]' '[:upper:]')
		if compiles "$@"; then
			echo "#define $macro 1"
		else
			echo "/* no $macro */"
		fi
	done
} >"$scratch.h"
mv "$scratch.h" "$output"

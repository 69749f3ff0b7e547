# compare.awk MODULE EMULATED: compares what `walk --records` printed on two backends, row by row.
#
# Every row that is exact must have the same n and the same records on both, and be there on both; a row that one
# of them skipped is a difference too. Prints both streams of each difference side by side. Ends with a line of
# counts, and with exit code 1 if there was a difference or nothing to compare.

FNR == 1 { side++ }
/^========/ { pass = $0 }
/^== / { table = $0 }
# The mark, the class, and the name up to the column where n or the reason begins.
/^(ok  |FAIL|----|skip) / {
	row = pass " " table " " substr($0, 16, 55)
	sub(/ +$/, "", row)
	while ((side, row) in seen) row = row "'"
	seen[side, row] = substr($0, 1, 4)
	if (side == 1) order[++rows] = row
	else if (!((1, row) in seen)) order[++rows] = row
}
/^records / {
	class[side, row] = $2
	sub(/^records [a-z]+ /, "")
	stream[side, row] = $0
}

function beside(left, right,   l, r, n, m, i) {
	n = split(left, l, " ")
	m = split(right, r, " ")
	printf "     %-44s %s\n", "module", "emulated"
	for (i = 1; i <= n || i <= m; i++)
		if (i <= 3 || l[i] != r[i]) printf "  %s  %-44s %s\n", l[i] == r[i] ? " " : "!", l[i], r[i]
}

END {
	for (i = 1; i <= rows; i++) {
		row = order[i]
		if (class[1, row] != "exact" && class[2, row] != "exact") { free++; continue }
		if (!((1, row) in stream) || !((2, row) in stream)) {
			printf "DIFFERENT %s: only the %s performed it\n", row, (1, row) in stream ? "module" : "emulated device"
			different++
		} else if (stream[1, row] != stream[2, row]) {
			printf "DIFFERENT %s\n", row
			beside(stream[1, row], stream[2, row])
			different++
		} else {
			same++
		}
	}
	printf "%d exact rows the same, %d different, %d rows that needn't be\n", same, different, free
	exit different > 0 || same == 0
}

# compare.awk MODULE EMULATED: compares what `walk --records` printed on two backends, row by row.
#
# Every row must have been performed on both, or skipped on both; refused by the kernel alike. A row that is exact
# must have the same n and the same records; of one that is covered, the emulated device must have reported each
# region that the module reported, and no less of it. Prints both streams of each difference side by side. Ends with
# a line of counts, and with exit code 1 if there was a difference or nothing to compare.

FNR == 1 { side++ }
/^========/ { pass = $0 }
/^== / { table = $0 }
# The mark, the class, and the name up to the column where n or the reason begins.
/^(ok  |FAIL|----|gap |skip|none) / {
	row = pass " " table " " substr($0, 16, 55)
	sub(/ +$/, "", row)
	while ((side, row) in seen) row = row "'"
	seen[side, row] = 1
	refused[side, row] = match($0, /refused: .*/) ? substr($0, RSTART) : ""
	if (!((3 - side, row) in seen)) order[++rows] = row
}
/^records / {
	between[side, row] = $2
	sub(/^records [a-z]+ /, "")
	stream[side, row] = $0
}

function beside(left, right,   l, r, n, m, i) {
	n = split(left, l, " ")
	m = split(right, r, " ")
	printf "     %-44s %s\n", "module", "emulated"
	for (i = 1; i <= n || i <= m; i++)
		if (i <= 24 || l[i] != r[i]) printf "  %s  %-44s %s\n", l[i] == r[i] ? " " : "!", l[i], r[i]
}

# Takes "#7[A+0,A+4)*" apart: number, start and end in pages of its memory, hinted.
function take(record) {
	match(record, /^#[0-9]+/)
	number = substr(record, 2, RLENGTH - 1)
	hinted = record !~ /\*$/
	record = substr(record, RLENGTH + 2)
	start = record
	sub(/,.*/, "", start)
	end = record
	sub(/.*,/, "", end)
	sub(/\).*/, "", end)
	gsub(/[AC~]/, "", start)
	gsub(/[AC~]/, "", end)
}

# A record without a hint was hit more than once: by which parts can't be told, so that it was hit must do.
function covers(left, right,   l, r, n, m, i, from, to) {
	n = split(left, l, " ")
	m = split(right, r, " ")
	for (i = 2; i <= m; i++) {
		take(r[i])
		from[number] = start + 0
		to[number] = end + 0
	}
	for (i = 2; i <= n; i++) {
		take(l[i])
		if (!(number in from) || (hinted && (from[number] > start + 0 || to[number] < end + 0))) return 0
	}
	return 1
}

function differs(row, why) {
	printf "DIFFERENT %s: %s\n", row, why
	beside(stream[1, row], stream[2, row])
	different++
}

END {
	for (i = 1; i <= rows; i++) {
		row = order[i]
		module = (1, row) in stream
		emulated = (2, row) in stream
		if (!module && !emulated)
			continue
		if (module != emulated)
			differs(row, "only the " (module ? "module" : "emulated device") " performed it")
		else if (refused[1, row] != refused[2, row])
			differs(row, "module " refused[1, row] ", emulated " refused[2, row])
		else if (between[2, row] == "exact" && stream[1, row] != stream[2, row])
			differs(row, "not the same")
		else if (between[2, row] == "covered" && !covers(stream[1, row], stream[2, row]))
			differs(row, "less than the module reports")
		else
			fine[between[2, row]]++
	}
	printf "%d exact rows the same, %d covered, %d different, %d that the emulator needn't see as the module does\n",
		fine["exact"], fine["covered"], different, fine["free"]
	exit different > 0 || fine["exact"] == 0
}

#!/usr/bin/env bash
# Ends servers that `setsid serve.sh` started, with all their processes: end.sh PID [PID ...]
# A server that is told to end leaves its shared memory behind: what its processes had open there is removed too.
set -uo pipefail
members() { ps -eo pid=,pgid= | awk -v groups=" $* " 'index(groups, " " $2 " ") { print $1 }'; }
memory() {
  for pid in $(members "$@"); do
    find "/proc/$pid/fd" "/proc/$pid/map_files" -lname '/dev/shm/*' -printf '%l\n' 2>/dev/null
  done | sort -u
}

left=$(memory "$@")
for signal in TERM KILL; do
  for group in "$@"; do kill -s "$signal" -- "-$group" 2>/dev/null; done
  for _ in $(seq 100); do
    [ -z "$(members "$@")" ] && break 2
    sleep 0.1
  done
done
# A name that Linux shows as deleted has " (deleted)" behind it, and is no file.
while read -r file; do [ -n "$file" ] && rm -f "$file"; done <<<"$left"
exit 0

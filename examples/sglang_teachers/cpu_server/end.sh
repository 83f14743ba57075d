#!/usr/bin/env bash
# Ends servers that `setsid serve.sh` started, with all their processes: end.sh PID [PID ...]
# A server that is told to end leaves its shared memory behind: what its processes had mapped there is removed too.
# PATIENCE is how many seconds they have to leave by themselves (default 10).
set -uo pipefail
members() { ps -eo pid=,pgid=,stat= | awk -v groups=" $* " '$3 !~ /^Z/ && index(groups, " " $2 " ") { print $1 }'; }
left=$(for pid in $(members "$@"); do
  awk '$6 ~ "^/dev/shm/" && NF == 6 { print $6 }' "/proc/$pid/maps" 2>/dev/null
done | sort -u)

for signal in TERM KILL; do
  for group in "$@"; do kill -s "$signal" -- "-$group" 2>/dev/null; done
  for _ in $(seq "$((${PATIENCE:-10} * 10))"); do
    [ -z "$(members "$@")" ] && break 2
    sleep 0.1
  done
done
for file in $left; do rm -f "$file"; done

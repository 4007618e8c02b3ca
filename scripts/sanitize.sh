#!/bin/bash
# Runs the tools of compute-sanitizer on the smallest cases of every kernel in the catalogue, with several processes per GPU. Prints the
# kernels with findings, and fails if there are any. With --changed, only kernels whose source is not in the ledger of GPU runs
# (snapshots/gpu.ron) are run. With --exemplars, only kernels in snapshots/cuda are run (docs/testing.md).
#
#   GEMMULE=target/release/gemmule scripts/sanitize.sh [--changed|--exemplars] [racecheck] [memcheck] …
#
# PROCESSES (default 15) is the number of processes per GPU. LOGS (default: a new folder) is the folder for logs.
set -u
only="" exemplars=""
case "${1:-}" in
  --changed) only=--changed; shift ;;
  --exemplars) exemplars=$(cat "$(dirname "$0")"/../snapshots/cuda{,/partials}/*.snap | sed -nE 's/^=== (\w+).*/\1/p' | sort -u); shift ;;
esac
tools=${*:-racecheck memcheck}
export GEMMULE=${GEMMULE:-target/release/gemmule} LOGS=${LOGS:-$(mktemp -d)} RAYON_NUM_THREADS=1
export SANITIZER=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
export GPUS; GPUS=$(nvidia-smi -L | wc -l)
# GEMMs with these sizes are so large that racecheck takes seconds for one token.
vocabularies="n30522_ n50265_ n50257_ n32000_ n128256_ n151936_"

# Prints a line for each exemplar: the max number of tokens of its cases, and its symbol. The limits are the same as in tasks().
exemplars_by_tokens() {
  local symbol vocabulary most
  for symbol in $exemplars; do
    most=70
    case $symbol in *_persistent*) most=400 ;; esac
    for vocabulary in $vocabularies; do
      case $symbol in *"$vocabulary"*) most=1 ;; esac
    done
    echo "$most $symbol"
  done
}

# Run twelve kernels per process, because starting a process takes seconds.
tasks_of_exemplars() {
  local tool number=0 most group all
  all=$(exemplars_by_tokens)
  for tool in $tools; do
    for most in 400 1 70; do
      while read -r group; do
        [ -z "$group" ] || echo "$((number++)) $tool --max-tokens $most --only ${group// / --only }"
      done < <(awk -v most=$most '$1 == most { print $2 }' <<< "$all" | xargs -n 12)
    done
  done
}

tasks() {
  [ -z "$exemplars" ] || { tasks_of_exemplars; return; }
  local tool number=0 vocabulary part skip=""
  for vocabulary in $vocabularies; do skip="$skip --skip $vocabulary"; done
  for tool in $tools; do
    # A persistent CTA of attention computes several tiles, one after another, only in larger cases.
    for part in 1 2; do echo "$((number++)) $tool $only --only _persistent --max-tokens 400 --part $part/2"; done
    for vocabulary in $vocabularies; do
      for part in $(seq 16); do echo "$((number++)) $tool $only --only $vocabulary --max-tokens 1 --part $part/16"; done
    done
    for part in $(seq 180); do echo "$((number++)) $tool $only $skip --max-tokens 70 --part $part/180"; done
  done
}

check() {
  local number=$1 tool=$2 log; shift 2
  log=$LOGS/$tool.$number.log
  CUDA_VISIBLE_DEVICES=$((number % GPUS)) "$SANITIZER" --tool "$tool" --print-limit 8 --error-exitcode 3 \
    "$GEMMULE" kernels check --verbose --device cuda:0 "$@" > "$log" 2>&1
  echo "$? $tool $*" >> "$LOGS/summary"
}
export -f check

tasks > "$LOGS/tasks"
xargs -a "$LOGS/tasks" -P $((${PROCESSES:-15} * GPUS)) -L 1 bash -c 'check "$@"' check
for tool in $tools; do
  echo "$tool: $(grep -hE '^[0-9]+ of [0-9]+ kernels agree' "$LOGS/$tool".*.log | awk '{ n += $1 } END { print n + 0 }') kernels checked, $(grep -c "^0 $tool" "$LOGS/summary") of $(grep -c "^[0-9]* $tool" "$LOGS/tasks") tasks clean; logs in $LOGS"
done
! grep -v '^0 ' "$LOGS/summary"

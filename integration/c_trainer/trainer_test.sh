#!/usr/bin/env bash
# Tests the trainer as its users run it: a killed run continues bit for bit, a full disk keeps the old checkpoint, steps that
# a loss scale leaves out are no updates, and bad input gets a clear error.
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

# What starts a run: two ranks, unless a test says otherwise.
start=("$launcher" -n 2 --)

# train NAME args...: a small model; output in $work/NAME.out
train() {
  local name=$1
  shift
  timeout -k 5 200 "${start[@]}" "$trainer" --config "$config" --data "$work/text" --width 32 --layers 2 --mlp 64 \
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
steps_of() { grep -v eval_loss "$work/$1.jsonl" | grep -oE '"(step|loss|lr|stage)": [^,}]*'; }

same_run() {
  [ "$(hash_of "$1")" = "$(hash_of "$2")" ] || fail "parameters of $2 differ from those of $1"
  diff <(losses_of "$1") <(losses_of "$2") >"$work/diff" || fail "logged losses of $2 differ from those of $1: $(head -n 6 "$work/diff")"
}

bytes_as_planned() {
  local sent planned
  sent=$(grep -o '"payload_bytes_sent": \[.*\]' "$work/$1.json" | grep -o '\[.*\]')
  planned=$(grep -o '"payload_bytes_planned": \[.*\]' "$work/$1.json" | grep -o '\[.*\]')
  [ "$sent" = "$planned" ] || fail "$1: bytes sent $sent are not the bytes planned $planned"
}

test_figures() {
  local span
  run_well whole --save "$work/whole.d" --save-every 1000
  [ "$(wc -l <"$work/whole.jsonl")" = 63 ] || fail "60 steps and 3 evaluations should be 63 lines"
  bytes_as_planned whole
  SOTTO_TRACE=$work/again run_well again
  same_run whole again
  for span in compute sotto_optim_step; do
    [ "$(grep -c "\"name\": \"$span\"" "$work/again.rank1.json")" = 60 ] || fail "the time line has not 60 spans \"$span\""
  done
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

# kill_at STEP NAME args...: starts a run and kills it, launcher and ranks, once a checkpoint of that step or later is complete.
kill_at() {
  local step=$1 name=$2 now
  shift 2
  train "$name" "$@" --save "$work/$name.d" --save-every 3 --eval-every 50000 --steps 100000 &
  background=$!
  for _ in $(seq 2000); do
    now=$(latest_step "$work/$name.d")
    [ "${now:-0}" -lt "$step" ] || break
    sleep 0.05
  done
  [ "${now:-0}" -ge "$step" ] || fail "$name: no checkpoint of step $step in 100 s: $(cat "$work/$name.out")"
  kill_tree "$background"
  wait "$background" 2>/dev/null || true
  background=
}

# What is killed writes a checkpoint every 3 steps and never evaluates; the resumed run must still equal an unbroken one.
test_resume() {
  local step
  kill_at 9 broken
  step=$(latest_step "$work/broken.d")
  [ "$step" -lt 49000 ] || fail "the run was killed too late (step $step)"
  run_well broken --save "$work/broken.d" --save-every 50 --resume --steps $((step + 20)) --eval-every 50000
  run_well unbroken --steps $((step + 20)) --eval-every 50000
  same_run unbroken broken
  expect_error "--seed was 1, now it is 7" other_seed --save "$work/broken.d" --resume --seed 7 --steps 100000
  expect_error "is of step $((step + 20)), --steps is 10" short --save "$work/broken.d" --resume --steps 10
}

# Every type trains; the 1-bit ones leave full precision after freeze_step, in tensors and in buckets too.
test_optimizers() {
  local name type params sections expected
  while read -r name type params sections expected; do
    printf '{"optimizer": {"type": "%s", "params": {"lr": 0.002%s}}%s}' "$type" "${params/-/}" "${sections/-/}" \
      >"$work/$name"
    run_well "$name" --config "$work/$name" --steps 6
    bytes_as_planned "$name"
    [ "$(stage_of "$name" 6)" = "$expected" ] || fail "$name: step 6 is logged as $(stage_of "$name" 6)"
  done <<'END'
sgd SGD ,"momentum":0.9 - full precision
adam Adam - - full precision
adamw AdamW ,"weight_decay":0.1 - full precision
lamb Lamb - - full precision
onebit_adam OneBitAdam ,"freeze_step":3 - compressed
tensors OneBitLamb ,"freeze_step":3 ,"fp16":{"enabled":true},"sotto":{"granularity":"tensor"} compressed
buckets OneBitLamb ,"freeze_step":3 ,"sotto":{"granularity":"bucket","bucket_elements":8192} compressed
END
}

# Outer steps by the file alone: every kind trains, and the bytes of its averages are those planned. Ranks end with the
# anchor, so a rank's hash is everybody's. What is killed with an average under way goes on from its checkpoint bit for bit.
test_outer_steps() {
  local name outer stages step ended
  while read -r name stages outer; do
    printf '{"optimizer": {"type": "Lamb", "params": {"lr": 0.02}}, "sotto": {"outer": %s}}' "$outer" >"$work/$name"
    run_well "$name" --config "$work/$name" --steps 15 --eval-every 5
    bytes_as_planned "$name"
    grep -q '"outer_period": [1-9]' "$work/$name.json" || fail "$name: the summary has no period"
    [ "$(stage_of "$name" 6),$(stage_of "$name" 7)" = "$stages" ] ||
      fail "$name: steps 6 and 7 are logged as $(stage_of "$name" 6) and $(stage_of "$name" 7)"
  done <<'END'
co2 outer,local {"preset": "co2", "period": 6}
co2_onebit outer,local {"preset": "co2", "period": 6, "codec": "onebit"}
diloco outer,local {"preset": "diloco", "period": 3}
slowmo local,local {"preset": "slowmo", "period": 4}
streaming local,local {"preset": "streaming_diloco", "period": 8, "delay": 2, "fragments": 2, "codec": "int4"}
warmed outer,local {"preset": "local_sgd", "period": 12, "warmup_steps": 6}
END
  printf '{"optimizer": {"type": "Lamb", "params": {"lr": 0.02}}, "sotto": {"outer": {"period": "auto"}}}' >"$work/auto"
  run_well measuring --config "$work/auto" --steps 15 --eval-every 5
  if grep outer_period "$work/measuring.json"; then fail "measuring: the summary has a period that is not chosen yet"; fi
  run_well measured --config "$work/auto"
  grep -q '"outer_period": [1-9]' "$work/measured.json" || fail "measured: the summary has no period"
  kill_at 9 outer_broken --config "$work/co2_onebit"
  step=$(latest_step "$work/outer_broken.d")
  run_well outer_broken --config "$work/co2_onebit" --save "$work/outer_broken.d" --save-every 50 --resume \
    --steps $((step + 20)) --eval-every 50000
  run_well outer_unbroken --config "$work/co2_onebit" --steps $((step + 20)) --eval-every 50000
  same_run outer_unbroken outer_broken
  # A run that has ended can be made longer.
  run_well outer_longer --config "$work/co2_onebit" --save "$work/outer_longer.d" --steps $((step + 3)) --eval-every 50000
  run_well outer_longer --config "$work/co2_onebit" --save "$work/outer_longer.d" --resume --steps $((step + 20)) \
    --eval-every 50000
  same_run outer_unbroken outer_longer
  # One that is resumed where it had ended makes the averages of its end again, with the rate of its last step.
  run_well ended --config "$work/slowmo" --save "$work/ended.d" --steps 15 --eval-every 5
  ended=$(hash_of ended)
  run_well ended --config "$work/slowmo" --save "$work/ended.d" --resume --steps 15
  [ "$(hash_of ended)" = "$ended" ] || fail "parameters of a run that had ended differ behind --resume"
  [ "$(sed -n 's/.*"clock".*, "wall_s": \([0-9]*\).*/\1/p' "$work/ended.json")" -lt 100 ] || fail "wall_s of a run that had ended: $(grep wall_s "$work/ended.json")"
}

# stage_of NAME STEP: what the log says that step did.
stage_of() { sed -n "s/^{\"step\": $2, .*\"stage\": \"\([a-z ]*\)\".*/\1/p" "$work/$1.jsonl"; }

# Between two synchronisations the ranks of 0/1 Adam have different parameters: a checkpoint holds each rank's own.
test_resume_between_synchronisations() {
  cat >"$work/zeroone_config" <<'END'
{"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 0.002, "var_freeze_step": 8, "var_update_scaler": 2,
  "local_step_scaler": 4, "local_step_clipper": 4}}}
END
  run_well zeroone --config "$work/zeroone_config" --steps 24 --eval-every 5000
  run_well cut --config "$work/zeroone_config" --steps 17 --eval-every 5000 --save "$work/cut.d"
  [ "$(stage_of cut 17)" = local ] || fail "step 17 should lie between synchronisations, not be $(stage_of cut 17)"
  run_well cut --config "$work/zeroone_config" --steps 24 --eval-every 5000 --save "$work/cut.d" --resume
  [ "$(hash_of zeroone)" = "$(hash_of cut)" ] || fail "parameters differ after a restart between synchronisations"
  diff <(steps_of zeroone) <(steps_of cut) >"$work/diff" ||
    fail "losses differ after a restart between synchronisations: $(head -n 6 "$work/diff")"
}

# scaled NAME FP16: ten steps of Adam whose gradients travel as 32-bit, or with 16 bits if FP16 says so.
scaled() {
  printf '{"optimizer": {"type": "Adam", "params": {"lr": 0.002}}%s}' "$2" >"$work/$1_config"
  run_well "$1" --config "$work/$1_config" --steps 10
}

# A static scale of a power of two changes nothing, neither parameters nor reported losses. A dynamic one that is too large
# at first leaves steps out, which are logged and not counted.
test_loss_scale() {
  local skipped
  scaled unscaled ''
  scaled static ', "fp16": {"enabled": true, "loss_scale": 1024}, "communication_data_type": "fp32"'
  same_run unscaled static
  scaled dynamic ', "fp16": {"enabled": true, "initial_scale_power": 24}, "communication_data_type": "fp16"'
  skipped=$(grep -c '"stage": "skipped", "skipped": true' "$work/dynamic.jsonl") || fail "a scale of 2^24 left no step out"
  grep -q "\"steps\": 10, \"skipped_steps\": $skipped," "$work/dynamic.json" || fail "the summary does not say 10 steps, $skipped skipped"
  [ "$(wc -l <"$work/dynamic.jsonl")" = $((10 + skipped + 1)) ] || fail "10 steps, $skipped skipped and 1 evaluation expected"
  [ "$(stage_of dynamic 10)" = "full precision" ] || fail "step 10 is logged as $(stage_of dynamic 10)"
}

# One rank connects to no peer, whatever started it and whatever address it was given. All runs are the same, bit for bit.
test_one_rank() {
  local name start nobody=192.0.2.1
  start=("$launcher" -n 1 --)
  run_well alone --steps 12 --eval-every 5000
  run_well alone_saved --steps 6 --eval-every 5000 --save "$work/alone.d"
  run_well alone_saved --steps 12 --eval-every 5000 --save "$work/alone.d" --resume
  [ "$(hash_of alone)" = "$(hash_of alone_saved)" ] || fail "parameters differ after a restart of one rank"
  start=(env RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 "MASTER_ADDR=$nobody" MASTER_PORT=29500)
  run_well torchrun --steps 12 --eval-every 5000
  start=(env OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1)
  run_well openmpi --steps 12 --eval-every 5000
  start=(env SOTTO_RANK=0 SOTTO_WORLD_SIZE=1)
  run_well without_address --steps 12 --eval-every 5000
  start=(env SOTTO_RANK=0 SOTTO_WORLD_SIZE=1 "SOTTO_RENDEZVOUS=tcp://$nobody:29500" SOTTO_TRANSPORT=tcp)
  run_well with_address --steps 12 --eval-every 5000
  for name in torchrun openmpi without_address with_address; do
    [ "$(hash_of alone)" = "$(hash_of "$name")" ] || fail "parameters of $name differ from those of sotto-run -n 1"
  done
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
  expect_error "--record needs the start of a run" resumed_record --record "$work/record" --save "$work/empty.d" --resume
  expect_error "--summary: cannot open \"$work/missing/summary" summary --summary "$work/missing/summary"
  [ ! -s "$work/summary.jsonl" ] || fail "a run without a place for its summary trained"
  expect_error "--record: cannot open \"$work/missing/record.rank" record --record "$work/missing/record"
}

seq 1 400000 >"$work/text"
for test in test_one_rank test_figures test_resume test_optimizers test_outer_steps test_resume_between_synchronisations test_loss_scale test_disk_full test_bad_input; do
  printf '%s\n' "$test"
  $test
done
echo passed

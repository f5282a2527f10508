/* main.c - trains a small masked language model on several ranks.
 *
 * What a trainer on Sotto has to do:
 *   1. join the other ranks                          ranks_join
 *   2. register parameter and gradient buffers       create_optimizer
 *   3. per step: compute the local gradient, start the optimizer's step, wait for it train_step
 *   4. save and restore the optimizer's state, which holds the parameters                   save,
 * resume Averaging, compression, clipping, learning rate and update happen inside sotto_optim_step,
 * as the configuration file says. The rest of this program is the model, its data, and the figures
 * it reports.
 */
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "blas.h"
#include "checkpoint.h"
#include "common.h"
#include "config.h"
#include "data.h"
#include "log.h"
#include "model.h"
#include "options.h"
#include "ranks.h"
#include "record.h"
#include "totals.h"

typedef struct Trainer {
  Options options;
  Ranks ranks;
  Data data;
  Model* model;
  Batch batch;
  sotto_optim* optim;
  sotto_outer* outer;         /* its outer steps; NULL: gradients are averaged in each step */
  sotto_optim_info info;      /* before the next step */
  sotto_comm_counters before; /* of ranks.comm, before the next step */
  uint64_t between_hosts;     /* ranks_sent_between_hosts when it was counted last */
  Totals totals;
  Log log;      /* rank 0 */
  FILE* record; /* NULL: none */
  RunKey key;
  Latest latest;   /* checkpoint that "latest" points at */
  int64_t last_ns; /* end of the last step, or the clock's start */
} Trainer;

static uint64_t samples_per_step(const Trainer* t) {
  return (uint64_t)t->ranks.size * (uint64_t)(t->options.micro_batch * t->options.accumulation);
}

/* ---- setting up ---- */

static void create_model(Trainer* t) {
  const Options* o = &t->options;
  const ModelShape shape = {.vocab = t->data.vocab,
                            .width = (int)o->width,
                            .layers = (int)o->layers,
                            .heads = (int)o->heads,
                            .mlp = (int)o->mlp,
                            .positions = (int)o->positions,
                            .masked = (int)o->masked,
                            .max_sequences = (int)o->micro_batch};
  t->model = model_create(&shape);
  if (!t->model || !batch_alloc(&t->batch, &shape, shape.max_sequences))
    die("out of memory for the model");
  model_init(t->model, (uint64_t)o->seed);
}

/* The parameters must start equal on all ranks; rank 0's are used, so that two machines whose
 * libraries round a logarithm differently do not diverge. The data must be the same files
 * everywhere. */
static void agree_on_start(Trainer* t) {
  uint64_t* hashes = calloc((size_t)t->ranks.size, sizeof *hashes);
  if (!hashes) die("out of memory");
  ranks_gather(&t->ranks, &t->data.hash, 1, SOTTO_INT64, hashes);
  for (int r = 1; r < t->ranks.size; ++r) {
    if (hashes[r] != hashes[0]) die("--data: the files of rank %d differ from those of rank 0", r);
  }
  free(hashes);
  ranks_broadcast(&t->ranks, t->model->params, t->model->n_params, SOTTO_FLOAT32);
}

static void create_optimizer(Trainer* t, const char* config) {
  Model* model = t->model;
  sotto_param* params = calloc((size_t)model->n_tensors, sizeof *params);
  if (!params) die("out of memory");
  for (int i = 0; i < model->n_tensors; ++i) {
    const Tensor* tensor = &model->tensors[i];
    params[i].struct_size = sizeof *params;
    params[i].name = tensor->name;
    params[i].group = tensor_group(tensor);
    params[i].param = buffer_of(model->params + tensor->offset, tensor->count, SOTTO_FLOAT32);
    params[i].grad = buffer_of(model->grads + tensor->offset, tensor->count, SOTTO_FLOAT32);
  }
  check(sotto_optim_create(t->ranks.comm, config, params, (uint64_t)model->n_tensors, &t->optim),
        "sotto_optim_create");
  free(params); /* the structs are copied; the buffers they name are borrowed */
  const sotto_status status = sotto_optim_outer(t->optim, &t->outer);
  if (status == SOTTO_E_INVALID_STATE)
    t->outer = NULL; /* the configuration has none */
  else
    check(status, "sotto_optim_outer");
}

static void read_optimizer_info(Trainer* t) {
  t->info.struct_size = sizeof t->info;
  check(sotto_optim_get_info(t->optim, &t->info), "sotto_optim_get_info");
  t->before.struct_size = sizeof t->before;
  check(sotto_comm_get_counters(t->ranks.comm, &t->before), "sotto_comm_get_counters");
}

/* ---- the clock ---- */

static void clock_start(Trainer* t) {
  ranks_barrier(&t->ranks);
  t->last_ns = now_ns();
}

/* Ends behind a barrier too, which counts as time in Sotto's calls. */
static void clock_stop(Trainer* t) {
  const int64_t before = now_ns();
  t->totals.running_ns += before - t->last_ns;
  ranks_barrier(&t->ranks);
  const int64_t waited = now_ns() - before;
  t->totals.sotto_ns += waited;
  t->totals.running_ns += waited;
}

/* ---- training ---- */

/* Batches drawn so far: a step that a dynamic loss scale leaves out has used one too. */
static uint64_t batches(const Totals* totals) { return totals->step + totals->skipped; }

/* What the next step will do, told by what it will send: full precision is at least 2 bytes per
 * parameter, each way to W - 1 of W ranks; compressed is one bit; between two synchronisations 0/1
 * Adam sends nothing, or a few bytes to decide on clipping and overflow together. */
static Stage next_stage(const Trainer* t) {
  if (t->outer) return t->info.payload_bytes_next_step ? OUTER : LOCAL;
  const double ways = 2.0 * (t->ranks.size - 1) / t->ranks.size;
  const double bytes = (double)t->info.payload_bytes_next_step;
  const double each = ways > 0 ? bytes / (ways * (double)t->model->n_params) : 0;
  if (ways > 0 && t->info.stage != 0 && each < 1.0 / 16) return LOCAL;
  return t->info.stage != 0 || (ways > 0 && each < 1.5) ? COMPRESSED : FULL_PRECISION;
}

/* Gradient of the mean loss over this rank's samples of the step, times the loss scale that the
 * optimizer divides by (1 without fp16); returns that loss, without the scale. */
static double compute_gradient(Trainer* t) {
  const Options* o = &t->options;
  Model* model = t->model;
  const double scale = 1.0 / (double)(o->micro_batch * o->accumulation * o->masked);
  double loss = 0;
  memset(model->grads, 0, model->n_params * sizeof *model->grads);
  t->batch.sequences = (int)o->micro_batch;
  for (int64_t i = 0; i < o->accumulation; ++i) {
    const uint64_t number = batches(&t->totals) * (uint64_t)o->accumulation + (uint64_t)i;
    data_train_batch(&t->data, &model->shape, (uint64_t)o->seed, number, t->ranks.rank, &t->batch);
    loss += model_forward(model, &t->batch);
    model_backward(model, &t->batch, (real)(scale * t->info.loss_scale));
  }
  return loss * scale;
}

/* Adds what was sent since the last time to the totals. */
static void count_bytes(Trainer* t) {
  const sotto_comm_counters before = t->before;
  read_optimizer_info(t);
  t->totals.payload_sent += t->before.payload_bytes_sent - before.payload_bytes_sent;
  t->totals.header_sent += t->before.header_bytes_sent - before.header_bytes_sent;
  t->totals.payload_planned += t->before.payload_bytes_planned - before.payload_bytes_planned;
}

static void count_between_hosts(Trainer* t) {
  const uint64_t before = t->between_hosts;
  t->between_hosts = ranks_sent_between_hosts(&t->ranks);
  t->totals.payload_between_hosts += t->between_hosts - before;
}

/* Adds the step's times and bytes to the totals and completes the record. The optimizer says
 * whether the step was an update: one that a dynamic loss scale left out has used time, bytes and a
 * batch, but is not counted as a step. */
static void account(Trainer* t, const sotto_op_stats* stats, int64_t computed_ns,
                    StepRecord* record) {
  const uint64_t updates = t->info.step, sent = t->totals.payload_sent;
  Totals* totals = &t->totals;
  count_bytes(t);
  const int64_t end = now_ns(), step_ns = end - t->last_ns, sotto_ns = end - computed_ns;
  const int64_t kernel_ns = (int64_t)stats->kernel_ns;
  if (t->info.step == updates) {
    record->stage = SKIPPED;
    ++totals->skipped;
  } else {
    ++totals->step;
  }
  totals->running_ns += step_ns;
  totals->sotto_ns += sotto_ns;
  totals->kernel_ns += kernel_ns;
  ++totals->stage_steps[record->stage];
  totals->stage_ns[record->stage] += step_ns;
  record->step_ms = (double)step_ns / 1e6;
  record->compute_ms = (double)(step_ns - sotto_ns) / 1e6;
  record->codec_ms = (double)kernel_ns / 1e6;
  record->comm_ms = (double)(sotto_ns - kernel_ns) / 1e6;
  record->payload_bytes = totals->payload_sent - sent;
  record->grad_norm = t->info.grad_norm;
  record->batch = samples_per_step(t);
  record->samples = batches(totals) * record->batch;
  t->last_ns = end;
}

/* The end of a training with outer steps: what was not averaged yet is, and the anchor becomes the
 * parameters. On the clock, as a part of the last step. */
static void flush(Trainer* t) {
  if (!t->outer) return;
  check(sotto_outer_flush(t->outer, NULL, NULL), "sotto_outer_flush");
  count_bytes(t);
  const int64_t now = now_ns();
  t->totals.running_ns += now - t->last_ns;
  t->totals.sotto_ns += now - t->last_ns;
  t->last_ns = now;
}

/* The last step as two spans of the time line, if SOTTO_TRACE asks for one. */
static void trace_step(Trainer* t, int64_t begin_ns, int64_t computed_ns) {
  sotto_context* context = t->ranks.context;
  check(sotto_trace_span(context, "compute", begin_ns, computed_ns), "sotto_trace_span");
  check(sotto_trace_span(context, "sotto_optim_step", computed_ns, t->last_ns), "sotto_trace_span");
}

/* Returns whether the parameters were updated. */
static int train_step(Trainer* t) {
  StepRecord record = {.lr = t->info.lr, .loss_scale = t->info.loss_scale, .stage = next_stage(t)};
  sotto_op_stats stats;
  sotto_op* op = NULL;
  record.loss = compute_gradient(t);
  if (t->record) record_step(t->record, t->model);
  const int64_t begin_ns = t->last_ns, computed_ns = now_ns();
  check(sotto_optim_step(t->optim, NULL, &op), "sotto_optim_step");
  finish_op(op, &stats, "sotto_optim_step");
  account(t, &stats, computed_ns, &record);
  trace_step(t, begin_ns, computed_ns);
  if (t->ranks.rank == 0) log_step(&t->log, &t->totals, &record);
  return record.stage != SKIPPED;
}

/* ---- evaluation ---- */

/* Mean loss over n fixed held-out sequences, which the ranks share out. */
static double evaluate(Trainer* t, int which, size_t n) {
  const ModelShape* shape = &t->model->shape;
  double sums[2] = {0, 0}; /* loss, masked tokens */
  t->batch.sequences = 0;
  for (size_t i = (size_t)t->ranks.rank; i < n; i += (size_t)t->ranks.size) {
    data_eval_sequence(&t->data, shape, which, i, &t->batch, t->batch.sequences++);
    if (t->batch.sequences < shape->max_sequences && i + (size_t)t->ranks.size < n) continue;
    sums[0] += model_forward(t->model, &t->batch);
    sums[1] += (double)t->batch.sequences * shape->masked;
    t->batch.sequences = 0;
  }
  ranks_sum(&t->ranks, sums, 2);
  return sums[0] / sums[1];
}

/* 0 without outer steps, and while a period "auto" is still measured. */
static uint64_t outer_period(const Trainer* t) {
  sotto_outer_info info = SOTTO_OUTER_INFO_INIT;
  if (!t->outer) return 0;
  check(sotto_outer_get_info(t->outer, &info), "sotto_outer_get_info");
  return info.events & SOTTO_OUTER_MEASURING ? 0 : info.period;
}

/* With outer steps it is the anchor, which all ranks have alike, that is evaluated. */
static void swap_anchor(Trainer* t) {
  if (t->outer) check(sotto_outer_swap(t->outer, NULL, NULL), "sotto_outer_swap");
}

static void evaluate_subset(Trainer* t) {
  swap_anchor(t);
  t->totals.eval_loss = evaluate(t, EVAL_SUBSET, (size_t)t->options.eval_sequences);
  swap_anchor(t);
  if (t->ranks.rank == 0) log_eval(&t->log, &t->totals, batches(&t->totals) * samples_per_step(t));
}

/* ---- checkpoints ---- */

/* Ends the program on all ranks if one of them failed; the one that did says why. */
static void agree(const Trainer* t, int ok, const char* what, const Failure* failure) {
  if (ranks_all(&t->ranks, ok)) return;
  die("%s: %s", what, ok ? "another rank failed; its message says why" : failure->text);
}

static void save(Trainer* t) {
  const char* directory = t->options.save;
  Failure failure;
  uint64_t n = 0;
  count_between_hosts(t);
  check(sotto_optim_state_export(t->optim, SOTTO_STATE_EXACT, NULL, 0, &n),
        "sotto_optim_state_export");
  void* state = malloc(n ? n : 1);
  if (!state) die("checkpoint: out of memory for %" PRIu64 " bytes", n);
  check(sotto_optim_state_export(t->optim, SOTTO_STATE_EXACT, state, n, &n),
        "sotto_optim_state_export");
  if (t->ranks.rank == 0) t->totals.log_bytes = log_flush(&t->log);
  const Latest next = {(int64_t)t->totals.step, 1 - t->latest.slot};
  int ok = checkpoint_write(directory, next.slot, &t->key, &t->totals, state, n, &failure);
  free(state);
  agree(t, ok, "checkpoint", &failure);
  if (t->ranks.rank == 0) ok = latest_write(directory, &next, &failure);
  agree(t, ok, "checkpoint", &failure);
  t->latest = next;
}

/* Finds out which checkpoint is the latest; rank 0's directory decides. */
static void prepare_checkpoints(Trainer* t) {
  Failure failure;
  int ok = checkpoint_prepare(t->options.save, &failure);
  if (ok && t->ranks.rank == 0) ok = latest_read(t->options.save, &t->latest, &failure);
  agree(t, ok, "checkpoint", &failure);
  ranks_broadcast(&t->ranks, &t->latest, 2, SOTTO_INT64);
}

static void resume(Trainer* t) {
  Failure failure;
  void* state = NULL;
  uint64_t n = 0;
  if (t->latest.step < 0) die("--resume: no complete checkpoint in \"%s\"", t->options.save);
  if (t->latest.step > t->options.steps) {
    die("--resume: the checkpoint is of step %" PRId64 ", --steps is %" PRId64, t->latest.step,
        t->options.steps);
  }
  int ok =
      checkpoint_read(t->options.save, t->latest.slot, &t->key, &t->totals, &state, &n, &failure);
  if (ok && (int64_t)t->totals.step != t->latest.step) {
    ok = 0;
    snprintf(failure.text, sizeof failure.text,
             "the file is of step %" PRIu64 " instead of %" PRId64, t->totals.step, t->latest.step);
  }
  agree(t, ok, "--resume", &failure);
  check(sotto_optim_state_import(t->optim, SOTTO_STATE_EXACT, state, n),
        "sotto_optim_state_import");
  free(state);
  read_optimizer_info(t);
  if (t->info.step != t->totals.step) {
    die("--resume: the optimizer's state is of step %" PRIu64
        ", the checkpoint's counts of step "
        "%" PRIu64,
        t->info.step, t->totals.step);
  }
}

static RunKey run_key(const Trainer* t) {
  const Options* o = &t->options;
  const RunKey key = {t->ranks.size,   t->ranks.rank, o->seed,   o->micro_batch,
                      o->accumulation, o->width,      o->layers, o->heads,
                      o->mlp,          o->positions,  o->masked, t->data.hash};
  return key;
}

/* ---- the run ---- */

static void train(Trainer* t) {
  const Options* o = &t->options;
  const uint64_t steps = (uint64_t)o->steps;
  clock_start(t);
  if (t->totals.step >= steps) { /* the checkpoint has averages under way */
    flush(t);
    clock_stop(t);
  }
  while (t->totals.step < steps) {
    if (!train_step(t)) continue;
    const int last = t->totals.step == steps;
    const int eval = last || t->totals.step % (uint64_t)o->eval_every == 0;
    const int checkpoint =
        o->save && (last || (o->save_every && t->totals.step % (uint64_t)o->save_every == 0));
    if (!eval && !checkpoint) continue;
    if (last && checkpoint) { /* with averages under way: the run can be made longer */
      clock_stop(t);
      save(t);
      clock_start(t);
    }
    if (last) flush(t);
    clock_stop(t);
    if (eval) evaluate_subset(t);
    if (checkpoint && !last) save(t);
    if (!last) clock_start(t);
  }
}

enum { N_TIMES = 3, N_BYTES = 4 };

/* Gathers the ranks' figures and writes the summary. */
static void report(Trainer* t, double val_loss, size_t windows) {
  count_between_hosts(t);
  const Totals* totals = &t->totals;
  const size_t world = (size_t)t->ranks.size;
  double times[N_TIMES] = {(double)(totals->running_ns - totals->sotto_ns) / 1e9,
                           (double)totals->kernel_ns / 1e9,
                           (double)(totals->sotto_ns - totals->kernel_ns) / 1e9};
  int64_t* bytes = calloc(N_BYTES * world, sizeof *bytes);
  if (!bytes) die("out of memory");
  ranks_sum(&t->ranks, times, N_TIMES);
  ranks_gather(&t->ranks, &totals->payload_sent, 1, SOTTO_INT64, bytes);
  ranks_gather(&t->ranks, &totals->payload_planned, 1, SOTTO_INT64, bytes + world);
  ranks_gather(&t->ranks, &totals->header_sent, 1, SOTTO_INT64, bytes + 2 * world);
  ranks_gather(&t->ranks, &totals->payload_between_hosts, 1, SOTTO_INT64, bytes + 3 * world);
  const Summary summary = {.val_loss = val_loss,
                           .eval_loss = totals->eval_loss,
                           .unigram_entropy = t->data.entropy,
                           .wall_s = (double)totals->running_ns / 1e9,
                           .compute_s = times[0] / (double)world,
                           .codec_s = times[1] / (double)world,
                           .exposed_comm_s = times[2] / (double)world,
                           .payload_sent = bytes,
                           .payload_planned = bytes + world,
                           .header_sent = bytes + 2 * world,
                           .between_hosts = bytes + 3 * world,
                           .held_out_sequences = windows,
                           .outer_period = outer_period(t),
                           .params_hash = hash_bytes(HASH_START, t->model->params,
                                                     t->model->n_params * sizeof *t->model->params),
                           .n_params = (int64_t)t->model->n_params,
                           .batch = (int64_t)samples_per_step(t),
                           .world = t->ranks.size,
                           .totals = totals};
  if (t->ranks.rank == 0) {
    char text[256];
    snprintf(text, sizeof text,
             "held-out loss %.4f nats (unigram entropy %.3f) after %.1f s on the clock", val_loss,
             t->data.entropy, summary.wall_s);
    log_note(&t->log, text);
    log_summary(&t->options, &summary);
  }
  free(bytes);
}

static void set_up(Trainer* t) {
  Options* o = &t->options;
  char* config = config_read(o->config);
  char transport[32];
  config_transport(o, config, transport, sizeof transport);
  ranks_join(&t->ranks, transport);
  config_batch(o, config, t->ranks.size);
  data_load(&t->data, o->data, o->n_data, t->ranks.rank == 0);
  create_model(t);
  agree_on_start(t);
  create_optimizer(t, config);
  free(config);
  t->key = run_key(t);
  t->latest.step = -1;
  t->latest.slot = 1;
  t->totals.eval_loss = NAN;
  if (o->save) prepare_checkpoints(t);
  if (o->resume) resume(t);
  if (o->record) t->record = record_open(o->record, t->ranks.rank, t->model);
  read_optimizer_info(t);
  t->between_hosts = ranks_sent_between_hosts(&t->ranks);
}

int main(int argc, char** argv) {
  Trainer trainer = {0}, *t = &trainer;
  blas_prepare(argv);
  signal(SIGXFSZ,
         SIG_IGN); /* a file size limit is an error of write(), not the end of the process */
  options_parse(&t->options, argc, argv);
  set_up(t);
  if (t->ranks.rank == 0) {
    char text[256];
    log_open(&t->log, &t->options, t->options.resume ? &t->totals : NULL);
    snprintf(
        text, sizeof text,
        "%zu parameters, %d ranks, %" PRIu64 " samples a step, from step %" PRIu64 ", BLAS: %s",
        t->model->n_params, t->ranks.size, samples_per_step(t), t->totals.step, blas_kernels());
    log_note(&t->log, text);
  }
  train(t);
  const size_t windows = data_held_out_windows(&t->data, &t->model->shape);
  report(t, evaluate(t, EVAL_ALL, windows), windows);
  if (t->ranks.rank == 0) log_close(&t->log);
  if (t->record) record_close(t->record);
  check(sotto_outer_destroy(t->outer), "sotto_outer_destroy");
  check(sotto_optim_destroy(t->optim), "sotto_optim_destroy");
  ranks_leave(&t->ranks);
  batch_free(&t->batch);
  model_destroy(t->model);
  data_free(&t->data);
  return 0;
}

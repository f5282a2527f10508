/* States that a library has written, and how training goes on from them. Two ranks, threads of this
 * process, use nothing but sotto.h.
 *
 *   states write DIR    trains with every optimizer, exports, goes on; DIR gets for each optimizer
 *                       and rank NAME.rankR.state, what was exported, and NAME.rankR.params, the
 *                       parameters some steps later
 *   states read DIR     imports these states: the parameters some steps later have to be the same,
 *                       bit for bit
 *   states rewrite DIR  the same, and an export behind the import has to be the same file again
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sotto/sotto.h"

#define RANKS 2
#define TENSORS 3
#define ELEMENTS 218
#define STEPS 10      /* before the export: in the compressed stage, between synchronisations */
#define STEPS_AFTER 7 /* with another one in between */

static const uint64_t kCounts[TENSORS] = {200, 17, 1};

typedef struct Kind {
  const char* name;
  const char* json;
} Kind;

static const Kind kKinds[] = {
    {"sgd", "{\"optimizer\": {\"type\": \"SGD\", \"params\": {\"lr\": 0.01, \"momentum\": 0.9}}}"},
    {"adam", "{\"optimizer\": {\"type\": \"Adam\", \"params\": {\"lr\": 0.01}}}"},
    {"adamw",
     "{\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 0.01, \"weight_decay\": 0.1}},"
     " \"scheduler\": {\"type\": \"WarmupLR\", \"params\": {\"warmup_max_lr\": 0.001, "
     "\"warmup_num_steps\": 12}},"
     " \"sotto\": {\"gradient_codec\": {\"type\": \"onebit\", \"chunk_align\": 8}}}"},
    {"lamb",
     "{\"optimizer\": {\"type\": \"Lamb\", \"params\": {\"lr\": 0.01, \"weight_decay\": 0.01}},"
     " \"gradient_clipping\": 1.0}"},
    {"onebit_adam",
     "{\"optimizer\": {\"type\": \"OneBitAdam\", \"params\": {\"lr\": 0.01, \"freeze_step\": 4}},"
     " \"sotto\": {\"chunk_align\": 8}}"},
    {"onebit_lamb",
     "{\"optimizer\": {\"type\": \"OneBitLamb\", \"params\": {\"lr\": 0.01, \"freeze_step\": 4}},"
     " \"sotto\": {\"chunk_align\": 8}}"},
    {"zeroone_adam",
     "{\"optimizer\": {\"type\": \"ZeroOneAdam\", \"params\": {\"lr\": 0.01, \"var_freeze_step\":"
     " 5, \"var_update_scaler\": 2, \"local_step_scaler\": 3, \"local_step_clipper\": 4}},"
     " \"sotto\": {\"chunk_align\": 8}}"},
    {"lion",
     "{\"optimizer\": {\"type\": \"Lion\", \"params\": {\"lr\": 0.01, \"weight_decay\": 0.1}}}"}};
#define KINDS (sizeof kKinds / sizeof kKinds[0])
#define KINDS_0_1 7 /* of those, that version 0.1 had */

static int g_write, g_rewrite;
static const char* g_folder;
static sotto_unique_id g_id;
static sotto_context* g_first;

static void fail(const char* what, const char* text) {
  fprintf(stderr, "%s: %s\n", what, text);
  exit(1);
}
static void must(sotto_status status, const char* what) {
  if (status != SOTTO_OK) fail(what, sotto_last_error());
}

typedef struct Bytes {
  char* data;
  uint64_t n;
} Bytes;

static FILE* open_file(const Kind* kind, int32_t rank, const char* ending, const char* mode) {
  char path[4096];
  FILE* file;
  snprintf(path, sizeof path, "%s/%s.rank%d.%s", g_folder, kind->name, rank, ending);
  file = fopen(path, mode);
  if (file == NULL) fail(path, "cannot be opened");
  return file;
}

static void write_file(const Kind* kind, int32_t rank, const char* ending, const void* data,
                       uint64_t n) {
  FILE* file = open_file(kind, rank, ending, "wb");
  if (fwrite(data, 1, n, file) != n || fclose(file) != 0) fail(kind->name, "cannot be written");
}

static Bytes read_file(const Kind* kind, int32_t rank, const char* ending) {
  FILE* file = open_file(kind, rank, ending, "rb");
  Bytes bytes = {malloc(1 << 20), 0};
  if (bytes.data == NULL) fail(kind->name, "no memory");
  bytes.n = fread(bytes.data, 1, 1 << 20, file);
  fclose(file);
  return bytes;
}

static Bytes export_of(const sotto_optim* optim) {
  Bytes bytes = {NULL, 0};
  must(sotto_optim_state_export(optim, SOTTO_STATE_EXACT, NULL, 0, &bytes.n), "length of a state");
  bytes.data = malloc(bytes.n);
  if (bytes.data == NULL) fail("state", "no memory");
  must(sotto_optim_state_export(optim, SOTTO_STATE_EXACT, bytes.data, bytes.n, &bytes.n), "export");
  return bytes;
}

/* Numbers that are the same on every machine. */
static float value(uint64_t i, uint64_t step, int32_t rank) {
  const uint64_t mixed = (i + 1) * 7919 + step * 104729 + (uint64_t)rank * 15485863;
  return (float)((int64_t)(mixed % 2001) - 1000) / 1000.0f;
}

static void train(sotto_optim* optim, float* grads, int32_t rank, uint64_t first, uint64_t steps) {
  uint64_t s, i;
  for (s = first; s < first + steps; ++s) {
    for (i = 0; i < ELEMENTS; ++i) grads[i] = value(i, s, rank);
    must(sotto_optim_step(optim, NULL, NULL), "step");
  }
}

static void compare(const Kind* kind, int32_t rank, const char* ending, const void* data,
                    uint64_t n) {
  Bytes golden = read_file(kind, rank, ending);
  if (golden.n != n || memcmp(golden.data, data, n) != 0) {
    fprintf(stderr, "%s, rank %d: %s differs from what was written before\n", kind->name, rank,
            ending);
    exit(1);
  }
  free(golden.data);
}

static void run_kind(sotto_comm* comm, int32_t rank, const Kind* kind) {
  float params[ELEMENTS], grads[ELEMENTS];
  sotto_param tensors[TENSORS];
  sotto_optim* optim;
  Bytes state;
  uint64_t i, at = 0;
  for (i = 0; i < ELEMENTS; ++i) params[i] = g_write ? value(i, 1000, 0) : 0.0f;
  for (i = 0; i < TENSORS; ++i) {
    const sotto_param init = SOTTO_PARAM_INIT;
    tensors[i] = init;
    tensors[i].param.data = params + at;
    tensors[i].grad.data = grads + at;
    tensors[i].param.count = tensors[i].grad.count = kCounts[i];
    tensors[i].param.dtype = tensors[i].grad.dtype = SOTTO_FLOAT32;
    at += kCounts[i];
  }
  must(sotto_optim_create(comm, kind->json, tensors, TENSORS, &optim), kind->name);
  if (g_write) {
    train(optim, grads, rank, 0, STEPS);
    state = export_of(optim);
    write_file(kind, rank, "state", state.data, state.n);
  } else {
    state = read_file(kind, rank, "state");
    must(sotto_optim_state_import(optim, SOTTO_STATE_EXACT, state.data, state.n), kind->name);
    if (g_rewrite) {
      Bytes again = export_of(optim);
      compare(kind, rank, "state", again.data, again.n);
      free(again.data);
    }
  }
  train(optim, grads, rank, STEPS, STEPS_AFTER);
  if (g_write)
    write_file(kind, rank, "params", params, sizeof params);
  else
    compare(kind, rank, "params", params, sizeof params);
  free(state.data);
  must(sotto_optim_destroy(optim), "optim_destroy");
}

static void* run_rank(void* number) {
  const int32_t rank = *(const int32_t*)number;
  sotto_context* context = g_first;
  sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
  sotto_comm* comm;
  size_t k;
  if (rank != 0) must(sotto_context_create(NULL, &context), "context");
  config.rank = rank;
  config.size = RANKS;
  config.id = &g_id;
  config.timeout_us = 60000000;
  must(sotto_comm_create(context, &config, &comm), "comm");
  for (k = 0; k < (g_write || g_rewrite ? KINDS : KINDS_0_1); ++k) run_kind(comm, rank, &kKinds[k]);
  must(sotto_comm_destroy(comm), "comm_destroy");
  must(sotto_context_destroy(context), "context_destroy");
  return NULL;
}

int main(int argc, char** argv) {
  pthread_t threads[RANKS];
  int32_t ranks[RANKS], r;
  if (argc != 3) fail("usage", "states write|read|rewrite DIR");
  g_write = strcmp(argv[1], "write") == 0;
  g_rewrite = strcmp(argv[1], "rewrite") == 0;
  if (!g_write && !g_rewrite && strcmp(argv[1], "read") != 0) fail(argv[1], "unknown");
  g_folder = argv[2];
  must(sotto_context_create(NULL, &g_first), "context");
  must(sotto_unique_id_create(g_first, &g_id), "id");
  for (r = 0; r < RANKS; ++r) {
    ranks[r] = r;
    if (pthread_create(&threads[r], NULL, run_rank, &ranks[r]) != 0) fail("thread", "none");
  }
  for (r = 0; r < RANKS; ++r) pthread_join(threads[r], NULL);
  printf("%d optimizers on %d ranks\n", (int)KINDS, RANKS);
  return 0;
}

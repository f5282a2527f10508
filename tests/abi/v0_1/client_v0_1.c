/* abi_old_client: a program as it was written for ABI 0.1, with its own copy of that version's
 * header. It has to work with every later library that takes clients of 0.1. Neither file changes
 * again; capi/abi/sotto-0.1.abi.json records the header.
 *
 *   client_v0_1 PATH-OF-LIBRARY
 */
#include <pthread.h>
#include <stdint.h>

#include "../client_support.h"
#include "sotto.h"

/* clang-format off */
#define SYMBOLS(X) \
  X(abi_version) X(version_string) X(build_info) X(status_name) X(last_error) X(set_log) \
  X(context_create_v) X(context_destroy) X(context_poll) X(context_report) X(unique_id_create) \
  X(comm_create) X(comm_split) X(comm_rank) X(comm_size) X(comm_abort) X(comm_error) \
  X(comm_report) X(comm_get_counters) X(comm_destroy) X(op_test) X(op_wait) X(op_wait_any) \
  X(op_stream_wait) X(op_error) X(op_get_stats) X(op_release) X(barrier) X(broadcast) X(all_gather) \
  X(reduce_scatter) X(all_reduce) X(send) X(recv) X(group_begin) X(group_end) X(codec_create) \
  X(codec_destroy) X(codec_state_export) X(codec_state_import) X(plan_report) X(config_report) \
  X(config_resolve) X(all_to_all) X(gather) X(scatter) X(optim_create) X(optim_step) \
  X(optim_accumulate) X(optim_replay) X(optim_set) X(optim_set_grads) X(optim_get_info) \
  X(optim_report) X(optim_state_export) X(optim_state_import) X(optim_state_import_arrays) \
  X(optim_destroy)
/* clang-format on */

static struct { SYMBOLS(DECLARE_SYMBOL) } api;

#define OK(call) REQUIRE((call) == SOTTO_OK, api.last_error())
#define FAILS(call, code)                                  \
  do {                                                     \
    REQUIRE((call) == (code), api.last_error());           \
    REQUIRE(api.last_error()[0] != '\0', "no error text"); \
  } while (0)

enum { RANKS = 2, COUNT = 1000 };

/* Ranks meet here outside of the library. */
static pthread_barrier_t meeting;

struct rank {
  int32_t number;
  const sotto_unique_id* id;
  sotto_context* context;
  sotto_comm* comm;
};

static sotto_buffer floats(float* data, uint64_t count) {
  sotto_buffer b = SOTTO_BUFFER_INIT;
  b.data = data;
  b.count = count;
  b.dtype = SOTTO_FLOAT32;
  return b;
}

static void done(void* user, sotto_status status) { *(sotto_status*)user = status; }

static void reductions(struct rank* self) {
  static float data[RANKS][COUNT], sums[RANKS][COUNT];
  sotto_buffer in = floats(data[self->number], COUNT), out = floats(sums[self->number], COUNT);
  sotto_call call = SOTTO_CALL_INIT;
  sotto_op *ops[2] = {NULL, NULL}, *stale;
  sotto_op_stats stats = SOTTO_OP_STATS_INIT;
  sotto_status called_back = SOTTO_IN_PROGRESS;
  uint64_t index = 99, i;
  const char* text = NULL;
  for (i = 0; i < COUNT; ++i)
    data[self->number][i] = (float)(i + 1) * (self->number == 0 ? 1.0f : 2.0f);

  call.tag = 7;
  call.on_done = done;
  call.user = &called_back;
  OK(api.all_reduce(self->comm, &in, &out, 1, &call, &ops[1]));
  OK(api.op_wait_any(ops, 2, -1, &index));
  REQUIRE(index == 1, "wait_any");
  OK(api.op_wait(ops[1], -1));
  OK(api.op_test(ops[1]));
  OK(api.op_error(ops[1], &text));
  REQUIRE(text != NULL && text[0] == '\0', "text of an operation without error");
  REQUIRE(called_back == SOTTO_OK, "on_done");
  OK(api.op_get_stats(ops[1], &stats));
  REQUIRE(stats.end_ns >= stats.launch_ns && stats.payload_bytes_planned > 0, "stats");
  FAILS(api.op_stream_wait(ops[1], NULL), SOTTO_E_UNSUPPORTED);
  stale = ops[1];
  OK(api.op_release(ops[1]));
  FAILS(api.op_release(stale), SOTTO_E_INVALID_ARGUMENT);
  FAILS(api.op_wait(stale, -1), SOTTO_E_INVALID_ARGUMENT);
  OK(api.op_release(NULL));
  for (i = 0; i < COUNT; ++i) REQUIRE(sums[self->number][i] == 3.0f * (float)(i + 1), "sum");

  memset(&call, 0, sizeof call);
  call.struct_size = sizeof call;
  call.reduce = SOTTO_REDUCE_MEAN;
  call.timeout_us = -1;
  OK(api.all_reduce(self->comm, &in, &in, 1, &call, NULL));
  for (i = 0; i < COUNT; ++i)
    REQUIRE(data[self->number][i] == 1.5f * (float)(i + 1), "mean in place");
}

static void exchanges(struct rank* self) {
  float mine[3], all[3 * RANKS], back[3];
  uint64_t to[RANKS], from[RANKS];
  sotto_parts parts = SOTTO_PARTS_INIT;
  sotto_buffer in = floats(mine, 3), out = floats(all, 3 * RANKS);
  int32_t i, root = 1;
  for (i = 0; i < 3; ++i) mine[i] = (float)(10 * self->number + i);
  OK(api.gather(self->comm, &in, self->number == root ? &out : NULL, 1, root, NULL, NULL));
  if (self->number == root) REQUIRE(all[1] == 1.0f && all[4] == 11.0f, "gather");
  in = floats(back, 3);
  OK(api.scatter(self->comm, self->number == root ? &out : NULL, &in, 1, root, NULL, NULL));
  REQUIRE(back[2] == mine[2], "scatter");
  /* Rank 0 keeps nothing and sends two elements; rank 1 keeps and sends one. */
  to[0] = self->number == 0 ? 0 : 1;
  to[1] = self->number == 0 ? 2 : 1;
  from[0] = self->number == 0 ? 0 : 2;
  from[1] = 1;
  parts.in_counts = to;
  parts.out_counts = from;
  in = floats(mine, 3);
  out = floats(all, 3 * RANKS);
  OK(api.all_to_all(self->comm, &in, &out, 1, &parts, NULL, NULL));
  REQUIRE(all[0] == (self->number == 0 ? 10.0f : 0.0f), "all_to_all");
  REQUIRE(self->number == 0 || all[2] == 11.0f, "all_to_all");
}

static void movements(struct rank* self) {
  float mine[4], all[4 * RANKS], part[2], from = (float)self->number;
  sotto_buffer in, out;
  int32_t other = 1 - self->number, i;
  for (i = 0; i < 4; ++i) mine[i] = (float)(10 * self->number + i);
  in = floats(mine, 4);
  out = floats(all, 4 * RANKS);
  OK(api.all_gather(self->comm, &in, &out, 1, NULL, NULL));
  for (i = 0; i < 4 * RANKS; ++i) REQUIRE(all[i] == (float)(10 * (i / 4) + i % 4), "all_gather");
  out = floats(part, 2);
  OK(api.reduce_scatter(self->comm, &in, &out, 1, NULL, NULL));
  REQUIRE(part[0] == 10.0f + 4.0f * (float)self->number, "reduce_scatter");
  OK(api.broadcast(self->comm, self->number == 1 ? &in : NULL, &in, 1, 1, NULL, NULL));
  REQUIRE(mine[3] == 13.0f, "broadcast");
  OK(api.group_begin(self->comm));
  in = floats(&from, 1);
  out = floats(part, 1);
  OK(api.send(self->comm, &in, 1, other, NULL, NULL));
  OK(api.recv(self->comm, &out, 1, other, NULL, NULL));
  OK(api.group_end(self->comm, NULL, NULL));
  REQUIRE(part[0] == (float)other, "send and recv in a group");
  OK(api.barrier(self->comm, NULL, NULL));
}

static void compressed(struct rank* self) {
  static float data[RANKS][COUNT];
  static char state[RANKS][65536];
  sotto_buffer buffer = floats(data[self->number], COUNT);
  sotto_call call = SOTTO_CALL_INIT;
  uint64_t need = 0, length = 0;
  OK(api.codec_create(self->comm, "{\"type\": \"1bit\"}", &buffer, 1, &call.codec));
  OK(api.all_reduce(self->comm, &buffer, &buffer, 1, &call, NULL));
  OK(api.codec_state_export(call.codec, SOTTO_STATE_EXACT, NULL, 0, &need));
  REQUIRE(need > 0 && need <= sizeof state[0], "size of a codec's state");
  OK(api.codec_state_export(call.codec, SOTTO_STATE_EXACT, state[self->number], need, &length));
  OK(api.codec_state_import(call.codec, SOTTO_STATE_EXACT, state[self->number], length));
  FAILS(api.codec_state_import(call.codec, SOTTO_STATE_EXACT, state[self->number], length - 1),
        SOTTO_E_INVALID_ARGUMENT);
  OK(api.codec_destroy(call.codec));
}

static void training(struct rank* self) {
  static const char json[] =
      "{\"optimizer\": {\"type\": \"OneBitLamb\", \"params\": {\"lr\": 0.01, \"freeze_step\": 2}}}";
  static float weights[RANKS][COUNT], gradients[RANKS][COUNT];
  static char state[RANKS][262144];
  sotto_param param = SOTTO_PARAM_INIT;
  sotto_named_array array = SOTTO_NAMED_ARRAY_INIT;
  sotto_optim* optim = NULL;
  sotto_optim_info info = SOTTO_OPTIM_INFO_INIT;
  uint64_t length = 0, i;
  char* report;
  int step;
  for (i = 0; i < COUNT; ++i) {
    weights[self->number][i] = 1.0f + (float)(i % 7);
    gradients[self->number][i] = (float)(i % 5) - 2.0f + (float)self->number;
  }
  param.name = "weights";
  param.param = floats(weights[self->number], COUNT);
  param.grad = floats(gradients[self->number], COUNT);
  OK(api.optim_create(self->comm, json, &param, 1, &optim));
  OK(api.optim_set(optim, "lr", -1, 0.02));
  OK(api.optim_set_grads(optim, &param.grad, 1));
  for (step = 0; step < 4; ++step) {
    sotto_op* op = NULL;
    if (step == 1) OK(api.optim_accumulate(optim, NULL, NULL));
    OK(api.optim_step(optim, NULL, &op));
    OK(api.op_wait(op, -1));
    if (step == 2) FAILS(api.optim_replay(optim, op), SOTTO_E_INVALID_STATE);
    OK(api.op_release(op));
  }
  OK(api.optim_get_info(optim, &info));
  REQUIRE(info.step == 4 && info.stage == 1 && info.lr == 0.02, "optimizer info");
  REQUIRE(weights[self->number][0] != 1.0f, "the parameters have moved");
  OK(api.optim_report(optim, NULL, NULL, 0, &length));
  report = malloc(length + 1);
  OK(api.optim_report(optim, NULL, report, length + 1, &length));
  REQUIRE(report != NULL && report[0] == '{' && strlen(report) == length, "report");
  free(report);
  OK(api.optim_state_export(optim, SOTTO_STATE_EXACT, state[self->number], sizeof state[0],
                            &length));
  REQUIRE(length > 0 && length <= sizeof state[0], "size of an optimizer's state");
  OK(api.optim_state_import(optim, SOTTO_STATE_EXACT, state[self->number], length));
  array.name = "weights/momentum";
  array.values = floats(gradients[self->number], COUNT);
  FAILS(api.optim_state_import_arrays(optim, &array, 1), SOTTO_E_INVALID_ARGUMENT);
  OK(api.optim_destroy(optim));
}

static void reports(struct rank* self) {
  char text[65536];
  uint64_t length = 0;
  sotto_comm_counters counters = SOTTO_COMM_COUNTERS_INIT;
  OK(api.context_report(self->context, NULL, text, sizeof text, &length));
  OK(api.comm_report(self->comm, "all", text, sizeof text, &length));
  OK(api.plan_report(self->comm,
                     "{\"kind\": \"all_reduce\", \"dtype\": \"fp32\", \"counts\": [1000]}", text,
                     sizeof text, &length));
  REQUIRE(text[0] == '{' && length < sizeof text, "plan report");
  OK(api.comm_get_counters(self->comm, &counters));
  REQUIRE(counters.payload_bytes_sent == counters.payload_bytes_planned &&
              counters.payload_bytes_sent > 0,
          "bytes sent are bytes planned");
}

static void* rank_main(void* argument) {
  struct rank* self = argument;
  sotto_context_config context_config = SOTTO_CONTEXT_CONFIG_INIT;
  sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
  sotto_comm* half = NULL;
  int32_t number = -1, size = -1;
  const char* text = NULL;
  context_config.cpu_threads = 1;
  if (self->context == NULL)
    OK(api.context_create_v(SOTTO_ABI_VERSION, &context_config, &self->context));
  config.rank = self->number;
  config.size = RANKS;
  config.id = self->id;
  config.timeout_us = 60000000;
  OK(api.comm_create(self->context, &config, &self->comm));
  OK(api.comm_rank(self->comm, &number));
  OK(api.comm_size(self->comm, &size));
  REQUIRE(number == self->number && size == RANKS, "rank and size");
  reductions(self);
  movements(self);
  exchanges(self);
  compressed(self);
  training(self);
  reports(self);
  OK(api.comm_split(self->comm, self->number, 0, &half));
  OK(api.comm_size(half, &size));
  REQUIRE(size == 1, "size of a split");
  OK(api.comm_destroy(half));
  OK(api.barrier(self->comm, NULL, NULL));
  OK(api.context_poll(self->context, 0));
  pthread_barrier_wait(&meeting); /* nobody is inside the barrier when the comm is aborted */
  OK(api.comm_abort(self->comm, "end of the test"));
  FAILS(api.comm_error(self->comm, &text), SOTTO_E_ABORTED);
  REQUIRE(strstr(text, "end of the test") != NULL, text);
  api.comm_destroy(self->comm);
  OK(api.context_destroy(self->context));
  return NULL;
}

static void log_line(void* user, int32_t level, const char* message) {
  (void)user;
  (void)level;
  (void)message;
}

static void without_context(void) {
  uint64_t length = 0;
  sotto_context* refused = NULL;
  REQUIRE(api.abi_version() >> 16 == SOTTO_ABI_MAJOR, "major version");
  REQUIRE((api.abi_version() & 0xffff) >= SOTTO_ABI_MINOR, "minor version");
  FAILS(api.context_create_v(SOTTO_ABI_VERSION - 1, NULL, &refused), SOTTO_E_UNSUPPORTED);
  REQUIRE(api.version_string()[0] != '\0' && api.build_info()[0] == '{', "version and build info");
  REQUIRE(strcmp(api.status_name(SOTTO_E_PEER_LOST), "PEER_LOST") == 0, "name of a status");
  OK(api.set_log(log_line, NULL, 2));
  FAILS(api.set_log(log_line, NULL, 6), SOTTO_E_INVALID_ARGUMENT);
  OK(api.config_report("{\"optimizer\": {\"type\": \"Lamb\", \"params\": {\"lr\": 0.01}}}", 4, 1000,
                       NULL, 0, &length));
  REQUIRE(length > 0, "length of a report");
  FAILS(api.config_report("{\"optimizer\": {\"type\": \"Lamb\", \"params\": {\"lrr\": 0.01}}}", 4,
                          1000, NULL, 0, &length),
        SOTTO_E_INVALID_ARGUMENT);
  REQUIRE(strstr(api.last_error(), "lrr") != NULL, api.last_error());
  OK(api.config_resolve("{\"train_batch_size\": \"auto\"}", "{\"train_batch_size\": 8}", NULL, 0,
                        &length));
  REQUIRE(length == strlen("{\"train_batch_size\":8}"), "length of a resolved configuration");
  OK(api.context_destroy(NULL));
}

int main(int argc, char** argv) {
  struct rank ranks[RANKS];
  sotto_unique_id id;
  pthread_t threads[RANKS];
  void* library;
  int32_t r;
  REQUIRE(argc == 2, "usage: client_v0_1 PATH-OF-LIBRARY");
  library = open_library(argv[1]);
  SYMBOLS(FIND_SYMBOL)
  without_context();
  memset(ranks, 0, sizeof ranks);
  REQUIRE(pthread_barrier_init(&meeting, NULL, RANKS) == 0, "barrier");
  setenv("SOTTO_TRANSPORT", "inproc", 1);
  OK(api.context_create_v(SOTTO_ABI_VERSION, NULL, &ranks[0].context));
  OK(api.unique_id_create(ranks[0].context, &id));
  for (r = 0; r < RANKS; ++r) {
    ranks[r].number = r;
    ranks[r].id = &id;
    REQUIRE(pthread_create(&threads[r], NULL, rank_main, &ranks[r]) == 0, "thread");
  }
  for (r = 0; r < RANKS; ++r) REQUIRE(pthread_join(threads[r], NULL) == 0, "join");
  OK(api.set_log(NULL, NULL, 0));
  puts("ABI 0.1 works");
  return 0;
}

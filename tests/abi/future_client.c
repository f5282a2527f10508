/* abi_future_client: a program that was compiled against a later header. Larger structs are
 * accepted as long as what this library does not know is zero, and refused otherwise; later
 * versions are refused with both numbers.
 *
 *   future_client PATH-OF-LIBRARY
 */
#include <stdint.h>

#include "client_support.h"
#include "sotto/sotto.h"

/* clang-format off */
#define SYMBOLS(X) \
  X(last_error) X(context_create_v) X(context_destroy) X(comm_create) X(comm_destroy) \
  X(comm_get_counters) X(barrier) X(op_wait) X(op_get_stats) X(op_release) X(optim_create) \
  X(optim_get_info) X(optim_destroy)
/* clang-format on */

static struct { SYMBOLS(DECLARE_SYMBOL) } api;

#define OK(call) REQUIRE((call) == SOTTO_OK, api.last_error())
#define FAILS(call, code, word)                                          \
  do {                                                                   \
    REQUIRE((call) == (code), api.last_error());                         \
    REQUIRE(strstr(api.last_error(), (word)) != NULL, api.last_error()); \
  } while (0)

/* The structs of a later version: 16 bytes more. */
#define FUTURE(name)     \
  struct future_##name { \
    sotto_##name now;    \
    uint64_t later[2];   \
  }
FUTURE(context_config);
FUTURE(comm_config);
FUTURE(call);
FUTURE(param);
FUTURE(comm_counters);
FUTURE(op_stats);
FUTURE(optim_info);

static const char kUnknown[] = "does not know";

static void versions(void) {
  sotto_context* context = NULL;
  char ours[32], theirs[32];
  const uint32_t later_minor = SOTTO_ABI_VERSION + 1, later_major = SOTTO_ABI_VERSION + 0x10000u;
  sprintf(ours, "%d.%d", SOTTO_ABI_MAJOR, SOTTO_ABI_MINOR);
  sprintf(theirs, "%d.%d", SOTTO_ABI_MAJOR, SOTTO_ABI_MINOR + 1);
  FAILS(api.context_create_v(later_minor, NULL, &context), SOTTO_E_UNSUPPORTED, ours);
  REQUIRE(strstr(api.last_error(), theirs) != NULL, api.last_error());
  FAILS(api.context_create_v(later_major, NULL, &context), SOTTO_E_UNSUPPORTED, ours);
  REQUIRE(context == NULL, "outputs are written only on success");
}

static sotto_context* contexts(void) {
  struct future_context_config config;
  sotto_context* context = NULL;
  memset(&config, 0, sizeof config);
  config.now.struct_size = sizeof config;
  config.now.cpu_threads = 1;
  config.later[1] = 1;
  FAILS(api.context_create_v(SOTTO_ABI_VERSION, &config.now, &context), SOTTO_E_UNSUPPORTED,
        kUnknown);
  config.later[1] = 0;
  config.now.struct_size = 3;
  FAILS(api.context_create_v(SOTTO_ABI_VERSION, &config.now, &context), SOTTO_E_INVALID_ARGUMENT,
        "struct_size is 3");
  config.now.struct_size = 4097;
  FAILS(api.context_create_v(SOTTO_ABI_VERSION, &config.now, &context), SOTTO_E_INVALID_ARGUMENT,
        "struct_size is 4097");
  config.now.struct_size = sizeof config;
  OK(api.context_create_v(SOTTO_ABI_VERSION, &config.now, &context));
  return context;
}

static sotto_comm* comms(sotto_context* context) {
  struct future_comm_config config;
  struct future_comm_counters counters;
  sotto_comm* comm = NULL;
  memset(&config, 0, sizeof config);
  config.now.struct_size = sizeof config;
  config.now.size = 1;
  config.later[0] = 1;
  FAILS(api.comm_create(context, &config.now, &comm), SOTTO_E_UNSUPPORTED, kUnknown);
  config.later[0] = 0;
  OK(api.comm_create(context, &config.now, &comm));

  memset(&counters, 0xff, sizeof counters);
  counters.now.struct_size = sizeof counters;
  OK(api.comm_get_counters(comm, &counters.now));
  REQUIRE(counters.now.struct_size == sizeof counters, "an out-struct keeps its size");
  REQUIRE(counters.later[0] == 0 && counters.later[1] == 0,
          "what the library does not know becomes zero");
  counters.now.struct_size = 8;
  FAILS(api.comm_get_counters(comm, &counters.now), SOTTO_E_INVALID_ARGUMENT, "struct_size is 8");
  return comm;
}

static void calls(sotto_comm* comm) {
  struct future_call call;
  struct future_op_stats stats;
  sotto_op* op = NULL;
  memset(&call, 0, sizeof call);
  call.now.struct_size = sizeof call;
  call.later[0] = 1;
  FAILS(api.barrier(comm, &call.now, &op), SOTTO_E_UNSUPPORTED, kUnknown);
  call.later[0] = 0;
  call.now.flags = 0x80000000u;
  FAILS(api.barrier(comm, &call.now, &op), SOTTO_E_UNSUPPORTED, "flags");
  call.now.flags = 0;
  OK(api.barrier(comm, &call.now, &op));
  OK(api.op_wait(op, -1));
  memset(&stats, 0xff, sizeof stats);
  stats.now.struct_size = sizeof stats;
  OK(api.op_get_stats(op, &stats.now));
  REQUIRE(stats.later[0] == 0 && stats.later[1] == 0,
          "what the library does not know becomes zero");
  OK(api.op_release(op));
}

static void optimizers(sotto_comm* comm) {
  static const char json[] = "{\"optimizer\": {\"type\": \"Adam\", \"params\": {\"lr\": 0.01}}}";
  static float weights[2][4], gradients[2][4];
  struct future_param params[2]; /* the stride is larger than this library's struct */
  struct future_optim_info info;
  sotto_optim* optim = NULL;
  int i;
  memset(params, 0, sizeof params);
  for (i = 0; i < 2; ++i) {
    params[i].now.struct_size = sizeof params[i];
    params[i].now.param.data = weights[i];
    params[i].now.grad.data = gradients[i];
    params[i].now.param.count = params[i].now.grad.count = 4;
    params[i].now.param.dtype = params[i].now.grad.dtype = SOTTO_FLOAT32;
  }
  params[1].later[0] = 1;
  FAILS(api.optim_create(comm, json, &params[0].now, 2, &optim), SOTTO_E_UNSUPPORTED, kUnknown);
  REQUIRE(strstr(api.last_error(), "params[1]") != NULL, api.last_error());
  params[1].later[0] = 0;
  OK(api.optim_create(comm, json, &params[0].now, 2, &optim));
  memset(&info, 0xff, sizeof info);
  info.now.struct_size = sizeof info;
  OK(api.optim_get_info(optim, &info.now));
  REQUIRE(info.now.step == 0 && info.later[0] == 0 && info.later[1] == 0, "info");
  OK(api.optim_destroy(optim));
}

int main(int argc, char** argv) {
  sotto_context* context;
  sotto_comm* comm;
  void* library;
  REQUIRE(argc == 2, "usage: future_client PATH-OF-LIBRARY");
  library = open_library(argv[1]);
  SYMBOLS(FIND_SYMBOL)
  versions();
  context = contexts();
  comm = comms(context);
  calls(comm);
  optimizers(comm);
  OK(api.comm_destroy(comm));
  OK(api.context_destroy(context));
  puts("a later client works");
  return 0;
}

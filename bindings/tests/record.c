/* record.c - loaded before a trainer (LD_PRELOAD), writes what its optimizer is given to
 * $RECORD_GRADIENTS.rank<R>, in the machine's byte order:
 *   tensors  uint64
 *   per tensor: length of its name, its group, its elements (uint64 each), the name, float32 values
 *   per step, per tensor: its gradient, float32
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sotto/sotto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static FILE* file;
static sotto_param* params; /* as registered */
static uint64_t n_params;

/* The library's function of a name that this file has too. */
static void* next(const char* name) {
  void* address = dlsym(RTLD_NEXT, name);
  if (!address) abort();
  return address;
}

static void put(const void* bytes, size_t n) {
  if (n > 0 && fwrite(bytes, n, 1, file) != 1) abort();
}

static void open_file(const sotto_comm* comm) {
  char path[4096];
  int32_t rank = -1;
  sotto_comm_rank(comm, &rank);
  snprintf(path, sizeof path, "%s.rank%d", getenv("RECORD_GRADIENTS"), (int)rank);
  file = fopen(path, "wb");
  if (!file) abort();
}

SOTTO_API sotto_status sotto_optim_create(sotto_comm* comm, const char* json,
                                          const sotto_param* given, uint64_t n,
                                          sotto_optim** out_optim) {
  sotto_status (*create)(sotto_comm*, const char*, const sotto_param*, uint64_t, sotto_optim**);
  *(void**)&create = next("sotto_optim_create");
  const sotto_status status = create(comm, json, given, n, out_optim);
  if (status != SOTTO_OK || !getenv("RECORD_GRADIENTS")) return status;
  params = malloc(n * sizeof *params);
  if (!params) abort();
  memcpy(params, given, n * sizeof *params);
  n_params = n;
  open_file(comm);
  put(&n, sizeof n);
  for (uint64_t i = 0; i < n; ++i) {
    const uint64_t header[] = {strlen(given[i].name), given[i].group, given[i].param.count};
    put(header, sizeof header);
    put(given[i].name, header[0]);
    put(given[i].param.data, header[2] * sizeof(float));
  }
  return status;
}

SOTTO_API sotto_status sotto_optim_step(sotto_optim* optim, const sotto_call* call,
                                        sotto_op** out_op) {
  sotto_status (*step)(sotto_optim*, const sotto_call*, sotto_op**);
  *(void**)&step = next("sotto_optim_step");
  for (uint64_t i = 0; file && i < n_params; ++i) {
    put(params[i].grad.data, params[i].grad.count * sizeof(float));
  }
  if (file && fflush(file) != 0) abort();
  return step(optim, call, out_op);
}

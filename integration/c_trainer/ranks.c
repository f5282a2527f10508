#include "ranks.h"

#include <stdlib.h>
#include <string.h>

#include "common.h"

void check(sotto_status status, const char* what) {
  if (status != SOTTO_OK) die("%s: %s: %s", what, sotto_status_name(status), sotto_last_error());
}

void finish_op(sotto_op* op, sotto_op_stats* stats, const char* what) {
  const sotto_status status = sotto_op_wait(op, -1);
  if (status != SOTTO_OK) {
    const char* text = "";
    sotto_op_error(op, &text);
    die("%s: %s: %s", what, sotto_status_name(status), text);
  }
  if (stats) {
    stats->struct_size = sizeof *stats;
    check(sotto_op_get_stats(op, stats), "sotto_op_get_stats");
  }
  check(sotto_op_release(op), "sotto_op_release");
}

void ranks_join(Ranks* ranks, const char* transport) {
  memset(ranks, 0, sizeof *ranks);
  sotto_comm_config config = SOTTO_COMM_CONFIG_INIT;
  config.transport = transport;
  check(sotto_context_create(NULL, &ranks->context), "sotto_context_create");
  check(sotto_comm_create(ranks->context, &config, &ranks->comm), "sotto_comm_create");
  check(sotto_comm_rank(ranks->comm, &ranks->rank), "sotto_comm_rank");
  check(sotto_comm_size(ranks->comm, &ranks->size), "sotto_comm_size");
  trainer_rank = ranks->rank;
  check(sotto_comm_split(ranks->comm, 0, ranks->rank, &ranks->side), "sotto_comm_split");
}

void ranks_leave(Ranks* ranks) {
  check(sotto_comm_destroy(ranks->side), "sotto_comm_destroy");
  check(sotto_comm_destroy(ranks->comm), "sotto_comm_destroy");
  check(sotto_context_destroy(ranks->context), "sotto_context_destroy");
}

sotto_buffer buffer_of(void* data, uint64_t count, sotto_dtype dtype) {
  const sotto_buffer buffer = {data, count, dtype, SOTTO_DEVICE_CPU, 0, 0};
  return buffer;
}

void ranks_barrier(const Ranks* ranks) {
  check(sotto_barrier(ranks->side, NULL, NULL), "sotto_barrier");
}

void ranks_broadcast(const Ranks* ranks, void* data, uint64_t count, sotto_dtype dtype) {
  const sotto_buffer buffer = buffer_of(data, count, dtype);
  check(sotto_broadcast(ranks->side, &buffer, &buffer, 1, 0, NULL, NULL), "sotto_broadcast");
}

void ranks_sum(const Ranks* ranks, double* values, uint64_t n) {
  const sotto_buffer buffer = buffer_of(values, n, SOTTO_FLOAT64);
  check(sotto_all_reduce(ranks->side, &buffer, &buffer, 1, NULL, NULL), "sotto_all_reduce");
}

int ranks_all(const Ranks* ranks, int ok) {
  int32_t value = ok != 0;
  const sotto_buffer buffer = buffer_of(&value, 1, SOTTO_INT32);
  sotto_call call = SOTTO_CALL_INIT;
  call.reduce = SOTTO_REDUCE_MIN;
  const sotto_status status = sotto_all_reduce(ranks->side, &buffer, &buffer, 1, &call, NULL);
  if (!ok) return 0; /* what happened here is worth more than what became of telling it */
  check(status, "sotto_all_reduce");
  return value;
}

void ranks_gather(const Ranks* ranks, const void* in, uint64_t n, sotto_dtype dtype, void* out) {
  const sotto_buffer from = buffer_of((void*)(uintptr_t)in, n, dtype);
  const sotto_buffer to = buffer_of(out, n * (uint64_t)ranks->size, dtype);
  check(sotto_all_gather(ranks->side, &from, &to, 1, NULL, NULL), "sotto_all_gather");
}

/* The report, malloc'ed. Numbers in it may become longer between two calls. */
static char* report_of(const sotto_comm* comm) {
  uint64_t cap = 0, n = 0;
  char* report = NULL;
  do {
    cap = n + 64;
    report = realloc(report, cap);
    if (!report) die("sotto_comm_report: out of memory");
    check(sotto_comm_report(comm, "all", report, cap, &n), "sotto_comm_report");
  } while (n >= cap);
  return report;
}

uint64_t ranks_sent_between_hosts(const Ranks* ranks) {
  char* report = report_of(ranks->comm);
  const long here = strtol(json_value(report, "host"), NULL, 10);
  const char* peer = json_value(report, "peers");
  uint64_t sent = 0;
  for (int32_t r = 1; r < ranks->size; ++r) {
    const char* host = json_value(peer, "host");
    peer = json_value(host, "payload_bytes_sent");
    if (strtol(host, NULL, 10) != here) sent += strtoull(peer, NULL, 10);
  }
  free(report);
  return sent;
}

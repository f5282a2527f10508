#include "common.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int trainer_rank = -1;

void die(const char* format, ...) {
  char text[4096];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  fflush(stdout);
  if (isatty(STDERR_FILENO)) fputc('\n', stderr); /* a progress line may stand there */
  if (trainer_rank >= 0) {
    fprintf(stderr, "c-trainer: rank %d: %s\n", trainer_rank, text);
  } else {
    fprintf(stderr, "c-trainer: %s\n", text);
  }
  exit(1);
}

int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

uint64_t hash_bytes(uint64_t hash, const void* bytes, uint64_t n) {
  const unsigned char* p = bytes;
  for (uint64_t i = 0; i < n; ++i) hash = (hash ^ p[i]) * UINT64_C(0x100000001b3);
  return hash;
}

const char* json_value(const char* json, const char* key) {
  char quoted[64];
  const int n = snprintf(quoted, sizeof quoted, "\"%s\"", key);
  for (const char* p = json; p && (p = strstr(p, quoted)) != NULL;) {
    p += n;
    p += strspn(p, " \t\r\n");
    if (*p == ':') return p + 1 + strspn(p + 1, " \t\r\n");
  }
  return NULL;
}

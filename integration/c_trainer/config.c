#include "config.h"

#include <errno.h>
#include <sotto/sotto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"
#include "ranks.h"

char* config_read(const char* path) {
  FILE* file = fopen(path, "rb");
  if (!file) die("--config: cannot open \"%s\": %s", path, strerror(errno));
  size_t n = 0, capacity = 1 << 16;
  char* text = malloc(capacity);
  while (text && (n += fread(text + n, 1, capacity - n - 1, file)) == capacity - 1) {
    text = realloc(text, capacity *= 2);
  }
  if (!text || ferror(file)) die("--config: cannot read \"%s\": %s", path, strerror(errno));
  fclose(file);
  text[n] = '\0';
  return text;
}

/* What the library makes of the configuration for so many ranks. */
static char* report_of(const Options* options, const char* text, int world) {
  uint64_t n = 0;
  check(sotto_config_report(text, world, 0, NULL, 0, &n), options->config);
  char* report = malloc(n + 1);
  if (!report) die("--config: out of memory");
  check(sotto_config_report(text, world, 0, report, n + 1, &n), options->config);
  return report;
}

void config_transport(const Options* options, const char* text, char* name, size_t size) {
  char* report = report_of(options, text, 1);
  const char* value = json_value(report, "transport");
  const size_t n = value && *value == '"' ? strcspn(value + 1, "\"") : 0;
  if (n >= size) die("--config: sotto.transport has %zu letters", n);
  memcpy(name, value ? value + 1 : "", n);
  name[n] = '\0';
  free(report);
}

/* Positive number `key` in the report's object "batch"; 0 if the configuration leaves it open. */
static int64_t batch_number(const char* report, const char* key) {
  const char* batch = json_value(report, "batch");
  if (!batch || *batch != '{') return 0;
  const char* number = json_value(batch, key);
  return number && number < strchr(batch, '}') ? strtoll(number, NULL, 10) : 0;
}

static int64_t choose(const char* flag, int64_t given, int64_t configured, int64_t otherwise) {
  if (given && configured && given != configured) {
    die("%s %lld contradicts the configuration, which says %lld", flag, (long long)given,
        (long long)configured);
  }
  if (given) return given;
  return configured ? configured : otherwise;
}

void config_batch(Options* options, const char* text, int world) {
  char* report = report_of(options, text, world);
  options->micro_batch = choose("--micro-batch", options->micro_batch,
                                batch_number(report, "train_micro_batch_size_per_gpu"), 6);
  options->accumulation = choose("--accumulation", options->accumulation,
                                 batch_number(report, "gradient_accumulation_steps"), 1);
  free(report);
}

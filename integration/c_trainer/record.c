#include "record.h"

#include <errno.h>
#include <string.h>

#include "common.h"

static void put(FILE* file, const void* data, size_t size, size_t n) {
  if (fwrite(data, size, n, file) != n) die("--record: cannot write: %s", strerror(errno));
}

static void put_number(FILE* file, uint64_t value) { put(file, &value, sizeof value, 1); }

FILE* record_open(const char* prefix, int rank, const Model* model) {
  char path[4096];
  snprintf(path, sizeof path, "%s.rank%d", prefix, rank);
  FILE* file = fopen(path, "wb");
  if (!file) die("--record: cannot open \"%s\": %s", path, strerror(errno));
  put_number(file, (uint64_t)model->n_tensors);
  for (int i = 0; i < model->n_tensors; ++i) {
    const Tensor* tensor = &model->tensors[i];
    put_number(file, tensor_group(tensor));
    put_number(file, tensor->count);
    put_number(file, strlen(tensor->name));
    put(file, tensor->name, 1, strlen(tensor->name));
  }
  put(file, model->params, sizeof *model->params, model->n_params);
  return file;
}

void record_step(FILE* file, const Model* model) {
  put(file, model->grads, sizeof *model->grads, model->n_params);
}

void record_close(FILE* file) {
  if (fclose(file) != 0) die("--record: cannot write: %s", strerror(errno));
}

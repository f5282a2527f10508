/* model_check.c - compares model_backward with central differences, element by element, for every
 * tensor of a tiny model. Compiled with MODEL_DOUBLE. It also checks that it would notice a
 * mistake: one element that is off by 0.1 % of the largest has to be found. Exit code 0: all is
 * well. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "model.h"
#include "rng.h"

static const double kTolerance = 1e-6; /* relative to the largest gradient of the tensor */

static void random_batch(Batch* batch, const ModelShape* shape) {
  Rng rng = rng_make(7, RNG_TEST, 0, 0);
  for (int i = 0; i < batch->sequences * shape->positions; ++i) {
    batch->tokens[i] = (uint16_t)rng_below(&rng, (uint32_t)shape->vocab);
  }
  for (int i = 0; i < batch->sequences * shape->masked; ++i) {
    const int sequence = i / shape->masked;
    batch->rows[i] = sequence * shape->positions + (i % shape->masked) * 2;
    batch->targets[i] = (uint16_t)rng_below(&rng, (uint32_t)shape->vocab);
  }
}

/* Central difference of the loss in parameter i. The step balances truncation (h^2) and rounding
 * (1e-16 / h). */
static double difference(Model* model, const Batch* batch, size_t i) {
  const double h = 1e-5, value = model->params[i];
  model->params[i] = value + h;
  const double above = model_forward(model, batch);
  model->params[i] = value - h;
  const double below = model_forward(model, batch);
  model->params[i] = value;
  return (above - below) / (2 * h);
}

static double largest(const double* x, size_t n) {
  double result = 0;
  for (size_t i = 0; i < n; ++i) result = fmax(result, fabs(x[i]));
  return result;
}

/* Largest error of a tensor's gradient, relative to its largest element. A gradient of all zeros is
 * an error too: every tensor has to take part. */
static double tensor_error(const double* expected, const double* found, size_t n) {
  double error = 0;
  for (size_t i = 0; i < n; ++i) error = fmax(error, fabs(expected[i] - found[i]));
  const double scale = largest(expected, n);
  return scale > 0 ? error / scale : 1;
}

static int check_tensor(const Tensor* tensor, const double* expected, double* found) {
  const double error = tensor_error(expected, found, tensor->count);
  const int wrong = !(error < kTolerance);
  printf("%-24s %6zu elements  error %.1e%s\n", tensor->name, tensor->count, error,
         wrong ? "  WRONG" : "");

  double *element = &found[tensor->count / 2], before = *element;
  *element += 1e-3 * largest(expected, tensor->count);
  const int noticed = tensor_error(expected, found, tensor->count) > kTolerance;
  *element = before;
  if (!noticed) printf("%-24s a spoilt element was not noticed\n", tensor->name);
  return wrong || !noticed;
}

int main(void) {
  const ModelShape shape = {11, 12, 2, 3, 20, 9, 3, 3};
  Batch batch;
  Model* model = model_create(&shape);
  double* expected = model ? calloc(model->n_params, sizeof *expected) : NULL;
  if (!expected || !batch_alloc(&batch, &shape, shape.max_sequences)) {
    fprintf(stderr, "out of memory\n");
    return 1;
  }
  model_init(model, 3);
  Rng rng = rng_make(7, RNG_TEST, 1, 0);
  /* Larger weights than at the start of training, and gains that differ: every non-linear part must
   * count. */
  for (size_t i = 0; i < model->n_params; ++i) model->params[i] += 0.3 * rng_normal(&rng);
  random_batch(&batch, &shape);
  for (size_t i = 0; i < model->n_params; ++i) expected[i] = 0.5 * difference(model, &batch, i);
  model_forward(model, &batch);
  model_backward(model, &batch, 0.25);
  model_forward(model, &batch);
  model_backward(model, &batch, 0.25); /* gradients add up: twice a quarter is a half */
  int failed = 0;
  for (int t = 0; t < model->n_tensors; ++t) {
    const Tensor* tensor = &model->tensors[t];
    failed += check_tensor(tensor, expected + tensor->offset, model->grads + tensor->offset);
  }
  batch_free(&batch);
  free(expected);
  model_destroy(model);
  printf("%s\n", failed ? "FAILED" : "passed");
  return failed != 0;
}

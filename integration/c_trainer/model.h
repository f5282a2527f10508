/* model.h - a small masked language model: encoder, forward and backward by hand.
 *
 *   x = embedding[token]
 *   per layer:  x += attention(layernorm(x)) Wo        scores get a learned bias per head and
 * distance x += gelu(layernorm(x) W1) W2 logits = layernorm(x) embedding^T                  at
 * masked positions only
 *
 * There are no biases besides the distance table. A bias on the keys would have a gradient of
 * exactly zero in theory and of rounding noise in practice, which a 1-bit momentum blows up to full
 * size.
 */
#ifndef C_TRAINER_MODEL_H
#define C_TRAINER_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "ops.h"

typedef struct ModelShape {
  int vocab; /* tokens, special ones included */
  int width; /* of the residual stream; a multiple of heads */
  int layers;
  int heads;
  int mlp;           /* width inside the MLP */
  int positions;     /* tokens per sequence */
  int masked;        /* of them masked */
  int max_sequences; /* largest batch */
} ModelShape;

/* One parameter tensor; all tensors lie one after the other in Model.params, their gradients in
 * Model.grads. */
typedef struct Tensor {
  char name[32];
  size_t offset, count;
  double init_std; /* 0: starts as ones */
  int decay;       /* 1: weight decay applies (matrices), 0: it does not (gains, distance biases) */
} Tensor;

/* Parameter group 0: matrices, with the configuration's weight decay. Group 1: gains and distance
 * biases, whose weight decay the configuration sets to 0 ("sotto": {"param_groups": [{},
 * {"weight_decay": 0.0}]}). */
static inline uint32_t tensor_group(const Tensor* tensor) { return tensor->decay ? 0 : 1; }

/* Sequences with some of their tokens masked. Rows are numbered sequence * positions + position. */
typedef struct Batch {
  int sequences;
  uint16_t* tokens;  /* sequences * positions, after masking */
  int32_t* rows;     /* sequences * masked: which rows are to be predicted, ascending */
  uint16_t* targets; /* what was there */
} Batch;

typedef struct Model Model;
struct Model {
  ModelShape shape;
  Tensor* tensors;
  int n_tensors;
  size_t n_params;
  real *params, *grads;
  struct Activations* act; /* what backward needs from forward, and scratch */
};

/* NULL when memory is short. Parameters are zero until model_init. */
Model* model_create(const ModelShape* shape);
void model_destroy(Model* model);

/* Sets the parameters; depends on the seed and the shape alone. */
void model_init(Model* model, uint64_t seed);

/* Cross entropy in nats, summed over the batch's masked positions. */
double model_forward(Model* model, const Batch* batch);

/* Adds scale * d(sum of cross entropies)/d(parameters) to grads, for the batch of the last
 * model_forward. */
void model_backward(Model* model, const Batch* batch, real scale);

/* Batches: allocated for at most `sequences`; free with batch_free. Returns 0 when memory is short.
 */
int batch_alloc(Batch* batch, const ModelShape* shape, int sequences);
void batch_free(Batch* batch);

#endif

#include "model.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rng.h"

/* Tensor numbers: five shared or final ones, then six per layer. */
enum { EMBEDDING, DISTANCE_BIAS, FINAL_GAIN, N_SHARED };
enum { ATTENTION_GAIN, QKV, ATTENTION_OUT, MLP_GAIN, MLP_IN, MLP_OUT, N_PER_LAYER };

/* Kept from forward for backward. T = sequences * positions rows. */
typedef struct LayerActs {
  real *normal1, *rstd1, *in1; /* T x width, T, T x width: layernorm before attention */
  real* qkv;                   /* T x 3 width: queries, keys, values; heads side by side in each */
  real* prob;                  /* sequences x heads x positions x positions */
  real* mixed;                 /* T x width: attention's output before its projection */
  real *normal2, *rstd2, *in2; /* layernorm before the MLP */
  real *up, *hidden;           /* T x mlp: before and after GELU */
} LayerActs;

struct Activations {
  real* memory;
  LayerActs* layers;
  real* x;                     /* T x width: residual stream */
  real *normal, *rstd, *final; /* final layernorm, masked rows only */
  real* logits;                /* masked rows x vocab; softmax - one_hot after forward */
  real *dx, *dwidth, *dqkv, *dmlp, *dprob; /* backward */
};

static View view(real* data, int stride) {
  const View v = {data, stride};
  return v;
}

/* ---- parameters ---- */

static void add_tensor(Model* model, size_t count, double init_std, int decay, const char* format,
                       ...) {
  Tensor* tensor = &model->tensors[model->n_tensors++];
  va_list args;
  va_start(args, format);
  vsnprintf(tensor->name, sizeof tensor->name, format, args);
  va_end(args);
  tensor->offset = model->n_params;
  tensor->count = count;
  tensor->init_std = init_std;
  tensor->decay = decay;
  model->n_params += count;
}

static void list_tensors(Model* model) {
  const ModelShape* s = &model->shape;
  const size_t width = (size_t)s->width, mlp = (size_t)s->mlp;
  add_tensor(model, (size_t)s->vocab * width, 0.05, 1, "embedding");
  add_tensor(model, (size_t)s->heads * (2 * (size_t)s->positions - 1), 0.02, 0, "distance_bias");
  add_tensor(model, width, 0, 0, "final.gain");
  for (int l = 0; l < s->layers; ++l) {
    add_tensor(model, width, 0, 0, "layer%d.attention.gain", l);
    add_tensor(model, width * 3 * width, 0.05, 1, "layer%d.attention.qkv", l);
    add_tensor(model, width * width, 0.05, 1, "layer%d.attention.out", l);
    add_tensor(model, width, 0, 0, "layer%d.mlp.gain", l);
    add_tensor(model, width * mlp, 0.05, 1, "layer%d.mlp.in", l);
    add_tensor(model, mlp * width, 0.05, 1, "layer%d.mlp.out", l);
  }
}

static real* shared(const Model* model, real* base, int which) {
  return base + model->tensors[which].offset;
}

static real* of_layer(const Model* model, real* base, int layer, int which) {
  return base + model->tensors[N_SHARED + layer * N_PER_LAYER + which].offset;
}

void model_init(Model* model, uint64_t seed) {
  for (int i = 0; i < model->n_tensors; ++i) {
    const Tensor* tensor = &model->tensors[i];
    real* p = model->params + tensor->offset;
    Rng rng = rng_make(seed, RNG_INIT, (uint64_t)i, 0);
    for (size_t j = 0; j < tensor->count; ++j) {
      p[j] = (real)(tensor->init_std > 0 ? tensor->init_std * rng_normal(&rng) : 1.0);
    }
  }
}

/* ---- memory ---- */

/* Cuts 64-byte aligned pieces off one block; with memory == NULL it only adds up their size. The
 * gap keeps pieces from starting at equal addresses modulo 4096: a loop that reads one and writes
 * the other would stall on every element. */
typedef struct Arena {
  real* memory;
  size_t used; /* elements */
} Arena;

static real* take(Arena* arena, size_t a, size_t b) {
  const size_t align = 64 / sizeof(real);
  real* piece = arena->memory ? arena->memory + arena->used : NULL;
  arena->used += ((a * b + align - 1) / align + 17) * align;
  return piece;
}

static void lay_out(struct Activations* act, const ModelShape* s, Arena* arena) {
  const size_t rows = (size_t)s->max_sequences * (size_t)s->positions;
  const size_t masked = (size_t)s->max_sequences * (size_t)s->masked;
  const size_t width = (size_t)s->width, mlp = (size_t)s->mlp,
               square = (size_t)s->positions * (size_t)s->positions;
  for (int l = 0; l < s->layers; ++l) {
    LayerActs* layer = &act->layers[l];
    layer->normal1 = take(arena, rows, width);
    layer->rstd1 = take(arena, rows, 1);
    layer->in1 = take(arena, rows, width);
    layer->qkv = take(arena, rows, 3 * width);
    layer->prob = take(arena, (size_t)s->max_sequences * (size_t)s->heads, square);
    layer->mixed = take(arena, rows, width);
    layer->normal2 = take(arena, rows, width);
    layer->rstd2 = take(arena, rows, 1);
    layer->in2 = take(arena, rows, width);
    layer->up = take(arena, rows, mlp);
    layer->hidden = take(arena, rows, mlp);
  }
  act->x = take(arena, rows, width);
  act->normal = take(arena, masked, width);
  act->rstd = take(arena, masked, 1);
  act->final = take(arena, masked, width);
  act->logits = take(arena, masked, (size_t)s->vocab);
  act->dx = take(arena, rows, width);
  act->dwidth = take(arena, rows, width);
  act->dqkv = take(arena, rows, 3 * width);
  act->dmlp = take(arena, rows, mlp);
  act->dprob = take(arena, square, 1);
}

static void* aligned_zeros(size_t bytes) {
  void* memory = NULL;
  if (posix_memalign(&memory, 64, bytes ? bytes : 64) != 0) return NULL;
  memset(memory, 0, bytes);
  return memory;
}

static struct Activations* activations_create(const ModelShape* shape) {
  struct Activations* act = calloc(1, sizeof *act);
  if (!act) return NULL;
  act->layers = calloc((size_t)shape->layers, sizeof *act->layers);
  Arena arena = {NULL, 0};
  if (act->layers) lay_out(act, shape, &arena);
  arena.memory = act->layers ? aligned_zeros(arena.used * sizeof(real)) : NULL;
  arena.used = 0;
  if (!arena.memory) {
    free(act->layers);
    free(act);
    return NULL;
  }
  act->memory = arena.memory;
  lay_out(act, shape, &arena);
  return act;
}

Model* model_create(const ModelShape* shape) {
  Model* model = calloc(1, sizeof *model);
  if (!model) return NULL;
  model->shape = *shape;
  model->tensors = calloc((size_t)(N_SHARED + shape->layers * N_PER_LAYER), sizeof *model->tensors);
  if (model->tensors) list_tensors(model);
  model->params = aligned_zeros(model->n_params * sizeof(real));
  model->grads = aligned_zeros(model->n_params * sizeof(real));
  model->act = activations_create(shape);
  if (!model->tensors || !model->params || !model->grads || !model->act) {
    model_destroy(model);
    return NULL;
  }
  return model;
}

void model_destroy(Model* model) {
  if (!model) return;
  if (model->act) {
    free(model->act->memory);
    free(model->act->layers);
  }
  free(model->act);
  free(model->params);
  free(model->grads);
  free(model->tensors);
  free(model);
}

int batch_alloc(Batch* batch, const ModelShape* shape, int sequences) {
  const size_t n = (size_t)sequences;
  batch->sequences = sequences;
  batch->tokens = calloc(n * (size_t)shape->positions, sizeof *batch->tokens);
  batch->rows = calloc(n * (size_t)shape->masked, sizeof *batch->rows);
  batch->targets = calloc(n * (size_t)shape->masked, sizeof *batch->targets);
  return batch->tokens && batch->rows && batch->targets;
}

void batch_free(Batch* batch) {
  free(batch->tokens);
  free(batch->rows);
  free(batch->targets);
  memset(batch, 0, sizeof *batch);
}

/* ---- attention, one head of one sequence at a time ---- */

/* Queries, keys or values (part 0, 1, 2) of a head, positions x (width / heads), inside a T x 3
 * width matrix. */
static View head_of(const ModelShape* s, real* qkv, int sequence, int head, int part) {
  const size_t row = (size_t)sequence * (size_t)s->positions;
  const int size = s->width / s->heads;
  return view(qkv + row * 3 * (size_t)s->width + part * s->width + head * size, 3 * s->width);
}

static View mixed_of(const ModelShape* s, real* mixed, int sequence, int head) {
  const size_t row = (size_t)sequence * (size_t)s->positions;
  return view(mixed + row * (size_t)s->width + head * (s->width / s->heads), s->width);
}

static real* prob_of(const ModelShape* s, const LayerActs* layer, int sequence, int head) {
  return layer->prob +
         (size_t)(sequence * s->heads + head) * (size_t)s->positions * (size_t)s->positions;
}

static void attention_forward(const Model* model, const LayerActs* layer, int sequences) {
  const ModelShape* s = &model->shape;
  const int n = s->positions, size = s->width / s->heads;
  const real* bias = shared(model, model->params, DISTANCE_BIAS);
  const real scale = (real)(1 / sqrt((double)size));
  for (int i = 0; i < sequences; ++i) {
    for (int h = 0; h < s->heads; ++h) {
      const View prob = view(prob_of(s, layer, i, h), n);
      gemm(0, 1, n, n, size, scale, head_of(s, layer->qkv, i, h, 0),
           head_of(s, layer->qkv, i, h, 1), 0, prob);
      attention_softmax(prob.data, bias + h * (2 * n - 1), n);
      gemm(0, 0, n, size, n, 1, prob, head_of(s, layer->qkv, i, h, 2), 0,
           mixed_of(s, layer->mixed, i, h));
    }
  }
}

/* From d(mixed) to d(qkv); the distance biases' gradient is added. */
static void attention_backward(const Model* model, const LayerActs* layer, int sequences,
                               real* dmixed) {
  const ModelShape* s = &model->shape;
  const int n = s->positions, size = s->width / s->heads;
  const real scale = (real)(1 / sqrt((double)size));
  real *dbias = shared(model, model->grads, DISTANCE_BIAS), *dqkv = model->act->dqkv;
  const View dprob = view(model->act->dprob, n);
  for (int i = 0; i < sequences; ++i) {
    for (int h = 0; h < s->heads; ++h) {
      const View prob = view(prob_of(s, layer, i, h), n), dout = mixed_of(s, dmixed, i, h);
      const View q = head_of(s, layer->qkv, i, h, 0), k = head_of(s, layer->qkv, i, h, 1);
      gemm(0, 1, n, n, size, 1, dout, head_of(s, layer->qkv, i, h, 2), 0, dprob);
      gemm(1, 0, n, size, n, 1, prob, dout, 0, head_of(s, dqkv, i, h, 2));
      attention_softmax_backward(dprob.data, prob.data, n, dbias + h * (2 * n - 1));
      gemm(0, 0, n, size, n, scale, dprob, k, 0, head_of(s, dqkv, i, h, 0));
      gemm(1, 0, n, size, n, scale, dprob, q, 0, head_of(s, dqkv, i, h, 1));
    }
  }
}

/* ---- layers ---- */

/* out (rows x n) = x (rows x k) weight (k x n), or added to out. */
static void linear(int rows, int k, int n, real* x, real* weight, int add, real* out) {
  gemm(0, 0, rows, n, k, 1, view(x, k), view(weight, n), (real)add, view(out, n));
}

/* dweight += x^T dout, and dx = dout weight^T. */
static void linear_backward(int rows, int k, int n, real* x, real* weight, real* dout,
                            real* dweight, real* dx) {
  gemm(1, 0, k, n, rows, 1, view(x, k), view(dout, n), 1, view(dweight, n));
  gemm(0, 1, rows, k, n, 1, view(dout, n), view(weight, n), 0, view(dx, k));
}

/* Layernorm and attention up to, but without, the projection back to the residual stream. */
static void attend(Model* model, int l, int sequences) {
  const ModelShape* s = &model->shape;
  const LayerActs* a = &model->act->layers[l];
  const int rows = sequences * s->positions;
  layernorm_forward(model->act->x, of_layer(model, model->params, l, ATTENTION_GAIN), rows,
                    s->width, a->normal1, a->rstd1, a->in1);
  linear(rows, s->width, 3 * s->width, a->in1, of_layer(model, model->params, l, QKV), 0, a->qkv);
  attention_forward(model, a, sequences);
}

/* The rest of the layer, row by row: projection, layernorm, MLP. */
static void transform(Model* model, int l, int rows) {
  const ModelShape* s = &model->shape;
  const LayerActs* a = &model->act->layers[l];
  real *p = model->params, *x = model->act->x;
  linear(rows, s->width, s->width, a->mixed, of_layer(model, p, l, ATTENTION_OUT), 1, x);
  layernorm_forward(x, of_layer(model, p, l, MLP_GAIN), rows, s->width, a->normal2, a->rstd2,
                    a->in2);
  linear(rows, s->width, s->mlp, a->in2, of_layer(model, p, l, MLP_IN), 0, a->up);
  gelu_forward(a->up, (size_t)rows * (size_t)s->mlp, a->hidden);
  linear(rows, s->mlp, s->width, a->hidden, of_layer(model, p, l, MLP_OUT), 1, x);
}

/* From the gradient of the residual stream after `transform` to the one before it, both in act->dx;
 * leaves the gradient of `mixed` in act->dwidth. */
static void transform_backward(Model* model, int l, int rows) {
  const ModelShape* s = &model->shape;
  const struct Activations* act = model->act;
  const LayerActs* a = &act->layers[l];
  real *p = model->params, *g = model->grads;
  linear_backward(rows, s->mlp, s->width, a->hidden, of_layer(model, p, l, MLP_OUT), act->dx,
                  of_layer(model, g, l, MLP_OUT), act->dmlp);
  gelu_backward(a->up, (size_t)rows * (size_t)s->mlp, act->dmlp);
  linear_backward(rows, s->width, s->mlp, a->in2, of_layer(model, p, l, MLP_IN), act->dmlp,
                  of_layer(model, g, l, MLP_IN), act->dwidth);
  layernorm_backward(act->dwidth, of_layer(model, p, l, MLP_GAIN), a->normal2, a->rstd2, rows,
                     s->width, act->dx, of_layer(model, g, l, MLP_GAIN));
  linear_backward(rows, s->width, s->width, a->mixed, of_layer(model, p, l, ATTENTION_OUT), act->dx,
                  of_layer(model, g, l, ATTENTION_OUT), act->dwidth);
}

/* Takes the gradient of `mixed` from act->dwidth and adds to act->dx. */
static void attend_backward(Model* model, int l, int sequences) {
  const ModelShape* s = &model->shape;
  const struct Activations* act = model->act;
  const LayerActs* a = &act->layers[l];
  const int rows = sequences * s->positions;
  attention_backward(model, a, sequences, act->dwidth);
  linear_backward(rows, s->width, 3 * s->width, a->in1, of_layer(model, model->params, l, QKV),
                  act->dqkv, of_layer(model, model->grads, l, QKV), act->dwidth);
  layernorm_backward(act->dwidth, of_layer(model, model->params, l, ATTENTION_GAIN), a->normal1,
                     a->rstd1, rows, s->width, act->dx,
                     of_layer(model, model->grads, l, ATTENTION_GAIN));
}

/* ---- the whole model ---- */

/* Moves the masked rows of x to the front. After the last attention no other row reaches the loss,
 * so the last MLP and the output head see a sixth of the rows. */
static void gather_rows(real* x, const int32_t* rows, int n, size_t width) {
  for (int i = 0; i < n; ++i)
    memmove(x + (size_t)i * width, x + (size_t)rows[i] * width, width * sizeof *x);
}

/* The reverse, for gradients: all other rows become zero. */
static void spread_rows(real* x, const int32_t* rows, int n, int total, size_t width) {
  for (int row = total - 1, i = n - 1; row >= 0; --row) {
    if (i >= 0 && rows[i] == row) {
      memmove(x + (size_t)row * width, x + (size_t)i-- * width, width * sizeof *x);
    } else {
      memset(x + (size_t)row * width, 0, width * sizeof *x);
    }
  }
}

/* Loss of the `masked` rows now in act->x, from the final layernorm and the output head. */
static double head_forward(Model* model, const uint16_t* targets, int masked) {
  const ModelShape* s = &model->shape;
  struct Activations* act = model->act;
  real* embedding = shared(model, model->params, EMBEDDING);
  double loss = 0;
  layernorm_forward(act->x, shared(model, model->params, FINAL_GAIN), masked, s->width, act->normal,
                    act->rstd, act->final);
  gemm(0, 1, masked, s->vocab, s->width, 1, view(act->final, s->width), view(embedding, s->width),
       0, view(act->logits, s->vocab));
  for (int i = 0; i < masked; ++i) {
    loss += cross_entropy(act->logits + (size_t)i * (size_t)s->vocab, s->vocab, targets[i]);
  }
  return loss;
}

/* Writes the gradient of the masked rows to act->dx. */
static void head_backward(Model* model, int masked, real scale) {
  const ModelShape* s = &model->shape;
  struct Activations* act = model->act;
  real *embedding = shared(model, model->params, EMBEDDING),
       *dembedding = shared(model, model->grads, EMBEDDING);
  const View dlogits = view(act->logits, s->vocab);
  gemm(1, 0, s->vocab, s->width, masked, scale, dlogits, view(act->final, s->width), 1,
       view(dembedding, s->width));
  gemm(0, 0, masked, s->width, s->vocab, scale, dlogits, view(embedding, s->width), 0,
       view(act->dwidth, s->width));
  memset(act->dx, 0, (size_t)masked * (size_t)s->width * sizeof(real));
  layernorm_backward(act->dwidth, shared(model, model->params, FINAL_GAIN), act->normal, act->rstd,
                     masked, s->width, act->dx, shared(model, model->grads, FINAL_GAIN));
}

double model_forward(Model* model, const Batch* batch) {
  const ModelShape* s = &model->shape;
  struct Activations* act = model->act;
  const size_t width = (size_t)s->width;
  const int rows = batch->sequences * s->positions, masked = batch->sequences * s->masked,
            last = s->layers - 1;
  const real* embedding = shared(model, model->params, EMBEDDING);
  for (int i = 0; i < rows; ++i) {
    memcpy(act->x + (size_t)i * width, embedding + batch->tokens[i] * width, width * sizeof(real));
  }
  for (int l = 0; l < last; ++l) {
    attend(model, l, batch->sequences);
    transform(model, l, rows);
  }
  attend(model, last, batch->sequences);
  gather_rows(act->x, batch->rows, masked, width);
  gather_rows(act->layers[last].mixed, batch->rows, masked, width);
  transform(model, last, masked);
  return head_forward(model, batch->targets, masked);
}

void model_backward(Model* model, const Batch* batch, real scale) {
  const ModelShape* s = &model->shape;
  const struct Activations* act = model->act;
  const size_t width = (size_t)s->width;
  const int rows = batch->sequences * s->positions, masked = batch->sequences * s->masked,
            last = s->layers - 1;
  head_backward(model, masked, scale);
  transform_backward(model, last, masked);
  spread_rows(act->dx, batch->rows, masked, rows, width);
  spread_rows(act->dwidth, batch->rows, masked, rows, width);
  attend_backward(model, last, batch->sequences);
  for (int l = last; l-- > 0;) {
    transform_backward(model, l, rows);
    attend_backward(model, l, batch->sequences);
  }
  real* dembedding = shared(model, model->grads, EMBEDDING);
  for (int i = 0; i < rows; ++i) {
    add_to(dembedding + batch->tokens[i] * width, act->dx + (size_t)i * width, width);
  }
}

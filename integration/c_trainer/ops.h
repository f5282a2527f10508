/* ops.h - the row-wise and element-wise pieces of the model; matrix products are left to CBLAS.
 *
 * Everything is written for `real`, which is float in the trainer. The gradient check compiles the
 * same sources with MODEL_DOUBLE, because central differences in float are too noisy to find small
 * mistakes. Matrices are row-major and dense unless a leading dimension is given.
 */
#ifndef C_TRAINER_OPS_H
#define C_TRAINER_OPS_H

#include <stddef.h>

#ifdef MODEL_DOUBLE
typedef double real;
#else
typedef float real;
#endif

/* A matrix inside a larger one: `stride` elements from row to row. */
typedef struct View {
  real* data;
  int stride;
} View;

/* C (m x n) = alpha * op(A) op(B) + beta * C, where op transposes if its flag is set and the inner
 * length is k. */
void gemm(int transpose_a, int transpose_b, int m, int n, int k, real alpha, View a, View b,
          real beta, View c);

/* normal = (x - mean) / sqrt(variance + 1e-5) per row, out = normal * gain; rstd keeps 1 /
 * sqrt(...) for backward. */
void layernorm_forward(const real* x, const real* gain, int rows, int width, real* normal,
                       real* rstd, real* out);

/* Adds the gradient to dx and dgain. dout is overwritten. */
void layernorm_backward(real* dout, const real* gain, const real* normal, const real* rstd,
                        int rows, int width, real* dx, real* dgain);

/* out = x * sigmoid(1.5958 (x + 0.044715 x^3)), the tanh form of GELU. */
void gelu_forward(const real* x, size_t n, real* out);

/* Turns d(loss)/d(out), in `grad`, into d(loss)/dx. */
void gelu_backward(const real* x, size_t n, real* grad);

/* In place: row i becomes softmax_j(scores[i][j] + bias[j - i + n - 1]), for an n x n matrix and 2n
 * - 1 biases. */
void attention_softmax(real* scores, const real* bias, int n);

/* Turns d(loss)/d(probabilities), in `grad`, into d(loss)/d(scores); adds the biases' gradient to
 * dbias. */
void attention_softmax_backward(real* grad, const real* prob, int n, real* dbias);

/* Cross entropy in nats of one row of logits against `target`. The row becomes softmax -
 * one_hot(target). */
double cross_entropy(real* logits, int n, int target);

void add_to(real* sum, const real* x, size_t n);

#endif

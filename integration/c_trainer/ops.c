#include "ops.h"

#include <cblas.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* The loops below are compiled twice, for any x86-64 and for one with AVX2; the loader picks (too
 * early for a sanitizer's run time). Sums over a row are declared as SIMD reductions, so that the
 * compiler may vectorise them without -ffast-math. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(TRAINER_SANITIZED)
#define MULTIVERSION __attribute__((target_clones("default", "arch=x86-64-v3")))
#else
#define MULTIVERSION
#endif

#ifdef MODEL_DOUBLE
#define CBLAS_GEMM cblas_dgemm
static inline real exp_of(real x) { return exp(x); }
#else
#define CBLAS_GEMM cblas_sgemm
/* exp(x) to about 2e-7 relative, without calls or branches so that it vectorises: x = n ln 2 + r,
 * |r| <= ln 2 / 2, Taylor's polynomial for exp(r), and n added to the exponent. */
static inline real exp_of(real x) {
  const float kRound = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float n = (x * 1.44269504f + kRound) - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts */
  float p = 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const int32_t bits = ((int32_t)n + 127) << 23;
  float power;
  memcpy(&power, &bits, sizeof power);
  return p * power;
}
#endif

static inline real sigmoid(real x) { return 1 / (1 + exp_of(-x)); }

void gemm(int transpose_a, int transpose_b, int m, int n, int k, real alpha, View a, View b,
          real beta, View c) {
  CBLAS_GEMM(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans,
             transpose_b ? CblasTrans : CblasNoTrans, m, n, k, alpha, a.data, a.stride, b.data,
             b.stride, beta, c.data, c.stride);
}

MULTIVERSION
void layernorm_forward(const real* x, const real* gain, int rows, int width, real* normal,
                       real* rstd, real* out) {
  for (int i = 0; i < rows; ++i, x += width, normal += width, out += width) {
    real sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < width; ++j) sum += x[j];
    const real mean = sum / (real)width;
#pragma omp simd reduction(+ : squares)
    for (int j = 0; j < width; ++j) squares += (x[j] - mean) * (x[j] - mean);
    rstd[i] = 1 / (real)sqrt(squares / (real)width + (real)1e-5);
#pragma omp simd
    for (int j = 0; j < width; ++j) {
      normal[j] = (x[j] - mean) * rstd[i];
      out[j] = normal[j] * gain[j];
    }
  }
}

MULTIVERSION
void layernorm_backward(real* dout, const real* gain, const real* normal, const real* rstd,
                        int rows, int width, real* dx, real* dgain) {
  for (int i = 0; i < rows; ++i, dout += width, normal += width, dx += width) {
    real sum = 0, dot = 0;
#pragma omp simd reduction(+ : sum, dot)
    for (int j = 0; j < width; ++j) {
      dgain[j] += dout[j] * normal[j];
      dout[j] *= gain[j];
      sum += dout[j];
      dot += dout[j] * normal[j];
    }
    sum /= (real)width;
    dot /= (real)width;
#pragma omp simd
    for (int j = 0; j < width; ++j) dx[j] += rstd[i] * (dout[j] - sum - normal[j] * dot);
  }
}

static const real kGelu = (real)1.5957691216057308; /* 2 sqrt(2 / pi) */
static const real kCube = (real)0.044715;

MULTIVERSION
void gelu_forward(const real* x, size_t n, real* out) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i)
    out[i] = x[i] * sigmoid(kGelu * (x[i] + kCube * x[i] * x[i] * x[i]));
}

MULTIVERSION
void gelu_backward(const real* x, size_t n, real* grad) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) {
    const real square = x[i] * x[i];
    const real s = sigmoid(kGelu * x[i] * (1 + kCube * square));
    grad[i] *= s + x[i] * s * (1 - s) * kGelu * (1 + 3 * kCube * square);
  }
}

MULTIVERSION
void attention_softmax(real* scores, const real* bias, int n) {
  for (int i = 0; i < n; ++i, scores += n) {
    const real* row_bias = bias + (n - 1 - i);
    real max = scores[0] + row_bias[0], sum = 0;
#pragma omp simd reduction(max : max)
    for (int j = 0; j < n; ++j) {
      scores[j] += row_bias[j];
      max = scores[j] > max ? scores[j] : max;
    }
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < n; ++j) {
      scores[j] = exp_of(scores[j] - max);
      sum += scores[j];
    }
    const real inverse = 1 / sum;
#pragma omp simd
    for (int j = 0; j < n; ++j) scores[j] *= inverse;
  }
}

MULTIVERSION
void attention_softmax_backward(real* grad, const real* prob, int n, real* dbias) {
  for (int i = 0; i < n; ++i, grad += n, prob += n) {
    real* row_bias = dbias + (n - 1 - i);
    real dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int j = 0; j < n; ++j) dot += grad[j] * prob[j];
#pragma omp simd
    for (int j = 0; j < n; ++j) {
      grad[j] = prob[j] * (grad[j] - dot);
      row_bias[j] += grad[j];
    }
  }
}

MULTIVERSION
double cross_entropy(real* logits, int n, int target) {
  real max = logits[0], sum = 0;
#pragma omp simd reduction(max : max)
  for (int j = 0; j < n; ++j) max = logits[j] > max ? logits[j] : max;
  const real at_target = logits[target] - max;
#pragma omp simd reduction(+ : sum)
  for (int j = 0; j < n; ++j) {
    logits[j] = exp_of(logits[j] - max);
    sum += logits[j];
  }
  const real inverse = 1 / sum;
#pragma omp simd
  for (int j = 0; j < n; ++j) logits[j] *= inverse;
  logits[target] -= 1;
  return log((double)sum) - (double)at_target;
}

MULTIVERSION
void add_to(real* sum, const real* x, size_t n) {
#pragma omp simd
  for (size_t i = 0; i < n; ++i) sum[i] += x[i];
}

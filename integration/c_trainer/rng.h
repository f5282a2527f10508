/* rng.h - random numbers that depend on a key alone.
 *
 * A generator is made from (seed, purpose, a, b), for example (seed, training batch, step, rank),
 * and then counted forward. Nothing survives between steps, so a resumed run draws exactly the
 * numbers of one that was never stopped, and two optimizers with the same seed see the same data.
 * The mixing function is SplitMix64's.
 */
#ifndef C_TRAINER_RNG_H
#define C_TRAINER_RNG_H

#include <math.h>
#include <stdint.h>

typedef struct Rng {
  uint64_t state;
} Rng;

/* What the numbers are for: different purposes never share a sequence. */
enum { RNG_INIT = 1, RNG_TRAIN = 2, RNG_EVAL = 3, RNG_HELD_OUT = 4, RNG_TEST = 5 };

static inline uint64_t rng_mix(uint64_t x) {
  x += UINT64_C(0x9e3779b97f4a7c15);
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

static inline Rng rng_make(uint64_t seed, uint64_t purpose, uint64_t a, uint64_t b) {
  Rng rng = {rng_mix(rng_mix(rng_mix(rng_mix(seed) + purpose) + a) + b)};
  return rng;
}

static inline uint64_t rng_next(Rng* rng) {
  const uint64_t value = rng_mix(rng->state);
  rng->state += UINT64_C(0x9e3779b97f4a7c15);
  return value;
}

/* Uniform in 0 .. n-1, for 1 <= n < 2^32 (bias below n / 2^32). */
static inline uint32_t rng_below(Rng* rng, uint32_t n) {
  return (uint32_t)(((rng_next(rng) >> 32) * n) >> 32);
}

/* Uniform in (0, 1]. */
static inline double rng_uniform(Rng* rng) {
  return ((double)(rng_next(rng) >> 11) + 1.0) / 9007199254740992.0;
}

/* Normal with mean 0 and deviation 1 (Box and Muller; one of the two values is used). */
static inline double rng_normal(Rng* rng) {
  const double radius = sqrt(-2.0 * log(rng_uniform(rng)));
  return radius * cos(6.283185307179586 * rng_uniform(rng));
}

#endif

/* common.h - errors, the clock, and values of the library's reports. */
#ifndef C_TRAINER_COMMON_H
#define C_TRAINER_COMMON_H

#include <stdint.h>

/* Shown in error messages; -1 before the rank is known. */
extern int trainer_rank;

/* Prints "c-trainer: rank R: message" to standard error and exits with code 1. The other ranks
 * learn of it from their next operation, which ends with PEER_LOST. */
#if defined(__GNUC__)
__attribute__((format(printf, 1, 2), noreturn))
#endif
void die(const char *format, ...);

/* Monotonic clock. */
int64_t now_ns(void);

/* FNV-1a, continued from `hash` (start with HASH_START); to compare data, parameters and
 * checkpoints. */
#define HASH_START UINT64_C(0xcbf29ce484222325)
uint64_t hash_bytes(uint64_t hash, const void* bytes, uint64_t n);

/* Start of the value of the first `key` at or after `json`; NULL if there is none. Enough for a
 * report of the library, whose strings never hold `"key":` with the quotes unescaped. */
const char* json_value(const char* json, const char* key);

#endif

/* checkpoint.h - files from which a run continues bit for bit.
 *
 * Each rank writes its own state to slot0.rankR or slot1.rankR in the directory; when all have,
 * rank 0 points the small file "latest" at that slot. The slots take turns, so the last complete
 * checkpoint stays until the next one is complete. Every file is written under a temporary name,
 * synced and renamed.
 */
#ifndef C_TRAINER_CHECKPOINT_H
#define C_TRAINER_CHECKPOINT_H

#include <stddef.h>
#include <stdint.h>

#include "totals.h"

/* What has to be equal for a checkpoint to fit a run. Only 8-byte fields. */
typedef struct RunKey {
  int64_t world, rank, seed, micro_batch, accumulation;
  int64_t width, layers, heads, mlp, positions, masked;
  uint64_t data_hash;
} RunKey;

typedef struct Latest {
  int64_t step; /* -1: there is no checkpoint */
  int64_t slot;
} Latest;

/* Results are 1, or 0 with a message in error. */
typedef struct Failure {
  char text[512];
} Failure;

/* Makes the directory if it is missing and tries whether files can be made in it. */
int checkpoint_prepare(const char* directory, Failure* failure);

int checkpoint_write(const char* directory, int64_t slot, const RunKey* key, const Totals* totals,
                     const void* state, uint64_t state_bytes, Failure* failure);

/* *state is malloc'ed; the caller frees it. Refuses a damaged file and one of another run, and says
 * which part differs. */
int checkpoint_read(const char* directory, int64_t slot, const RunKey* key, Totals* totals,
                    void** state, uint64_t* state_bytes, Failure* failure);

/* Rank 0. A missing file is not an error: step becomes -1. */
int latest_read(const char* directory, Latest* latest, Failure* failure);
int latest_write(const char* directory, const Latest* latest, Failure* failure);

#endif

/* data.h - text as tokens, and batches of masked sequences.
 *
 * All files are joined in order; the last 5 % of the bytes are held out. Each byte value is a
 * token; values seen fewer than 50 times in the training part share one "unknown" token. A further
 * token stands for a masked position.
 */
#ifndef C_TRAINER_DATA_H
#define C_TRAINER_DATA_H

#include <stddef.h>
#include <stdint.h>

#include "model.h"

typedef struct Data {
  uint16_t* tokens;       /* training part, then held-out part */
  size_t train, held_out; /* tokens */
  int vocab;              /* byte tokens, unknown, mask */
  int unknown, mask;      /* token numbers */
  double entropy;         /* unigram entropy of the held-out part, nats per token */
  uint64_t hash;          /* of the text, to compare ranks and checkpoints */
  int files;
} Data;

/* Reads files, and the .py files below directories (all levels, sorted by path). With n == 0 it
 * takes the modules of the machine's Python library. Ends the program with a clear message when a
 * path cannot be read or when the text is shorter than 2 MB. `verbose` lists what was taken. */
void data_load(Data* data, char* const* paths, int n, int verbose);
void data_free(Data* data);

/* Training batch number `step` of `rank`: random windows of the training part, random masks. */
void data_train_batch(const Data* data, const ModelShape* shape, uint64_t seed, uint64_t step,
                      int rank, Batch* batch);

/* Fixed evaluation sequence number i, into place `slot` of a batch. EVAL_SUBSET: a random window of
 * the held-out part, the same for every run; EVAL_ALL: the i-th of the consecutive windows. */
enum { EVAL_SUBSET, EVAL_ALL };
void data_eval_sequence(const Data* data, const ModelShape* shape, int which, size_t i,
                        Batch* batch, int slot);

/* Whole windows in the held-out part. */
size_t data_held_out_windows(const Data* data, const ModelShape* shape);

#endif

/* totals.h - what a rank counts over a run; part of a checkpoint, so that a resumed run reports the
 * whole. */
#ifndef C_TRAINER_TOTALS_H
#define C_TRAINER_TOTALS_H

#include <stdint.h>

/* What a step did. Local: it sent nothing. Outer: it launched an average of what local steps have
 * changed. Skipped: a dynamic loss scale left it out, nothing was updated. */
typedef enum Stage { FULL_PRECISION, COMPRESSED, LOCAL, OUTER, SKIPPED, N_STAGES } Stage;

/* Only 8-byte fields: written to checkpoints as it is. Bytes are what this rank sent in optimizer
 * steps. */
typedef struct Totals {
  uint64_t step;            /* updates done */
  uint64_t skipped;         /* steps that updated nothing; each had a batch of its own */
  int64_t running_ns;       /* clock: barrier to barrier, evaluation and checkpoints left out */
  int64_t sotto_ns;         /* of it inside Sotto's calls */
  int64_t kernel_ns;        /* of that in Sotto's kernels */
  uint64_t payload_sent;    /* measured at the transport */
  uint64_t payload_planned; /* predicted by the plans before sending */
  uint64_t header_sent;
  uint64_t payload_between_hosts; /* of payload_sent; up to the last checkpoint or the end */
  uint64_t stage_steps[N_STAGES];
  int64_t stage_ns[N_STAGES];
  int64_t log_bytes; /* rank 0: length of the log at the checkpoint */
  double eval_loss;  /* last evaluation, nats per masked token */
} Totals;

#endif

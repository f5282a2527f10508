/* log.h - what rank 0 tells: JSON lines, the progress line and the summary. */
#ifndef C_TRAINER_LOG_H
#define C_TRAINER_LOG_H

#include <stdint.h>
#include <stdio.h>

#include "options.h"
#include "totals.h"

typedef struct Log {
  const Options* options;
  FILE* file;       /* NULL: no JSON lines */
  int redraw;       /* progress: 1 one line redrawn, 0 plain lines, -1 off */
  int64_t shown_ns; /* when progress was last shown */
  double step_ns;   /* running average of a step */
} Log;

/* One training step as rank 0 saw it; times in ms. */
typedef struct StepRecord {
  double loss; /* of rank 0's own samples, before the update, nats per masked token */
  double lr, grad_norm;
  double loss_scale; /* of this step's gradients; the loss is without it */
  Stage stage;
  double step_ms; /* = compute_ms + codec_ms + comm_ms */
  double compute_ms, codec_ms, comm_ms;
  uint64_t payload_bytes;
  uint64_t samples; /* so far, over all ranks */
  uint64_t batch;   /* samples per step over all ranks */
} StepRecord;

/* Figures of the whole run. The arrays have one element per rank. */
typedef struct Summary {
  double val_loss, eval_loss, unigram_entropy, wall_s;
  double compute_s, codec_s, exposed_comm_s; /* means over ranks */
  const int64_t *payload_sent, *payload_planned, *header_sent, *between_hosts;
  uint64_t held_out_sequences, params_hash;
  uint64_t outer_period; /* 0: no outer steps, or the period "auto" has not been chosen */
  int64_t n_params, batch;
  int world;
  const Totals* totals;
} Summary;

extern const char* const kStageNames[N_STAGES];

/* totals: of the checkpoint that is resumed, so that what the log says beyond it is cut off; NULL:
 * start anew. */
void log_open(Log* log, const Options* options, const Totals* totals);
void log_step(Log* log, const Totals* totals, const StepRecord* record);
void log_eval(Log* log, const Totals* totals, uint64_t samples);
void log_note(Log* log, const char* text); /* a line of its own, between progress lines */

/* Flushes, and returns the length of the log in bytes. */
int64_t log_flush(Log* log);
void log_close(Log* log);

void log_summary(const Options* options, const Summary* summary);

#endif

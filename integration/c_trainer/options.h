/* options.h - the command line. */
#ifndef C_TRAINER_OPTIONS_H
#define C_TRAINER_OPTIONS_H

#include <stdint.h>

typedef struct Options {
  const char* name;    /* of the run, in the log, the summary and the progress line */
  const char* config;  /* DeepSpeed JSON file */
  char** data;         /* files and directories; points into argv */
  int n_data;          /* 0: the machine's Python library */
  const char* log;     /* JSON lines, one per step; NULL: none */
  const char* summary; /* JSON at the end; NULL: none */
  const char* record;  /* prefix of files with all gradients; NULL: none */
  const char* save;    /* directory of checkpoints; NULL: none */
  int64_t save_every;  /* steps; 0: at the end only */
  int resume;          /* continue from the checkpoint in `save` */
  int64_t steps, seed;
  int64_t micro_batch;  /* sequences per rank and micro-batch; 0: the configuration's, else 6 */
  int64_t accumulation; /* micro-batches per step; 0: the configuration's, else 1 */
  int64_t eval_every, eval_sequences;
  int64_t width, layers, heads, mlp, positions, masked;
  const char* progress; /* auto, line, plain, off */
} Options;

/* Fills *options from the command line. Ends the program with a message when something is wrong, or
 * after --help. */
void options_parse(Options* options, int argc, char** argv);

#endif

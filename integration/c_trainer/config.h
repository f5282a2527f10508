/* config.h - the configuration file, as far as the trainer itself needs it: the batch sizes. */
#ifndef C_TRAINER_CONFIG_H
#define C_TRAINER_CONFIG_H

#include "options.h"

/* The file's text, to be handed to sotto_optim_create; malloc'ed, the caller frees it. */
char* config_read(const char* path);

/* Sets options->micro_batch and accumulation from the configuration, for `world` ranks. A flag that
 * contradicts the file ends the program; without either they are 6 and 1. */
void config_batch(Options* options, const char* text, int world);

#endif

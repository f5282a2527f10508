/* config.h - the configuration file, as far as the trainer needs it: transport, batch sizes. */
#ifndef C_TRAINER_CONFIG_H
#define C_TRAINER_CONFIG_H

#include <stddef.h>

#include "options.h"

/* The file's text, to be handed to sotto_optim_create; malloc'ed, the caller frees it. */
char* config_read(const char* path);

/* The transport that the file names for the comm, which has not been created yet; else "auto". */
void config_transport(const Options* options, const char* text, char* name, size_t size);

/* Sets options->micro_batch and accumulation from the configuration, for `world` ranks. A flag that
 * contradicts the file ends the program; without either they are 6 and 1. */
void config_batch(Options* options, const char* text, int world);

#endif

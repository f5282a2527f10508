/* record.h - what a run did to its parameters, for trainers in other languages to repeat without
 * the model.
 *
 * A rank's file, little-endian: the number of tensors as uint64; for each tensor its parameter
 * group, its elements and the bytes of its name as uint64, and the name; the start values of all
 * tensors as float32; then for every step the gradients of all tensors as float32, as the optimizer
 * got them.
 */
#ifndef C_TRAINER_RECORD_H
#define C_TRAINER_RECORD_H

#include <stdio.h>

#include "model.h"

/* Begins PREFIX.rank<rank>. Ends the program with a message when it cannot be written, as the
 * others do. */
FILE* record_open(const char* prefix, int rank, const Model* model);
void record_step(FILE* file, const Model* model);
void record_close(FILE* file);

#endif

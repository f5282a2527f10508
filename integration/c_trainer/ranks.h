/* ranks.h - the group of ranks: joining it, and the few collectives that training needs besides the
 * optimizer's.
 *
 * Two comms over the same connections: `comm` belongs to the optimizer alone, so its counters are
 * exactly the traffic of training; barriers, evaluation and checkpoints use `side`.
 */
#ifndef C_TRAINER_RANKS_H
#define C_TRAINER_RANKS_H

#include <sotto/sotto.h>
#include <stdint.h>

typedef struct Ranks {
  sotto_context* context;
  sotto_comm *comm, *side;
  int32_t rank, size;
} Ranks;

/* Ends the program with Sotto's message unless status is SOTTO_OK. `what` names the call. */
void check(sotto_status status, const char* what);

/* Waits for an operation; ends the program with the operation's message if it failed. Fills stats
 * if not NULL. */
void finish_op(sotto_op* op, sotto_op_stats* stats, const char* what);

/* Rank, size and rendezvous come from the launcher's environment (sotto-run, torchrun, ...).
 * transport: as in sotto_comm_config. */
void ranks_join(Ranks* ranks, const char* transport);
void ranks_leave(Ranks* ranks);

sotto_buffer buffer_of(void* data, uint64_t count, sotto_dtype dtype);

void ranks_barrier(const Ranks* ranks);
void ranks_broadcast(const Ranks* ranks, void* data, uint64_t count,
                     sotto_dtype dtype);                        /* from rank 0, in place */
void ranks_sum(const Ranks* ranks, double* values, uint64_t n); /* in place */
int ranks_all(const Ranks* ranks, int ok);                      /* 1 if ok on every rank */

/* Payload that the optimizer has sent so far from this rank to ranks of other hosts, in bytes. */
uint64_t ranks_sent_between_hosts(const Ranks* ranks);

/* out: size * n values, in rank order. */
void ranks_gather(const Ranks* ranks, const void* in, uint64_t n, sotto_dtype dtype, void* out);

#endif

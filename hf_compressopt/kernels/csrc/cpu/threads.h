/* The threads that the CPU kernels share. No OpenMP: a child that was forked after a parallel region would hang. */
#ifndef COMPRESSOPT_CPU_THREADS_H
#define COMPRESSOPT_CPU_THREADS_H

#include <stdint.h>

namespace compressopt {

typedef void (*Work)(const void *context, int64_t begin, int64_t end);

/* Runs work on [0, count) in pieces of at most grain, each begun at a multiple of it, on at most this many threads, and
 * returns when all is done. Which thread gets which piece is left to chance, so pieces must not depend on one another.
 * Any number of threads may call at once; all but one of them then work alone. */
void parallel_for(int threads, int64_t count, int64_t grain, Work work, const void *context);

}  // namespace compressopt

#endif

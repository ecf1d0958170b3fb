/* The threads of the CPU kernels: the host's, where it hands over its OpenMP runtime, or else a pool of their own, which
 * a process that was forked from one with threads can use. The host's are better where there are any: for some
 * milliseconds after a parallel region OpenMP's threads wait for the next one without sleeping, each on a core. */
#ifndef COMPRESSOPT_CPU_THREADS_H
#define COMPRESSOPT_CPU_THREADS_H

#include <stdint.h>

namespace compressopt {

typedef void (*Work)(const void *context, int64_t begin, int64_t end);

/* GOMP_parallel, of GNU's OpenMP runtime and of those that stand in for it. */
typedef void (*GompParallel)(void (*function)(void *), void *data, unsigned threads, unsigned flags);

struct Team {
    int threads;           /* of the host */
    GompParallel parallel; /* or NULL */
};

/* Runs work on [0, count) in runs that begin at multiples of grain, on at most this many threads, and returns when all is
 * done. Which thread gets which run is left to chance, so its parts must not depend on one another. Any number of threads
 * may call at once; of those that share the pool all but one then work alone. */
void parallel_for(const Team &team, int threads, int64_t count, int64_t grain, Work work, const void *context);

}  // namespace compressopt

#endif

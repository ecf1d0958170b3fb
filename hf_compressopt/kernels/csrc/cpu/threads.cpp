#include "threads.h"

#include <atomic>
#include <new>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace compressopt {
namespace {

constexpr int kMostThreads = 256;
constexpr size_t kStackBytes = 1 << 20;

#if defined(__x86_64__)
uint32_t floating_point_mode() { return _mm_getcsr(); }
void set_floating_point_mode(uint32_t mode) { _mm_setcsr(mode); }
#else
uint32_t floating_point_mode() { return 0; }
void set_floating_point_mode(uint32_t) {}
#endif

struct Job {
    Work work;
    const void *context;
    int64_t count, grain, threads;
    uint32_t rounding; /* the caller's floating-point mode: flushing of denormals must not depend on the thread */
    std::atomic<int64_t> next{0}, seats{0};

    void begin(int most, int64_t number, int64_t least_share, Work todo, const void *with) {
        work = todo;
        context = with;
        count = number;
        grain = least_share;
        threads = most;
        rounding = floating_point_mode();
        next.store(0, std::memory_order_relaxed);
        seats.store(most, std::memory_order_relaxed);
    }

    /* Each takes its part of half of what is left, so that it reads memory in long runs, and all end together. */
    void take_pieces() {
        int64_t begin = next.load(std::memory_order_relaxed);
        while (begin < count) {
            int64_t share = (count - begin) / (2 * threads) / grain * grain, size = share < grain ? grain : share;
            if (!next.compare_exchange_weak(begin, begin + size, std::memory_order_relaxed)) continue;
            work(context, begin, count - begin < size ? count : begin + size);
            begin = next.load(std::memory_order_relaxed);
        }
    }
};

/* Sleeping threads of one process. Never freed: threads of a process that ends are in nobody's way. */
struct Pool {
    pid_t pid;
    pthread_mutex_t caller = PTHREAD_MUTEX_INITIALIZER; /* held by the one whose job this is */
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;  /* guards what follows */
    pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
    pthread_cond_t rest = PTHREAD_COND_INITIALIZER;
    int workers = 0;
    int wanted = 0; /* workers that may still join the job */
    int active = 0; /* workers that have joined */
    Job job;

    static void *worker(void *self) {
        static_cast<Pool *>(self)->work();
        return nullptr;
    }

    void work() {
        pthread_mutex_lock(&mutex);
        for (;;) {
            while (wanted == 0) pthread_cond_wait(&wake, &mutex);
            --wanted;
            ++active;
            set_floating_point_mode(job.rounding);
            pthread_mutex_unlock(&mutex);
            job.take_pieces();
            pthread_mutex_lock(&mutex);
            if (--active == 0) pthread_cond_signal(&rest);
        }
    }

    void add_workers(int number) {
        if (workers >= number) return;
        sigset_t all, old;
        sigfillset(&all); /* signals are the host's: its own threads take them */
        pthread_sigmask(SIG_SETMASK, &all, &old);
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        pthread_attr_setstacksize(&attributes, kStackBytes);
        pthread_t thread;
        while (workers < number && pthread_create(&thread, &attributes, worker, this) == 0) ++workers;
        pthread_attr_destroy(&attributes);
        pthread_sigmask(SIG_SETMASK, &old, nullptr);
    }

    void run(int threads, int64_t count, int64_t grain, Work work, const void *context) {
        add_workers(threads - 1);
        pthread_mutex_lock(&mutex);
        job.begin(threads, count, grain, work, context);
        wanted = threads - 1 < workers ? threads - 1 : workers;
        for (int i = 0; i < wanted; ++i) pthread_cond_signal(&wake);
        pthread_mutex_unlock(&mutex);
        job.take_pieces();
        pthread_mutex_lock(&mutex);
        wanted = 0; /* who is still asleep need not come */
        while (active > 0) pthread_cond_wait(&rest, &mutex);
        pthread_mutex_unlock(&mutex);
    }
};

std::atomic<Pool *> current{nullptr};

/* This process's pool. A forked child has none of its parent's threads, and locks that may be held for ever: it leaves
 * the parent's pool alone and makes one of its own. */
Pool *pool() {
    Pool *known = current.load(std::memory_order_acquire);
    pid_t pid = getpid();
    while (known == nullptr || known->pid != pid) {
        void *memory = malloc(sizeof(Pool));
        if (memory == nullptr) return nullptr;
        Pool *fresh = new (memory) Pool;
        fresh->pid = pid;
        if (current.compare_exchange_strong(known, fresh, std::memory_order_acq_rel)) return fresh;
        free(fresh);
    }
    return known;
}

/* A thread of the host's runtime: it keeps its own floating-point mode. */
void take_seat(void *pointer) {
    Job *job = static_cast<Job *>(pointer);
    if (job->seats.fetch_sub(1, std::memory_order_relaxed) <= 0) return;
    uint32_t own = floating_point_mode();
    set_floating_point_mode(job->rounding);
    job->take_pieces();
    set_floating_point_mode(own);
}

}  // namespace

void parallel_for(const Team &team, int threads, int64_t count, int64_t grain, Work work, const void *context) {
    int64_t pieces = (count + grain - 1) / grain;
    if (threads > kMostThreads) threads = kMostThreads;
    if (threads > pieces) threads = static_cast<int>(pieces);
    if (threads <= 1) {
        if (count > 0) work(context, 0, count);
        return;
    }
    if (team.parallel != nullptr) { /* with all of its threads, since it ends those that a smaller team leaves out */
        Job job;
        job.begin(threads, count, grain, work, context);
        team.parallel(take_seat, &job, static_cast<unsigned>(team.threads), 0);
        return;
    }
    Pool *workers = pool();
    if (workers == nullptr || pthread_mutex_trylock(&workers->caller) != 0) {
        work(context, 0, count);
        return;
    }
    workers->run(threads, count, grain, work, context);
    pthread_mutex_unlock(&workers->caller);
}

}  // namespace compressopt

/* What all kernels share: loops over vectors, tables of segments, tiles handed to threads.
 *
 * Included once per instruction set, after its vector_*.h. Everything here is in an unnamed namespace, and nothing of
 * the standard library is instantiated: a function that another file shares might be taken from this one by the linker,
 * and fail on a machine without these instructions. */
#pragma once
#include <stdlib.h>
#include <string.h>

#include "dispatch.h"
#include "threads.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "messages are little-endian");

namespace compressopt {
namespace CO_VECTOR {
namespace {

constexpr int kLanes = 16;
constexpr int64_t kTile = 512; /* elements worked on at a time: so few that streams of reads and of writes mix well */
constexpr int64_t kBytesPerThread = 512 << 10;    /* less is not worth waking a thread for */
constexpr int64_t kStreamBytes = 16 << 20;        /* larger outputs are written past the caches */
constexpr int64_t kPiece = 32768;                 /* elements that a thread takes at a time */

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* The root of at most 49 steps, to nearest, with their sign. */
constexpr int32_t root(int32_t steps) {
    int32_t size = steps < 0 ? -steps : steps, q = 0;
    for (int32_t k = 0; k < 7; ++k) q += size > k * (k + 1);
    return steps < 0 ? -q : q;
}

/* ---- loops over vectors ------------------------------------------------------------------------------------------ */

struct Full {
    template <class T>
    Vec get(const T *p) const {
        return load(p);
    }
    template <class T>
    void put(T *p, Vec a) const {
        store(p, a);
    }
    Vec only(Vec a) const { return a; } /* 0 in the lanes that hold no element */
};

struct Part {
    int n;
    template <class T>
    Vec get(const T *p) const {
        return load(p, n);
    }
    template <class T>
    void put(T *p, Vec a) const {
        store(p, a, n);
    }
    Vec only(Vec a) const {
        float lanes[kLanes] = {};
        store(lanes, a, n);
        return load(lanes);
    }
};

/* body(i, lanes) for every vector of n elements. What body has captured by value stays in registers. */
template <class Body>
inline void each_vector(int64_t n, Body body) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, Full{});
    if (i < n) body(i, Part{static_cast<int>(n - i)});
}

template <class T>
struct Type {
    using type = T;
};

/* function(Type<...>) of the element type. */
template <class Function>
inline void with_dtype(int32_t dtype, const Function &function) {
    if (dtype == CO_FLOAT32) function(Type<float>{});
    if (dtype == CO_BFLOAT16) function(Type<bfloat16>{});
    if (dtype == CO_FLOAT16) function(Type<float16>{});
}

inline const void *element(const void *data, int32_t dtype, int64_t i) {
    return static_cast<const char *>(data) + i * (dtype == CO_FLOAT32 ? 4 : 2);
}
inline void *element(void *data, int32_t dtype, int64_t i) {
    return static_cast<char *>(data) + i * (dtype == CO_FLOAT32 ? 4 : 2);
}

/* What becomes of the part of a block that its integers do not hold. */
enum class Rest { kNone, kStored, kStreamed };

/* Into the second-level cache. */
inline void prefetch_far(const void *p) { __builtin_prefetch(p, 0, 2); }

/* Streams of memory that loops fetch while they work on something else, a line at a time: of many fetches at once the
 * last ones wait for the first, and the work with them. One loop fetches all of it, or each of two loops one half. */
class Ahead {
  public:
    void add(const void *from, int64_t bytes) { streams_[count_++] = {static_cast<const char *>(from), bytes}; }
    /* For every vector of a loop, which is at element i. */
    void fetch(int64_t i) const {
        for (int k = 0; k < count_; ++k) prefetch_far(streams_[k].from + i * streams_[k].bytes);
    }
    /* For every second vector of one of two loops. */
    void fetch_half(int64_t i) const {
        for (int k = 0; k < count_; ++k) {
            prefetch_far(streams_[k].from + (static_cast<uint64_t>(i * streams_[k].bytes) >> 1));
        }
    }
    /* The same from the element i on. */
    Ahead from(int64_t i) const {
        Ahead rest = *this;
        for (int k = 0; k < count_; ++k) rest.streams_[k].from += i * streams_[k].bytes;
        return rest;
    }

  private:
    struct Stream {
        const char *from;
        int64_t bytes; /* of an element */
    };
    Stream streams_[4];
    int count_ = 0;
};

/* Write value(i, lanes) of n elements past the caches. */
template <class Value>
inline void stream_each(float *out, int64_t n, const Value &value) {
    int64_t before = static_cast<int64_t>(-(reinterpret_cast<uintptr_t>(out) / 4) & (kLanes - 1));
    Part head{static_cast<int>(least(n, before))};
    if (head.n > 0) head.put(out, value(0, head));
    int64_t i = head.n;
    for (; i + kLanes <= n; i += kLanes) stream(out + i, value(i, Full{}));
    Part rest{static_cast<int>(n - i)};
    if (rest.n > 0) rest.put(out + i, value(i, rest));
}

/* Copy past the caches. */
inline void stream_copy(float *out, const float *in, int64_t n) {
    stream_each(out, n, [in](int64_t i, auto lanes) { return lanes.get(in + i); });
}

/* A sum of squares: of even and of odd vectors, in sixteen lanes each, so that its order is the same everywhere. */
class NormSum {
  public:
    /* Adds value(i, lanes) for n elements. Only in the last call for a sum may n be no multiple of 32. What value has
     * captured by value stays in registers. Half of what lies ahead is fetched. */
    template <class Value>
    void add(int64_t n, Value value, const Ahead &ahead = Ahead()) {
        SquareSum even = even_, odd = odd_; /* in registers: value may write to memory */
        int64_t i = 0;
        for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
            ahead.fetch_half(i);
            even.add(value(i, Full{}));
            odd.add(value(i + kLanes, Full{}));
        }
        each_vector(n - i, [&](int64_t rest, auto lanes) { even.add(lanes.only(value(i + rest, lanes))); });
        even_ = even;
        odd_ = odd;
    }
    template <class T>
    void add(const T *x, int64_t n) {
        add(n, [&](int64_t i, auto lanes) { return lanes.get(x + i); });
    }

    void add(Vec value) { even_.add(value); }
    void add_once(Vec value) { even_.add_once(value); } /* instead of its square */
    void add(Vec even, Vec odd) {
        even_.add(even);
        odd_.add(odd);
    }

    double total() const { return total(even_) + total(odd_); }

  private:
    static double total(const SquareSum &sum) {
        double lanes[kLanes];
        sum.lanes(lanes);
        for (int width = kLanes / 2; width > 0; width /= 2) {
            for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
        }
        return lanes[0];
    }
    SquareSum even_, odd_;
};

/* ---- memory that lives as long as a call ------------------------------------------------------------------------- */

template <class T, int kInline>
struct Array {
    T few[kInline];
    T *data;
    explicit Array(int64_t count)
        : data(count <= kInline ? few : static_cast<T *>(malloc(static_cast<size_t>(count) * sizeof(T)))) {}
    ~Array() {
        if (data != few) free(data);
    }
    Array(const Array &) = delete;
    Array &operator=(const Array &) = delete;
    T &operator[](int64_t i) { return data[i]; }
    const T &operator[](int64_t i) const { return data[i]; }
};

/* Where each of several runs begins, and the end of the last. */
struct Starts {
    Array<int64_t, 256> at;
    int64_t count;
    explicit Starts(int64_t runs) : at(runs + 1), count(runs) {}
    bool missing() const { return at.data == nullptr; }
    /* The run that element i lies in; there is one. */
    int64_t find(int64_t i) const {
        int64_t low = 0, high = count; /* at[low] <= i < at[high] */
        while (high - low > 1) {
            int64_t middle = low + (high - low) / 2;
            (at[middle] <= i ? low : high) = middle;
        }
        return low;
    }
};

struct Segments {
    const co_segment *table;
    Starts starts;
    Segments(const co_segment *segments, int64_t count) : table(segments), starts(count) {
        if (missing()) return;
        starts.at[0] = 0;
        for (int64_t i = 0; i < count; ++i) starts.at[i + 1] = starts.at[i] + segments[i].numel;
    }
    bool missing() const { return starts.missing(); }

    /* body(segment, offset in it, first element, elements) of every piece of a segment in [begin, end). */
    template <class Body>
    void each(int64_t begin, int64_t end, const Body &body) const {
        if (begin >= end) return;
        for (int64_t s = starts.find(begin); begin < end; ++s) {
            int64_t stop = least(starts.at[s + 1], end);
            if (stop > begin) body(table[s], begin - starts.at[s], begin, stop - begin);
            begin = stop > begin ? stop : begin;
        }
    }
};

/* ---- threads ----------------------------------------------------------------------------------------------------- */

inline int threads_for(const co_exec *exec, int64_t bytes, int64_t per_thread) {
    int64_t useful = bytes / per_thread;
    return static_cast<int>(useful < 1 ? 1 : least(useful, exec->threads));
}

/* body(i) for every i in [0, count), on as many threads as the bytes that it moves are worth. */
template <class Body>
inline void parallel(const co_exec *exec, int64_t bytes, int64_t count, int64_t grain, const Body &body,
                     int64_t per_thread = kBytesPerThread) {
    auto work = [](const void *context, int64_t begin, int64_t end) {
        const Body &todo = *static_cast<const Body *>(context);
        for (int64_t i = begin; i < end; ++i) todo(i);
        stream_done();
    };
    Team team{exec->threads, reinterpret_cast<GompParallel>(exec->stream)};
    parallel_for(team, threads_for(exec, bytes, per_thread), count, grain, work, &body);
}

/* body(begin, end) for every tile of numel elements. */
template <class Body>
inline void parallel_tiles(const co_exec *exec, int64_t bytes, int64_t numel, const Body &body) {
    parallel(exec, bytes, ceil_div(numel, kTile), kPiece / kTile,
             [&](int64_t tile) { body(tile * kTile, least((tile + 1) * kTile, numel)); });
}

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt

/* What is compressed: the values that a rank sends, and the mean of what it received. */
#pragma once
#include "messages.h"

#include <type_traits>

namespace compressopt {
namespace CO_VECTOR {
namespace {

constexpr int kGroup = 4;                    /* messages that are summed by themselves */
constexpr int64_t kRound = 2 * kGroup;       /* messages whose signs are read together */
constexpr int64_t kAhead = 512;              /* bytes of a message */
constexpr int64_t kStep = 1024;              /* elements that are worked on, and fetched, at a time */

const co_average kNoAverage = {nullptr, nullptr, 1, 0, 0, 1, 0};

/* ---- what is compressed ------------------------------------------------------------------------------------------ */

/* z of co_combination. */
struct Combination {
    const co_combination &z;
    Segments segments;
    Average last; /* read where z has no x, but this */
    explicit Combination(const co_combination &combination)
        : z(combination),
          segments(combination.grads, combination.grads == nullptr ? 0 : combination.count),
          last(combination.last == nullptr ? kNoAverage : *combination.last) {}
    bool missing() const { return segments.missing(); }
    bool decodes() const { return z.x == nullptr && z.last != nullptr; }
    int64_t bytes() const { return (z.x != nullptr ? 4 : 0) + (z.grads != nullptr ? 4 : 0); }

    /* out <- z of elements [begin, end), or z + out; out points to the element begin. For this function and the next
     * two, begin is a multiple of 8, and there are at most kStep elements. */
    void write(int64_t begin, int64_t end, float *out, bool add) const {
        each_run(begin, end, [&](int64_t start, int64_t n, const auto &value) { put(value, n, out + (start - begin), add); });
    }

    /* use(first element, elements, value) of the pieces of tensors in [begin, end), with the value that run() gives. */
    template <class Use>
    void each_run(int64_t begin, int64_t end, const Use &use) const {
        alignas(64) float scratch[kStep];
        const float *x = values(begin, end, scratch);
        if (z.grads == nullptr) {
            run(x, nullptr, CO_FLOAT32, 1.0f, [&](const auto &value) { use(begin, end - begin, value); });
            return;
        }
        segments.each(begin, end, [&](const co_segment &segment, int64_t offset, int64_t start, int64_t n) {
            const float *from = x == nullptr ? nullptr : x + (start - begin);
            keep_still(segment, scratch + (start - begin), n);
            run(from, data(segment, offset), segment.dtype, factor(segment),
                [&](const auto &value) { use(start, n, value); });
        });
    }

    /* Whether the elements [begin, end) lie in one tensor, so that each_run has one piece of them. */
    bool undivided(int64_t begin, int64_t end) const {
        return z.grads == nullptr || segments.starts.at[segments.starts.find(begin) + 1] >= end;
    }

    /* out <- z + error, whose squares are added to the sum; error(i, lanes) are the errors from element begin + i on.
     * Half of what lies ahead is fetched. */
    template <class Error>
    void add_to(int64_t begin, int64_t end, const Error &error, float *out, NormSum &sum, const Ahead &ahead) const {
        auto add = [&](const auto &value) {
            auto put = [value, error, out](int64_t i, auto lanes) {
                Vec u = value(i, lanes) + error(i, lanes);
                lanes.put(out + i, u);
                return u;
            };
            sum.add(end - begin, put, ahead);
        };
        alignas(64) float scratch[kStep];
        if (z.grads == nullptr) {
            run(values(begin, end, scratch), nullptr, CO_FLOAT32, 1.0f, add);
            return;
        }
        int64_t s = segments.starts.find(begin);
        if (segments.starts.at[s + 1] < end) { /* in several tensors: lanes are counted from the block's beginning */
            put(error, end - begin, out, false);
            write(begin, end, out, true);
            sum.add(out, end - begin);
            return;
        }
        const co_segment &segment = segments.table[s];
        const void *g = data(segment, begin - segments.starts.at[s]);
        if (decodes() && (segment.flags & CO_STILL) == 0) {
            Average::Run same = last.run_from(begin);
            if (same.n >= end - begin) { /* decoded in registers, times alpha before */
                return run_scaled(SignedScale{Scale(z.alpha * same.scale), same.signs}, g, segment.dtype,
                                  factor(segment), add);
            }
        }
        const float *x = values(begin, end, scratch);
        keep_still(segment, scratch, end - begin);
        run(x, g, segment.dtype, factor(segment), add);
    }

    /* Adds what z is made of, from the element begin on: of a tensor, as if it did not end. */
    void add_streams(int64_t begin, Ahead *ahead) const {
        if (z.x != nullptr) ahead->add(z.x + begin, 4);
        if (z.grads == nullptr) return;
        int64_t s = segments.starts.find(begin);
        const co_segment &segment = segments.table[s];
        const void *g = data(segment, begin - segments.starts.at[s]);
        if (g != nullptr) ahead->add(g, segment.dtype == CO_FLOAT32 ? 4 : 2);
    }

    /* x of [begin, end): where it lies, or decoded to scratch; or NULL. */
    const float *values(int64_t begin, int64_t end, float *scratch) const {
        if (z.x != nullptr) return z.x + begin;
        if (z.last == nullptr) return nullptr;
        last.write(begin, end, scratch);
        return scratch;
    }

    /* What was decoded of a tensor that keeps still counts as 0. */
    void keep_still(const co_segment &segment, float *scratch, int64_t n) const {
        if (decodes() && (segment.flags & CO_STILL) != 0) memset(scratch, 0, static_cast<size_t>(n) * 4);
    }

    float factor(const co_segment &segment) const { return z.factors == nullptr ? 1.0f : z.factors[segment.index]; }

    static const void *data(const co_segment &segment, int64_t offset) {
        return segment.data == nullptr ? nullptr : element(segment.data, segment.dtype, offset);
    }

    /* use(value), value(i, lanes) being z of the elements from i on; x and the gradient g are given, or NULL. */
    template <class Use>
    void run(const float *x, const void *g, int32_t dtype, float factor, const Use &use) const {
        if (x == nullptr) {
            Vec zero = set1(0.0f);
            run_scaled([zero](int64_t, auto) { return zero; }, g, dtype, factor, use);
        } else if (g == nullptr && z.alpha == 1.0f && factor == 1.0f) {
            use(Lying{x});
        } else {
            Vec alpha = set1(z.alpha);
            run_scaled([=](int64_t i, auto lanes) { return alpha * lanes.get(x + i); }, g, dtype, factor, use);
        }
    }

    /* The same with alpha x. */
    template <class Scaled, class Use>
    void run_scaled(const Scaled &scaled, const void *g, int32_t dtype, float factor, const Use &use) const {
        Vec beta = set1(z.beta), f = set1(factor);
        if (g == nullptr) return use([=](int64_t i, auto lanes) { return scaled(i, lanes) * f; });
        with_dtype(dtype, [&](auto type) {
            const auto *grad = static_cast<const typename decltype(type)::type *>(g);
            if (factor == 1.0f) {
                use([=](int64_t i, auto lanes) { return scaled(i, lanes) + beta * lanes.get(grad + i); });
            } else {
                use([=](int64_t i, auto lanes) { return (scaled(i, lanes) + beta * lanes.get(grad + i)) * f; });
            }
        });
    }

    template <class Value>
    static void put(const Value &value, int64_t n, float *out, bool add) {
        if (add) {
            each_vector(n, [=](int64_t i, auto lanes) { lanes.put(out + i, value(i, lanes) + lanes.get(out + i)); });
        } else {
            each_vector(n, [=](int64_t i, auto lanes) { lanes.put(out + i, value(i, lanes)); });
        }
    }
};

/* The mean of world_size messages of one chunk. A group of messages has sixteen sums in a block, one for each pattern of
 * their signs: they make a table, and an element takes its own by its signs. */
struct Mean {
    const uint8_t *messages;
    int64_t scale_block, world_size, stride;
    int64_t offset; /* of the signs in a message */
    Mean(const uint8_t *m, int64_t numel, int64_t block, int64_t count)
        : messages(m),
          scale_block(block),
          world_size(count),
          stride(message_nbytes(numel, block)),
          offset(signs_offset(numel, block)) {}
    bool missing() const { return false; }
    void add_streams(int64_t, Ahead *) const {} /* few bytes, which add_to fetches */
    int64_t bytes() const { return world_size / 8; }

    /* out <- mean + error of elements [begin, end) of one block, at most kStep, whose squares are added to the sum; begin
     * is a multiple of 8, and error(i, lanes) are the errors from element begin + i on. */
    template <class Error>
    void add_to(int64_t begin, int64_t end, const Error &error, float *out, NormSum &sum, const Ahead &ahead) const {
        const uint8_t *scales = messages + (scale_block == 0 ? 0 : 4 * (begin / scale_block));
        const uint8_t *signs = messages + offset + begin / 8;
        Vec inverse = set1(static_cast<float>(1.0 / static_cast<double>(world_size)));
        int64_t n = end - begin;
        auto add = [&](const auto &sum_at, const auto &addend) {
            auto put = [=](int64_t i, auto lanes) {
                Vec u = sum_at(i, lanes) * inverse + addend(i, lanes);
                lanes.put(out + i, u);
                return u;
            };
            sum.add(n, put, ahead);
        };
        /* The signs of so few messages are decoded in registers. AVX-512 adds two by the table in less time, but for
         * errors that lie in memory as floats. */
        constexpr int64_t kFew = kLanes == 16 && !std::is_same_v<Error, Lying> ? 1 : 2;
        if (world_size <= kFew) {
            SignedScale first{Scale(load_scale(scales)), signs};
            if (world_size == 1) return add(first, error);
            SignedScale second{Scale(load_scale(scales + stride)), signs + stride};
            return add([=](int64_t i, auto lanes) { return first(i, lanes) + second(i, lanes); }, error);
        }
        static_assert(kStep % kTransposed == 0);
        alignas(64) uint8_t patterns[kStep];
        alignas(64) float sums[kStep]; /* of the rounds before */
        for (int64_t j = 0; j < world_size; j += kRound) {
            write_patterns(j, signs, n, patterns);
            with_sums(j, scales, patterns, sums, [&](const auto &sum_at) {
                if (j + kRound >= world_size) {
                    add([=](int64_t i, auto) { return sum_at(i); }, error);
                } else {
                    for (int64_t i = 0; i < n; i += kLanes) store(sums + i, sum_at(i));
                }
            });
        }
    }

    /* The signs of a round of messages, from the j-th on: a byte for each of n elements. */
    void write_patterns(int64_t j, const uint8_t *signs, int64_t n, uint8_t *patterns) const {
        int count = static_cast<int>(least(kRound, world_size - j));
        for (int64_t i = 0; i < n; i += kTransposed) {
            const uint8_t *bits = signs + j * stride + i / 8;
            /* so many slow streams escape the hardware's own prefetching */
            for (int k = 0; k < count; ++k) prefetch(bits + k * stride + kAhead);
            transpose_signs(bits, stride, count, ceil_div(least(n - i, kTransposed), 8), patterns + i);
        }
    }

    /* use(sum_at), sum_at(i) being the sums of all messages up to those of this round. */
    template <class Use>
    void with_sums(int64_t j, const uint8_t *scales, const uint8_t *patterns, const float *sums, const Use &use) const {
        Table low = table(j, scales), high = table(j + kGroup, scales);
        if (j > 0) {
            use([=](int64_t i) { return load(sums + i) + low.at<0>(patterns + i) + high.at<kGroup>(patterns + i); });
        } else if (world_size > kGroup) {
            use([=](int64_t i) { return low.at<0>(patterns + i) + high.at<kGroup>(patterns + i); });
        } else {
            use([=](int64_t i) { return low.at<0>(patterns + i); });
        }
    }

    /* The sums of the group from the j-th message on. -0, for what is missing, changes no bit of what it is added to. */
    Table table(int64_t j, const uint8_t *scales) const {
        const uint32_t negative[kGroup] = {0xaaaa, 0xcccc, 0xf0f0, 0xff00}; /* for which patterns */
        Vec sums = set1(-0.0f);
        for (int k = 0; k < kGroup && j + k < world_size; ++k) {
            sums = sums + Scale(load_scale(scales + (j + k) * stride)).with_signs(negative[k]);
        }
        return Table(sums);
    }

    static float load_scale(const uint8_t *p) {
        float scale;
        memcpy(&scale, p, 4);
        return scale;
    }
};

int32_t combine(const co_combination *z, float *out, int64_t numel, const co_exec *exec) {
    Combination source(*z);
    if (source.missing()) return out_of_memory();
    parallel_tiles(exec, numel * (4 + source.bytes()), numel,
                   [&](int64_t begin, int64_t end) { source.write(begin, end, out + begin, false); });
    return CO_OK;
}

template <class T>
void sum_rows(const T *rows, int64_t count, float *out, int64_t numel, float factor, const co_exec *exec) {
    parallel_tiles(exec, numel * (4 + count * static_cast<int64_t>(sizeof(T))), numel, [&](int64_t begin, int64_t end) {
        alignas(64) float sums[kTile];
        float *total = sums;
        int64_t n = end - begin;
        for (int64_t k = 0; k < count; ++k) { /* a row after another: so many streams would escape prefetching */
            const T *row = rows + k * numel + begin;
            if (k == 0) {
                each_vector(n, [=](int64_t i, auto lanes) { lanes.put(total + i, lanes.get(row + i)); });
            } else {
                each_vector(n, [=](int64_t i, auto lanes) { lanes.put(total + i, lanes.get(total + i) + lanes.get(row + i)); });
            }
        }
        float *to = out + begin;
        Vec f = set1(factor);
        if (factor == 1.0f) {
            each_vector(n, [=](int64_t i, auto lanes) { lanes.put(to + i, lanes.get(total + i)); });
        } else {
            each_vector(n, [=](int64_t i, auto lanes) { lanes.put(to + i, lanes.get(total + i) * f); });
        }
    });
}

int32_t sum_rows(const void *rows, int32_t dtype, int64_t count, float *out, int64_t numel, float factor,
                 const co_exec *exec) {
    with_dtype(dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        sum_rows(static_cast<const T *>(rows), count, out, numel, factor, exec);
    });
    return CO_OK;
}

int32_t copy(const float *in, float *out, int64_t numel, const co_exec *exec) {
    parallel_tiles(exec, 8 * numel, numel,
                   [&](int64_t begin, int64_t end) { stream_copy(out + begin, in + begin, end - begin); });
    return CO_OK;
}

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt

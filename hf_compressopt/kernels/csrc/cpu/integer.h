/* The kernels of b-bit integers: compression and its inverse. */
#pragma once
#include "errors.h"
#include "sources.h"

namespace compressopt {
namespace CO_VECTOR {
namespace {

/* ---- compression ------------------------------------------------------------------------------------------------- */

/* out <- z + error of n elements from the bucket's first on; error(i, lanes) are the errors from first + i on. Half of
 * what lies ahead is fetched. */
template <class Error>
inline void add_error(const Combination &source, const Error &error, int64_t first, int64_t n, float *out,
                      const Ahead &ahead) {
    source.each_run(first, first + n, [&](int64_t start, int64_t some, const auto &value) {
        int64_t from = start - first;
        each_vector(some, [=](int64_t i, auto lanes) {
            if (i % (2 * kLanes) == 0) ahead.fetch_half(from + i);
            lanes.put(out + from + i, value(i, lanes) + error(from + i, lanes));
        });
    });
}

template <int kBits, class Errors>
inline int32_t compress_integers(const co_combination *z, const Errors &errors, const Errors *new_error,
                                 uint8_t *messages, int64_t numel, int32_t world_size, const co_exec *exec) {
    Combination source(*z);
    if (source.missing()) return out_of_memory();
    IntegerMessages<kBits> to = integer_messages<kBits>(messages, numel, world_size);
    int64_t bytes = numel * (1 + (new_error == nullptr ? 1 : 2) * Errors::kBytes + source.bytes());
    to.write_padding();
    if (new_error != nullptr) new_error->write_padding();
    to.each_tile(exec, bytes, [&](int64_t j, int64_t begin, int64_t end) {
        alignas(64) float u[kIntegerTile], scratch[kIntegerTile];
        int64_t first = j * to.chunks.chunk + begin, last = first + end - begin;
        Ahead ahead = streams_from(source, errors, first + kLeastAhead, numel), later = ahead.from((end - begin) / 2);
        auto add = [&](const auto &error) { add_error(source, error, first, end - begin, u, ahead); };
        source.undivided(first, last) ? errors.with(j, begin, end, add)
                                      : add(Lying{errors.read(j, begin, end, scratch)});
        if (new_error == nullptr) {
            write_blocks<Rest::kNone>(u, to.from(j, begin), end - begin, nullptr, later);
            return;
        }
        float *left = new_error->place(j, begin, scratch);
        write_blocks<Rest::kStored>(u, to.from(j, begin), end - begin, left, later);
        new_error->write(j, begin, end, left);
    });
    return CO_OK;
}

/* out <- the sums of the messages of n elements, finished. The messages lie stride bytes apart. out has room for whole
 * blocks. finish(at, some) returns what makes a vector of a sum, (place in the block, sum), for the block of some
 * elements from at on. */
template <int kBits, class Finish>
inline void add_messages(Message<kBits> first, int64_t stride, int32_t world_size, int64_t n, float *out,
                         const Finish &finish) {
    constexpr int64_t kBlockBytes = Message<kBits>::kBlockBytes;
    alignas(64) uint8_t integers_part[kGroup * kBlockBytes];
    for (int64_t at = 0; at < n; at += kIntegerBlock) {
        int64_t some = least(kIntegerBlock, n - at);
        const auto finished = finish(at, some);
        for (int32_t j = 0; j < world_size; j += kGroup) { /* groups of four, and then their sums */
            int count = static_cast<int>(least(kGroup, world_size - j));
            bool last = j + count == world_size;
            const uint8_t *integers = first.integers + j * stride + at * kBits / 8;
            const uint8_t *scales = first.scales + j * stride + at / kIntegerBlock * 2;
            int64_t apart = stride;
            float by[kGroup];
            for (int k = 0; k < count; ++k) {
                by[k] = load_bfloat16(scales + k * stride);
                /* so many slow streams escape the hardware's own prefetching */
                for (int line = 0; line < kBlockBytes; line += 64) prefetch(integers + k * stride + kAhead + line);
            }
            if (some < kIntegerBlock) {
                for (int k = 0; k < count; ++k) {
                    copy_part(integers_part + k * kBlockBytes, kBlockBytes, integers + k * stride,
                              integers_nbytes(some, kBits));
                }
                integers = integers_part;
                apart = kBlockBytes;
            }
            float *u = out + at;
            sum_of_integers<kBits>(integers, apart, count, by, [&](int i, Vec sum) {
                if (j > 0) sum = load(u + i) + sum;
                store(u + i, last ? finished(i, sum) : sum);
            });
        }
    }
}

/* out <- the mean of the messages of n elements + error. What lies ahead is fetched. */
template <int kBits>
inline void add_mean(Message<kBits> first, int64_t stride, int32_t world_size, int64_t n, const float *error, float *out,
                     const Ahead &ahead) {
    Vec inverse = set1(static_cast<float>(1.0 / static_cast<double>(world_size)));
    alignas(64) float error_part[kIntegerBlock];
    add_messages(first, stride, world_size, n, out, [&](int64_t at, int64_t some) {
        const float *e = error + at;
        if (some < kIntegerBlock) e = static_cast<float *>(copy_part(error_part, sizeof(error_part), e, 4 * some));
        return [e, inverse, at, &ahead](int i, Vec sum) {
            ahead.fetch(at + i);
            return sum * inverse + load(e + i);
        };
    });
}

/* Whether errors go to other places than they come from, past the caches. */
inline bool past_caches(const FloatErrors &error, const FloatErrors &new_error, int64_t numel) {
    bool aligned = reinterpret_cast<uintptr_t>(new_error.values) % 64 == 0;
    return new_error.values != error.values && 4 * numel >= kStreamBytes && aligned;
}
inline bool past_caches(const IntegerErrors &, const IntegerErrors &, int64_t) { return false; }

template <int kBits, class Errors>
inline int32_t average_integers(const uint8_t *messages, const Errors &error, const Errors &new_error, uint8_t *out,
                                int64_t numel, int32_t world_size, const co_exec *exec) {
    IntegerMessages<kBits> from = integer_messages<kBits>(messages, numel, 1);
    IntegerMessages<kBits> to = integer_messages<kBits>(out, numel, 1);
    bool streamed = past_caches(error, new_error, numel);
    to.write_padding();
    new_error.write_padding();
    to.each_tile(exec, numel * (1 + 2 * Errors::kBytes + world_size), [&](int64_t j, int64_t begin, int64_t end) {
        alignas(64) float u[kIntegerTile], scratch[kIntegerTile];
        const float *old = error.read(j, begin, end, scratch);
        Ahead ahead;
        if (begin + kLeastAhead < numel) error.add_stream(begin + kLeastAhead, &ahead);
        add_mean(from.from(0, begin), from.stride, world_size, end - begin, old, u, ahead);
        float *left = new_error.place(j, begin, scratch);
        if (streamed) {
            write_blocks<Rest::kStreamed>(u, to.from(0, begin), end - begin, left);
        } else {
            write_blocks<Rest::kStored>(u, to.from(0, begin), end - begin, left);
        }
        new_error.write(j, begin, end, left);
    });
    return CO_OK;
}

template <int kBits>
inline int32_t mean_integers(const uint8_t *messages, float *out, int64_t numel, int32_t world_size, float factor,
                             const co_exec *exec) {
    IntegerMessages<kBits> from = integer_messages<kBits>(messages, numel, 1);
    from.each_tile(exec, numel * (4 + world_size), [&](int64_t, int64_t begin, int64_t end) {
        alignas(64) float mean[kIntegerTile];
        Vec by = set1(factor);
        add_messages(from.from(0, begin), from.stride, world_size, end - begin, mean, [by](int64_t, int64_t) {
            return [by](int, Vec sum) { return sum * by; };
        });
        memcpy(out + begin, mean, static_cast<size_t>(end - begin) * 4);
    });
    return CO_OK;
}

/* ---- decompression ----------------------------------------------------------------------------------------------- */

template <int kBits>
inline int32_t decode_integers(const co_integers *y, float *out, const co_exec *exec) {
    IntegerMessages<kBits> from = integer_messages<kBits>(y->messages, y->numel, y->world_size, y->stride);
    bool past_caches = 4 * y->numel >= kStreamBytes;
    from.each_tile(exec, 5 * y->numel, [&](int64_t j, int64_t begin, int64_t end) {
        from.from(j, begin).decode(end - begin, out + j * from.chunks.chunk + begin, past_caches);
    });
    return CO_OK;
}

template <int kBits>
inline int32_t add_integers(const co_integers *y, const co_segment *out, int64_t count, float decay, float scale,
                            const co_exec *exec) {
    Segments outputs(out, count);
    if (outputs.missing()) return out_of_memory();
    IntegerMessages<kBits> from = integer_messages<kBits>(y->messages, y->numel, y->world_size, y->stride);
    bool past_caches = 4 * y->numel >= kStreamBytes;
    from.each_tile(exec, 9 * y->numel, [&](int64_t j, int64_t begin, int64_t end) {
        int64_t first = j * from.chunks.chunk + begin, n = end - begin;
        alignas(64) float values[kIntegerTile];
        from.from(j, begin).decode(n, values);
        add_to_outputs(outputs, first, first + n, values, decay, scale, past_caches);
    });
    return CO_OK;
}

/* ---- the choice of bits and of the form of errors ---------------------------------------------------------------- */

int32_t compress_integers(const co_combination *z, const co_errors *error, const co_errors *new_error,
                          uint8_t *messages, int64_t numel, int32_t bits, int32_t world_size, const co_exec *exec) {
    return with_errors(*error, numel, world_size, [&](const auto &errors) {
        auto other = errors.another(new_error == nullptr ? *error : *new_error);
        const auto *left = new_error == nullptr ? nullptr : &other;
        return bits == 4 ? compress_integers<4>(z, errors, left, messages, numel, world_size, exec)
                         : compress_integers<8>(z, errors, left, messages, numel, world_size, exec);
    });
}

int32_t mean_integers(const uint8_t *messages, float *out, int64_t numel, int32_t bits, int32_t world_size, float factor,
                      const co_exec *exec) {
    return (bits == 4 ? mean_integers<4> : mean_integers<8>)(messages, out, numel, world_size, factor, exec);
}

int32_t add_integers(const co_integers *y, const co_segment *outputs, int64_t count, float decay, float scale,
                     const co_exec *exec) {
    return (y->bits == 4 ? add_integers<4> : add_integers<8>)(y, outputs, count, decay, scale, exec);
}

int32_t average_integers(const uint8_t *messages, const co_errors *error, const co_errors *new_error, uint8_t *out,
                         int64_t numel, int32_t bits, int32_t world_size, const co_exec *exec) {
    return with_errors(*error, numel, 1, [&](const auto &errors) {
        auto left = errors.another(*new_error);
        return bits == 4 ? average_integers<4>(messages, errors, left, out, numel, world_size, exec)
                         : average_integers<8>(messages, errors, left, out, numel, world_size, exec);
    });
}

int32_t any_nan(const co_integers *y, uint8_t *found, const co_exec *) {
    Chunks chunks(y->numel, y->world_size);
    unsigned largest = 0; /* bit pattern of a scale without its sign */
    for (int64_t j = 0; j < chunks.count; ++j) {
        const uint8_t *scales = y->messages + j * y->stride + integers_nbytes(chunks.size(j), y->bits);
        for (int64_t b = 0; b < ceil_div(chunks.size(j), kIntegerBlock); ++b) {
            uint16_t pattern;
            memcpy(&pattern, scales + 2 * b, 2);
            unsigned magnitude = pattern & 0x7fffu;
            largest = magnitude > largest ? magnitude : largest;
        }
    }
    *found = largest > 0x7f80u;
    return CO_OK;
}

int32_t decode_integers(const co_integers *y, float *out, const co_exec *exec) {
    return (y->bits == 4 ? decode_integers<4> : decode_integers<8>)(y, out, exec);
}

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt

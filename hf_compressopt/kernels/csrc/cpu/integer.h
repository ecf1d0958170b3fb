/* The kernels of b-bit integers: compression, its inverse, and the commit. */
#pragma once
#include "integer_block.h"

namespace compressopt {
namespace CO_VECTOR {
namespace {

/* ---- compression ------------------------------------------------------------------------------------------------- */

/* out <- z + error of elements [begin, end); out points to the element begin. */
inline void add_error(const Combination &source, const float *error, int64_t begin, int64_t end, float *out) {
    source.each_run(begin, end, [&](int64_t start, int64_t n, const auto &value) {
        const float *e = error + start;
        float *to = out + (start - begin);
        each_vector(n, [&](int64_t i, auto lanes) {
            prefetch_far(e + i + kIntegerAhead);
            lanes.put(to + i, value(i, lanes) + lanes.get(e + i));
        });
    });
}

template <int kBits>
inline int32_t compress_integers(const co_combination *z, const float *error, uint8_t *messages, int64_t numel,
                                 int32_t world_size, const co_exec *exec) {
    Combination source(*z);
    if (source.missing()) return out_of_memory();
    IntegerMessages<kBits> to = integer_messages<kBits>(messages, numel, world_size);
    to.write_padding();
    to.each_tile(exec, numel * (5 + source.bytes()), [&](int64_t j, int64_t begin, int64_t end) {
        int64_t first = j * to.chunks.chunk;
        IntegerTile tile;
        add_error(source, error, first + begin, first + end, tile.u);
        tile.quantize_to<Rest::kNone>(to.from(j, begin), end - begin, nullptr);
    });
    return CO_OK;
}

/* out <- the mean of the messages of n elements + error. The messages lie stride bytes apart. */
template <int kBits>
inline void add_mean(Message<kBits> first, int64_t stride, int32_t world_size, int64_t n, const float *error,
                     float *out) {
    constexpr int64_t kBlockBytes = Message<kBits>::kBlockBytes;
    Vec inverse = set1(static_cast<float>(1.0 / static_cast<double>(world_size)));
    alignas(64) uint8_t integers_part[kGroup * kBlockBytes];
    alignas(64) float error_part[kIntegerBlock];
    for (int64_t at = 0; at < n; at += kIntegerBlock) {
        int64_t some = least(kIntegerBlock, n - at);
        const float *e = error + at;
        if (some < kIntegerBlock) e = static_cast<float *>(copy_part(error_part, sizeof(error_part), e, 4 * some));
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
                if (last) {
                    prefetch_far(e + i + kIntegerAhead);
                    sum = sum * inverse + load(e + i);
                }
                store(u + i, sum);
            });
        }
    }
}

template <int kBits>
inline int32_t average_integers(const uint8_t *messages, const float *error, float *new_error, uint8_t *out,
                                int64_t numel, int32_t world_size, const co_exec *exec) {
    IntegerMessages<kBits> from = integer_messages<kBits>(messages, numel, 1);
    IntegerMessages<kBits> to = integer_messages<kBits>(out, numel, 1);
    bool aligned = reinterpret_cast<uintptr_t>(new_error) % 64 == 0;
    bool past_caches = new_error != error && 4 * numel >= kStreamBytes && aligned;
    to.write_padding();
    to.each_tile(exec, numel * (9 + world_size), [&](int64_t, int64_t begin, int64_t end) {
        IntegerTile tile;
        add_mean(from.from(0, begin), from.stride, world_size, end - begin, error + begin, tile.u);
        if (past_caches) {
            tile.quantize_to<Rest::kStreamed>(to.from(0, begin), end - begin, new_error + begin);
        } else {
            tile.quantize_to<Rest::kStored>(to.from(0, begin), end - begin, new_error + begin);
        }
    });
    return CO_OK;
}

/* ---- decompression, and the commit ------------------------------------------------------------------------------- */

template <int kBits>
inline int32_t decode_integers(const co_integers *y, float *out, const co_exec *exec) {
    IntegerMessages<kBits> from = integer_messages<kBits>(y->messages, y->numel, y->world_size, y->stride);
    bool past_caches = 4 * y->numel >= kStreamBytes;
    from.each_tile(exec, 5 * y->numel, [&](int64_t j, int64_t begin, int64_t end) {
        from.from(j, begin).decode(end - begin, out + j * from.chunks.chunk + begin, past_caches);
    });
    return CO_OK;
}

/* outputs of [begin, end) <- values * scale; values points to the element begin. */
inline void write_outputs(const Segments &outputs, int64_t begin, int64_t end, const float *values, float scale) {
    Vec by = set1(scale);
    outputs.each(begin, end, [&](const co_segment &segment, int64_t offset, int64_t start, int64_t n) {
        if (segment.data == nullptr) return;
        with_dtype(segment.dtype, [&](auto type) {
            auto *to = static_cast<typename decltype(type)::type *>(element(segment.data, segment.dtype, offset));
            const float *from = values + (start - begin);
            each_vector(n, [&](int64_t i, auto lanes) { lanes.put(to + i, lanes.get(from + i) * by); });
        });
    });
}

template <int kBits>
inline int32_t commit_integers(const co_combination *z, float *error, const uint8_t *own, const co_integers *y,
                               const co_segment *out, int64_t count, float output_scale, const co_exec *exec) {
    Combination source(*z);
    Segments outputs(out, count);
    if (source.missing() || outputs.missing()) return out_of_memory();
    IntegerMessages<kBits> sent = integer_messages<kBits>(own, y->numel, y->world_size);
    IntegerMessages<kBits> average = integer_messages<kBits>(y->messages, y->numel, y->world_size, y->stride);
    sent.each_tile(exec, y->numel * (14 + source.bytes()), [&](int64_t j, int64_t begin, int64_t end) {
        int64_t first = j * sent.chunks.chunk + begin, n = end - begin;
        alignas(64) float values[kIntegerTile];
        sent.from(j, begin).decode(n, values);
        source.each_run(first, first + n, [&](int64_t start, int64_t some, const auto &value) {
            float *e = error + start;
            const float *q = values + (start - first);
            each_vector(some, [&](int64_t i, auto lanes) {
                prefetch_far(e + i + kIntegerAhead);
                lanes.put(e + i, value(i, lanes) + lanes.get(e + i) - lanes.get(q + i));
            });
        });
        average.from(j, begin).decode(n, values);
        write_outputs(outputs, first, first + n, values, output_scale);
    });
    return CO_OK;
}

/* ---- the choice of bits ------------------------------------------------------------------------------------------ */

int32_t compress_integers(const co_combination *z, const float *error, uint8_t *messages, int64_t numel, int32_t bits,
                          int32_t world_size, const co_exec *exec) {
    return (bits == 4 ? compress_integers<4> : compress_integers<8>)(z, error, messages, numel, world_size, exec);
}

int32_t average_integers(const uint8_t *messages, const float *error, float *new_error, uint8_t *out, int64_t numel,
                         int32_t bits, int32_t world_size, const co_exec *exec) {
    return (bits == 4 ? average_integers<4> : average_integers<8>)(messages, error, new_error, out, numel, world_size,
                                                                   exec);
}

int32_t decode_integers(const co_integers *y, float *out, const co_exec *exec) {
    return (y->bits == 4 ? decode_integers<4> : decode_integers<8>)(y, out, exec);
}

int32_t commit_integers(const co_combination *z, float *error, const uint8_t *own, const co_integers *y,
                        const co_segment *out, int64_t count, float output_scale, const co_exec *exec) {
    return (y->bits == 4 ? commit_integers<4> : commit_integers<8>)(z, error, own, y, out, count, output_scale, exec);
}

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt

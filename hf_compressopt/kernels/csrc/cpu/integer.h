/* The kernels of b-bit integers: compression, its inverse, and the commit. */
#pragma once
#include "integer_block.h"

namespace compressopt {
namespace CO_VECTOR {
namespace {

/* body(begin, n, u) of each block of [begin, end): u = z + error, 0 beyond its n elements. Blocks count from begin. */
template <class Body>
inline void each_block(const Combination &source, const float *error, int64_t begin, int64_t end, const Body &body) {
    const co_combination &z = source.z;
    while (begin < end) {
        const void *g = nullptr;
        int64_t stop = end;
        int32_t dtype = CO_FLOAT32;
        float factor = 1.0f;
        if (z.grads != nullptr) {
            int64_t s = source.segments.starts.find(begin);
            const co_segment &segment = source.segments.table[s];
            stop = least(end, source.segments.starts.at[s + 1]);
            g = Combination::data(segment, begin - source.segments.starts.at[s]);
            dtype = segment.dtype;
            factor = source.factor(segment);
        }
        int64_t whole = (stop - begin) / kIntegerBlock * kIntegerBlock;
        if (whole == 0) { /* several tensors, or the last block of a chunk */
            int64_t n = least(kIntegerBlock, end - begin);
            alignas(64) float part[kIntegerBlock] = {};
            memcpy(part, error + begin, static_cast<size_t>(n) * 4);
            source.write(begin, begin + n, part, true);
            Block u = load_block(part);
            body(begin, n, u);
            begin += n;
            continue;
        }
        source.run(begin, g, dtype, factor, [&](const auto &value) {
            for (int64_t i = 0; i < whole; i += kIntegerBlock) {
                Block u;
#pragma GCC unroll 8
                for (int k = 0; k < 8; ++k) {
                    int64_t at = i + kLanes * k;
                    prefetch_far(error + begin + at + kIntegerAhead);
                    if (g != nullptr) prefetch_far(element(g, dtype, at + kIntegerAhead));
                    u.v[k] = value(at, Full{}) + load(error + begin + at);
                }
                body(begin + i, kIntegerBlock, u);
            }
        });
        begin += whole;
    }
}

/* ---- compression ------------------------------------------------------------------------------------------------- */

template <int kBits>
inline int32_t compress_integers(const co_combination *z, const float *error, uint8_t *messages, int64_t numel,
                                 int32_t world_size, const co_exec *exec) {
    Combination source(*z);
    if (source.missing()) return out_of_memory();
    IntegerMessages<kBits> to = integer_messages<kBits>(messages, numel, world_size);
    for (int64_t j = 0; j < to.chunks.count; ++j) to.write_padding(j);
    to.each_piece(exec, numel * (5 + source.bytes()), [&](int64_t j, int64_t begin, int64_t end) {
        int64_t first = j * to.chunks.chunk;
        BlockWriter<kBits> writer(to.chunk(j));
        each_block(source, error, first + begin, first + end, [&](int64_t at, int64_t n, const Block &u) {
            writer.template add<false>((at - first) / kIntegerBlock, n, u);
        });
        writer.template flush<false>();
    });
    return CO_OK;
}

/* The sum of all messages' blocks at b, of n elements: in groups of four, and then of the groups' sums. */
template <int kBits>
inline Block sum_of_messages(const Message &from, int64_t stride, int32_t world_size, int64_t b, int64_t n) {
    constexpr int64_t kBlockBytes = IntegerMessages<kBits>::kBlockBytes;
    alignas(64) uint8_t parts[kGroup * kBlockBytes] = {};
    Block sum;
    for (int32_t j = 0; j < world_size; j += kGroup) {
        int count = static_cast<int>(least(kGroup, world_size - j));
        const uint8_t *integers = from.integers + j * stride + b * kBlockBytes;
        float scales[kGroup];
        for (int k = 0; k < count; ++k) scales[k] = load_bfloat16(from.scales + (j + k) * stride + 2 * b);
        Block group;
        if (n == kIntegerBlock) {
            for (int k = 0; k < count; ++k) { /* so many slow streams escape the hardware's own prefetching */
                for (int line = 0; line < kBlockBytes; line += 64) prefetch(integers + k * stride + kAhead + line);
            }
            group = sum_of_integers<kBits>(integers, stride, count, scales);
        } else {
            for (int k = 0; k < count; ++k) {
                size_t nbytes = static_cast<size_t>(integers_nbytes(n, kBits));
                memcpy(parts + k * kBlockBytes, integers + k * stride, nbytes);
            }
            group = sum_of_integers<kBits>(parts, kBlockBytes, count, scales);
        }
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) sum.v[k] = j == 0 ? group.v[k] : sum.v[k] + group.v[k];
    }
    return sum;
}

template <int kBits>
inline int32_t average_integers(const uint8_t *messages, const float *error, float *new_error, uint8_t *out,
                                int64_t numel, int32_t world_size, const co_exec *exec) {
    IntegerMessages<kBits> from = integer_messages<kBits>(messages, numel, 1);
    IntegerMessages<kBits> to = integer_messages<kBits>(out, numel, 1);
    Message received = from.chunk(0);
    Vec inverse = set1(static_cast<float>(1.0 / static_cast<double>(world_size)));
    bool aligned = reinterpret_cast<uintptr_t>(new_error) % 64 == 0;
    bool past_caches = new_error != error && 4 * numel >= kStreamBytes && aligned;
    to.write_padding(0);
    to.each_piece(exec, numel * (9 + world_size), [&](int64_t, int64_t begin, int64_t end) {
        BlockWriter<kBits> writer(to.chunk(0));
        for (int64_t at = begin; at < end; at += kIntegerBlock) {
            int64_t n = least(kIntegerBlock, end - at), b = at / kIntegerBlock;
            Block u = sum_of_messages<kBits>(received, from.stride, world_size, b, n), e = load_some(error + at, n);
#pragma GCC unroll 8
            for (int k = 0; k < 8; ++k) u.v[k] = u.v[k] * inverse + e.v[k];
            writer.template add<true>(b, n, u, new_error + at, past_caches);
        }
        writer.template flush<true>();
    });
    return CO_OK;
}

/* ---- decompression, and the commit ------------------------------------------------------------------------------- */

template <int kBits>
inline int32_t decode_integers(const co_integers *y, float *out, const co_exec *exec) {
    IntegerMessages<kBits> from = integer_messages<kBits>(y->messages, y->numel, y->world_size, y->stride);
    bool past_caches = 4 * y->numel >= kStreamBytes;
    from.each_piece(exec, 5 * y->numel, [&](int64_t j, int64_t begin, int64_t end) {
        Message message = from.chunk(j);
        for (int64_t at = begin; at < end; at += kIntegerBlock) {
            int64_t n = least(kIntegerBlock, end - at);
            Block values = from.read(message, at / kIntegerBlock, n);
            float *to = out + j * from.chunks.chunk + at;
            if (past_caches && n == kIntegerBlock && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
                stream_block(to, values);
            } else {
                store_some(to, values, n);
            }
        }
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
    sent.each_piece(exec, y->numel * (14 + source.bytes()), [&](int64_t j, int64_t begin, int64_t end) {
        int64_t first = j * sent.chunks.chunk;
        Message mine = sent.chunk(j), common = average.chunk(j);
        for (int64_t at = begin; at < end; at += kIntegerTile) {
            int64_t stop = least(at + kIntegerTile, end);
            alignas(64) float values[kIntegerTile];
            each_block(source, error, first + at, first + stop, [&](int64_t place, int64_t n, Block &u) {
                int64_t b = (place - first) / kIntegerBlock;
                Block q = sent.read(mine, b, n);
#pragma GCC unroll 8
                for (int k = 0; k < 8; ++k) u.v[k] = u.v[k] - q.v[k];
                store_some(error + place, u, n);
                store_some(values + (place - first - at), average.read(common, b, n), n);
            });
            write_outputs(outputs, first + at, first + stop, values, output_scale);
        }
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

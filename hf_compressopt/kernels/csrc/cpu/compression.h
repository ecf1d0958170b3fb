/* Compression and its inverse: messages as kernels/__init__.py describes them. */
#pragma once
#include "common.h"

namespace compressopt {
namespace CO_VECTOR {
namespace {

constexpr int64_t kCachedBlock = 128 << 10; /* elements of a block whose second pass still finds it in the L2 cache */

/* ---- where things lie -------------------------------------------------------------------------------------------- */

inline int64_t blocks_of(int64_t numel, int64_t scale_block) {
    return scale_block == 0 ? 1 : ceil_div(numel, scale_block);
}

inline int64_t signs_offset(int64_t numel, int64_t scale_block) { return 4 * blocks_of(numel, scale_block); }

inline int64_t message_nbytes(int64_t numel, int64_t scale_block) {
    return numel == 0 ? 0 : (signs_offset(numel, scale_block) + ceil_div(numel, 8) + 15) / 16 * 16;
}

/* A bucket of numel elements as world_size chunks. */
struct Chunks {
    int64_t numel, chunk, count;
    Chunks(int64_t n, int64_t world_size) : numel(n), chunk(ceil_div(n, 8 * world_size) * 8), count(ceil_div(n, chunk)) {}
    int64_t size(int64_t j) const { return least(chunk, numel - j * chunk); }
};

/* ---- what is compressed ------------------------------------------------------------------------------------------ */

/* z of co_combination. */
struct Combination {
    const co_combination &z;
    Segments segments;
    explicit Combination(const co_combination &combination)
        : z(combination), segments(combination.grads, combination.grads == nullptr ? 0 : combination.count) {}
    bool missing() const { return segments.missing(); }
    int64_t bytes() const { return (z.x != nullptr ? 4 : 0) + (z.grads != nullptr ? 4 : 0); }

    /* out <- z + error of elements [begin, end); error == NULL: z. out and error point at the element begin. */
    void operator()(int64_t begin, int64_t end, const float *error, float *out) const {
        if (z.grads == nullptr) {
            run(z.x == nullptr ? nullptr : z.x + begin, nullptr, CO_FLOAT32, 1.0f, end - begin, error, out);
            return;
        }
        segments.each(begin, end, [&](const co_segment &segment, int64_t offset, int64_t start, int64_t n) {
            float factor = z.factors == nullptr ? 1.0f : z.factors[segment.index];
            const void *g = segment.data == nullptr ? nullptr : element(segment.data, segment.dtype, offset);
            run(z.x == nullptr ? nullptr : z.x + start, g, segment.dtype, factor, n,
                error == nullptr ? nullptr : error + (start - begin), out + (start - begin));
        });
    }

    void run(const float *x, const void *g, int32_t dtype, float factor, int64_t n, const float *error,
             float *out) const {
        Vec alpha = set1(z.alpha), beta = set1(z.beta), f = set1(factor);
        if (g == nullptr) {
            finish(n, error, out, [&](int64_t i, auto lanes) {
                return (x == nullptr ? set1(0.0f) : alpha * lanes.get(x + i)) * f;
            });
            return;
        }
        with_dtype(dtype, [&](auto type) {
            const auto *grad = static_cast<const typename decltype(type)::type *>(g);
            if (x == nullptr) {
                finish(n, error, out, [&](int64_t i, auto lanes) {
                    return (set1(0.0f) + beta * lanes.get(grad + i)) * f; /* -0 becomes 0 */
                });
            } else {
                finish(n, error, out, [&](int64_t i, auto lanes) {
                    return (alpha * lanes.get(x + i) + beta * lanes.get(grad + i)) * f;
                });
            }
        });
    }

    template <class Value>
    static void finish(int64_t n, const float *error, float *out, const Value &value) {
        if (error == nullptr) {
            each_vector(n, [&](int64_t i, auto lanes) { lanes.put(out + i, value(i, lanes)); });
        } else {
            each_vector(n, [&](int64_t i, auto lanes) { lanes.put(out + i, value(i, lanes) + lanes.get(error + i)); });
        }
    }
};

/* The mean of world_size messages of one chunk. */
struct Mean {
    const uint8_t *messages;
    int64_t numel, scale_block, world_size;
    bool missing() const { return false; }
    int64_t bytes() const { return world_size / 8; }

    /* out <- mean + error of elements [begin, end); begin is a multiple of 8. */
    void operator()(int64_t begin, int64_t end, const float *error, float *out) const {
        int64_t block = scale_block == 0 ? numel : scale_block;
        while (begin < end) {
            int64_t n = least((begin / block + 1) * block, end) - begin;
            one_block(begin, n, begin / block, error, out);
            begin += n;
            error += n;
            out += n;
        }
    }

    void one_block(int64_t begin, int64_t n, int64_t block, const float *error, float *out) const {
        int64_t stride = message_nbytes(numel, scale_block);
        const uint8_t *scales = messages + 4 * block;
        const uint8_t *signs = messages + signs_offset(numel, scale_block) + begin / 8;
        Vec inverse = set1(static_cast<float>(1.0 / static_cast<double>(world_size)));
        int64_t i = 0;
        for (; i + 64 <= n; i += 64) {
            Vec sum[4] = {};
            for (int64_t j = 0; j < world_size; ++j) {
                float s;
                uint64_t bits;
                memcpy(&s, scales + j * stride, 4);
                memcpy(&bits, signs + j * stride + i / 8, 8);
                Scale scale(s);
                for (int k = 0; k < 4; ++k) {
                    Vec part = scale.with_signs(static_cast<uint32_t>(bits >> 16 * k) & 0xffff);
                    sum[k] = j == 0 ? part : sum[k] + part;
                }
            }
            for (int k = 0; k < 4; ++k) {
                int64_t at = i + kLanes * k;
                store(out + at, sum[k] * inverse + load(error + at));
            }
        }
        each_vector(n - i, [&](int64_t rest, auto lanes) {
            int64_t at = i + rest;
            Vec sum = set1(0.0f);
            for (int64_t j = 0; j < world_size; ++j) {
                float s;
                memcpy(&s, scales + j * stride, 4);
                Vec part = Scale(s).with_signs(few_bits(signs + j * stride + at / 8, n - at));
                sum = j == 0 ? part : sum + part;
            }
            lanes.put(out + at, sum * inverse + lanes.get(error + at));
        });
    }

    /* The signs of at most sixteen of n elements, without reading a byte that holds none of them. */
    static uint32_t few_bits(const uint8_t *signs, int64_t n) {
        return n > 8 ? static_cast<uint32_t>(signs[0]) | static_cast<uint32_t>(signs[1]) << 8 : signs[0];
    }
};

/* ---- compression ------------------------------------------------------------------------------------------------- */

inline float root_mean_square(double sum, int64_t n) {
    return static_cast<float>(__builtin_sqrt(sum / static_cast<double>(n)));
}

/* Signs of u, and error <- u - Q(u), of one block or a part of it whose length is a multiple of 8, or that is the last.
 * u may be error. */
inline void quantize(const float *u, int64_t n, float s, uint8_t *signs, float *error) {
    Scale scale(s);
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        uint64_t bits = 0;
        for (int k = 0; k < 4; ++k) {
            int64_t at = i + kLanes * k;
            Vec x = load(u + at);
            uint32_t part = negative(x);
            bits |= static_cast<uint64_t>(part) << 16 * k;
            store(error + at, x - scale.with_signs(part));
        }
        memcpy(signs + i / 8, &bits, 8);
    }
    each_vector(n - i, [&](int64_t rest, auto lanes) {
        int64_t at = i + rest;
        Vec x = lanes.get(u + at);
        uint32_t part = negative(x);
        lanes.put(error + at, x - scale.with_signs(part));
        signs[at / 8] = static_cast<uint8_t>(part);
        if (n - at > 8) signs[at / 8 + 1] = static_cast<uint8_t>(part >> 8);
    });
}

/* Compression of source(begin, end, error, out) = what a rank wants to send + error. */
template <class Source>
struct Compressor {
    const Source &source;
    float *error;
    uint8_t *messages;
    int64_t scale_block;
    Chunks chunks;
    const co_exec *exec;

    int64_t bytes() const { return chunks.numel * (8 + source.bytes()); }
    uint8_t *message(int64_t j) const { return messages + j * message_nbytes(chunks.chunk, scale_block); }
    uint8_t *signs(int64_t j) const { return message(j) + signs_offset(chunks.size(j), scale_block); }

    void write_scale(int64_t j, int64_t block, float scale) const { memcpy(message(j) + 4 * block, &scale, 4); }

    void write_padding(int64_t j) const {
        int64_t n = chunks.size(j);
        int64_t used = signs_offset(n, scale_block) + ceil_div(n, 8);
        memset(message(j) + used, 0, static_cast<size_t>(message_nbytes(n, scale_block) - used));
    }

    int32_t operator()() const {
        for (int64_t j = 0; j < chunks.count; ++j) write_padding(j);
        if (scale_block != 0 && scale_block <= kTile) {
            short_blocks();
        } else if (scale_block != 0 && scale_block <= kCachedBlock) {
            cached_blocks();
        } else {
            return long_blocks();
        }
        return CO_OK;
    }

    /* One pass over memory: a tile of whole blocks stays in the L1 cache from its sums to its errors. */
    void short_blocks() const {
        int64_t step = kTile / scale_block * scale_block, tiles = ceil_div(chunks.chunk, step);
        parallel(exec, bytes(), chunks.count * tiles, kPieceTiles, [&](int64_t tile) {
            int64_t j = tile / tiles, begin = tile % tiles * step, end = least(begin + step, chunks.size(j));
            if (begin >= end) return;
            int64_t first = j * chunks.chunk;
            alignas(64) float u[kTile];
            source(first + begin, first + end, error + first + begin, u);
            for (int64_t at = begin; at < end; at += scale_block) {
                int64_t n = least(scale_block, end - at);
                float scale = root_mean_square(sum_of_squares(u + (at - begin), n), n);
                write_scale(j, at / scale_block, scale);
                quantize(u + (at - begin), n, scale, signs(j) + at / 8, error + first + at);
            }
        });
    }

    /* The same, by way of the error buffer, for blocks that fit the L2 cache. */
    void cached_blocks() const {
        int64_t blocks = ceil_div(chunks.chunk, scale_block);
        parallel(exec, bytes(), chunks.count * blocks, 1, [&](int64_t block) {
            int64_t j = block / blocks, begin = block % blocks * scale_block;
            int64_t n = least(scale_block, chunks.size(j) - begin);
            if (n <= 0) return;
            int64_t first = j * chunks.chunk + begin;
            double sum = 0;
            for (int64_t at = 0; at < n; at += kTile) sum += fill(first + at, first + least(at + kTile, n));
            float scale = root_mean_square(sum, n);
            write_scale(j, begin / scale_block, scale);
            quantize(error + first, n, scale, signs(j) + begin / 8, error + first);
        });
    }

    /* error <- u of [begin, end). Returns the sum of its squares. */
    double fill(int64_t begin, int64_t end) const {
        source(begin, end, error + begin, error + begin);
        return sum_of_squares(error + begin, end - begin);
    }

    /* Two passes over memory: sums of tiles, scales, and then signs and errors. */
    int32_t long_blocks() const {
        int64_t block = scale_block == 0 ? chunks.chunk : least(scale_block, chunks.chunk);
        int64_t blocks = ceil_div(chunks.chunk, block), per_block = ceil_div(block, kTile);
        int64_t tiles = chunks.count * blocks * per_block;
        Array<double, 64> sums(tiles);
        if (sums.data == nullptr) return out_of_memory();
        /* body(tile, chunk, block, first and last element in the chunk) */
        auto each_tile = [&](auto body) {
            parallel(exec, bytes(), tiles, kPieceTiles, [&](int64_t tile) {
                int64_t j = tile / (blocks * per_block), b = tile / per_block % blocks;
                int64_t begin = b * block + tile % per_block * kTile;
                int64_t end = least(least(begin + kTile, (b + 1) * block), chunks.size(j));
                body(tile, j, b, begin, end);
            });
        };
        each_tile([&](int64_t tile, int64_t j, int64_t, int64_t begin, int64_t end) {
            int64_t first = j * chunks.chunk;
            sums[tile] = begin < end ? fill(first + begin, first + end) : 0.0;
        });
        write_scales(sums.data, block, blocks, per_block);
        each_tile([&](int64_t, int64_t j, int64_t b, int64_t begin, int64_t end) {
            if (begin >= end) return;
            float scale;
            memcpy(&scale, message(j) + 4 * b, 4);
            float *part = error + j * chunks.chunk + begin;
            quantize(part, end - begin, scale, signs(j) + begin / 8, part);
        });
        return CO_OK;
    }

    void write_scales(const double *sums, int64_t block, int64_t blocks, int64_t per_block) const {
        double all = 0;
        for (int64_t j = 0; j < chunks.count; ++j) {
            for (int64_t b = 0; b < blocks; ++b) {
                double sum = 0;
                for (int64_t k = 0; k < per_block; ++k) sum += *sums++;
                all += sum;
                int64_t n = least(block, chunks.size(j) - b * block);
                if (scale_block != 0 && n > 0) write_scale(j, b, root_mean_square(sum, n));
            }
        }
        if (scale_block != 0) return;
        for (int64_t j = 0; j < chunks.count; ++j) write_scale(j, 0, root_mean_square(all, chunks.numel));
    }
};

template <class Source>
inline int32_t compress_source(const Source &source, float *error, uint8_t *messages, int64_t numel,
                               int64_t scale_block, int64_t world_size, const co_exec *exec) {
    if (source.missing()) return out_of_memory();
    Compressor<Source> compressor{source, error, messages, scale_block, Chunks(numel, world_size), exec};
    return compressor();
}

int32_t compress(const co_combination *z, float *error, uint8_t *messages, int64_t numel, int64_t scale_block,
                 int32_t world_size, const co_exec *exec) {
    return compress_source(Combination(*z), error, messages, numel, scale_block, world_size, exec);
}

int32_t average_compress(const uint8_t *messages, float *error, uint8_t *out, int64_t numel, int64_t scale_block,
                         int32_t world_size, const co_exec *exec) {
    Mean mean{messages, numel, scale_block, world_size};
    return compress_source(mean, error, out, numel, scale_block, 1, exec);
}

int32_t combine(const co_combination *z, float *out, int64_t numel, const co_exec *exec) {
    Combination source(*z);
    if (source.missing()) return out_of_memory();
    parallel_tiles(exec, numel * (4 + source.bytes()), numel,
                   [&](int64_t begin, int64_t end) { source(begin, end, nullptr, out + begin); });
    return CO_OK;
}

/* ---- decompression ----------------------------------------------------------------------------------------------- */

/* The elements that n signs and a scale stand for. */
inline void decode(float s, const uint8_t *signs, int64_t n, float *out) {
    Scale scale(s);
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        uint64_t bits;
        memcpy(&bits, signs + i / 8, 8);
        for (int k = 0; k < 4; ++k) {
            store(out + i + kLanes * k, scale.with_signs(static_cast<uint32_t>(bits >> 16 * k) & 0xffff));
        }
    }
    each_vector(n - i, [&](int64_t rest, auto lanes) {
        int64_t at = i + rest;
        lanes.put(out + at, scale.with_signs(Mean::few_bits(signs + at / 8, n - at)));
    });
}

/* y of compressopt.h. */
struct Average {
    const co_average &y;
    Chunks chunks;
    explicit Average(const co_average &average) : y(average), chunks(average.numel, average.world_size) {}
    int64_t bytes() const { return y.messages == nullptr ? 4 : 0; }

    /* The elements [begin, end), begin a multiple of 8: where they lie, or written to scratch. */
    const float *read(int64_t begin, int64_t end, float *scratch) const {
        if (y.messages == nullptr) return y.values + begin;
        write(begin, end, scratch);
        return scratch;
    }

    /* The same of messages, always written. */
    void write(int64_t begin, int64_t end, float *out) const {
        int64_t block = y.scale_block == 0 ? chunks.chunk : y.scale_block;
        while (begin < end) {
            int64_t j = begin / chunks.chunk, at = begin - j * chunks.chunk, numel = chunks.size(j);
            int64_t b = at / block;
            int64_t n = least(least((b + 1) * block, numel), end - j * chunks.chunk) - at;
            const uint8_t *message = y.messages + j * y.stride;
            float scale;
            memcpy(&scale, message + 4 * b, 4);
            decode(scale, message + signs_offset(numel, y.scale_block) + at / 8, n, out);
            begin += n;
            out += n;
        }
    }
};

int32_t decompress(const co_average *average, float *out, const co_exec *exec) {
    Average y(*average);
    bool past_caches = 4 * average->numel >= kStreamBytes;
    parallel_tiles(exec, 4 * average->numel, average->numel, [&](int64_t begin, int64_t end) {
        alignas(64) float scratch[kTile];
        if (average->messages == nullptr) {
            memmove(out + begin, average->values + begin, static_cast<size_t>(end - begin) * 4);
        } else if (past_caches) {
            y.write(begin, end, scratch);
            stream_copy(out + begin, scratch, end - begin);
        } else {
            y.write(begin, end, out + begin);
        }
    });
    return CO_OK;
}

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt

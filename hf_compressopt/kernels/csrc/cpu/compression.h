/* Compression and its inverse: messages as kernels/__init__.py describes them. */
#pragma once
#include "common.h"

namespace compressopt {
namespace CO_VECTOR {
namespace {

constexpr int kGroup = 4;                    /* messages that are summed by themselves */
constexpr int64_t kRound = 2 * kGroup;       /* messages whose signs are read together */
constexpr int64_t kAhead = 512;              /* bytes of a message */
constexpr int64_t kStep = 1024;              /* elements that are worked on, and fetched, at a time */
constexpr int64_t kSumTile = 4096;           /* elements of a longer block that are summed by themselves */
constexpr int64_t kCachedBlock = 64 << 10; /* elements of a block whose second pass still finds it in the L2 cache */

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
    Chunks(int64_t n, int64_t world_size)
        : numel(n), chunk(ceil_div(n, 8 * world_size) * 8), count(ceil_div(n, chunk)) {}
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

    /* out <- z of elements [begin, end), or z + out; out points to the element begin. */
    void write(int64_t begin, int64_t end, float *out, bool add) const {
        each_run(begin, end, [&](int64_t start, int64_t n, const auto &value) { put(value, n, out + (start - begin), add); });
    }

    /* use(first element, elements, value) of the pieces of tensors in [begin, end), with the value that run() gives. */
    template <class Use>
    void each_run(int64_t begin, int64_t end, const Use &use) const {
        if (z.grads == nullptr) {
            run(begin, nullptr, CO_FLOAT32, 1.0f, [&](const auto &value) { use(begin, end - begin, value); });
            return;
        }
        segments.each(begin, end, [&](const co_segment &segment, int64_t offset, int64_t start, int64_t n) {
            run(start, data(segment, offset), segment.dtype, factor(segment),
                [&](const auto &value) { use(start, n, value); });
        });
    }

    /* out <- z + out, whose squares are added to the sum. */
    void add_to(int64_t begin, int64_t end, float *out, NormSum &sum) const {
        auto add = [&](const auto &value) {
            sum.add(end - begin, [&value, out](int64_t i, auto lanes) {
                Vec u = value(i, lanes) + lanes.get(out + i);
                lanes.put(out + i, u);
                return u;
            });
        };
        if (z.grads == nullptr) {
            run(begin, nullptr, CO_FLOAT32, 1.0f, add);
            return;
        }
        int64_t s = segments.starts.find(begin);
        if (segments.starts.at[s + 1] < end) { /* in several tensors: lanes are counted from the block's beginning */
            write(begin, end, out, true);
            sum.add(out, end - begin);
            return;
        }
        const co_segment &segment = segments.table[s];
        run(begin, data(segment, begin - segments.starts.at[s]), segment.dtype, factor(segment), add);
    }

    float factor(const co_segment &segment) const { return z.factors == nullptr ? 1.0f : z.factors[segment.index]; }

    static const void *data(const co_segment &segment, int64_t offset) {
        return segment.data == nullptr ? nullptr : element(segment.data, segment.dtype, offset);
    }

    /* use(value), value(i, lanes) being z of the elements from begin + i on; g: the gradient at begin, or NULL. */
    template <class Use>
    void run(int64_t begin, const void *g, int32_t dtype, float factor, const Use &use) const {
        Vec alpha = set1(z.alpha), beta = set1(z.beta), f = set1(factor), zero = set1(0.0f);
        const float *x = z.x == nullptr ? nullptr : z.x + begin;
        if (g == nullptr && x == nullptr) {
            use([&](int64_t, auto) { return zero * f; });
        } else if (g == nullptr) {
            if (z.alpha == 1.0f && factor == 1.0f) return use([x](int64_t i, auto lanes) { return lanes.get(x + i); });
            use([=](int64_t i, auto lanes) { return alpha * lanes.get(x + i) * f; });
        } else {
            with_dtype(dtype, [&](auto type) {
                const auto *grad = static_cast<const typename decltype(type)::type *>(g);
                if (x == nullptr) {
                    use([&](int64_t i, auto lanes) { return (zero + beta * lanes.get(grad + i)) * f; });
                } else {
                    use([&](int64_t i, auto lanes) {
                        return (alpha * lanes.get(x + i) + beta * lanes.get(grad + i)) * f;
                    });
                }
            });
        }
    }

    template <class Value>
    static void put(const Value &value, int64_t n, float *out, bool add) {
        if (add) {
            each_vector(n, [&](int64_t i, auto lanes) { lanes.put(out + i, value(i, lanes) + lanes.get(out + i)); });
        } else {
            each_vector(n, [&](int64_t i, auto lanes) { lanes.put(out + i, value(i, lanes)); });
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
    int64_t bytes() const { return world_size / 8; }

    /* out <- mean + out of elements [begin, end) of one block, whose squares are added to the sum; begin is a multiple
     * of 8. */
    void add_to(int64_t begin, int64_t end, float *out, NormSum &sum) const {
        const uint8_t *scales = messages + (scale_block == 0 ? 0 : 4 * (begin / scale_block));
        const uint8_t *signs = messages + offset;
        Vec inverse = set1(static_cast<float>(1.0 / static_cast<double>(world_size)));
        static_assert(kStep % kTransposed == 0);
        alignas(64) uint8_t patterns[kStep];
        alignas(64) float sums[kStep]; /* of the rounds before */
        for (; begin < end; begin += kStep, out += kStep) {
            int64_t n = least(kStep, end - begin);
            for (int64_t j = 0; j < world_size; j += kRound) {
                write_patterns(j, signs + begin / 8, n, patterns);
                with_sums(j, scales, patterns, sums, [&](const auto &sum_at) {
                    if (j + kRound < world_size) {
                        for (int64_t i = 0; i < n; i += kLanes) store(sums + i, sum_at(i));
                        return;
                    }
                    sum.add(n, [&](int64_t i, auto lanes) {
                        Vec u = sum_at(i) * inverse + lanes.get(out + i);
                        lanes.put(out + i, u);
                        return u;
                    });
                });
            }
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
            use([&](int64_t i) { return load(sums + i) + low.at<0>(patterns + i) + high.at<kGroup>(patterns + i); });
        } else if (world_size > kGroup) {
            use([&](int64_t i) { return low.at<0>(patterns + i) + high.at<kGroup>(patterns + i); });
        } else {
            use([&](int64_t i) { return low.at<0>(patterns + i); });
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

    /* The signs of at most sixteen of n elements, without reading a byte that holds none of them. */
    static uint32_t few_bits(const uint8_t *signs, int64_t n) {
        return n > 8 ? static_cast<uint32_t>(signs[0]) | static_cast<uint32_t>(signs[1]) << 8 : signs[0];
    }
};

/* ---- compression ------------------------------------------------------------------------------------------------- */

inline float root_mean_square(double sum, int64_t n) {
    return static_cast<float>(__builtin_sqrt(sum / static_cast<double>(n)));
}

/* Signs of some of u, and u <- u - Q(u). */
template <class Lanes>
inline uint32_t quantize(float *u, const Scale &scale, Lanes lanes) {
    uint32_t bits;
    lanes.put(u, scale.error(lanes.get(u), &bits));
    return bits;
}

/* The same of a block, or of a part of one whose length is a multiple of 8 or that is the last. */
inline void quantize(float *u, int64_t n, float s, uint8_t *signs) {
    Scale scale(s);
    int64_t i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        uint32_t bits = quantize(u + i, scale, Full{});
        bits |= quantize(u + i + kLanes, scale, Full{}) << kLanes;
        memcpy(signs + i / 8, &bits, 4);
    }
    each_vector(n - i, [&](int64_t rest, auto lanes) {
        int64_t at = i + rest;
        uint32_t bits = quantize(u + at, scale, lanes);
        signs[at / 8] = static_cast<uint8_t>(bits);
        if (n - at > 8) signs[at / 8 + 1] = static_cast<uint8_t>(bits >> 8);
    });
}

/* Compression of what source adds to the error. */
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
        if (scale_block == 0 || scale_block > kCachedBlock) return long_blocks();
        short_blocks();
        return CO_OK;
    }

    /* One pass over memory: a block stays in a cache from its sum to its errors. All the while errors are fetched half
     * a block ahead, so that memory does not wait for the quantizing; the hardware fetches the other streams well. */
    void short_blocks() const {
        int64_t step = ceil_div(kPiece, scale_block) * scale_block, steps = ceil_div(chunks.chunk, step);
        parallel(exec, bytes(), chunks.count * steps, 1, [&](int64_t piece) {
            int64_t j = piece / steps, begin = piece % steps * step, end = least(begin + step, chunks.size(j));
            for (; begin < end; begin += scale_block) {
                int64_t n = least(scale_block, end - begin), first = j * chunks.chunk + begin;
                const float *ahead = error + first + n / 2;
                auto fetch = [&](int64_t elements) {
                    for (int64_t i = 0; i < elements / 2; i += kLanes) prefetch(ahead + i);
                    ahead += elements / 2;
                };
                NormSum sum;
                for (int64_t at = first; at < first + n; at += kStep) {
                    int64_t stop = least(at + kStep, first + n);
                    fetch(stop - at);
                    source.add_to(at, stop, error + at, sum);
                }
                float scale = root_mean_square(sum.total(), n);
                write_scale(j, begin / scale_block, scale);
                uint8_t *block_signs = signs(j) + begin / 8;
                for (int64_t at = 0; at < n; at += kStep) {
                    int64_t some = least(kStep, n - at);
                    fetch(some);
                    quantize(error + first + at, some, scale, block_signs + at / 8);
                }
            }
        });
    }

    /* Two passes over memory: sums of tiles, scales, and then signs and errors. */
    int32_t long_blocks() const {
        int64_t block = scale_block == 0 ? chunks.chunk : least(scale_block, chunks.chunk);
        int64_t blocks = ceil_div(chunks.chunk, block), per_block = ceil_div(block, kSumTile);
        int64_t tiles = chunks.count * blocks * per_block;
        Array<double, 64> sums(tiles);
        if (sums.data == nullptr) return out_of_memory();
        /* body(tile, chunk, block, first and last element in the chunk) */
        auto each_tile = [&](auto body) {
            parallel(exec, bytes(), tiles, kPiece / kSumTile, [&](int64_t tile) {
                int64_t j = tile / (blocks * per_block), b = tile / per_block % blocks;
                int64_t begin = b * block + tile % per_block * kSumTile;
                int64_t end = least(least(begin + kSumTile, (b + 1) * block), chunks.size(j));
                body(tile, j, b, begin, end);
            });
        };
        each_tile([&](int64_t tile, int64_t j, int64_t, int64_t begin, int64_t end) {
            int64_t first = j * chunks.chunk;
            NormSum sum;
            if (begin < end) source.add_to(first + begin, first + end, error + first + begin, sum);
            sums[tile] = sum.total();
        });
        write_scales(sums.data, block, blocks, per_block);
        each_tile([&](int64_t, int64_t j, int64_t b, int64_t begin, int64_t end) {
            if (begin >= end) return;
            float scale;
            memcpy(&scale, message(j) + 4 * b, 4);
            quantize(error + j * chunks.chunk + begin, end - begin, scale, signs(j) + begin / 8);
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
    return compress_source(Mean(messages, numel, scale_block, world_size), error, out, numel, scale_block, 1, exec);
}

int32_t combine(const co_combination *z, float *out, int64_t numel, const co_exec *exec) {
    Combination source(*z);
    if (source.missing()) return out_of_memory();
    parallel_tiles(exec, numel * (4 + source.bytes()), numel,
                   [&](int64_t begin, int64_t end) { source.write(begin, end, out + begin, false); });
    return CO_OK;
}

int32_t copy(const float *in, float *out, int64_t numel, const co_exec *exec) {
    parallel_tiles(exec, 8 * numel, numel,
                   [&](int64_t begin, int64_t end) { stream_copy(out + begin, in + begin, end - begin); });
    return CO_OK;
}

/* ---- decompression ----------------------------------------------------------------------------------------------- */

/* The elements that n signs and a scale stand for. */
inline void decode(float s, const uint8_t *signs, int64_t n, float *out) {
    Scale scale(s);
    int64_t i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        Vec pair[2];
        scale.with_signs(signs + i / 8, pair);
        store(out + i, pair[0]);
        store(out + i + kLanes, pair[1]);
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

/* Compression to messages of signs. */
#pragma once
#include "errors.h"
#include "sources.h"

namespace compressopt {
namespace CO_VECTOR {
namespace {

constexpr int64_t kSumTile = 4096;           /* elements of a longer block that are summed by themselves */
constexpr int64_t kCachedBlock = 64 << 10; /* elements of a block whose second pass still finds it in the L2 cache */

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
inline void quantize(float *u, int64_t n, float s, uint8_t *signs, const Ahead &ahead = Ahead()) {
    Scale scale(s);
    int64_t i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        ahead.fetch_half(i);
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

/* Compression of what source adds to the errors. */
template <class Source, class Errors>
struct Compressor {
    const Source &source;
    Errors errors;
    uint8_t *messages;
    int64_t scale_block;
    Chunks chunks;
    const co_exec *exec;

    int64_t bytes() const { return chunks.numel * (2 * Errors::kBytes + source.bytes()); }
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
        errors.write_padding();
        if (scale_block == 0 || run_of(errors) > kCachedBlock) return long_blocks(errors);
        short_blocks(errors);
        return CO_OK;
    }

    /* Elements that begin and end with blocks of scales, and of errors. */
    int64_t run_of(const FloatErrors &) const { return scale_block; }
    template <class Integers>
    int64_t run_of(const Integers &) const {
        int64_t run = scale_block; /* a multiple of 8: at most four times it is doubled */
        while (run % kIntegerBlock != 0) run *= 2;
        return run;
    }

    /* One pass over memory: a block stays in a cache from its sum to its errors. All the while another one is fetched, so
     * that memory does not wait for the quantizing. */
    void short_blocks(const FloatErrors &) const {
        float *error = errors.values;
        int64_t step = ceil_div(kPiece, scale_block) * scale_block, steps = ceil_div(chunks.chunk, step);
        parallel(exec, bytes(), chunks.count * steps, 1, [&](int64_t piece) {
            int64_t j = piece / steps, begin = piece % steps * step, end = least(begin + step, chunks.size(j));
            for (; begin < end; begin += scale_block) {
                int64_t n = least(scale_block, end - begin), first = j * chunks.chunk + begin;
                Ahead ahead = ahead_of(first, n), later = ahead.from(n / 2);
                NormSum sum;
                for (int64_t at = 0; at < n; at += kStep) {
                    float *u = error + first + at;
                    source.add_to(first + at, first + least(at + kStep, n), Lying{u}, u, sum, ahead.from(at / 2));
                }
                float scale = root_mean_square(sum.total(), n);
                write_scale(j, begin / scale_block, scale);
                uint8_t *block_signs = signs(j) + begin / 8;
                for (int64_t at = 0; at < n; at += kStep) {
                    float *u = error + first + at;
                    quantize(u, least(kStep, n - at), scale, block_signs + at / 8, later.from(at / 2));
                }
            }
        });
    }

    /* What to fetch while n elements are compressed. */
    Ahead ahead_of(int64_t first, int64_t n) const {
        return streams_from(source, errors, first + (n < kLeastAhead ? kLeastAhead : n), chunks.numel);
    }

    /* The same with errors that are read to a cache, a run of blocks at a time, and written from there. */
    template <class Other>
    void short_blocks(const Other &) const {
        int64_t whole = run_of(errors), run = ceil_div(kStep, whole) * whole;
        int64_t step = ceil_div(kPiece, run) * run, steps = ceil_div(chunks.chunk, step);
        parallel(exec, bytes(), chunks.count * steps, 1, [&](int64_t piece) {
            int64_t j = piece / steps, begin = piece % steps * step, end = least(begin + step, chunks.size(j));
            alignas(64) float u[kCachedBlock];
            for (; begin < end; begin += run) compress_run(j, begin, least(run, end - begin), u);
        });
    }

    void compress_run(int64_t j, int64_t begin, int64_t n, float *u) const {
        int64_t first = j * chunks.chunk + begin, written = 0;
        Ahead ahead = ahead_of(first, n), later = ahead.from(n / 2);
        bool whole = scale_block % kLanes == 0; /* vectors lie in a block each */
        if (!whole) errors.read(j, begin, begin + n, u);
        for (int64_t block = 0; block < n; block += scale_block) {
            int64_t stop = least(block + scale_block, n);
            NormSum sum;
            for (int64_t at = block; at < stop; at += kStep) {
                int64_t to = least(at + kStep, stop);
                auto add = [&](const auto &error) {
                    source.add_to(first + at, first + to, error, u + at, sum, ahead.from(at / 2));
                };
                whole ? errors.with(j, begin + at, begin + to, add) : add(Lying{u + at});
            }
            float scale = root_mean_square(sum.total(), stop - block);
            write_scale(j, (begin + block) / scale_block, scale);
            for (int64_t at = block; at < stop; at += kStep) {
                int64_t to = least(at + kStep, stop);
                quantize(u + at, to - at, scale, signs(j) + (begin + at) / 8, later.from(at / 2));
                for (; written + kIntegerTile <= to || (to == n && written < n); written += kIntegerTile) {
                    errors.write(j, begin + written, begin + least(written + kIntegerTile, n), u + written);
                }
            }
        }
    }

    /* Two passes over memory: sums of tiles, scales, and then signs and errors. */
    int32_t long_blocks(const Errors &) const {
        int64_t block = scale_block == 0 ? chunks.chunk : least(scale_block, chunks.chunk);
        int64_t blocks = ceil_div(chunks.chunk, block), per_block = ceil_div(block, kSumTile);
        int64_t tiles = chunks.count * blocks * per_block;
        Array<double, 64> sums(tiles);
        if (sums.data == nullptr) return out_of_memory();
        parallel(exec, bytes(), tiles, kPiece / kSumTile, [&](int64_t tile) {
            int64_t j = tile / (blocks * per_block), b = tile / per_block % blocks;
            int64_t begin = b * block + tile % per_block * kSumTile;
            int64_t end = least(least(begin + kSumTile, (b + 1) * block), chunks.size(j));
            NormSum sum;
            add_tile(errors, j, begin, end, sum);
            sums[tile] = sum.total();
        });
        write_scales(sums.data, block, blocks, per_block);
        int64_t steps = ceil_div(chunks.chunk, kSumTile);
        parallel(exec, bytes(), chunks.count * steps, kPiece / kSumTile, [&](int64_t tile) {
            int64_t j = tile / steps, begin = tile % steps * kSumTile;
            quantize_tile(errors, j, begin, least(begin + kSumTile, chunks.size(j)), block);
        });
        return CO_OK;
    }

    /* The first pass: u, which replaces the errors, unless they are integers. */
    void add_tile(const FloatErrors &, int64_t j, int64_t begin, int64_t end, NormSum &sum) const {
        float *u = errors.values + j * chunks.chunk;
        for (int64_t at = begin; at < end; at += kStep) add(j, at, least(at + kStep, end), u + at, sum);
    }
    template <class Other>
    void add_tile(const Other &, int64_t j, int64_t begin, int64_t end, NormSum &sum) const {
        alignas(64) float u[kStep + kIntegerBlock];
        for (int64_t at = begin; at < end; at += kStep) {
            int64_t to = least(at + kStep, end), from = at / kIntegerBlock * kIntegerBlock;
            errors.read(j, from, to, u);
            add(j, at, to, u + (at - from), sum);
        }
    }

    /* The second pass, of elements that may lie in several blocks. */
    void quantize_tile(const FloatErrors &, int64_t j, int64_t begin, int64_t end, int64_t block) const {
        float *u = errors.values + j * chunks.chunk;
        each_block(j, begin, end, block, [&](int64_t at, int64_t to, float scale) {
            quantize(u + at, to - at, scale, signs(j) + at / 8);
        });
    }
    template <class Other>
    void quantize_tile(const Other &, int64_t j, int64_t begin, int64_t end, int64_t block) const {
        alignas(64) float u[kIntegerTile];
        for (; begin < end; begin += kIntegerTile) {
            int64_t stop = least(begin + kIntegerTile, end);
            errors.read(j, begin, stop, u);
            each_block(j, begin, stop, block, [&](int64_t at, int64_t to, float scale) {
                NormSum unused;
                add(j, at, to, u + (at - begin), unused);
                quantize(u + (at - begin), to - at, scale, signs(j) + at / 8);
            });
            errors.write(j, begin, stop, u);
        }
    }

    void add(int64_t j, int64_t begin, int64_t end, float *u, NormSum &sum) const {
        source.add_to(j * chunks.chunk + begin, j * chunks.chunk + end, Lying{u}, u, sum, Ahead());
    }

    /* use(first and last element, scale) of the parts of blocks in [begin, end) */
    template <class Use>
    void each_block(int64_t j, int64_t begin, int64_t end, int64_t block, const Use &use) const {
        while (begin < end) {
            int64_t b = begin / block, stop = least((b + 1) * block, end);
            float scale;
            memcpy(&scale, message(j) + 4 * b, 4);
            use(begin, stop, scale);
            begin = stop;
        }
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
inline int32_t compress_source(const Source &source, const co_errors &error, uint8_t *messages, int64_t numel,
                               int64_t scale_block, int64_t world_size, const co_exec *exec) {
    if (source.missing()) return out_of_memory();
    return with_errors(error, numel, world_size, [&](auto errors) {
        Chunks chunks(numel, world_size);
        Compressor<Source, decltype(errors)> compressor{source, errors, messages, scale_block, chunks, exec};
        return compressor();
    });
}

int32_t compress(const co_combination *z, const co_errors *error, uint8_t *messages, int64_t numel,
                 int64_t scale_block, int32_t world_size, const co_exec *exec) {
    return compress_source(Combination(*z), *error, messages, numel, scale_block, world_size, exec);
}

int32_t average_compress(const uint8_t *messages, const co_errors *error, uint8_t *out, int64_t numel,
                         int64_t scale_block, int32_t world_size, const co_exec *exec) {
    return compress_source(Mean(messages, numel, scale_block, world_size), *error, out, numel, scale_block, 1, exec);
}

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt

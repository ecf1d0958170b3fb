/* Messages of signs, as kernels/__init__.py describes them: where they lie, and what they stand for. */
#pragma once
#include "common.h"

namespace compressopt {
namespace CO_VECTOR {
namespace {

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

/* ---- decompression ----------------------------------------------------------------------------------------------- */

/* The signs of at most sixteen of n elements, without reading a byte that holds none of them. */
inline uint32_t few_bits(const uint8_t *signs, int64_t n) {
    return n > 8 ? static_cast<uint32_t>(signs[0]) | static_cast<uint32_t>(signs[1]) << 8 : signs[0];
}

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
        lanes.put(out + at, scale.with_signs(few_bits(signs + at / 8, n - at)));
    });
}

/* What signs and a scale stand for, from the first of the signs on. */
struct SignedScale {
    Scale scale;
    const uint8_t *signs;
    Vec operator()(int64_t i, Full) const { return scale.with_signs_at(signs + i / 8); }
    Vec operator()(int64_t i, Part part) const { return scale.with_signs(few_bits(signs + i / 8, part.n)); }
};

/* What lies in memory. */
struct Lying {
    const float *values;
    template <class Lanes>
    Vec operator()(int64_t i, Lanes lanes) const {
        return lanes.get(values + i);
    }
};

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
        while (begin < end) {
            Run run = run_from(begin);
            int64_t n = least(run.n, end - begin);
            decode(run.scale, run.signs, n, out);
            begin += n;
            out += n;
        }
    }

    /* Elements that share a scale: as many of messages as there are from element begin on, a multiple of 8. */
    struct Run {
        float scale;
        const uint8_t *signs;
        int64_t n;
    };
    Run run_from(int64_t begin) const {
        int64_t block = y.scale_block == 0 ? chunks.chunk : y.scale_block;
        int64_t j = begin / chunks.chunk, at = begin - j * chunks.chunk, numel = chunks.size(j), b = at / block;
        const uint8_t *message = y.messages + j * y.stride;
        float scale;
        memcpy(&scale, message + 4 * b, 4);
        return {scale, message + signs_offset(numel, y.scale_block) + at / 8, least((b + 1) * block, numel) - at};
    }
};

/* outputs of [begin, end) <- outputs * decay + values * scale; values points to the element begin. Float32 outputs that
 * are not read may go past the caches. */
inline void add_to_outputs(const Segments &outputs, int64_t begin, int64_t end, const float *values, float decay,
                           float scale, bool past_caches) {
    Vec keep = set1(decay), by = set1(scale);
    outputs.each(begin, end, [&](const co_segment &segment, int64_t offset, int64_t start, int64_t n) {
        if (segment.data == nullptr) return;
        const float *from = values + (start - begin);
        auto scaled = [from, by](int64_t i, auto lanes) { return lanes.get(from + i) * by; };
        void *out = element(segment.data, segment.dtype, offset);
        if (decay == 0.0f && past_caches && segment.dtype == CO_FLOAT32) {
            return stream_each(static_cast<float *>(out), n, scaled);
        }
        with_dtype(segment.dtype, [&](auto type) {
            auto *to = static_cast<typename decltype(type)::type *>(out);
            if (decay == 0.0f) {
                each_vector(n, [=](int64_t i, auto lanes) { lanes.put(to + i, scaled(i, lanes)); });
            } else {
                each_vector(n, [=](int64_t i, auto lanes) {
                    lanes.put(to + i, lanes.get(to + i) * keep + scaled(i, lanes));
                });
            }
        });
    });
}

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

int32_t add_average(const co_average *average, const co_segment *out, int64_t count, float decay, float scale,
                    const co_exec *exec) {
    Segments outputs(out, count);
    if (outputs.missing()) return out_of_memory();
    Average y(*average);
    bool past_caches = 4 * average->numel >= kStreamBytes;
    parallel_tiles(exec, average->numel * (8 + y.bytes()), average->numel, [&](int64_t begin, int64_t end) {
        alignas(64) float scratch[kTile];
        add_to_outputs(outputs, begin, end, y.read(begin, end, scratch), decay, scale, past_caches);
    });
    return CO_OK;
}

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt

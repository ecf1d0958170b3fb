/* A refresh of the frozen variance: what it learns from averaged gradients, and codes that are rounded at random. */
#pragma once
#include "../sketch_hash.h"
#include "integer_block.h"
#include "updates.h"

namespace compressopt {
namespace CO_VECTOR {
namespace {

/* body(number, first element, one behind the last, gradients) for tiles of a bucket, numbered by their order, on the
 * threads; bytes are those of an element beside its gradient. */
template <int kBits, class Body>
inline void each_tile_of(const co_integers &y, int64_t bytes, const co_exec *exec, const Body &body) {
    IntegerMessages<kBits> from = integer_messages<kBits>(y.messages, y.numel, y.world_size, y.stride);
    int64_t tiles = ceil_div(from.chunks.chunk, kIntegerTile);
    from.each_tile(exec, y.numel * (1 + bytes), [&](int64_t j, int64_t begin, int64_t end) {
        alignas(64) float gradients[kIntegerTile];
        from.from(j, begin).decode(end - begin, gradients);
        int64_t start = j * from.chunks.chunk;
        body(j * tiles + begin / kIntegerTile, start + begin, start + end, gradients);
    });
}

template <class Body>
inline void each_tile_of(const co_refresh &refresh, int64_t bytes, const co_exec *exec, const Body &body) {
    if (refresh.y != nullptr) {
        return refresh.y->bits == 4 ? each_tile_of<4>(*refresh.y, bytes, exec, body)
                                    : each_tile_of<8>(*refresh.y, bytes, exec, body);
    }
    parallel_tiles(exec, refresh.numel * (4 + bytes), refresh.numel, [&](int64_t begin, int64_t end) {
        body(begin / kTile, begin, end, refresh.values + begin);
    });
}

/* At least as many numbers as each_tile_of gives. */
inline int64_t tiles_of(const co_refresh &refresh) {
    if (refresh.y == nullptr) return ceil_div(refresh.numel, kTile);
    Chunks chunks(refresh.numel, refresh.y->world_size);
    return chunks.count * ceil_div(chunks.chunk, kIntegerTile);
}

struct Itself {
    Vec operator()(Vec v) const { return v; }
    Vec operator()(const uint8_t *codes, int32_t top) const { return decode_variance(codes, top); }
};

/* body(part, g, learnt) for the parts of tensors in a tile, whose data is none: learnt(i, lanes, g g) is v'. */
template <class Body>
inline void each_learning(const co_refresh &refresh, const Segments &segments, const Variance &variance, int64_t begin,
                          int64_t end, const float *gradients, const Body &body) {
    Vec memory = set1(refresh.memory), rest = set1(refresh.rest);
    segments.each(begin, end, [&](const co_segment &segment, int64_t offset, int64_t start, int64_t n) {
        PartOfTile part{segment, nullptr, start, n};
        const float *g = gradients + (start - begin);
        variance.each(part, Itself(), [&](const auto &v) {
            body(part, offset, g,
                 [=](int64_t i, auto lanes, Vec square) { return v(i, lanes) * memory + square * rest; });
        });
    });
}

/* What a part of a tensor adds to its sums. */
struct VarianceSums {
    double total, most, square;
    const co_segment *segment; /* NULL: there is no such part */
};

int32_t variance_sums(const co_refresh *refresh, const co_variance *exp_avg_sq, const co_segment *table, int64_t count,
                      double *sums, const co_exec *exec) {
    Segments segments(table, count);
    int64_t most_parts = tiles_of(*refresh) + count; /* of tile t and segment s: t + s */
    Array<VarianceSums, 64> parts(most_parts);
    if (segments.missing() || parts.data == nullptr) return out_of_memory();
    for (int64_t k = 0; k < most_parts; ++k) parts[k].segment = nullptr;
    Variance variance(exp_avg_sq);
    each_tile_of(*refresh, variance.bytes(), exec, [&](int64_t tile, int64_t begin, int64_t end, const float *gradients) {
        each_learning(*refresh, segments, variance, begin, end, gradients,
                      [&](const PartOfTile &part, int64_t, const float *g, const auto &learnt) {
                          NormSum total;
                          Vec most = set1(0.0f), squares = most;
                          each_vector(part.n, [&](int64_t i, auto lanes) {
                              Vec gradient = lanes.get(g + i), square = gradient * gradient;
                              Vec fresh = lanes.only(learnt(i, lanes, square));
                              total.add_once(fresh);
                              most = nan_or_greater(most, fresh);
                              squares = nan_or_greater(squares, lanes.only(square));
                          });
                          parts[tile + (&part.segment - table)] = {total.total(), greatest(most), greatest(squares),
                                                                   &part.segment};
                      });
    });
    auto keep = [](double &most, double x) { most = most < x || x != x ? x : most; };
    for (int64_t k = 0; k < most_parts; ++k) {
        if (parts[k].segment == nullptr) continue;
        double *sum = sums + 3 * static_cast<int64_t>(parts[k].segment->index);
        sum[0] += parts[k].total;
        keep(sum[1], parts[k].most);
        keep(sum[2], parts[k].square);
    }
    return CO_OK;
}

/* The first ten bits of a mantissa from which on the nearest of the nine points of an octave is another one. */
constexpr uint32_t kPlaces[] = {45, 142, 248, 363, 488, 625, 774, 937};
constexpr int32_t kLastCode = 254, kLowestTop = -126 * 8;

/* Codes from the top on of n <= kIntegerTile variances, of which `place` is that of the first in its tensor. */
inline void round_at_random(const float *values, int64_t n, uint64_t key, int64_t place, const float *factors, int32_t top,
                            uint8_t *codes) {
    uint64_t words[kIntegerTile / 8 + 1];
    int64_t first = place / 8, last = (place + n - 1) / 8;
    for (int64_t w = 0; w <= last - first; ++w) words[w] = mix(key + static_cast<uint64_t>(first + w) * kGolden);
    const uint8_t *random = reinterpret_cast<const uint8_t *>(words) + place % 8;
    float moved[kIntegerTile];
    for (int64_t i = 0; i < n; ++i) moved[i] = values[i] * factors[random[i]];
    int32_t from = top + 127 * 8, lowest = top - kLowestTop;
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits = bits_of(moved[i]) >> 13, mantissa = bits & 1023;
        int32_t point = static_cast<int32_t>(bits >> 10) * 8;
        for (uint32_t bound : kPlaces) point += mantissa >= bound;
        int32_t code = from - point;
        code = code < 0 ? 0 : code > kLastCode ? kLastCode : code;
        code = code > lowest ? lowest : code;
        codes[i] = static_cast<uint8_t>(values[i] == 0.0f ? kZeroCode : code);
    }
}

int32_t refresh_variance(const co_refresh *refresh, const co_variance *exp_avg_sq, const co_segment *table, int64_t count,
                         const float *floors, const int32_t *tops, const float *factors, uint64_t key,
                         const co_exec *exec) {
    Segments segments(table, count);
    if (segments.missing()) return out_of_memory();
    Variance variance(exp_avg_sq);
    uint64_t of_call = mix(key + kGolden);
    each_tile_of(*refresh, 2 * variance.bytes(), exec, [&](int64_t, int64_t begin, int64_t end, const float *gradients) {
        each_learning(
            *refresh, segments, variance, begin, end, gradients,
            [&](const PartOfTile &part, int64_t offset, const float *g, const auto &learnt) {
                int32_t index = part.segment.index;
                if (floors[index] != floors[index]) return;
                alignas(64) float scratch[kIntegerTile];
                float *out = exp_avg_sq->codes == nullptr ? exp_avg_sq->values + part.begin : scratch;
                Vec floor = set1(floors[index]);
                each_vector(part.n, [=](int64_t i, auto lanes) {
                    Vec gradient = lanes.get(g + i);
                    lanes.put(out + i, nan_or_greater(floor, learnt(i, lanes, gradient * gradient)));
                });
                if (exp_avg_sq->codes == nullptr) return;
                uint64_t of_tensor = mix((of_call ^ static_cast<uint64_t>(index)) + kGolden);
                int64_t place = reinterpret_cast<intptr_t>(part.segment.data) + offset;
                round_at_random(scratch, part.n, of_tensor, place, factors, tops[index], exp_avg_sq->codes + part.begin);
            });
    });
    return CO_OK;
}

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt

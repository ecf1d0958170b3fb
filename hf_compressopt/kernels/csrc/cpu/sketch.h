/* The sketch of a group's elements, and their sum of squares in the same pass. */
#pragma once
#include "../sketch_hash.h"
#include "common.h"

#include <type_traits>

namespace compressopt {
namespace CO_VECTOR {
namespace {

constexpr int64_t kSketchAhead = 2048; /* elements */
static_assert(kRowLanes == kLanes && kSignWord == 4 * kRowLanes);
template <int kNumber>
using Row = std::integral_constant<int, kNumber>;

/* The sketch of one span. */
struct SpanSketch {
    const SketchKeys &keys;
    float *y;
    double squares[kLanes] = {};

    /* Adds elements [i, i + n) of the group. */
    template <class T>
    void add(const T *x, int64_t i, int64_t n) {
        while (n > 0) {
            int64_t run = i / kSketch, place = i % kSketch, some = least(n, kSketch - place);
            add_to_run(x, run, place, some);
            x += some;
            i += some;
            n -= some;
        }
    }

    template <class T>
    inline void add_to_run(const T *x, int64_t run, int64_t place, int64_t n) {
        Vec sum = set1(0.0f); /* at most 256 squares a lane: float32 will do */
        uint32_t both = keys.rotation(run);
        uint32_t rows = both % kRows;
        LaneRotation rotation(both / kRows);
        auto row_of = [&](int64_t at) { return (static_cast<uint32_t>(at) / kRowLanes + rows) % kRows; };
        auto add_row = [&](Vec value, int64_t at, uint64_t signs) {
            float *to = y + row_of(at) * kRowLanes;
            sum = sum + value * value;
            store(to, load(to) + rotation(with_signs_changed(value, static_cast<uint32_t>(signs))));
        };
        auto add_row_of_word = [&](const WordSigns &signs, auto number, float *to) {
            constexpr int kRow = decltype(number)::value;
            prefetch_far(x + kLanes * kRow + kSketchAhead); /* the first-level cache is half full of the sketch */
            Vec value = load(x + kLanes * kRow);
            sum = sum + value * value;
            store(to, load(to) + rotation(signs.template change<kRow>(value)));
        };
        auto add_word = [&](const WordSigns &signs, float *a, float *b, float *c, float *d) {
            add_row_of_word(signs, Row<0>(), a);
            add_row_of_word(signs, Row<1>(), b);
            add_row_of_word(signs, Row<2>(), c);
            add_row_of_word(signs, Row<3>(), d);
        };
        int64_t words = run * (kSketch / kSignWord);
        auto signs_at = [&](int64_t at) {
            uint32_t here = static_cast<uint32_t>(at);
            return keys.sign_word(words + here / kSignWord) >> here % kSignWord;
        };
        auto add_some = [&](int64_t some) { /* of one row; 0 in the other lanes changes nothing */
            float lanes[kLanes] = {};
            store(lanes + place % kLanes, load(x, static_cast<int>(some)), static_cast<int>(some));
            add_row(load(lanes), place / kLanes * kLanes, signs_at(place / kLanes * kLanes) & 0xffff);
            x += some;
            place += some;
            n -= some;
        };
        if (place % kLanes != 0) add_some(least(n, kLanes - place % kLanes));
        while (n >= kLanes && place % kSignWord != 0) {
            add_row(load(x), place, signs_at(place) & 0xffff);
            x += kLanes;
            place += kLanes;
            n -= kLanes;
        }
        for (; n >= kSignWord; n -= kSignWord) {
            WordSigns signs(signs_at(place));
            float *to = y + row_of(place) * kRowLanes, *end = y + kSketch;
            if (to + 4 * kRowLanes <= end) {
                add_word(signs, to, to + kRowLanes, to + 2 * kRowLanes, to + 3 * kRowLanes);
            } else { /* one of the rows is the first */
                auto next = [&](float *row) { return row + kRowLanes == end ? y : row + kRowLanes; };
                float *b = next(to), *c = next(b);
                add_word(signs, to, b, c, next(c));
            }
            x += kSignWord;
            place += kSignWord;
        }
        while (n >= kLanes) {
            add_row(load(x), place, signs_at(place) & 0xffff);
            x += kLanes;
            place += kLanes;
            n -= kLanes;
        }
        if (n > 0) add_some(n);
        float lanes[kLanes];
        store(lanes, sum);
        for (int lane = 0; lane < kLanes; ++lane) squares[lane] += static_cast<double>(lanes[lane]);
    }
};

int32_t sketch(const co_segment *segments, int64_t count, int64_t offset, uint64_t seed, float *y, double *squares,
               const co_exec *exec) {
    Segments table(segments, count);
    if (table.missing()) return out_of_memory();
    int64_t numel = table.starts.at[count], bytes = 0;
    for (int64_t i = 0; i < count; ++i) bytes += segments[i].data == nullptr ? 0 : 4 * segments[i].numel;
    Spans spans(offset, numel);
    SketchKeys keys(seed);
    Array<float, 1> sketches((spans.count + 3) * kSketch); /* and twice as much for the sums of the spans */
    Array<double, kMostSpans> sums(spans.count);
    if (sketches.data == nullptr || sums.data == nullptr) return out_of_memory();
    uintptr_t after = reinterpret_cast<uintptr_t>(sketches.data) % 64;
    float *first = sketches.data + (after == 0 ? 0 : (64 - after) / 4);
    parallel(exec, bytes, spans.count, 1, [&](int64_t span) {
        SpanSketch sketch{keys, first + span * kSketch};
        memset(sketch.y, 0, kSketch * sizeof(float));
        table.each(spans.begin(span), spans.end(span),
                   [&](const co_segment &segment, int64_t inside, int64_t start, int64_t n) {
                       if (segment.data == nullptr) return;
                       with_dtype(segment.dtype, [&](auto type) {
                           using T = typename decltype(type)::type;
                           sketch.add(static_cast<const T *>(segment.data) + inside, offset + start, n);
                       });
                   });
        sums[span] = 0;
        for (double lane : sketch.squares) sums[span] += lane;
    });
    for (int64_t span = 0; span < spans.count; ++span) *squares += sums[span];
    double *total = reinterpret_cast<double *>(first + spans.count * kSketch);
    memset(total, 0, kSketch * sizeof(double));
    for (int64_t span = 0; span < spans.count; ++span) {
        const float *add = first + span * kSketch;
        for (int64_t p = 0; p < kSketch; ++p) total[p] += static_cast<double>(add[p]);
    }
    for (int64_t p = 0; p < kSketch; ++p) y[p] = static_cast<float>(static_cast<double>(y[p]) + total[p]);
    return CO_OK;
}

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt

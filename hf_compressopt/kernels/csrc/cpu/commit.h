/* What a commit leaves as the errors of a step. */
#pragma once
#include "errors.h"
#include "sources.h"

namespace compressopt {
namespace CO_VECTOR {
namespace {

/* left <- z + old - sent of n elements, at most kIntegerTile, from the bucket's first on. left may be old. What lies
 * ahead is fetched. */
inline void leave_rest(const Combination &source, int64_t first, int64_t n, const float *old, const float *sent,
                       float *left, const Ahead &ahead) {
    source.each_run(first, first + n, [&](int64_t start, int64_t some, const auto &value) {
        int64_t from = start - first;
        const float *e = old + from, *q = sent + from;
        float *to = left + from;
        each_vector(some, [&](int64_t i, auto lanes) {
            ahead.fetch(from + i);
            lanes.put(to + i, value(i, lanes) + lanes.get(e + i) - lanes.get(q + i));
        });
    });
}

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt

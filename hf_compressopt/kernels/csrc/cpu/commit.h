/* What a commit leaves as the errors of a step. */
#pragma once
#include "errors.h"
#include "sources.h"

namespace compressopt {
namespace CO_VECTOR {
namespace {

/* left <- z + old - sent of n elements, at most kIntegerTile, from the bucket's first on. left may be old. */
template <class Errors>
inline void leave_rest(const Combination &source, int64_t first, int64_t n, const float *old, const float *sent,
                       float *left) {
    source.each_run(first, first + n, [&](int64_t start, int64_t some, const auto &value) {
        const float *e = old + (start - first), *q = sent + (start - first);
        float *to = left + (start - first);
        each_vector(some, [&](int64_t i, auto lanes) {
            Errors::fetch(e + i + kIntegerAhead);
            lanes.put(to + i, value(i, lanes) + lanes.get(e + i) - lanes.get(q + i));
        });
    });
}

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt

/* The signs and rotations of a sketch, alike on all devices: see kernels/reference.py. */
#ifndef COMPRESSOPT_SKETCH_HASH_H
#define COMPRESSOPT_SKETCH_HASH_H

#include <stdint.h>

#ifdef __CUDACC__
#define CO_ON_DEVICE __host__ __device__
#else
#define CO_ON_DEVICE
#endif

namespace compressopt {
namespace { /* nothing here is shared by the files of several instruction sets */

constexpr int64_t kSketch = 4096;   /* numbers of a sketch, and elements of a run */
constexpr uint32_t kRowLanes = 16;  /* elements of a row */
constexpr uint32_t kRows = kSketch / kRowLanes;
constexpr uint32_t kSignWord = 64;  /* elements whose signs are one hash */
constexpr int64_t kMostSpans = 64;  /* parts that are summed by themselves */
constexpr int64_t kLeastRuns = 16;  /* runs of a span */
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;

/* The finalizer of SplitMix64. */
CO_ON_DEVICE constexpr uint64_t mix(uint64_t h) {
    h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9;
    h = (h ^ h >> 27) * 0x94d049bb133111eb;
    return h ^ h >> 31;
}

struct SketchKeys {
    uint64_t signs, rotations;
    explicit constexpr SketchKeys(uint64_t seed)
        : signs(mix(seed + kGolden)), rotations(mix(mix(seed + kGolden) + kGolden)) {}
    /* Bit k is the sign of element 64 word + k: 1 changes it. */
    CO_ON_DEVICE constexpr uint64_t sign_word(int64_t word) const {
        return mix(signs + static_cast<uint64_t>(word) * kGolden);
    }
    /* Row v, lane l of a run belong to row v + (its bits 0 to 7), lane l + (its bits 8 to 11). */
    CO_ON_DEVICE constexpr uint32_t rotation(int64_t run) const {
        return static_cast<uint32_t>(mix(rotations + static_cast<uint64_t>(run) * kGolden)) & 0xfff;
    }
};

/* The runs of elements [offset, offset + numel), and the spans that they are cut into. */
struct Spans {
    int64_t offset, numel, first_run, runs, per_span, count;
    constexpr Spans(int64_t offset_, int64_t numel_)
        : offset(offset_),
          numel(numel_),
          first_run(offset / kSketch),
          runs((offset + numel + kSketch - 1) / kSketch - first_run),
          per_span(runs <= kMostSpans * kLeastRuns ? kLeastRuns : (runs + kMostSpans - 1) / kMostSpans),
          count((runs + per_span - 1) / per_span) {}
    /* The first element of a span, counted from offset. */
    CO_ON_DEVICE constexpr int64_t begin(int64_t span) const {
        int64_t first = (first_run + span * per_span) * kSketch - offset;
        return first < 0 ? 0 : first;
    }
    CO_ON_DEVICE constexpr int64_t end(int64_t span) const {
        int64_t last = (first_run + (span + 1) * per_span) * kSketch - offset;
        return last < numel ? last : numel;
    }
};

}  // namespace
}  // namespace compressopt

#endif

/* Signs and rotations of rows of sixteen in AVX-512 registers. See sketch_portable.h for the meaning of each. */
#pragma once
#include "common.h"

namespace compressopt {
namespace CO_VECTOR {
namespace {

inline Vec with_signs_changed(Vec x, uint32_t bits) {
    return {_mm512_mask_xor_ps(x.v, static_cast<__mmask16>(bits), x.v, _mm512_set1_ps(-0.0f))};
}

/* The signs of the four rows of a word. */
class WordSigns {
  public:
    explicit WordSigns(uint64_t word) : word_(word) {}
    template <int kRow>
    Vec change(Vec x) const {
        return with_signs_changed(x, static_cast<uint32_t>(word_ >> 16 * kRow & 0xffff));
    }

  private:
    uint64_t word_;
};

struct LaneRotation {
    __m512i from;
    explicit LaneRotation(uint32_t by)
        : from(_mm512_sub_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                _mm512_set1_epi32(static_cast<int>(by)))) {}
    Vec operator()(Vec x) const { /* only the lowest four bits count */
        return {_mm512_permutexvar_ps(from, x.v)};
    }
};

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt

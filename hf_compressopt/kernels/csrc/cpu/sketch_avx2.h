/* Signs and rotations of rows of sixteen in AVX2 registers. See sketch_portable.h for the meaning of each. */
#pragma once
#include "common.h"

namespace compressopt {
namespace avx2 {
namespace {

inline Vec with_signs_changed(Vec x, uint32_t bits) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
    const __m256i up = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    const __m256i high = _mm256_setr_epi32(23, 22, 21, 20, 19, 18, 17, 16);
    const __m256i sign = _mm256_set1_epi32(INT32_MIN);
    __m256i a = _mm256_and_si256(_mm256_sllv_epi32(all, up), sign);
    __m256i b = _mm256_and_si256(_mm256_sllv_epi32(all, high), sign);
    return {_mm256_xor_ps(x.a, _mm256_castsi256_ps(a)), _mm256_xor_ps(x.b, _mm256_castsi256_ps(b))};
}

/* The signs of the four rows of a word. */
class WordSigns {
  public:
    explicit WordSigns(uint64_t word)
        : halves_{_mm256_set1_epi32(static_cast<int>(word)), _mm256_set1_epi32(static_cast<int>(word >> 32))} {}
    template <int kRow>
    Vec change(Vec x) const {
        constexpr int kUp = kRow % 2 == 0 ? 31 : 15;
        const __m256i up =
            _mm256_setr_epi32(kUp, kUp - 1, kUp - 2, kUp - 3, kUp - 4, kUp - 5, kUp - 6, kUp - 7);
        const __m256i high = _mm256_sub_epi32(up, _mm256_set1_epi32(8));
        const __m256i sign = _mm256_set1_epi32(INT32_MIN);
        __m256i a = _mm256_and_si256(_mm256_sllv_epi32(halves_[kRow / 2], up), sign);
        __m256i b = _mm256_and_si256(_mm256_sllv_epi32(halves_[kRow / 2], high), sign);
        return {_mm256_xor_ps(x.a, _mm256_castsi256_ps(a)), _mm256_xor_ps(x.b, _mm256_castsi256_ps(b))};
    }

  private:
    __m256i halves_[2];
};

/* Each half is rotated, and lanes that leave it change places with those of the other. */
struct LaneRotation {
    __m256i from;
    __m256 other;
    explicit LaneRotation(uint32_t by) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i shift = _mm256_set1_epi32(static_cast<int>(by & 7));
        const __m256i swap = _mm256_set1_epi32(by < 8 ? 0 : -1);
        from = _mm256_sub_epi32(lane, shift);
        other = _mm256_castsi256_ps(_mm256_xor_si256(_mm256_cmpgt_epi32(shift, lane), swap));
    }
    Vec operator()(Vec x) const { /* only the lowest three bits count */
        __m256 a = _mm256_permutevar8x32_ps(x.a, from), b = _mm256_permutevar8x32_ps(x.b, from);
        return {_mm256_blendv_ps(a, b, other), _mm256_blendv_ps(b, a, other)};
    }
};

}  // namespace
}  // namespace avx2
}  // namespace compressopt

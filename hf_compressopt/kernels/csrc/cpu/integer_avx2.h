/* Blocks of b-bit integers in AVX2 registers. See integer_portable.h for what every function means. */
#pragma once
#include "common.h"

namespace compressopt {
namespace avx2 {
namespace {

struct Block {
    Vec v[8];
};

inline uint32_t largest_pattern(const Block &u) {
    const __m256i size = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    for (const Vec &x : u.v) {
        __m256i a = _mm256_and_si256(_mm256_castps_si256(x.a), size);
        __m256i b = _mm256_and_si256(_mm256_castps_si256(x.b), size);
        most = _mm256_max_epu32(most, _mm256_max_epu32(a, b));
    }
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1))));
}

/* kRest: x <- x - integer * scale. */
template <bool kRest>
inline __m256i integers(__m256 &x, __m256 by, __m256 unit) {
    __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(x, by));
    /* the product is exact, so that fusing it with the difference rounds no differently */
    if (kRest) x = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(q), unit, x);
    return q;
}

/* Of two neighbours the four lowest bits each, in 16 bits. */
inline __m256i join_pairs(__m256i bytes) {
    return _mm256_maddubs_epi16(_mm256_and_si256(bytes, _mm256_set1_epi8(15)), _mm256_set1_epi16(0x1001));
}

template <int kBits, bool kRest>
inline void quantize(Block &u, float inverse, float scale, uint8_t *out) {
    const __m256 by = _mm256_set1_ps(inverse), unit = _mm256_set1_ps(scale);
    /* packing stays in lanes of 128 bits; this restores the order of the elements */
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
#pragma GCC unroll 2
    for (int k = 0; k < 8; k += 4) {
        __m256i bytes[2];
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            Vec &x = u.v[k + 2 * h], &y = u.v[k + 2 * h + 1];
            __m256i low = _mm256_packs_epi32(integers<kRest>(x.a, by, unit), integers<kRest>(x.b, by, unit));
            __m256i high = _mm256_packs_epi32(integers<kRest>(y.a, by, unit), integers<kRest>(y.b, by, unit));
            bytes[h] = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
        }
        __m256i *to = reinterpret_cast<__m256i *>(out + 2 * kBits * k);
        if (kBits == 8) {
            _mm256_storeu_si256(to, bytes[0]);
            _mm256_storeu_si256(to + 1, bytes[1]);
        } else {
            __m256i joined = _mm256_packus_epi16(join_pairs(bytes[0]), join_pairs(bytes[1]));
            _mm256_storeu_si256(to, _mm256_permute4x64_epi64(joined, 0xd8));
        }
    }
}

/* sum + the eight integers in the lowest bytes, times unit: an exact product */
inline __m256 add_eight(__m256 sum, __m128i bytes, __m256 unit) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)), unit, sum);
}

template <int kBits>
inline Block sum_of_integers(const uint8_t *q, int64_t stride, int count, const float *scales) {
    const __m128i nibble = _mm_set1_epi8(15);
    const __m128i levels = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    Block sum;
    for (int k = 0; k < 8; k += 2) { /* thirty-two elements, whose sums stay in registers */
        __m256 s[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
        for (int j = 0; j < count; ++j) {
            const __m128i *from = reinterpret_cast<const __m128i *>(q + j * stride + 2 * kBits * k);
            const __m256 unit = _mm256_set1_ps(scales[j]);
            __m128i first = _mm_loadu_si128(from), second;
            if (kBits == 8) {
                second = _mm_loadu_si128(from + 1);
            } else {
                __m128i even = _mm_shuffle_epi8(levels, _mm_and_si128(first, nibble));
                __m128i odd = _mm_shuffle_epi8(levels, _mm_and_si128(_mm_srli_epi16(first, 4), nibble));
                first = _mm_unpacklo_epi8(even, odd);
                second = _mm_unpackhi_epi8(even, odd);
            }
            s[0] = add_eight(s[0], first, unit);
            s[1] = add_eight(s[1], _mm_unpackhi_epi64(first, first), unit);
            s[2] = add_eight(s[2], second, unit);
            s[3] = add_eight(s[3], _mm_unpackhi_epi64(second, second), unit);
        }
        sum.v[k] = {s[0], s[1]};
        sum.v[k + 1] = {s[2], s[3]};
    }
    return sum;
}

}  // namespace
}  // namespace avx2
}  // namespace compressopt

/* Blocks of b-bit integers in AVX2 registers. See integer_portable.h for what every function means. */
#pragma once
#include "common.h"

namespace compressopt {
namespace avx2 {
namespace {

inline uint32_t largest_pattern(const float *u) {
    const __m256i size = _mm256_set1_epi32(0x7fffffff);
    __m256i most[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 16
    for (int k = 0; k < 16; ++k) {
        __m256i pattern = _mm256_load_si256(reinterpret_cast<const __m256i *>(u + 8 * k));
        most[k % 2] = _mm256_max_epu32(most[k % 2], _mm256_and_si256(pattern, size));
    }
    __m256i all = _mm256_max_epu32(most[0], most[1]);
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    __m128i two = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32(two, 0xb1))));
}

/* The steps that integers stand for. */
template <int kBits>
inline __m256 values(__m256i q) {
    __m256 x = _mm256_cvtepi32_ps(q);
    return kBits == 8 ? x : _mm256_mul_ps(x, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x));
}

/* The root of a few steps, to nearest, with their sign: none is so near to a tie that the estimate decides. */
inline __m256i roots(__m256i steps) {
    __m256 size = _mm256_cvtepi32_ps(_mm256_abs_epi32(steps));
    __m256 root = _mm256_mul_ps(size, _mm256_rsqrt_ps(_mm256_max_ps(size, _mm256_set1_ps(1.0f))));
    return _mm256_sign_epi32(_mm256_cvtps_epi32(root), steps);
}

/* Eight integers of a block, and what they leave of u. */
template <int kBits, Rest kRest>
inline __m256i integers(const float *u, __m256 by, __m256 unit, float *rest) {
    __m256 x = _mm256_load_ps(u);
    __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(x, by));
    if (kBits == 4) q = roots(q);
    if (kRest == Rest::kNone) return q;
    /* the product is exact, so that fusing it with the difference rounds no differently */
    x = _mm256_fnmadd_ps(values<kBits>(q), unit, x);
    (kRest == Rest::kStreamed ? _mm256_stream_ps : _mm256_storeu_ps)(rest, x);
    return q;
}

/* Of two neighbours the four lowest bits each, in 16 bits. */
inline __m256i join_pairs(__m256i bytes) {
    return _mm256_maddubs_epi16(_mm256_and_si256(bytes, _mm256_set1_epi8(15)), _mm256_set1_epi16(0x1001));
}

/* Packing stays in lanes of 128 bits; the order of the elements is restored at the end. */
template <int kBits, Rest kRest>
inline void quantize(const float *u, float inverse, float scale, uint8_t *out, float *rest) {
    const __m256 by = _mm256_set1_ps(inverse), unit = _mm256_set1_ps(scale);
    const __m256i fours = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i twos = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
#pragma GCC unroll 2
    for (int k = 0; k < 128; k += 64) {
        __m256i bytes[2];
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            __m256i q[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                int at = k + 32 * h + 8 * i;
                q[i] = integers<kBits, kRest>(u + at, by, unit, rest + at);
            }
            bytes[h] = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
        }
        __m256i *to = reinterpret_cast<__m256i *>(out + k * kBits / 8);
        if (kBits == 8) {
            _mm256_storeu_si256(to, _mm256_permutevar8x32_epi32(bytes[0], fours));
            _mm256_storeu_si256(to + 1, _mm256_permutevar8x32_epi32(bytes[1], fours));
        } else {
            __m256i joined = _mm256_packus_epi16(join_pairs(bytes[0]), join_pairs(bytes[1]));
            _mm256_storeu_si256(to, _mm256_shuffle_epi8(_mm256_permute4x64_epi64(joined, 0xd8), twos));
        }
    }
}

template <int kBits>
inline __m256i eight_integers(const uint8_t *q) {
    if (kBits == 8) return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(q)));
    int all;
    memcpy(&all, q, 4);
    const __m256i to_the_top = _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0);
    return _mm256_srai_epi32(_mm256_sllv_epi32(_mm256_set1_epi32(all), to_the_top), 28);
}

template <int kBits, class Use>
inline void sum_of_integers(const uint8_t *q, int64_t stride, int count, const float *scales, const Use &use) {
#pragma GCC unroll 2
    for (int k = 0; k < 128; k += 64) { /* sixty-four elements, whose sums stay in registers */
        __m256 s[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) s[i] = _mm256_setzero_ps();
        const uint8_t *from = q + k * kBits / 8;
        for (int j = 0; j < count; ++j, from += stride) {
            const __m256 unit = _mm256_set1_ps(scales[j]);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) { /* the product is exact */
                s[i] = _mm256_fmadd_ps(values<kBits>(eight_integers<kBits>(from + i * kBits)), unit, s[i]);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < 8; i += 2) use(k + 8 * i, Vec{s[i], s[i + 1]});
    }
}

}  // namespace
}  // namespace avx2
}  // namespace compressopt

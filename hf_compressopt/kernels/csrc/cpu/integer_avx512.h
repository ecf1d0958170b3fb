/* Blocks of b-bit integers in AVX-512 registers. See integer_portable.h for what every function means. */
#pragma once
#include "common.h"

namespace compressopt {
namespace CO_VECTOR {
namespace {

inline uint32_t largest_pattern(const float *u) {
    const __m512i size = _mm512_set1_epi32(0x7fffffff);
    __m512i most[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
        most[k % 2] = _mm512_max_epu32(most[k % 2], _mm512_and_si512(_mm512_load_si512(u + 16 * k), size));
    }
    return _mm512_reduce_max_epu32(_mm512_max_epu32(most[0], most[1]));
}

/* Sixty-four integers as bytes. Packing stays in lanes of 128 bits; the order of the elements is restored last. */
inline __m512i pack(const __m512i *q) {
    __m512i low = _mm512_packs_epi32(q[0], q[1]), high = _mm512_packs_epi32(q[2], q[3]);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
}

/* Of two neighbours the four lowest bits each, in 16 bits. */
inline __m512i join_pairs(__m512i bytes) {
    return _mm512_maddubs_epi16(_mm512_and_si512(bytes, _mm512_set1_epi8(15)), _mm512_set1_epi16(0x1001));
}

/* The steps that integers of 4 bits stand for: of -8 nothing is sent. */
inline __m512 levels() {
    return _mm512_setr_ps(0, 1, 4, 9, 16, 25, 36, 49, -64, -49, -36, -25, -16, -9, -4, -1);
}

#if defined(__AVX512VBMI__)
/* By the seven lowest bits of some steps. */
struct Roots {
    int8_t of[128];
};
constexpr Roots table_of_roots() {
    Roots table = {};
    for (int32_t steps = -49; steps <= 49; ++steps) table.of[steps & 127] = static_cast<int8_t>(root(steps));
    return table;
}
alignas(64) constexpr Roots kRoots = table_of_roots();

/* The bytes of a sign, 0 or -1, find the root of 0 or -1, which is the sign again. */
inline __m512i roots(__m512i steps) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(kRoots.of), steps, _mm512_load_si512(kRoots.of + 64));
}
#else
/* The root of a few steps, to nearest, with their sign: none is so near to a tie that the estimate decides. */
inline __m512i roots(__m512i steps) {
    __m512 size = _mm512_cvtepi32_ps(_mm512_abs_epi32(steps));
    __m512i root = _mm512_cvtps_epi32(_mm512_mul_ps(size, _mm512_rsqrt14_ps(_mm512_max_ps(size, _mm512_set1_ps(1.0f)))));
    return _mm512_mask_sub_epi32(root, _mm512_cmplt_epi32_mask(steps, _mm512_setzero_si512()), _mm512_setzero_si512(), root);
}
#endif

template <int kBits, Rest kRest>
inline void quantize(const float *u, float inverse, float scale, uint8_t *out, float *rest) {
    const __m512 by = _mm512_set1_ps(inverse), unit = _mm512_set1_ps(scale);
    __m512i q[8];
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
        __m512 x = _mm512_load_ps(u + 16 * k);
        q[k] = _mm512_cvtps_epi32(_mm512_mul_ps(x, by));
        if (kBits == 4) q[k] = roots(q[k]);
        if (kRest == Rest::kNone) continue;
        /* the product is exact, so that fusing it with the difference rounds no differently */
        x = _mm512_fnmadd_ps(kBits == 8 ? _mm512_cvtepi32_ps(q[k]) : _mm512_permutexvar_ps(q[k], levels()), unit, x);
        if (kRest == Rest::kStreamed) {
            _mm512_stream_ps(rest + 16 * k, x);
        } else {
            _mm512_storeu_ps(rest + 16 * k, x);
        }
    }
    __m512i first = pack(q), second = pack(q + 4);
    if (kBits == 8) {
        _mm512_storeu_si512(out, first);
        _mm512_storeu_si512(out + 64, second);
    } else {
        __m512i joined = _mm512_packus_epi16(join_pairs(first), join_pairs(second));
        _mm512_storeu_si512(out, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), joined));
    }
}

template <int kBits, class Use>
inline void sum_of_integers(const uint8_t *q, int64_t stride, int count, const float *scales, const Use &use) {
    __m512 s[8];
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) s[k] = _mm512_setzero_ps();
    if (kBits == 8) {
        for (int j = 0; j < count; ++j, q += stride) {
            const __m512 unit = _mm512_set1_ps(scales[j]);
#pragma GCC unroll 8
            for (int k = 0; k < 8; ++k) {
                __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(q + 16 * k));
                /* the product is exact */
                s[k] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), unit, s[k]);
            }
        }
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) use(16 * k, Vec{s[k]});
        return;
    }
    /* The sixteen values of a block make a table; even and odd elements are summed apart. */
    for (int j = 0; j < count; ++j, q += stride) {
        const __m512 values = _mm512_mul_ps(levels(), _mm512_set1_ps(scales[j]));
#pragma GCC unroll 4
        for (int k = 0; k < 8; k += 2) {
            __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(q + 8 * k)));
            __m512 even = _mm512_permutexvar_ps(pairs, values); /* bits above the lowest four count for nothing */
            __m512 odd = _mm512_permutexvar_ps(_mm512_srli_epi32(pairs, 4), values);
            s[k] = _mm512_add_ps(s[k], even);
            s[k + 1] = _mm512_add_ps(s[k + 1], odd);
        }
    }
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
#pragma GCC unroll 4
    for (int k = 0; k < 8; k += 2) {
        use(16 * k, Vec{_mm512_permutex2var_ps(s[k], low, s[k + 1])});
        use(16 * k + 16, Vec{_mm512_permutex2var_ps(s[k], high, s[k + 1])});
    }
}

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt

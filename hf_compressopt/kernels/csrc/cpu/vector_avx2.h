/* Sixteen floats in two AVX2 registers. See vector_portable.h for what every function means. */
#pragma once
#include <immintrin.h>
#include <string.h>

#include "elements.h"

#define CO_VECTOR avx2

namespace compressopt {
namespace avx2 {
namespace {

constexpr const char *kName = "avx2";

struct Vec {
    __m256 a, b;
};

inline Vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec operator+(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Vec operator-(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Vec operator*(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Vec operator/(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Vec square_root(Vec x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }

inline Vec load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float *p, Vec x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline void stream(float *p, Vec x) {
    _mm256_stream_ps(p, x.a);
    _mm256_stream_ps(p + 8, x.b);
}
inline void stream_done() { _mm_sfence(); }
inline void prefetch(const void *p) { _mm_prefetch(static_cast<const char *>(p), _MM_HINT_T0); }

inline __m256 widen(bfloat16, __m128i half) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline __m256 widen(float16, __m128i half) { return _mm256_cvtph_ps(half); }

inline __m128i narrow(bfloat16, __m256 x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i half = _mm256_srli_epi32(up, 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    half = _mm256_blendv_epi8(half, _mm256_set1_epi32(kBfloat16NaN), nan);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(half, half), 0x08);
    return _mm256_castsi256_si128(packed);
}
inline __m128i narrow(float16, __m256 x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Vec load(const int8_t *p) {
    __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(all)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(all, all)))};
}
template <class Half>
inline Vec load(const Half *p) {
    const __m128i *half = reinterpret_cast<const __m128i *>(p);
    return {widen(Half{}, _mm_loadu_si128(half)), widen(Half{}, _mm_loadu_si128(half + 1))};
}
template <class Half>
inline void store(Half *p, Vec x) {
    __m128i *half = reinterpret_cast<__m128i *>(p);
    _mm_storeu_si128(half, narrow(Half{}, x.a));
    _mm_storeu_si128(half + 1, narrow(Half{}, x.b));
}
template <class T>
inline Vec load(const T *p, int n) {
    T part[16] = {};
    memcpy(part, p, n * sizeof(T));
    return load(part);
}
template <class T>
inline void store(T *p, Vec x, int n) {
    T part[16];
    store(part, x);
    memcpy(p, part, n * sizeof(T));
}

struct Scale {
    __m256 plus;
    explicit Scale(float s) : plus(_mm256_set1_ps(s)) {}
    Vec error(Vec x, uint32_t *bits) const {
        __m256 a = _mm256_cmp_ps(x.a, _mm256_setzero_ps(), _CMP_LT_OQ);
        __m256 b = _mm256_cmp_ps(x.b, _mm256_setzero_ps(), _CMP_LT_OQ);
        *bits = static_cast<uint32_t>(_mm256_movemask_ps(a) | _mm256_movemask_ps(b) << 8);
        return {_mm256_sub_ps(x.a, flip(a)), _mm256_sub_ps(x.b, flip(b))};
    }
    Vec with_signs(uint32_t bits) const { return with_signs(_mm256_set1_epi32(static_cast<int>(bits))); }
    Vec with_signs_at(const uint8_t *bits) const {
        int16_t both;
        memcpy(&both, bits, 2);
        return with_signs(_mm256_set1_epi16(both));
    }
    /* Each element's bit is shifted to the place of the sign. */
    Vec with_signs(__m256i bits) const {
        return {flip(_mm256_castsi256_ps(_mm256_sllv_epi32(bits, _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24)))),
                flip(_mm256_castsi256_ps(_mm256_sllv_epi32(bits, _mm256_setr_epi32(23, 22, 21, 20, 19, 18, 17, 16))))};
    }
    void with_signs(const uint8_t *bits, Vec *out) const {
        out[0] = with_signs(static_cast<uint32_t>(bits[0] | bits[1] << 8));
        out[1] = with_signs(static_cast<uint32_t>(bits[2] | bits[3] << 8));
    }
    __m256 flip(__m256 set) const { return _mm256_xor_ps(plus, _mm256_and_ps(set, _mm256_set1_ps(-0.0f))); }
};

constexpr int64_t kTransposed = 256;

/* In bytes, exchange the bits of a that are not kept with those of b that are, kBits places lower. */
template <int kBits>
inline void exchange(__m256i &a, __m256i &b, int kept) {
    const __m256i mask = _mm256_set1_epi8(static_cast<char>(kept));
    __m256i moved = _mm256_and_si256(_mm256_xor_si256(_mm256_srli_epi16(a, kBits), b), mask);
    a = _mm256_xor_si256(a, _mm256_slli_epi16(moved, kBits));
    b = _mm256_xor_si256(b, moved);
}

inline __m256i low8(__m256i a, __m256i b) { return _mm256_unpacklo_epi8(a, b); }
inline __m256i high8(__m256i a, __m256i b) { return _mm256_unpackhi_epi8(a, b); }
inline __m256i low16(__m256i a, __m256i b) { return _mm256_unpacklo_epi16(a, b); }
inline __m256i high16(__m256i a, __m256i b) { return _mm256_unpackhi_epi16(a, b); }

#include "transpose.h"

inline __m256i load_bytes(const uint8_t *p, int64_t n) {
    if (n == 32) return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
    alignas(32) uint8_t part[32] = {};
    memcpy(part, p, static_cast<size_t>(n));
    return _mm256_load_si256(reinterpret_cast<const __m256i *>(part));
}

inline void transpose_signs(const uint8_t *signs, int64_t stride, int count, int64_t nbytes, uint8_t *patterns) {
    __m256i r[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) r[j] = j < count ? load_bytes(signs + j * stride, nbytes) : _mm256_setzero_si256();
    transpose_bits(r);
    /* r[k] holds the patterns of the elements 8 i + k */
    interleave_bytes(r);
#pragma GCC unroll 8
    for (int j = 0; j < 4; ++j) {
        int from = (j & 1) * 4 + (j & 2); /* in the order of bytes */
        __m256i x = _mm256_unpacklo_epi32(r[from], r[from + 1]), y = _mm256_unpackhi_epi32(r[from], r[from + 1]);
        __m256i *out = reinterpret_cast<__m256i *>(patterns + 32 * j);
        _mm256_storeu_si256(out, _mm256_permute2x128_si256(x, y, 0x20));
        _mm256_storeu_si256(out + 4, _mm256_permute2x128_si256(x, y, 0x31));
    }
}

struct Table {
    Vec of;
    explicit Table(Vec numbers) : of(numbers) {}
    template <int kShift>
    Vec at(const uint8_t *bytes) const {
        return {eight<kShift>(bytes), eight<kShift>(bytes + 8)};
    }
    template <int kShift>
    __m256 eight(const uint8_t *bytes) const { /* the lowest three bits count, and then the fourth of them */
        __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(bytes)));
        if (kShift > 0) index = _mm256_srli_epi32(index, kShift);
        __m256 fourth = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(of.a, index), _mm256_permutevar8x32_ps(of.b, index), fourth);
    }
};

/* The number whose pattern is of + power; 0 where the code says so. */
inline __m256 number_of(__m256i codes, __m256i of, __m256i power) {
    __m256i zero = _mm256_cmpeq_epi32(codes, _mm256_set1_epi32(kZeroCode));
    return _mm256_castsi256_ps(_mm256_andnot_si256(zero, _mm256_add_epi32(of, power)));
}
inline __m256 variance_of(__m256i codes, int32_t top) {
    __m256i k = _mm256_sub_epi32(_mm256_set1_epi32(top), codes);
    __m256i power = _mm256_slli_epi32(_mm256_andnot_si256(_mm256_set1_epi32(7), k), 20);
    /* of k the lowest three bits count */
    return number_of(codes, _mm256_permutevar8x32_epi32(_mm256_setr_epi32(CO_POINTS), k), power);
}
inline __m256 root_of(__m256i codes, int32_t top) {
    __m256i k = _mm256_sub_epi32(_mm256_set1_epi32(top), codes);
    __m256i power = _mm256_slli_epi32(_mm256_andnot_si256(_mm256_set1_epi32(15), k), 19);
    __m256i low = _mm256_permutevar8x32_epi32(_mm256_setr_epi32(CO_LOW_ROOTS), k);
    __m256i high = _mm256_permutevar8x32_epi32(_mm256_setr_epi32(CO_HIGH_ROOTS), k);
    __m256 fourth = _mm256_castsi256_ps(_mm256_slli_epi32(k, 28));
    __m256 root = _mm256_blendv_ps(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high), fourth);
    return number_of(codes, _mm256_castps_si256(root), power);
}
inline __m256i eight_codes(const uint8_t *p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
}
inline Vec decode_variance(const uint8_t *codes, int32_t top) {
    return {variance_of(eight_codes(codes), top), variance_of(eight_codes(codes + 8), top)};
}
inline Vec decode_root(const uint8_t *codes, int32_t top) {
    return {root_of(eight_codes(codes), top), root_of(eight_codes(codes + 8), top)};
}

inline Vec bounded(Vec x, Vec low, Vec high) { /* of two numbers one of which is NaN both take the second */
    return {_mm256_max_ps(low.a, _mm256_min_ps(high.a, x.a)), _mm256_max_ps(low.b, _mm256_min_ps(high.b, x.b))};
}

inline __m256 nan_or_greater(__m256 most, __m256 x) {
    __m256 take = _mm256_or_ps(_mm256_cmp_ps(most, x, _CMP_LT_OQ), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_ps(most, x, take);
}
inline Vec nan_or_greater(Vec most, Vec x) { return {nan_or_greater(most.a, x.a), nan_or_greater(most.b, x.b)}; }

struct SquareSum {
    __m256d sum[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
    void add(Vec x) { /* the square is exact, so that fusing it with the sum rounds no differently */
        add(0, _mm256_castps256_ps128(x.a));
        add(1, _mm256_extractf128_ps(x.a, 1));
        add(2, _mm256_castps256_ps128(x.b));
        add(3, _mm256_extractf128_ps(x.b, 1));
    }
    void add(int i, __m128 x) {
        __m256d wide = _mm256_cvtps_pd(x);
        sum[i] = _mm256_fmadd_pd(wide, wide, sum[i]);
    }
    void add_once(Vec x) {
        sum[0] = _mm256_add_pd(sum[0], _mm256_cvtps_pd(_mm256_castps256_ps128(x.a)));
        sum[1] = _mm256_add_pd(sum[1], _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1)));
        sum[2] = _mm256_add_pd(sum[2], _mm256_cvtps_pd(_mm256_castps256_ps128(x.b)));
        sum[3] = _mm256_add_pd(sum[3], _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1)));
    }
    void lanes(double *out) const {
        for (int i = 0; i < 4; ++i) _mm256_storeu_pd(out + 4 * i, sum[i]);
    }
};

}  // namespace
}  // namespace avx2
}  // namespace compressopt

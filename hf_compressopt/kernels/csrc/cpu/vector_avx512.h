/* Sixteen floats in one AVX-512 register, with and without GFNI. See vector_portable.h for what every function means. */
#pragma once
#include <immintrin.h>

#include "elements.h"

#ifdef __GFNI__
#define CO_VECTOR avx512_gfni
#else
#define CO_VECTOR avx512
#endif

namespace compressopt {
namespace CO_VECTOR {
namespace {

#ifdef __GFNI__
constexpr const char *kName = "avx512_gfni";
#else
constexpr const char *kName = "avx512";
#endif

struct Vec {
    __m512 v;
};

inline Vec set1(float a) { return {_mm512_set1_ps(a)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec square_root(Vec a) { return {_mm512_sqrt_ps(a.v)}; }

inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }

inline Vec load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const float *p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline void store(float *p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline void store(float *p, Vec a, int n) { _mm512_mask_storeu_ps(p, first(n), a.v); }
inline void stream(float *p, Vec a) { _mm512_stream_ps(p, a.v); }
inline void stream_done() { _mm_sfence(); }
inline void prefetch(const void *p) { _mm_prefetch(static_cast<const char *>(p), _MM_HINT_T0); }

inline Vec widen(bfloat16, __m256i half) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}
inline Vec widen(float16, __m256i half) { return {_mm512_cvtph_ps(half)}; }

inline __m256i narrow(bfloat16, Vec a) {
    __m512i bits = _mm512_castps_si512(a.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m512i half = _mm512_srli_epi32(up, 16);
    __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(half, nan, _mm512_set1_epi32(kBfloat16NaN)));
}
inline __m256i narrow(float16, Vec a) {
    return _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline Vec load(const int8_t *p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))))};
}
template <class Half>
inline Vec load(const Half *p) {
    return widen(Half{}, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
template <class Half>
inline Vec load(const Half *p, int n) {
    return widen(Half{}, _mm256_maskz_loadu_epi16(first(n), p));
}
template <class Half>
inline void store(Half *p, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), narrow(Half{}, a));
}
template <class Half>
inline void store(Half *p, Vec a, int n) {
    _mm256_mask_storeu_epi16(p, first(n), narrow(Half{}, a));
}

struct Scale {
    __m512 plus, minus;
    explicit Scale(float s) : plus(_mm512_set1_ps(s)), minus(_mm512_set1_ps(-s)) {}
    Vec error(Vec a, uint32_t *bits) const {
        __mmask16 negative = _mm512_cmp_ps_mask(a.v, _mm512_setzero_ps(), _CMP_LT_OQ);
        *bits = _cvtmask16_u32(negative);
        return {_mm512_sub_ps(a.v, _mm512_mask_blend_ps(negative, plus, minus))};
    }
    Vec with_signs(uint32_t bits) const {
        return {_mm512_mask_blend_ps(static_cast<__mmask16>(bits), plus, minus)};
    }
    Vec with_signs_at(const uint8_t *bits) const { return with_signs(static_cast<uint32_t>(bits[0] | bits[1] << 8)); }
    void with_signs(const uint8_t *bits, Vec *out) const { /* by shifts: loads of mask registers are slow */
        __m512i all = _mm512_castps_si512(_mm512_broadcastss_ps(_mm_load_ss(reinterpret_cast<const float *>(bits))));
        const __m512i lo = _mm512_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16);
        const __m512i hi = _mm512_setr_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512i top = _mm512_set1_epi32(INT32_MIN);
        __m512i s = _mm512_castps_si512(plus);
        out[0] = {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_sllv_epi32(all, lo), top, s, 0x6a))};
        out[1] = {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_sllv_epi32(all, hi), top, s, 0x6a))};
    }
};

constexpr int64_t kTransposed = 512;

inline __m512i low8(__m512i a, __m512i b) { return _mm512_unpacklo_epi8(a, b); }
inline __m512i high8(__m512i a, __m512i b) { return _mm512_unpackhi_epi8(a, b); }
inline __m512i low16(__m512i a, __m512i b) { return _mm512_unpacklo_epi16(a, b); }
inline __m512i high16(__m512i a, __m512i b) { return _mm512_unpackhi_epi16(a, b); }

/* In bytes, exchange the bits of a that are not kept with those of b that are, kBits places lower. */
template <int kBits>
inline void exchange(__m512i &a, __m512i &b, int kept) {
    const __m512i mask = _mm512_set1_epi8(static_cast<char>(kept));
    __m512i up = _mm512_slli_epi16(b, kBits), down = _mm512_srli_epi16(a, kBits);
    a = _mm512_ternarylogic_epi32(a, up, mask, 0xe4);
    b = _mm512_ternarylogic_epi32(down, b, mask, 0xe4);
}

#include "transpose.h"

/* Bits of eight messages are transposed before their bytes are interleaved, or, by GFNI, in each eight bytes after it. */
#ifdef __GFNI__
inline int register_of(int message) { return 7 - message; } /* the instruction counts rows from the last */
inline void transpose_before(__m512i *) {}
inline __m512i transpose_after(__m512i x) {
    return _mm512_gf2p8affine_epi64_epi8(_mm512_set1_epi64(static_cast<int64_t>(0x8040201008040201)), x, 0);
}
#else
inline int register_of(int message) { return message; }
inline void transpose_before(__m512i *r) { transpose_bits(r); }
inline __m512i transpose_after(__m512i x) { return x; }
#endif

inline void transpose_signs(const uint8_t *signs, int64_t stride, int count, int64_t nbytes, uint8_t *patterns) {
    /* 16-bit words, ordered so that unpacking, which stays in lanes of 128 bits, leaves the elements in order */
    const __m512i order = _mm512_set_epi16(31, 27, 23, 19, 15, 11, 7, 3, 30, 26, 22, 18, 14, 10, 6, 2, 29, 25, 21, 17,
                                           13, 9, 5, 1, 28, 24, 20, 16, 12, 8, 4, 0);
    const __mmask64 there = ~uint64_t{0} >> (64 - nbytes);
    __m512i r[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
        __m512i bytes = _mm512_maskz_loadu_epi8(j < count ? there : 0, signs + (j < count ? j : 0) * stride);
        r[register_of(j)] = _mm512_permutexvar_epi16(order, bytes);
    }
    transpose_before(r);
    interleave_bytes(r);
#pragma GCC unroll 8
    for (int j = 0; j < 4; ++j) {
        int from = (j & 1) * 4 + (j & 2); /* in the order of bytes */
        __m512i *out = reinterpret_cast<__m512i *>(patterns + 128 * j);
        _mm512_store_si512(out, transpose_after(_mm512_unpacklo_epi32(r[from], r[from + 1])));
        _mm512_store_si512(out + 1, transpose_after(_mm512_unpackhi_epi32(r[from], r[from + 1])));
    }
}

struct Table {
    __m512 of;
    explicit Table(Vec numbers) : of(numbers.v) {}
    template <int kShift>
    Vec at(const uint8_t *bytes) const { /* bits above the lowest four count for nothing */
        __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(bytes)));
        return {_mm512_permutexvar_ps(kShift == 0 ? index : _mm512_srli_epi32(index, kShift), of)};
    }
};

/* Sixteen codes: the numbers 2^(k / kPoints), k = top - code, from a table whose entry is taken by the lowest bits of k. */
template <int kPoints>
inline Vec decode_codes(const uint8_t *p, int32_t top, __m512i table) {
    __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    __m512i k = _mm512_sub_epi32(_mm512_set1_epi32(top), codes);
    __m512i whole = _mm512_andnot_si512(_mm512_set1_epi32(kPoints - 1), k);
    __m512i power = _mm512_slli_epi32(whole, kPoints == 8 ? 20 : 19);
    __mmask16 there = _mm512_cmpneq_epi32_mask(codes, _mm512_set1_epi32(kZeroCode));
    return {_mm512_castsi512_ps(_mm512_maskz_add_epi32(there, _mm512_permutexvar_epi32(k, table), power))};
}
inline Vec decode_variance(const uint8_t *codes, int32_t top) {
    return decode_codes<8>(codes, top, _mm512_broadcast_i32x8(_mm256_setr_epi32(CO_POINTS)));
}
inline Vec decode_root(const uint8_t *codes, int32_t top) {
    __m512i low = _mm512_castsi256_si512(_mm256_setr_epi32(CO_LOW_ROOTS));
    return decode_codes<16>(codes, top, _mm512_inserti64x4(low, _mm256_setr_epi32(CO_HIGH_ROOTS), 1));
}

inline Vec bounded(Vec a, Vec low, Vec high) { /* of two numbers one of which is NaN both take the second */
    return {_mm512_max_ps(low.v, _mm512_min_ps(high.v, a.v))};
}

inline Vec nan_or_greater(Vec most, Vec a) {
    __mmask16 take = _mm512_cmp_ps_mask(most.v, a.v, _CMP_LT_OQ) | _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    return {_mm512_mask_blend_ps(take, most.v, a.v)};
}

struct SquareSum {
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    void add(Vec a) { /* the square is exact, so that fusing it with the sum rounds no differently */
        __m512d x = _mm512_cvtps_pd(_mm512_castps512_ps256(a.v));
        __m512d y = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1));
        low = _mm512_fmadd_pd(x, x, low);
        high = _mm512_fmadd_pd(y, y, high);
    }
    void add_once(Vec a) {
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(a.v)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1)));
    }
    void lanes(double *out) const {
        _mm512_storeu_pd(out, low);
        _mm512_storeu_pd(out + 8, high);
    }
};

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt

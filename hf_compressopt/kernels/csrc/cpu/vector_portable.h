/* Sixteen floats in an array: the meaning of what the other two do in registers, and the way of every other machine.
 *
 * Bits are equal everywhere: each operation is rounded on its own, and sums keep sixteen lanes. */
#pragma once
#include <stdint.h>
#include <string.h>

#include "elements.h"

#define CO_VECTOR portable

namespace compressopt {
namespace portable {
namespace {

constexpr const char *kName = "portable";

struct Vec {
    float v[16];
};

inline Vec set1(float x) {
    Vec r;
    for (int i = 0; i < 16; ++i) r.v[i] = x;
    return r;
}
inline Vec operator+(const Vec &x, const Vec &y) {
    Vec r;
    for (int i = 0; i < 16; ++i) r.v[i] = x.v[i] + y.v[i];
    return r;
}
inline Vec operator-(const Vec &x, const Vec &y) {
    Vec r;
    for (int i = 0; i < 16; ++i) r.v[i] = x.v[i] - y.v[i];
    return r;
}
inline Vec operator*(const Vec &x, const Vec &y) {
    Vec r;
    for (int i = 0; i < 16; ++i) r.v[i] = x.v[i] * y.v[i];
    return r;
}
inline Vec operator/(const Vec &x, const Vec &y) {
    Vec r;
    for (int i = 0; i < 16; ++i) r.v[i] = x.v[i] / y.v[i];
    return r;
}
inline Vec square_root(const Vec &x) {
    Vec r;
    for (int i = 0; i < 16; ++i) r.v[i] = __builtin_sqrtf(x.v[i]);
    return r;
}

inline float widen(float x) { return x; }
inline float widen(bfloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(float16 x) {
    uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
    uint32_t exponent = x.bits >> 10 & 31, fraction = x.bits & 0x3ff;
    if (exponent == 31) { /* infinity, or NaN, which becomes a quiet one */
        return float_of(sign | 0x7f800000 | (fraction != 0 ? 0x400000 : 0) | fraction << 13);
    }
    if (exponent != 0) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
    return float_of(sign | bits_of(static_cast<float>(fraction) * 0x1p-24f));
}

/* To nearest, ties to even. NaN stays NaN. */
inline void narrow(float x, float *out) { *out = x; }
inline void narrow(float x, bfloat16 *out) {
    uint32_t bits = bits_of(x);
    out->bits = x != x ? kBfloat16NaN : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void narrow(float x, float16 *out) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) {
        out->bits = static_cast<uint16_t>(sign | 0x7e00 | (size >> 13 & 0x3ff));
    } else if (size >= 0x477ff000) { /* 65520 and more */
        out->bits = static_cast<uint16_t>(sign | 0x7c00);
    } else if (size >= 0x38800000) { /* 2^-14 and more: normal */
        out->bits = static_cast<uint16_t>(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
    } else { /* adding 0.5 leaves the multiple of 2^-24 in the lowest bits, rounded */
        out->bits = static_cast<uint16_t>(sign | (bits_of(float_of(size) + 0.5f) - 0x3f000000));
    }
}

/* n: only so many of the sixteen; the others are loaded as 0. */
template <class T>
inline Vec load(const T *p, int n = 16) {
    Vec r = {};
    for (int i = 0; i < n; ++i) r.v[i] = widen(p[i]);
    return r;
}
template <class T>
inline void store(T *p, const Vec &x, int n = 16) {
    for (int i = 0; i < n; ++i) narrow(x.v[i], p + i);
}
/* Past the caches, where that can be; p: aligned to 64 bytes. */
inline void stream(float *p, const Vec &x) { store(p, x); }
inline void stream_done() {}
inline void prefetch(const void *p) { __builtin_prefetch(p); }

struct Scale {
    float plus;
    explicit Scale(float s) : plus(s) {}
    /* x minus what its signs say; bit i: whether element i is less than 0. */
    Vec error(const Vec &x, uint32_t *bits) const {
        *bits = 0;
        for (int i = 0; i < 16; ++i) *bits |= static_cast<uint32_t>(x.v[i] < 0.0f) << i;
        return x - with_signs(*bits);
    }
    /* -s where the bit is set, else s */
    Vec with_signs(uint32_t bits) const {
        Vec r;
        for (int i = 0; i < 16; ++i) r.v[i] = float_of(bits_of(plus) ^ (bits >> i & 1) << 31);
        return r;
    }
    /* The same for the 16 bits of two bytes. */
    Vec with_signs_at(const uint8_t *bits) const { return with_signs(static_cast<uint32_t>(bits[0] | bits[1] << 8)); }
    /* The same for 32 bits, and two vectors. */
    void with_signs(const uint8_t *bits, Vec *out) const {
        out[0] = with_signs(static_cast<uint32_t>(bits[0] | bits[1] << 8));
        out[1] = with_signs(static_cast<uint32_t>(bits[2] | bits[3] << 8));
    }
};

/* The signs of the same kTransposed elements in count <= 8 messages, of which nbytes are there: bit j of patterns[i] is
 * that of element i in the j-th message. 0 where there is no message, or no byte. */
constexpr int64_t kTransposed = 64;
inline void transpose_signs(const uint8_t *signs, int64_t stride, int count, int64_t nbytes, uint8_t *patterns) {
    for (int64_t byte = 0; byte < kTransposed / 8; ++byte) {
        uint64_t rows = 0; /* byte j: the j-th message */
        for (int j = 0; j < count && byte < nbytes; ++j) {
            rows |= static_cast<uint64_t>(signs[j * stride + byte]) << 8 * j;
        }
        uint64_t moved = (rows ^ rows >> 28) & 0x00000000f0f0f0f0; /* the two quarters off the diagonal change places */
        rows ^= moved ^ moved << 28;
        moved = (rows ^ rows >> 14) & 0x0000cccc0000cccc; /* and so in each quarter */
        rows ^= moved ^ moved << 14;
        moved = (rows ^ rows >> 7) & 0x00aa00aa00aa00aa;
        rows ^= moved ^ moved << 7;
        memcpy(patterns + 8 * byte, &rows, 8);
    }
}

/* Sixteen numbers, one of which is taken by four bits of a byte: those from kShift on. */
struct Table {
    Vec of;
    explicit Table(const Vec &numbers) : of(numbers) {}
    template <int kShift>
    Vec at(const uint8_t *bytes) const {
        Vec r;
        for (int i = 0; i < 16; ++i) r.v[i] = of.v[bytes[i] >> kShift & 15];
        return r;
    }
};

/* The variances that sixteen codes stand for. */
inline Vec decode_variance(const uint8_t *codes, int32_t top) {
    static const uint32_t points[8] = {CO_POINTS};
    Vec r;
    for (int i = 0; i < 16; ++i) {
        uint32_t k = static_cast<uint32_t>(top) - codes[i];
        r.v[i] = float_of(codes[i] == kZeroCode ? 0 : points[k & 7] + ((k & ~7u) << 20));
    }
    return r;
}

/* The square roots of the same. */
inline Vec decode_root(const uint8_t *codes, int32_t top) {
    static const uint32_t roots[16] = {CO_LOW_ROOTS, CO_HIGH_ROOTS};
    Vec r;
    for (int i = 0; i < 16; ++i) {
        uint32_t k = static_cast<uint32_t>(top) - codes[i];
        r.v[i] = float_of(codes[i] == kZeroCode ? 0 : roots[k & 15] + ((k & ~15u) << 19));
    }
    return r;
}

/* x, or the bound that it passes; NaN stays. */
inline Vec bounded(const Vec &x, const Vec &low, const Vec &high) {
    Vec r;
    for (int i = 0; i < 16; ++i) {
        r.v[i] = x.v[i] > high.v[i] ? high.v[i] : x.v[i] < low.v[i] ? low.v[i] : x.v[i];
    }
    return r;
}

/* The greater; NaN where either is NaN. */
inline Vec nan_or_greater(const Vec &most, const Vec &x) {
    Vec r;
    for (int i = 0; i < 16; ++i) r.v[i] = most.v[i] < x.v[i] || x.v[i] != x.v[i] ? x.v[i] : most.v[i];
    return r;
}

/* Sums of squares in double, one for each lane. */
struct SquareSum {
    double sum[16] = {};
    void add(const Vec &x) {
        for (int i = 0; i < 16; ++i) sum[i] += static_cast<double>(x.v[i]) * static_cast<double>(x.v[i]);
    }
    /* Instead of its square. */
    void add_once(const Vec &x) {
        for (int i = 0; i < 16; ++i) sum[i] += static_cast<double>(x.v[i]);
    }
    void lanes(double *out) const { memcpy(out, sum, sizeof sum); }
};

}  // namespace
}  // namespace portable
}  // namespace compressopt

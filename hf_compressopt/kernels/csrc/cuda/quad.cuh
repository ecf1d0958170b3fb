// Arithmetic that keeps its bits whatever the compiler's flags are, and four elements at a time to and from memory.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../compressopt.h"

namespace compressopt {

// A float32. Each operation is rounded on its own: these intrinsics are never contracted to fused multiply-adds.
struct Real {
    float value;
    Real() = default;
    __host__ __device__ constexpr Real(float number) : value(number) {}
};

__device__ inline Real operator+(Real a, Real b) { return __fadd_rn(a.value, b.value); }
__device__ inline Real operator-(Real a, Real b) { return __fsub_rn(a.value, b.value); }
__device__ inline Real operator*(Real a, Real b) { return __fmul_rn(a.value, b.value); }
__device__ inline Real operator/(Real a, Real b) { return __fdiv_rn(a.value, b.value); }
__device__ inline Real square_root(Real a) { return __fsqrt_rn(a.value); }

constexpr int kQuad = 4;

// Four consecutive elements, the first of which is at a multiple of four in the bucket.
struct Quad {
    Real of[kQuad];
};

// Which elements of a quad are there: first <= k < last.
struct Span {
    int first, last;
    __device__ bool whole() const { return first == 0 && last == kQuad; }
    __device__ bool has(int k) const { return first <= k && k < last; }
};

// The elements of the quad at i that are in [low, high).
__device__ inline Span span_of(int64_t i, int64_t low, int64_t high) {
    return {low > i ? static_cast<int>(low - i < kQuad ? low - i : kQuad) : 0,
            high - i < kQuad ? static_cast<int>(high > i ? high - i : 0) : kQuad};
}

template <class Operation>
__device__ inline Quad each(Operation operation) {
    Quad result;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) result.of[k] = operation(k);
    return result;
}

__device__ inline Quad same(Real a) {
    return each([&](int) { return a; });
}
__device__ inline Quad operator+(const Quad& a, const Quad& b) {
    return each([&](int k) { return a.of[k] + b.of[k]; });
}
__device__ inline Quad operator-(const Quad& a, const Quad& b) {
    return each([&](int k) { return a.of[k] - b.of[k]; });
}
__device__ inline Quad operator*(const Quad& a, const Quad& b) {
    return each([&](int k) { return a.of[k] * b.of[k]; });
}
__device__ inline Quad operator/(const Quad& a, const Quad& b) {
    return each([&](int k) { return a.of[k] / b.of[k]; });
}
__device__ inline Quad operator+(const Quad& a, Real b) { return a + same(b); }
__device__ inline Quad operator*(const Quad& a, Real b) { return a * same(b); }
__device__ inline Quad operator/(const Quad& a, Real b) { return a / same(b); }
__device__ inline Quad square_root(const Quad& a) {
    return each([&](int k) { return square_root(a.of[k]); });
}
// What passes a bound > 0 becomes it; NaN stays.
__device__ inline Quad bounded(const Quad& a, Real bound) {
    return each([&](int k) {
        const float x = a.of[k].value;
        return Real(x > bound.value ? bound.value : x < -bound.value ? -bound.value : x);
    });
}
__device__ inline Quad negated(const Quad& a) {
    return each([&](int k) { return Real(-a.of[k].value); });
}

// ---- memory ----------------------------------------------------------------------------------------------------------
//
// `first` is where element 0 of a quad is, or would be: only the elements of the span are touched.

template <class T>
__device__ inline bool in_one_access(const T* first, Span span) {
    return span.whole() && reinterpret_cast<uintptr_t>(first) % (kQuad * sizeof(T)) == 0;
}

// Accesses of two and four words are written out. Left to itself a compiler joins the stores of an assignment, one by one,
// with the stores of the branch for what is not aligned, and puts off a load until its value is used, so that few are
// under way.
__device__ inline uint4 load_four(const void* first) {
    uint4 a;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a.x), "=r"(a.y), "=r"(a.z), "=r"(a.w)
                 : "l"(first)
                 : "memory");
    return a;
}
constexpr unsigned kPacked = 4294967295;  // the last word of two that hold four elements
// Two words, and kPacked, where `wide` is 0. One statement, since a load in each of two branches ends in registers of its
// own, and to bring them together the thread waits for what it has only just asked for.
__device__ inline uint4 load_four_or_two(const void* first, int wide) {
    uint4 a;
    asm volatile(
        "{.reg .pred wide;\n"
        "setp.ne.s32 wide, %5, 0;\n"
        "mov.u32 %3, 4294967295;\n"
        "@wide ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "@!wide ld.global.v2.u32 {%0, %1}, [%4];}"
        : "=&r"(a.x), "=&r"(a.y), "=&r"(a.z), "=&r"(a.w)
        : "l"(first), "r"(wide)
        : "memory");
    return a;
}
__device__ inline void store_four(void* first, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(first), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ inline void store_two(void* first, unsigned a, unsigned b) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(first), "r"(a), "r"(b) : "memory");
}

// Elements that are not in the span are 0.
__device__ inline Quad load(const float* first, Span span) {
    if (in_one_access(first, span)) {
        const uint4 a = load_four(first);
        return {{__uint_as_float(a.x), __uint_as_float(a.y), __uint_as_float(a.z), __uint_as_float(a.w)}};
    }
    return each([&](int k) { return Real(span.has(k) ? first[k] : 0.0f); });
}

__device__ inline void store(float* first, const Quad& quad, Span span) {
    if (in_one_access(first, span)) {
        return store_four(first, __float_as_uint(quad.of[0].value), __float_as_uint(quad.of[1].value),
                          __float_as_uint(quad.of[2].value), __float_as_uint(quad.of[3].value));
    }
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
        if (span.has(k)) first[k] = quad.of[k].value;
    }
}

// A quad of any dtype as it lies in memory: a thread asks for all that it needs before widened() looks at the first of
// it. Each element has a word, or, of two bytes and in one access, two share one and the last is kPacked.
struct RawQuad {
    unsigned word[kQuad];
};

// An element as it lies in memory, by one choice: of two loads with a condition each, the second waits for the first.
__device__ inline unsigned load_one(const void* tensor, int dtype, int64_t i) {
    return dtype == CO_FLOAT32 ? static_cast<const unsigned*>(tensor)[i] : static_cast<const uint16_t*>(tensor)[i];
}

__device__ inline RawQuad load(const void* tensor, int dtype, int64_t i, Span span) {
    const int wide = dtype == CO_FLOAT32;
    const char* const first = static_cast<const char*>(tensor) + i * (wide ? 4 : 2);
    if (span.whole() && (reinterpret_cast<uintptr_t>(first) & (wide ? 15 : 7)) == 0) {
        const uint4 a = load_four_or_two(first, wide);
        return {{a.x, a.y, a.z, a.w}};
    }
    RawQuad raw = {};
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
        if (span.has(k)) raw.word[k] = load_one(tensor, dtype, i + k);
    }
    return raw;
}

__device__ inline Quad widened(const RawQuad& raw, int dtype) {
    if (dtype == CO_FLOAT32) return each([&](int k) { return Real(__uint_as_float(raw.word[k])); });
    return each([&](int k) {
        const unsigned bits = raw.word[3] == kPacked ? raw.word[k / 2] >> (16 * (k % 2)) & 0xffffu : raw.word[k];
        if (dtype == CO_BFLOAT16) return Real(__uint_as_float(bits << 16));
        return Real(__half2float(__ushort_as_half(static_cast<uint16_t>(bits))));
    });
}

__device__ inline void store(void* tensor, int dtype, int64_t i, const Quad& quad, Span span) {
    if (dtype == CO_FLOAT32) return store(static_cast<float*>(tensor) + i, quad, span);
    uint16_t* const first = static_cast<uint16_t*>(tensor) + i;
    unsigned bits[kQuad];
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
        const float value = quad.of[k].value;
        bits[k] = dtype == CO_BFLOAT16 ? __bfloat16_as_ushort(__float2bfloat16_rn(value))
                                       : __half_as_ushort(__float2half_rn(value));
    }
    if (in_one_access(first, span)) return store_two(first, bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
        if (span.has(k)) first[k] = static_cast<uint16_t>(bits[k]);
    }
}

}  // namespace compressopt

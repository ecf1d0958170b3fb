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
__device__ inline Quad negated(const Quad& a) {
    return each([&](int k) { return Real(-a.of[k].value); });
}

// ---- memory ----------------------------------------------------------------------------------------------------------

__device__ inline float widened(float a) { return a; }
__device__ inline float widened(__nv_bfloat16 a) { return __bfloat162float(a); }
__device__ inline float widened(__half a) { return __half2float(a); }
template <class T>
__device__ T rounded(float a);
template <>
__device__ inline float rounded<float>(float a) {
    return a;
}
template <>
__device__ inline __nv_bfloat16 rounded<__nv_bfloat16>(float a) {
    return __float2bfloat16_rn(a);
}
template <>
__device__ inline __half rounded<__half>(float a) {
    return __float2half_rn(a);
}

// Four elements that move in one access: 16 bytes of float32, 8 of the others.
template <class T>
struct alignas(kQuad * sizeof(T)) Packed {
    T of[kQuad];
};

template <class T>
__device__ inline bool in_one_access(const T* first, Span span) {
    return span.whole() && reinterpret_cast<uintptr_t>(first) % sizeof(Packed<T>) == 0;
}

// `first` may lie outside the tensor: only the elements of the span are touched. The others are 0.
template <class T>
__device__ inline Quad load(const T* first, Span span) {
    if (in_one_access(first, span)) {
        const Packed<T> packed = *reinterpret_cast<const Packed<T>*>(first);
        return each([&](int k) { return Real(widened(packed.of[k])); });
    }
    return each([&](int k) { return Real(span.has(k) ? widened(first[k]) : 0.0f); });
}

template <class T>
__device__ inline void store(T* first, const Quad& quad, Span span) {
    if (in_one_access(first, span)) {
        Packed<T> packed;
#pragma unroll
        for (int k = 0; k < kQuad; ++k) packed.of[k] = rounded<T>(quad.of[k].value);
        *reinterpret_cast<Packed<T>*>(first) = packed;
        return;
    }
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
        if (span.has(k)) first[k] = rounded<T>(quad.of[k].value);
    }
}

// The quad whose first element is the i-th of a tensor of this dtype.
__device__ inline Quad load(const void* tensor, int dtype, int64_t i, Span span) {
    if (dtype == CO_BFLOAT16) return load(static_cast<const __nv_bfloat16*>(tensor) + i, span);
    if (dtype == CO_FLOAT16) return load(static_cast<const __half*>(tensor) + i, span);
    return load(static_cast<const float*>(tensor) + i, span);
}

__device__ inline void store(void* tensor, int dtype, int64_t i, const Quad& quad, Span span) {
    if (dtype == CO_BFLOAT16) return store(static_cast<__nv_bfloat16*>(tensor) + i, quad, span);
    if (dtype == CO_FLOAT16) return store(static_cast<__half*>(tensor) + i, quad, span);
    store(static_cast<float*>(tensor) + i, quad, span);
}

}  // namespace compressopt

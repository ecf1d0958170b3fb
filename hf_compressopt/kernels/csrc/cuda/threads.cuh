// What the threads of a block do together. Orders are fixed, so that results are the same on every GPU and every time.
#pragma once

#include "quad.cuh"

namespace compressopt {

constexpr int kThreads = 256;  // of every kernel's blocks
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr bool kTakesMore = true;  // registers: with 4 blocks, kernels with many loads under way would spill
#else
constexpr bool kTakesMore = false;
#endif
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kTileBits = 12;
constexpr int64_t kTile = int64_t{1} << kTileBits;  // elements that a block takes, where nothing else sets it
constexpr int kTileQuads = kTile / kQuad / kThreads;  // of each thread

struct Sum {
    __device__ double operator()(double a, double b) const { return a + b; }
};
struct Maximum {  // not a number, once met, stays
    __device__ double operator()(double a, double b) const { return a > b || a != a ? a : b; }
};

template <class Fold>
__device__ inline double over_warp(double value, Fold fold) {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        value = fold(value, __shfl_xor_sync(kAllLanes, value, distance));
    }
    return value;
}

// The result is thread 0's alone. All threads of the block call.
template <class Fold>
__device__ inline double over_block(double value, Fold fold) {
    __shared__ double of_warp[kThreads / kWarp];
    value = over_warp(value, fold);
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < kThreads / kWarp; ++warp) value = fold(value, of_warp[warp]);
    }
    __syncthreads();  // of_warp may be written again
    return value;
}

// sqrt(sum over the group's threads / numel), for all of them. kGroup: a warp's 32 threads, or the whole block.
// One thread takes the root: GPUs made for graphics have few units for float64.
template <int kGroup>
__device__ inline float root_mean(double squares, int64_t numel) {
    if constexpr (kGroup == kWarp) {
        squares = over_warp(squares, Sum());
        const float scale = threadIdx.x % kWarp == 0 ? static_cast<float>(sqrt(squares / numel)) : 0.0f;
        return __shfl_sync(kAllLanes, scale, 0);
    } else {
        static_assert(kGroup == kThreads);
        __shared__ float scale;
        squares = over_block(squares, Sum());
        if (threadIdx.x == 0) scale = static_cast<float>(sqrt(squares / numel));
        __syncthreads();
        return scale;
    }
}

__device__ inline double square_sum(const Quad& quad, Span span) {
    double sum = 0;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
        const double value = span.has(k) ? quad.of[k].value : 0.0f;
        sum = __fma_rn(value, value, sum);  // the product is exact: the bits of a product and a sum, by one operation
    }
    return sum;
}

// Quotient of two numbers >= 0; the 64-bit division, which is slow, only where it is needed.
__device__ inline int64_t quotient(int64_t a, int64_t b) {
    if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
    return a / b;
}

}  // namespace compressopt

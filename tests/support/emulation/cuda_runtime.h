// Enough of CUDA to compile the kernels as C++ and run them on a CPU, for tests only. The threads of a block are fibers
// that change at barriers and shuffles; whether all threads that must take part do so is checked, and the order in which
// threads and blocks run can be changed, since no result may depend on it.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <functional>

#define __device__
#define __host__
#define __global__
#define __shared__ static
#define __grid_constant__ &
#define __launch_bounds__(...)
#define __CUDA_ARCH_LIST__ 900
#define CUDART_VERSION 13000

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace emulator {

extern dim3 thread_index, block_index;
// Run body() as each thread of each block. Returns false where threads wait for others that do not come.
bool run(unsigned blocks, unsigned threads, const std::function<void()>& body);
extern int driver_version;    // what the driver supports
extern bool out_of_memory;    // no kernel can be loaded
void wait_for_block();
// Each lane of the warp hands in a value, and gets that of another.
uint64_t exchange(uint64_t value, unsigned from_lane);

}  // namespace emulator

#define threadIdx (emulator::thread_index)
#define blockIdx (emulator::block_index)

inline void __syncthreads() { emulator::wait_for_block(); }

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
    static_assert(sizeof(T) <= 8);
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = emulator::exchange(bits, static_cast<unsigned>(lane));
    memcpy(&value, &bits, sizeof(T));
    return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
    return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ distance);
}

// Compiled with -ffp-contract=off.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline int __float2int_rn(float a) { return static_cast<int>(nearbyintf(a)); }
template <typename To, typename From>
inline To with_bits_of(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    memcpy(&result, &x, sizeof result);
    return result;
}
inline float __uint_as_float(unsigned bits) { return with_bits_of<float>(bits); }
inline unsigned __float_as_uint(float value) { return with_bits_of<unsigned>(value); }
using std::isinf;

// The byte that each of the four lowest hexadecimal digits says, of the eight of b:a.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned result = 0;
    for (int k = 0; k < 4; ++k) result |= static_cast<unsigned>(bytes >> (8 * (select >> (4 * k) & 7)) & 0xff) << (8 * k);
    return result;
}

struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- the host's side: one device, whose memory is the host's ----------------------------------------------------------

enum cudaError_t {
    cudaSuccess,
    cudaErrorInsufficientDriver,
    cudaErrorNoDevice,
    cudaErrorInvalidDevice,
    cudaErrorNoKernelImageForDevice,
    cudaErrorInvalidDeviceFunction,
    cudaErrorUnsupportedPtxVersion,
    cudaErrorInvalidKernelImage,
    cudaErrorMemoryAllocation,
    cudaErrorLaunchFailure,
};
using cudaStream_t = struct CUstream_st*;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
struct cudaFuncAttributes {};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes = 0;
    cudaStream_t stream = nullptr;
};

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorLaunchFailure ? "threads wait for others that do not come" : "an error";
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = emulator::driver_version, cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 9, cudaSuccess; }
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*)()) {
    return emulator::out_of_memory ? cudaErrorMemoryAllocation : cudaSuccess;
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus*, unsigned long long*) {
    return cudaSuccess;
}
inline cudaError_t cudaMalloc(void** memory, size_t nbytes) {
    *memory = aligned_alloc(256, (nbytes + 255) / 256 * 256);
    return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
    const bool finished = emulator::run(config->gridDim.x, config->blockDim.x, [&] { kernel(arguments...); });
    return finished ? cudaSuccess : cudaErrorLaunchFailure;
}

// Enough of CUDA to run the kernels on a CPU, for tests only: what translate.py makes of them is compiled as C++.
//
// The threads of a block are fibers, which change at barriers and shuffles, and by chance at accesses of global memory.
// Their order is drawn by lot, since no result may depend on it. What CUDA leaves undefined is a fault: barriers and
// shuffles that not all of the threads meet that must, vectors off their alignment, and accesses beside a buffer.
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
#define __grid_constant__ &
#define __launch_bounds__(...)
#define __CUDA_ARCH_LIST__ 900
#define CUDART_VERSION 13000

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// The numbers are CUDA's.
enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInsufficientDriver = 35,
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidKernelImage = 200,
    cudaErrorNoKernelImageForDevice = 209,
    cudaErrorUnsupportedPtxVersion = 222,
    cudaErrorIllegalAddress = 700,
    cudaErrorLaunchTimeout = 702,
    cudaErrorMisalignedAddress = 716,
    cudaErrorLaunchFailure = 719,
    cudaErrorStreamCaptureUnsupported = 900,
};

namespace emulator {

extern dim3 thread_index, block_index;

// Where a thread waits.
struct Site {
    const char* function;
    int line;
    bool operator==(const Site& other) const { return function == other.function && line == other.line; }
};

cudaError_t run(unsigned blocks, unsigned threads, const std::function<void()>& body);
void wait_for_block(Site site);
uint64_t exchange(unsigned mask, uint64_t value, unsigned from_lane, Site site);

// What nobody has written: no number as float64, float32, bfloat16 or float16.
constexpr unsigned kPoison = 0x7ff47ff4u;
void poison(void* memory, size_t nbytes);

// The block's variable of that key.
void* shared_memory(const void* key, size_t nbytes);
template <class T>
T& shared(const void* key) {
    return *static_cast<T*>(shared_memory(key, sizeof(T)));
}

// Ends the launch if the access is off its alignment or leaves a guarded buffer; another thread may go on first.
void check_access(const void* first, size_t nbytes);

template <class... Words>
void load(const void* first, Words*... words) {
    check_access(first, sizeof...(words) * sizeof(unsigned));
    const volatile unsigned* next = static_cast<const unsigned*>(first);
    ((*words = *next++), ...);
}
template <class... Words>
void store(void* first, Words... words) {
    check_access(first, sizeof...(words) * sizeof(unsigned));
    volatile unsigned* next = static_cast<unsigned*>(first);
    ((*next++ = words), ...);
}

// Counts a call of the runtime. Returns the error that the test wants of it.
cudaError_t call(const char* function);
int& setting(const char* name);

}  // namespace emulator

#define threadIdx (emulator::thread_index)
#define blockIdx (emulator::block_index)
#define __syncthreads() emulator::wait_for_block({__PRETTY_FUNCTION__, __LINE__})

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, const char* function = __builtin_FUNCTION(),
              int line = __builtin_LINE()) {
    static_assert(sizeof(T) <= 8);
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(T));
    bits = emulator::exchange(mask, bits, static_cast<unsigned>(lane), {function, line});
    memcpy(&value, &bits, sizeof(T));
    return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance, const char* function = __builtin_FUNCTION(),
                  int line = __builtin_LINE()) {
    return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ distance, function, line);
}

// Compiled with -ffp-contract=off.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
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

inline int __popc(unsigned x) { return __builtin_popcount(x); }

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

// ---- the host's side: devices whose memory is the host's ---------------------------------------------------------------

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

const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaMalloc(void** memory, size_t nbytes);
inline cudaError_t cudaGetLastError() { return emulator::call("cudaGetLastError"); }
inline cudaError_t cudaGetDevice(int* device) {
    *device = emulator::setting("device");
    return emulator::call("cudaGetDevice");
}
inline cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= emulator::setting("devices")) return cudaErrorInvalidDevice;
    emulator::setting("device") = device;
    return emulator::call("cudaSetDevice");
}
inline cudaError_t cudaGetDeviceCount(int* count) {
    *count = emulator::setting("devices");
    return emulator::call("cudaGetDeviceCount");
}
inline cudaError_t cudaDriverGetVersion(int* version) {
    *version = emulator::setting("driver");
    return emulator::call("cudaDriverGetVersion");
}
inline cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = emulator::setting("runtime");
    return emulator::call("cudaRuntimeGetVersion");
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? emulator::setting("major") : emulator::setting("minor");
    return emulator::call("cudaDeviceGetAttribute");
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*)()) {
    return emulator::call("cudaFuncGetAttributes");
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
    return emulator::call("cudaThreadExchangeStreamCaptureMode");
}
inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id) {
    *id = static_cast<unsigned>(emulator::setting("capture"));
    *status = *id ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return emulator::call("cudaStreamGetCaptureInfo");
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
    const cudaError_t error = emulator::call("cudaLaunchKernelEx");
    if (error != cudaSuccess) return error;
    return emulator::run(config->gridDim.x, config->blockDim.x, [&] { kernel(arguments...); });
}

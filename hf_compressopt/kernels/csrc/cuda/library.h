// The host's side of every call: checks, errors in words, the device, launches, and the little memory that some need.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime.h>

#include "../compressopt.h"

namespace compressopt {

// Keep the words for co_last_error(), and return the code.
co_status fail(co_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));
co_status fail(cudaError_t error, const char* doing);

inline co_status bad_argument(const char* what) { return fail(CO_BAD_ARGUMENT, "%s", what); }

// Makes the device of a call the current one, and gives the thread its own back at the end.
class DeviceGuard {
public:
    explicit DeviceGuard(int device);
    ~DeviceGuard();
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;
    co_status status() const { return status_; }

private:
    int previous_ = -1;
    co_status status_ = CO_OK;
};

// Where a call's kernels run, and its caller's memory.
struct Place {
    int device;
    cudaStream_t stream;
    co_allocate allocate;
    explicit Place(const co_exec& exec)
        : device(exec.device), stream(static_cast<cudaStream_t>(exec.stream)), allocate(exec.allocate) {}
};

// Device memory for results that one kernel hands to the next on the same stream. It is the caller's, whose allocator
// knows of the stream, and of a graph that captures it.
class Scratch {
public:
    Scratch(const Place& place, size_t nbytes)
        : memory_(place.allocate ? place.allocate(place.device, static_cast<int64_t>(nbytes)) : nullptr),
          status_(memory_ ? CO_OK
                          : fail(CO_DEVICE_ERROR, "there are no %zu bytes of memory for a kernel on CUDA device %d", nbytes,
                                 place.device)) {}
    co_status status() const { return status_; }
    template <class T>
    T* as() const {
        return static_cast<T*>(memory_);
    }

private:
    void* memory_;
    co_status status_;
};

// Enqueue `blocks` blocks of 256 threads.
template <class... Parameters, class... Arguments>
co_status launch(void (*kernel)(Parameters...), int64_t blocks, const Place& place, const Arguments&... arguments) {
    if (blocks > INT32_MAX) return fail(CO_BAD_ARGUMENT, "%lld blocks of threads are too many", (long long)blocks);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(256);
    config.stream = place.stream;
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
    return error == cudaSuccess ? CO_OK : fail(error, "launching a kernel");
}

}  // namespace compressopt

// Return from the enclosing function what went wrong, if anything did.
#define CO_TRY(expression)                                               \
    do {                                                                 \
        const co_status co_try_status = (expression);                    \
        if (co_try_status != CO_OK) return co_try_status;                \
    } while (0)
#define CO_REQUIRE(condition, what)                                      \
    do {                                                                 \
        if (!(condition)) return compressopt::bad_argument(what);        \
    } while (0)

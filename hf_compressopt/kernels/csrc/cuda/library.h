// The host's side of every call: checks, errors in words, the device, launches, and the little memory that some need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

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

// Device memory for results that one kernel hands to the next on the same stream, for as long as this object lives on
// the host: no other thread gets the stream's memory between two launches of one call.
//
// There is one piece per device, stream and graph capture. It is allocated when it is first needed, which is legal while
// a stream is captured, and kept: work that was enqueued, or a graph that is replayed, may use it at any later time. A
// graph has a piece of its own, since it may be replayed beside other work of the stream that it was captured on.
class Scratch {
public:
    Scratch(int device, cudaStream_t stream, size_t nbytes);
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    co_status status() const { return status_; }
    template <class T>
    T* as() const {
        return static_cast<T*>(memory_);
    }

private:
    std::lock_guard<std::mutex> lock_;
    void* memory_ = nullptr;
    co_status status_ = CO_OK;
};

// Where a call's kernels run.
struct Place {
    int device;
    cudaStream_t stream;
    explicit Place(const co_exec& exec) : device(exec.device), stream(static_cast<cudaStream_t>(exec.stream)) {}
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

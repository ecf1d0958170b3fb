// About the library: whether it can run here, and errors in words.
#include "library.h"

#include <cstdarg>
#include <cstdio>

namespace compressopt {
namespace {

constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};  // 750, 800, ...

thread_local char last_error[512] = "";

__global__ void probe() {}

// For the newest architecture there is PTX too, which the driver can compile for GPUs that are newer still.
struct InstructionSet {
    char names[256] = "";
    InstructionSet() {
        int length = 0, newest = 0;
        for (int architecture : kArchitectures) {
            newest = architecture / 10;
            length += snprintf(names + length, sizeof(names) - length, "sm_%d ", newest);
        }
        snprintf(names + length, sizeof(names) - length, "compute_%d", newest);
    }
};

co_status check_driver() {
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    // a driver runs the code of any minor version, but kernels with more than 4 KiB of parameters from CUDA 12.1 on
    const bool twelve = runtime < 13000;
    const char* const needed = twelve ? "530" : "580";
    if (driver == 0) {
        return fail(CO_NO_DEVICE, "there is no NVIDIA driver on this machine (this library needs %s or newer)", needed);
    }
    if (driver / 1000 < runtime / 1000 || (twelve && driver < 12010)) {
        return fail(CO_NO_DEVICE,
                    "the NVIDIA driver is too old: it supports CUDA %d.%d, this library is built with CUDA %d.%d and "
                    "needs driver %s or newer",
                    driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10, needed);
    }
    return CO_OK;
}

co_status check_code(int device) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, probe);
    if (error == cudaSuccess) return CO_OK;
    cudaGetLastError();
    if (error != cudaErrorNoKernelImageForDevice && error != cudaErrorInvalidDeviceFunction &&
        error != cudaErrorUnsupportedPtxVersion && error != cudaErrorInvalidKernelImage) {
        return fail(CO_DEVICE_ERROR, "loading the kernels on CUDA device %d: %s", device, cudaGetErrorString(error));
    }
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    return fail(CO_NO_DEVICE, "this library has no code for CUDA device %d, of compute capability %d.%d: it has %s",
                device, major, minor, co_instruction_set());
}

co_status check_device(int device) {
    CO_TRY(check_driver());
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
        cudaGetLastError();
        return fail(CO_NO_DEVICE, "the NVIDIA driver finds no GPU (is it hidden by CUDA_VISIBLE_DEVICES?)");
    }
    if (error != cudaSuccess) return fail(CO_DEVICE_ERROR, "counting the GPUs: %s", cudaGetErrorString(error));
    if (device < 0 || device >= count) {
        return fail(CO_NO_DEVICE, "there is no CUDA device %d: the driver finds %d", device, count);
    }
    const DeviceGuard guard(device);
    CO_TRY(guard.status());
    return check_code(device);
}

}  // namespace

co_status fail(co_status status, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof(last_error), format, arguments);
    va_end(arguments);
    return status;
}

co_status fail(cudaError_t error, const char* doing) {
    cudaGetLastError();  // it is reported here, and must not be met again by the next one who asks
    switch (error) {
        case cudaErrorInsufficientDriver:
            return check_driver();
        case cudaErrorNoDevice:
        case cudaErrorInvalidDevice:
        case cudaErrorNoKernelImageForDevice:
        case cudaErrorUnsupportedPtxVersion:
            return fail(CO_NO_DEVICE, "%s: %s (co_check_device says more)", doing, cudaGetErrorString(error));
        default:
            return fail(CO_DEVICE_ERROR, "%s: %s", doing, cudaGetErrorString(error));
    }
}

DeviceGuard::DeviceGuard(int device) {
    int current = -1;
    cudaError_t error = cudaGetDevice(&current);
    if (error == cudaSuccess && current != device) {
        error = cudaSetDevice(device);
        if (error == cudaSuccess) previous_ = current;
    }
    if (error != cudaSuccess) status_ = fail(error, "choosing the CUDA device");
}

DeviceGuard::~DeviceGuard() {
    if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace compressopt

using namespace compressopt;

int32_t co_abi_version(void) { return CO_ABI_VERSION; }

const char* co_instruction_set(void) {
    static const InstructionSet instruction_set;
    return instruction_set.names;
}

int32_t co_copy(const float*, float*, int64_t, const co_exec*) { return bad_argument("the host copies on a GPU"); }

int32_t co_use_instruction_set(const char*) { return bad_argument("a GPU has one instruction set"); }

int32_t co_check_device(int32_t device) { return check_device(device); }

const char* co_last_error(void) { return last_error; }

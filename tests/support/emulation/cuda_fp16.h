#pragma once

#include "cuda_runtime.h"

using __half = _Float16;

inline float __half2float(__half a) { return static_cast<float>(a); }
inline __half __ushort_as_half(uint16_t bits) {
    __half value;
    memcpy(&value, &bits, 2);
    return value;
}
inline uint16_t __half_as_ushort(__half a) {
    uint16_t bits;
    memcpy(&bits, &a, 2);
    return bits;
}
inline __half __float2half_rn(float a) { return static_cast<__half>(a); }

#pragma once

#include "cuda_runtime.h"

using __half = _Float16;

inline float __half2float(__half a) { return static_cast<float>(a); }
inline __half __ushort_as_half(uint16_t bits) { return with_bits_of<__half>(bits); }
inline uint16_t __half_as_ushort(__half a) { return with_bits_of<uint16_t>(a); }
inline __half __float2half_rn(float a) { return static_cast<__half>(a); }

#pragma once

#include "cuda_runtime.h"

using __half = _Float16;

inline float __half2float(__half a) { return static_cast<float>(a); }
inline __half __float2half_rn(float a) { return static_cast<__half>(a); }

#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
    uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 a) { return __uint_as_float(static_cast<unsigned>(a.bits) << 16); }

inline __nv_bfloat16 __float2bfloat16_rn(float a) {
    const unsigned bits = __float_as_uint(a);
    if (a != a) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

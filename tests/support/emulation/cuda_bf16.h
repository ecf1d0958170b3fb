#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
    uint16_t bits;
};

inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 a) { return a.bits; }

inline __nv_bfloat16 __float2bfloat16_rn(float a) {
    const unsigned bits = __float_as_uint(a);
    if (a != a) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

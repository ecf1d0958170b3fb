/* Two parts of the transposition of signs, for eight registers r of any width. A vector header includes this file in its
   own namespace, after exchange(), low8(), high8(), low16() and high16(). */

/* Transpose the bits of each byte position: bit k of r[j] becomes bit j of r[k]. */
template <typename Register>
__attribute__((always_inline)) inline void transpose_bits(Register *r) {
#pragma GCC unroll 8
    for (int j = 0; j < 4; ++j) exchange<4>(r[j], r[j + 4], 0x0f);
#pragma GCC unroll 8
    for (int j = 0; j < 4; ++j) exchange<2>(r[j + (j & 2)], r[j + (j & 2) + 2], 0x33);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j += 2) exchange<1>(r[j], r[j + 1], 0x55);
}

/* Interleave the bytes of the registers, and then the pairs of bytes. */
template <typename Register>
__attribute__((always_inline)) inline void interleave_bytes(Register *r) {
    Register s[8];
#pragma GCC unroll 8
    for (int j = 0; j < 4; ++j) {
        s[j] = low8(r[2 * j], r[2 * j + 1]);
        s[j + 4] = high8(r[2 * j], r[2 * j + 1]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < 4; ++j) {
        r[j] = low16(s[2 * j], s[2 * j + 1]);
        r[j + 4] = high16(s[2 * j], s[2 * j + 1]);
    }
}

// The frozen variance, as values or in 8 bits (see kernels/compact.py).
#pragma once

#include "runs.cuh"

namespace compressopt {

// What load_raw has loaded, of makes numbers of. Elements that are not in the span are 0.
struct FloatVariance {
    using Raw = Quad;
    const float* values;

    __device__ Raw load_raw(const Run&, int64_t i, Span span) const { return load(values + i, span); }
    __device__ Quad of(const Raw& raw) const { return raw; }
};

struct LogVariance {
    struct Raw {
        unsigned codes;  // of the quad
        unsigned top;
    };
    const uint8_t* codes;
    const int32_t* tops;

    __device__ Raw load_raw(const Run& run, int64_t i, Span span) const {
        const uint8_t* const first = codes + i;
        const unsigned top = static_cast<unsigned>(tops[run.index]);
        if (in_one_access(first, span)) return {*reinterpret_cast<const unsigned*>(first), top};
        unsigned word = 0;
#pragma unroll
        for (int k = 0; k < kQuad; ++k) word |= (span.has(k) ? unsigned{first[k]} : kZeroCode) << (8 * k);
        return {word, top};
    }

    // 2^(k/8) has the exponent k >> 3 and the (k & 7)-th of eight mantissas, whose bytes are chosen for the whole quad.
    __device__ Quad of(const Raw& raw) const {
        const unsigned eighths = ((raw.top & 7u) * 0x01010101u + 0x08080808u - (raw.codes & 0x07070707u)) & 0x07070707u;
        const unsigned select = __byte_perm(eighths | eighths >> 4, 0, 0x4420);
        const unsigned low = __byte_perm(bytes_of(0, 0), bytes_of(0, 4), select);
        const unsigned middle = __byte_perm(bytes_of(1, 0), bytes_of(1, 4), select);
        const unsigned high = __byte_perm(bytes_of(2, 0), bytes_of(2, 4), select);
        const unsigned first = __byte_perm(low, middle, 0x5140), second = __byte_perm(low, middle, 0x7362);
        const unsigned mantissas[kQuad] = {__byte_perm(first, high, 0x0410), __byte_perm(first, high, 0x0532),
                                           __byte_perm(second, high, 0x0610), __byte_perm(second, high, 0x0732)};
        return each([&](int k) {
            const unsigned code = raw.codes >> (8 * k) & 0xffu;
            const unsigned exponent = (raw.top + kBias - code) << (kMantissaBits - 3);  // and a part to be cleared
            const unsigned pattern = (exponent & ~kMantissaMask) | (mantissas[k] & kMantissaMask);
            return Real(code == kZeroCode ? 0.0f : __uint_as_float(pattern));
        });
    }

private:
    static constexpr unsigned kZeroCode = 255, kMantissaBits = 23, kMantissaMask = (1u << kMantissaBits) - 1;
    static constexpr unsigned kBias = 127 * 8;

    // Byte `byte` of the mantissas of 2^(j/8), for four j from `first` on.
    __host__ __device__ static constexpr unsigned bytes_of(int byte, int first) {
        constexpr unsigned mantissas[] = {0x000000, 0x0b95c2, 0x1837f0, 0x25fed7, 0x3504f3, 0x45672a, 0x5744fd, 0x6ac0c7};
        unsigned word = 0;
        for (int j = 0; j < 4; ++j) word |= (mantissas[first + j] >> (8 * byte) & 0xffu) << (8 * j);
        return word;
    }
};

inline co_status check_variance(const co_variance* v) {
    CO_REQUIRE(v, "exp_avg_sq is null");
    CO_REQUIRE(!v->values != !v->codes, "exp_avg_sq has neither or both of values and codes");
    CO_REQUIRE(!v->codes || v->tops, "exp_avg_sq has codes without tops");
    return CO_OK;
}

// Call call(variance) with the form that it has.
template <class Call>
co_status with_variance(const co_variance& v, Call call) {
    return v.values ? call(FloatVariance{v.values}) : call(LogVariance{v.codes, v.tops});
}

}  // namespace compressopt

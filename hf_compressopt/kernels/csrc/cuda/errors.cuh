// The errors of a bucket, as values or in 8 bits (see kernels/compact.py), tile by tile.
#pragma once

#include "integer.cuh"

namespace compressopt {

struct FloatErrors {
    static constexpr bool kCompact = false;
    float* values;

    struct Raw {};
    __device__ bool given() const { return values; }
    // What to ask for before the rest of the work on a tile,
    template <int kGroup>
    __device__ Raw load_raw(const Tile<kGroup>&) const {
        return {};
    }
    // and then a quad, of whose elements at least the first is there.
    template <int kGroup>
    __device__ Quad at(const Raw&, const Tile<kGroup>& tile, int q) const {
        return load(values + tile.start + tile.offset(q), tile.span(q));
    }
    // New errors: of a quad of a tile, if it is there,
    template <int kGroup>
    __device__ void put(const Tile<kGroup>& tile, int q, const Quad& rest) const {
        if (tile.has(q)) store(values + tile.start + tile.offset(q), rest, tile.span(q));
    }
    // and when all of them are known.
    template <int kGroup>
    __device__ void put_all(const Tile<kGroup>&, Quad (&)[kTileQuads]) const {}
};

// Tiles that are put begin with a block of 128 elements. Nobody but the warp that puts a block has read it since.
struct CompactErrors {
    static constexpr bool kCompact = true;
    Integers chunks;
    static constexpr int kErrorBits = 8;

    using Raw = Integers::RawTile;
    __device__ bool given() const { return chunks.messages; }
    template <int kGroup>
    __device__ Raw load_raw(const Tile<kGroup>& tile) const {
        return chunks.with_bits<kErrorBits>().load_raw(tile);
    }
    template <int kGroup>
    __device__ Quad at(const Raw& raw, const Tile<kGroup>&, int q) const {
        return chunks.with_bits<kErrorBits>().of(raw, q);
    }
    template <int kGroup>
    __device__ void put(const Tile<kGroup>&, int, const Quad&) const {}
    template <int kGroup>
    __device__ void put_all(const Tile<kGroup>& tile, Quad (&rest)[kTileQuads]) const {
        quantize(rest, chunks.with_bits<kErrorBits>(), tile);
    }
};

inline co_status check_errors(const co_errors* error, const char* name) {
    if (!error) return fail(CO_BAD_ARGUMENT, "%s is null", name);
    if (!error->values == !error->messages) {
        return fail(CO_BAD_ARGUMENT, "%s has neither or both of values and messages", name);
    }
    if (reinterpret_cast<uintptr_t>(error->messages) % kAlignment != 0) {
        return fail(CO_BAD_ARGUMENT, "%s: messages are not aligned to 16 bytes", name);
    }
    return CO_OK;
}

inline co_status check_both_errors(const co_errors* error, const co_errors* new_error) {
    CO_TRY(check_errors(error, "error"));
    CO_TRY(check_errors(new_error, "new_error"));
    CO_REQUIRE(!error->values == !new_error->values, "error and new_error are of different forms");
    return CO_OK;
}

// A call that compresses z, or corrects errors by what was sent of z.
inline co_status check_sending(const co_combination* z, int64_t numel, const co_errors* error) {
    CO_TRY(check_combination(z, numel));
    return numel == 0 ? CO_OK : check_errors(error, "error");
}

inline CompactErrors compact_errors(const co_errors& error, int64_t numel, int64_t world_size) {
    return {Integers(error.messages, numel, world_size, CompactErrors::kErrorBits)};
}

// None, of the form that others have.
inline FloatErrors no_errors(const FloatErrors&) { return {nullptr}; }
inline CompactErrors no_errors(const CompactErrors& others) {
    CompactErrors none = others;
    none.chunks.messages = nullptr;
    return none;
}

// Others of the same bucket, of the form that the first ones have.
inline FloatErrors another(const FloatErrors&, const co_errors& errors) { return {errors.values}; }
inline CompactErrors another(const CompactErrors& first, const co_errors& errors) {
    CompactErrors other = first;
    other.chunks.messages = errors.messages;
    return other;
}

// Call call(errors) with the form that they have.
template <class Call>
co_status with_errors(const co_errors& error, int64_t numel, int64_t world_size, Call call) {
    return error.values ? call(FloatErrors{error.values}) : call(compact_errors(error, numel, world_size));
}

}  // namespace compressopt

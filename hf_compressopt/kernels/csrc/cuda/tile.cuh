// Tiles of a bucket, a few quads of each thread, and what is to be sent of them.
#pragma once

#include "message.cuh"

namespace compressopt {

// Up to kTile consecutive elements of the bucket, and this thread's quads of them, kGroup quads apart. Offsets count from
// the first of them; they fit in 32 bits, and are constants but for the thread's own.
template <int kGroup>
struct Tile {
    int64_t start;  // in the bucket
    int64_t chunk;  // which chunk
    int64_t inside; // in the chunk; a multiple of 8
    int64_t scale;  // which of the chunk's scales
    int length;
    int first;  // offset of the thread's first quad

    __device__ int offset(int q) const { return first + q * kQuad * kGroup; }
    __device__ bool has(int q) const { return offset(q) < length; }
    // The same, of a quad that is there in any case: what is loaded without asking needs no branch.
    __device__ int offset_or_0(int q) const { return has(q) ? offset(q) : 0; }
    __device__ Span span(int q) const { return {0, length - offset(q) < kQuad ? length - offset(q) : kQuad}; }
};

// A Source gives z, what is to be sent: the quads of a tile that are there. kSeveral: from several messages, for which a
// thread needs so many registers that a multiprocessor has room for two blocks of threads. Errors in 8 bits need them too.

template <class Runs>
struct Combination {
    static constexpr bool kSeveral = false;
    FirstTerm first;
    const float* factors;
    Real alpha, beta, nothing;  // nothing: what gradients are added to where there is no first term
    Runs runs;

    template <int kGroup>
    __device__ void get(Quad (&z)[kTileQuads], const Tile<kGroup>& tile) const {
        Cursor cursor = find(tile.start);
        if (cursor.stop >= tile.length) return get_from_run(z, tile, runs.entries[cursor.run]);
        get_first(z, tile, false);
#pragma unroll
        for (int q = 0; q < kTileQuads; ++q) {
            if (!tile.has(q)) continue;
            if (first.given()) z[q] = z[q] * alpha;
            add_grads(z[q], tile.start, tile.offset(q), tile.span(q).last, cursor);
        }
    }

    const Combination& of_any_tile() const { return *this; }

private:
    struct Cursor {
        int run, stop;  // stop: offset in the tile
    };

    // What messages stand for. Mostly a tile has one scale.
    template <int kGroup>
    __device__ static void get_last(Quad (&z)[kTileQuads], const Tile<kGroup>& tile, const Average& last) {
        const int64_t j = quotient(tile.start, last.chunk), inside = tile.start - j * last.chunk;
        const int64_t block = quotient(inside, last.scale_block);
        if (inside + tile.length <= last.chunk && inside + tile.length <= (block + 1) * last.scale_block) {
            const uint8_t* const message = last.messages + j * last.stride;
            const uint8_t* const bits = message + 4 * (j == last.last_chunk ? last.last_blocks : last.blocks);
            const float scale = scale_at(message, block);
            unsigned signs[kTileQuads];
#pragma unroll
            for (int q = 0; q < kTileQuads; ++q) signs[q] = signs_at(bits, inside + tile.offset_or_0(q));
#pragma unroll
            for (int q = 0; q < kTileQuads; ++q) z[q] = each([&](int k) { return with_sign(scale, signs[q] >> k); });
        } else {
#pragma unroll
            for (int q = 0; q < kTileQuads; ++q) {
                if (tile.has(q)) z[q] = last.decoded(tile.start + tile.offset(q));
            }
        }
    }

    // Each form has a loop of its own, so that all loads of one are asked for at once.
    template <int kGroup>
    __device__ void get_first(Quad (&z)[kTileQuads], const Tile<kGroup>& tile, bool still) const {
        if (first.values) {
#pragma unroll
            for (int q = 0; q < kTileQuads; ++q) {
                if (tile.has(q)) z[q] = load(first.values + tile.start + tile.offset(q), tile.span(q));
            }
        } else if (first.last.messages && !still) {
            get_last(z, tile, first.last);
        } else {
#pragma unroll
            for (int q = 0; q < kTileQuads; ++q) z[q] = same(first.last.messages ? Real(0.0f) : nothing);
        }
    }

    // The tile lies in one run: everything is asked for at once.
    template <int kGroup>
    __device__ void get_from_run(Quad (&z)[kTileQuads], const Tile<kGroup>& tile, const Run& run) const {
        RawQuad g[kTileQuads] = {};
        if (run.grad) {
#pragma unroll
            for (int q = 0; q < kTileQuads; ++q) {
                if (tile.has(q)) g[q] = run.load_grad(tile.start + tile.offset(q), tile.span(q));
            }
        }
        get_first(z, tile, run.grad_still);
#pragma unroll
        for (int q = 0; q < kTileQuads; ++q) {
            if (!tile.has(q)) continue;
            if (first.given()) z[q] = z[q] * alpha;
            if (run.grad) z[q] = z[q] + run.grad_of(g[q]) * beta;
            if (factors) z[q] = z[q] * Real(factors[run.index]);
        }
    }

    __device__ int stop_of(int run, int64_t start) const {
        const int64_t offset = runs.entries[run].stop() - start;
        return offset < kTile ? static_cast<int>(offset) : static_cast<int>(kTile);
    }

    // All threads of a group search for the same element.
    __device__ Cursor find(int64_t start) const {
        int run = 0, beyond = runs.count;
        while (beyond - run > 1) {
            const int middle = (run + beyond) / 2;
            if (runs.entries[middle].start <= start) {
                run = middle;
            } else {
                beyond = middle;
            }
        }
        return {run, stop_of(run, start)};
    }

    // Call body(run, part) for the runs that a quad lies in.
    template <class Body>
    __device__ void for_parts(int64_t start, int offset, int last, Cursor& cursor, Body body) const {
        for (int k = 0; k < last;) {
            while (offset + k >= cursor.stop) {
                ++cursor.run;
                cursor.stop = stop_of(cursor.run, start);
            }
            const Span part = {k, cursor.stop - offset < last ? cursor.stop - offset : last};
            body(runs.entries[cursor.run], part);
            k = part.last;
        }
    }

    __device__ void add_grads(Quad& z, int64_t start, int offset, int last, Cursor& cursor) const {
        for_parts(start, offset, last, cursor, [&](const Run& run, Span part) {
            Quad sum = first.last.messages && run.grad_still ? same(Real(0.0f) * alpha) : z;
            if (run.grad) sum = sum + run.grad_of(run.load_grad(start + offset, part)) * beta;
            if (factors) sum = sum * Real(factors[run.index]);
            z = each([&](int e) { return part.has(e) ? sum.of[e] : z.of[e]; });
        });
    }
};

}  // namespace compressopt

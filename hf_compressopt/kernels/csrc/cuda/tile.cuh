// Tiles of a bucket, a few quads of each thread, and what is to be sent of them.
#pragma once

#include "message.cuh"

namespace compressopt {

// Up to kTile consecutive elements of the bucket, and this thread's quads of them, kGroup quads apart. Offsets count from
// the first of them; they fit in 32 bits, and are constants but for the thread's own.
template <int kGroup>
struct Tile {
    int64_t start;  // in the bucket
    int64_t inside; // in the chunk; a multiple of 8
    int64_t scale;  // which of the chunk's scales
    int length;
    int first;  // offset of the thread's first quad

    __device__ int offset(int q) const { return first + q * kQuad * kGroup; }
    __device__ bool has(int q) const { return offset(q) < length; }
    __device__ Span span(int q) const { return {0, length - offset(q) < kQuad ? length - offset(q) : kQuad}; }
};

// A Source gives z, what is to be sent: the quads of a tile that are there.

template <class Runs>
struct Combination {
    const float *x, *factors;
    Real alpha, beta, nothing;
    Runs runs;

    template <int kGroup>
    __device__ void get(Quad (&z)[kTileQuads], const Tile<kGroup>& tile) const {
        Cursor cursor = find(tile.start);
        if (cursor.stop >= tile.length) return get_from_run(z, tile, runs.entries[cursor.run]);
#pragma unroll
        for (int q = 0; q < kTileQuads; ++q) {
            if (!tile.has(q)) continue;
            z[q] = load_x(tile, q);
            if (x) z[q] = z[q] * alpha;
            add_grads(z[q], tile.start, tile.offset(q), tile.span(q).last, cursor);
        }
    }

private:
    struct Cursor {
        int run, stop;  // stop: offset in the tile
    };

    template <int kGroup>
    __device__ Quad load_x(const Tile<kGroup>& tile, int q) const {
        return x ? load(x + tile.start + tile.offset(q), tile.span(q)) : same(nothing);
    }

    // The tile lies in one run: everything is asked for at once.
    template <int kGroup>
    __device__ void get_from_run(Quad (&z)[kTileQuads], const Tile<kGroup>& tile, const Run& run) const {
#pragma unroll
        for (int q = 0; q < kTileQuads; ++q) {
            if (tile.has(q)) z[q] = load_x(tile, q);
        }
        RawQuad g[kTileQuads] = {};
        if (run.grad) {
#pragma unroll
            for (int q = 0; q < kTileQuads; ++q) {
                if (tile.has(q)) g[q] = run.load_grad(tile.start + tile.offset(q), tile.span(q));
            }
        }
#pragma unroll
        for (int q = 0; q < kTileQuads; ++q) {
            if (!tile.has(q)) continue;
            if (x) z[q] = z[q] * alpha;
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

    // A quad may lie in several runs.
    __device__ void add_grads(Quad& z, int64_t start, int offset, int last, Cursor& cursor) const {
        for (int k = 0; k < last;) {
            while (offset + k >= cursor.stop) {
                ++cursor.run;
                cursor.stop = stop_of(cursor.run, start);
            }
            const Run& run = runs.entries[cursor.run];
            const Span part = {k, cursor.stop - offset < last ? cursor.stop - offset : last};
            Quad sum = z;
            if (run.grad) sum = sum + run.grad_of(run.load_grad(start + offset, part)) * beta;
            if (factors) sum = sum * Real(factors[run.index]);
            z = each([&](int e) { return part.has(e) ? sum.of[e] : z.of[e]; });
            k = part.last;
        }
    }
};

}  // namespace compressopt

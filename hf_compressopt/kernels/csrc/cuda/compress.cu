// Compression with error feedback: u = z + error; messages <- Q(u); error <- u - Q(u).
//
// A block of scale_block elements is the work of a group of threads, a warp or a block of them, which keeps u in registers
// between the sum that gives the scale and the signs: one pass over memory. With one scale for everything there are
// three passes: u and the sums of its tiles, the scale, the signs; the sums lie where the signs will be.
//
// Errors in 8 bits have blocks of their own, of 128 elements, which are quads of one warp where a tile begins with one.
// Where blocks of signs do not, the scales are found first, and then u is computed again, in tiles that do; and so where
// blocks of signs are too large for registers, since u cannot wait in such errors.
#include "errors.cuh"

namespace compressopt {
namespace {

constexpr int64_t kWarpBlock = kTileQuads * kQuad * kWarp;  // largest scale_block that a warp keeps in registers

constexpr int kMessageGroup = 4;  // messages that are summed by themselves

// The mean of the messages of one chunk. kOneScale: of tiles that lie in one block each.
template <bool kOneScale>
struct Mean {
    static constexpr bool kSeveral = true;
    const uint8_t* messages;
    int64_t stride, scale_block, blocks;
    int32_t world_size;
    Real inverse;

    template <int kGroup>
    __device__ void get(Quad (&z)[kTileQuads], const Tile<kGroup>& tile) const {
        constexpr int kScales = kOneScale ? 1 : kTileQuads;
        const int shift = tile.first % 8;  // to the signs of a quad in their byte
        const uint8_t* message = messages;
        int64_t block[kScales];
#pragma unroll
        for (int q = 0; q < kScales; ++q) {
            block[q] = kOneScale ? tile.scale : quotient(tile.inside + tile.offset_or_0(q), scale_block);
        }
#pragma unroll
        for (int q = 0; q < kTileQuads; ++q) z[q] = same(-0.0f);  // to which a sum is added without a change
        for (int rank = 0; rank < world_size; rank += kMessageGroup) {
            float scale[kMessageGroup][kScales];
            unsigned signs[kMessageGroup][kTileQuads];
#pragma unroll
            for (int r = 0; r < kMessageGroup; ++r, message += stride) {  // all that a group reads is asked for together
                if (rank + r >= world_size) continue;
#pragma unroll
                for (int q = 0; q < kScales; ++q) scale[r][q] = scale_at(message, block[q]);
                const uint8_t* const bits = message + 4 * blocks + tile.inside / 8;
#pragma unroll
                for (int q = 0; q < kTileQuads; ++q) signs[r][q] = bits[tile.offset_or_0(q) >> 3];
            }
#pragma unroll
            for (int q = 0; q < kTileQuads; ++q) {
                const auto value = [&](int r) {
                    return each([&](int k) { return with_sign(scale[r][kOneScale ? 0 : q], signs[r][q] >> (shift + k)); });
                };
                Quad sum = value(0);
#pragma unroll
                for (int r = 1; r < kMessageGroup; ++r) {
                    if (rank + r < world_size) sum = sum + value(r);
                }
                z[q] = z[q] + sum;
            }
        }
#pragma unroll
        for (int q = 0; q < kTileQuads; ++q) z[q] = z[q] * inverse;
    }

    Mean<false> of_any_tile() const { return {messages, stride, scale_block, blocks, world_size, inverse}; }
};

// The elements of one block, or some of a chunk.
struct Part {
    int64_t start, length;  // in the bucket
    int64_t chunk;          // which chunk
    uint8_t* message;       // of the chunk
    int64_t inside;         // start, in the chunk
    int64_t scale;          // which of the chunk's scales
    int64_t blocks, numel;  // of the chunk

    __device__ bool ends_chunk() const { return inside + length == numel; }

    template <int kGroup>
    __device__ Tile<kGroup> tile(int64_t begin, int thread) const {
        const int64_t left = length - begin;
        return {start + begin, chunk, inside + begin, scale, static_cast<int>(left < kTile ? left : kTile), kQuad * thread};
    }
};

// The bucket and its messages. scale_block: the chunk, where there is one scale.
struct Bucket {
    uint8_t* messages;
    int64_t numel, chunk, scale_block;
    int64_t blocks, nbytes;  // of a chunk that is full: only the last that is not empty may not be
    int64_t groups;          // all blocks
    int64_t chunks;          // that are not empty

    Bucket(uint8_t* messages_, int64_t numel_, int64_t chunk_, int64_t scale_block_)
        : messages(messages_),
          numel(numel_),
          chunk(chunk_),
          scale_block(scale_block_ == 0 ? chunk : scale_block_),
          blocks(ceil_div(chunk, scale_block)),
          nbytes(message_nbytes(chunk, scale_block_)),
          chunks(ceil_div(numel, chunk)) {
        groups = parts(scale_block);
    }

    // The pieces of `length` elements of all chunks.
    int64_t parts(int64_t length) const {
        return (chunks - 1) * ceil_div(chunk, length) + ceil_div(numel - (chunks - 1) * chunk, length);
    }

    // The n-th of the pieces of `length` elements, `count` to a full chunk.
    __device__ Part part(int64_t n, int64_t length, int64_t count) const {
        const int64_t j = quotient(n, count), begin = j * chunk;
        Part part;
        part.chunk = j;
        part.numel = numel - begin < chunk ? numel - begin : chunk;
        part.inside = (n - j * count) * length;
        part.start = begin + part.inside;
        part.length = part.numel - part.inside < length ? part.numel - part.inside : length;
        part.message = messages + j * nbytes;
        part.scale = quotient(part.inside, scale_block);
        part.blocks = quotient(part.numel + scale_block - 1, scale_block);
        return part;
    }
};

// Write the signs of consecutive quads, one of each lane of a warp, all of which call: 32 elements at a time where that
// is aligned, 8 otherwise. bits: of the elements at offset 0 and on; lane 0's offset is a multiple of 8.
__device__ inline void store_signs(uint8_t* bits, int offset, int length, unsigned mine) {
    const int lane = threadIdx.x % 8;
    unsigned word = mine << (4 * lane);
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) word |= __shfl_xor_sync(kAllLanes, word, distance);
    const int first = offset - kQuad * lane;
    if (first + 32 <= length && reinterpret_cast<uintptr_t>(bits + first / 8) % 4 == 0) {
        if (lane == 0) *reinterpret_cast<uint32_t*>(bits + first / 8) = word;
    } else if (lane % 2 == 0 && offset < length) {
        bits[offset / 8] = static_cast<uint8_t>(word >> (4 * lane));
    }
}

// error <- u - Q(u), and the signs. scale_of(q): the scale of a quad. Leaves what remains in u.
template <int kGroup, class Errors, class ScaleOf>
__device__ inline void store_tile(const Errors& error, const Part& part, const Tile<kGroup>& tile,
                                  Quad (&u)[kTileQuads], ScaleOf scale_of) {
    uint8_t* const bits = part.message + 4 * part.blocks + tile.inside / 8;
#pragma unroll
    for (int q = 0; q < kTileQuads; ++q) {
        const Span span = tile.span(q);
        const float scale = scale_of(q);
        unsigned signs = 0;
        u[q] = each([&](int k) {
            const bool negative = span.has(k) && u[q].of[k].value < 0.0f;
            signs |= static_cast<unsigned>(negative) << k;
            return u[q].of[k] - with_sign(scale, negative);
        });
        error.put(tile, q, u[q]);
        store_signs(bits, tile.offset(q), tile.length, signs);
    }
    error.put_all(tile, u);
}

// What follows the last sign of a chunk. thread: the caller's place among at least 16.
__device__ inline void store_padding(const Part& part, int thread) {
    if (!part.ends_chunk()) return;
    const int64_t used = 4 * part.blocks + (part.numel + 7) / 8;
    if (used + thread < (used + kAlignment - 1) / kAlignment * kAlignment) part.message[used + thread] = 0;
}

template <int kGroup, class Errors>
__device__ inline void load_error(Quad (&u)[kTileQuads], const Errors& error, const typename Errors::Raw& raw,
                                  const Tile<kGroup>& tile) {
#pragma unroll
    for (int q = 0; q < kTileQuads; ++q) u[q] = tile.has(q) ? error.at(raw, tile, q) : same(0.0f);
}

template <int kGroup>
__device__ inline void store_error(const Quad (&u)[kTileQuads], const FloatErrors& error, const Tile<kGroup>& tile) {
#pragma unroll
    for (int q = 0; q < kTileQuads; ++q) error.put(tile, q, u[q]);
}

// u = error + what is to be sent. Returns the sum of this thread's squares.
template <int kGroup, class Source, class Errors>
__device__ inline double load_u(Quad (&u)[kTileQuads], const Errors& error, const Source& source,
                                const Tile<kGroup>& tile) {
    Quad z[kTileQuads];
    const typename Errors::Raw raw = error.load_raw(tile);
    source.get(z, tile);
    load_error(u, error, raw, tile);
    double squares = 0;
#pragma unroll
    for (int q = 0; q < kTileQuads; ++q) {
        if (!tile.has(q)) continue;
        u[q] = z[q] + u[q];
        squares += square_sum(u[q], tile.span(q));
    }
    return squares;
}

template <int kGroup, class Source, class Errors>
__global__ void __launch_bounds__(kThreads, Source::kSeveral || Errors::kCompact ? 2 : 3)
    compress_blocks(const Source __grid_constant__ source, const Errors __grid_constant__ error,
                    const Bucket __grid_constant__ bucket) {
    static_assert(sizeof(Source) + sizeof(Errors) + sizeof(Bucket) <= kMaxParameters);
    const int thread = threadIdx.x % kGroup;
    const int64_t group = int64_t{blockIdx.x} * (kThreads / kGroup) + threadIdx.x / kGroup;
    if (group >= bucket.groups) return;  // a whole warp; blocks of threads that are one group are all needed
    const Part part = bucket.part(group, bucket.scale_block, bucket.blocks);
    const Tile<kGroup> tile = part.tile<kGroup>(0, thread);
    Quad u[kTileQuads];
    const float scale = root_mean<kGroup>(load_u(u, error, source, tile), part.length);
    if (thread == 0) reinterpret_cast<float*>(part.message)[part.scale] = scale;
    store_tile(error, part, tile, u, [&](int) { return scale; });
    store_padding(part, thread);
}

// For blocks too large to be kept in registers: u waits in `error`, where each thread reads what it wrote itself.
template <class Source>
__global__ void __launch_bounds__(kThreads, 2)
    compress_large_blocks(const Source __grid_constant__ source, const FloatErrors __grid_constant__ error,
                          const Bucket __grid_constant__ bucket) {
    const Part part = bucket.part(blockIdx.x, bucket.scale_block, bucket.blocks);
    Quad u[kTileQuads];
    double squares = 0;
    for (int64_t begin = 0; begin < part.length; begin += kTile) {
        const Tile<kThreads> tile = part.tile<kThreads>(begin, threadIdx.x);
        squares += load_u(u, error, source, tile);
        store_error(u, error, tile);
    }
    const float scale = root_mean<kThreads>(squares, part.length);
    if (threadIdx.x == 0) reinterpret_cast<float*>(part.message)[part.scale] = scale;
    for (int64_t begin = 0; begin < part.length; begin += kTile) {
        const Tile<kThreads> tile = part.tile<kThreads>(begin, threadIdx.x);
        load_error(u, error, {}, tile);
        store_tile(error, part, tile, u, [&](int) { return scale; });
    }
    store_padding(part, threadIdx.x);
}

// ---- one scale for the whole bucket ----------------------------------------------------------------------------------

// error <- u, and the sum of the squares of each tile of the bucket, which waits in the messages.
template <class Source>
__global__ void __launch_bounds__(kThreads, 3)
    sum_tiles(const Source __grid_constant__ source, const FloatErrors __grid_constant__ error,
              const Bucket __grid_constant__ bucket) {
    static_assert(sizeof(Source) + sizeof(FloatErrors) + sizeof(Bucket) <= kMaxParameters);
    const int64_t start = blockIdx.x * kTile, left = bucket.numel - start;
    const Tile<kThreads> tile = {start, 0, start, 0, static_cast<int>(left < kTile ? left : kTile),
                                 static_cast<int>(kQuad * threadIdx.x)};
    Quad u[kTileQuads];
    const double squares = over_block(load_u(u, error, source, tile), Sum());
    if (threadIdx.x == 0) reinterpret_cast<double*>(bucket.messages)[blockIdx.x] = squares;
    store_error(u, error, tile);
}

// One block of threads: the scale, to the head of each message. All sums are read before anything is written.
__global__ void __launch_bounds__(kThreads) find_scale(const Bucket __grid_constant__ bucket, const int64_t tiles) {
    const double* const sums = reinterpret_cast<const double*>(bucket.messages);
    double squares = 0;
    for (int64_t tile = threadIdx.x; tile < tiles; tile += kThreads) squares += sums[tile];
    const float scale = root_mean<kThreads>(squares, bucket.numel);
    for (int64_t j = threadIdx.x; j < bucket.chunks; j += kThreads) {
        *reinterpret_cast<float*>(bucket.messages + j * bucket.nbytes) = scale;
    }
}

__global__ void __launch_bounds__(kThreads, 4)
    store_tiles(const FloatErrors __grid_constant__ error, const Bucket __grid_constant__ bucket,
                const int64_t tiles_of_chunk) {
    const Part part = bucket.part(blockIdx.x, kTile, tiles_of_chunk);
    const Tile<kThreads> tile = part.tile<kThreads>(0, threadIdx.x);
    Quad u[kTileQuads];
    load_error(u, error, {}, tile);
    const float scale = scale_at(part.message, 0);
    store_tile(error, part, tile, u, [&](int) { return scale; });
    store_padding(part, threadIdx.x);
}

// ---- errors in 8 bits, whose blocks are not those of the signs --------------------------------------------------------

// The sum of the squares of each tile of the chunks, which waits in the messages.
template <class Source>
__global__ void __launch_bounds__(kThreads, 2)
    sum_parts(const Source __grid_constant__ source, const CompactErrors __grid_constant__ error,
              const Bucket __grid_constant__ bucket, const int64_t tiles_of_chunk) {
    const Part part = bucket.part(blockIdx.x, kTile, tiles_of_chunk);
    Quad u[kTileQuads];
    const double squares = over_block(load_u(u, error, source, part.tile<kThreads>(0, threadIdx.x)), Sum());
    if (threadIdx.x == 0) reinterpret_cast<double*>(bucket.messages)[blockIdx.x] = squares;
}

// The scales of all blocks.
template <int kGroup, class Source>
__global__ void __launch_bounds__(kThreads, 2)
    find_scales(const Source __grid_constant__ source, const CompactErrors __grid_constant__ error,
                const Bucket __grid_constant__ bucket) {
    const int thread = threadIdx.x % kGroup;
    const int64_t group = int64_t{blockIdx.x} * (kThreads / kGroup) + threadIdx.x / kGroup;
    if (group >= bucket.groups) return;
    const Part part = bucket.part(group, bucket.scale_block, bucket.blocks);
    double squares = 0;
    for (int64_t begin = 0; begin < part.length; begin += kTile) {
        Quad u[kTileQuads];
        squares += load_u(u, error, source, part.tile<kGroup>(begin, thread));
    }
    const float scale = root_mean<kGroup>(squares, part.length);
    if (thread == 0) reinterpret_cast<float*>(part.message)[part.scale] = scale;
}

// The signs, and what remains, where the scales are known.
template <class Source>
__global__ void __launch_bounds__(kThreads, 2)
    store_parts(const Source __grid_constant__ source, const CompactErrors __grid_constant__ error,
                const Bucket __grid_constant__ bucket, const int64_t tiles_of_chunk) {
    static_assert(sizeof(Source) + sizeof(CompactErrors) + sizeof(Bucket) + sizeof(int64_t) <= kMaxParameters);
    const Part part = bucket.part(blockIdx.x, kTile, tiles_of_chunk);
    const Tile<kThreads> tile = part.tile<kThreads>(0, threadIdx.x);
    Quad u[kTileQuads];
    load_u(u, error, source, tile);
    store_tile(error, part, tile, u, [&](int q) {
        if (!tile.has(q)) return 0.0f;
        return scale_at(part.message, quotient(tile.inside + tile.offset(q), bucket.scale_block));
    });
    store_padding(part, threadIdx.x);
}

// ---- runs in memory --------------------------------------------------------------------------------------------------

// More runs than a table holds.
struct StoredRuns {
    int64_t count;
    const Run* entries;
};

template <class Runs>
__global__ void __launch_bounds__(kThreads) store_runs(const Runs __grid_constant__ runs, Run* to) {
    for (int k = threadIdx.x; k < runs.count; k += kThreads) to[k] = runs.entries[k];
}

// ---- host ------------------------------------------------------------------------------------------------------------

// Blocks that a group of threads keeps in registers.
template <class Source, class Errors>
co_status compress_blocks_of(const Source& source, const Errors& error, const Bucket& bucket, const Place& place) {
    if (bucket.scale_block <= kWarpBlock) {
        return launch(compress_blocks<kWarp, Source, Errors>, ceil_div(bucket.groups, kThreads / kWarp), place, source,
                      error, bucket);
    }
    return launch(compress_blocks<kThreads, Source, Errors>, bucket.groups, place, source, error, bucket);
}

template <class Source>
co_status compress(const Source& source, const FloatErrors& error, const Bucket& bucket, bool one_scale,
                   const Place& place) {
    if (one_scale) {
        const int64_t tiles = ceil_div(bucket.numel, kTile);
        CO_TRY(launch(sum_tiles<Source>, tiles, place, source, error, bucket));
        CO_TRY(launch(find_scale, 1, place, bucket, tiles));
        return launch(store_tiles, bucket.parts(kTile), place, error, bucket, ceil_div(bucket.chunk, kTile));
    }
    if (bucket.scale_block <= kTile) return compress_blocks_of(source, error, bucket, place);
    return launch(compress_large_blocks<Source>, bucket.groups, place, source, error, bucket);
}

template <class Source>
co_status compress(const Source& source, const CompactErrors& error, const Bucket& bucket, bool one_scale,
                   const Place& place) {
    const bool together = bucket.scale_block % kIntegerBlock == 0 && bucket.scale_block <= kTile;
    if (together && !one_scale) return compress_blocks_of(source, error, bucket, place);
    const auto any = source.of_any_tile();
    using Any = std::decay_t<decltype(any)>;
    const int64_t tiles = ceil_div(bucket.chunk, kTile), parts = bucket.parts(kTile);
    if (one_scale) {
        CO_TRY(launch(sum_parts<Any>, parts, place, any, error, bucket, tiles));
        CO_TRY(launch(find_scale, 1, place, bucket, parts));
    } else if (bucket.scale_block <= kWarpBlock) {
        CO_TRY(launch(find_scales<kWarp, Any>, ceil_div(bucket.groups, kThreads / kWarp), place, any, error, bucket));
    } else {
        CO_TRY(launch(find_scales<kThreads, Any>, bucket.groups, place, any, error, bucket));
    }
    return launch(store_parts<Any>, parts, place, any, error, bucket, tiles);
}

template <class Runs>
Combination<Runs> combination(const co_combination& z, Real nothing, const Runs& runs) {
    return {FirstTerm(z), z.factors, z.alpha, z.beta, nothing, runs};
}

co_status compress(const co_combination& z, const FloatErrors& error, const Bucket& bucket, bool one_scale,
                   const Place& place) {
    // Blocks may cross the borders of tables: more runs than one table holds are added to the error first.
    const bool at_once = !z.grads || z.count <= ManyRuns::capacity;
    if (!at_once) CO_TRY(combine(z, error.values, bucket.numel, true, place));
    const co_combination rest = at_once ? z : co_combination{};
    const Real nothing = at_once ? 0.0f : -0.0f;  // what is added where there is no x; -0 leaves all bits as they are
    const RunsOf runs(nullptr, rest.grads, bucket.numel);
    return for_tables<FewRuns, ManyRuns>(runs.count(rest.count), kTileBits, runs, [&](const auto& table, int64_t) {
        return compress(combination(rest, nothing, table), error, bucket, one_scale, place);
    });
}

co_status compress(const co_combination& z, const CompactErrors& error, const Bucket& bucket, bool one_scale,
                   const Place& place) {
    const RunsOf runs(nullptr, z.grads, bucket.numel);
    const int64_t count = runs.count(z.count);
    if (count <= FewRuns::capacity) {
        return for_tables<FewRuns, FewRuns>(count, kTileBits, runs, [&](const FewRuns& table, int64_t) {
            return compress(combination(z, 0.0f, table), error, bucket, one_scale, place);
        });
    }
    const Scratch scratch(place, count * sizeof(Run));
    CO_TRY(scratch.status());
    Run* const entries = scratch.as<Run>();
    int64_t stored = 0;
    const auto keep = [&](const auto& table, int64_t) {
        using Runs = std::decay_t<decltype(table)>;
        Run* const to = entries + stored;
        stored += table.count;
        return launch(store_runs<Runs>, 1, place, table, to);
    };
    CO_TRY((for_tables<FewRuns, ManyRuns>(count, kTileBits, runs, keep)));
    return compress(combination(z, 0.0f, StoredRuns{count, entries}), error, bucket, one_scale, place);
}

co_status check_signs(const void* messages, int64_t numel, int64_t scale_block, int32_t world_size) {
    CO_REQUIRE(scale_block >= 0 && scale_block % 8 == 0, "scale_block is no multiple of 8 and not 0");
    return check_messages(messages, numel, world_size);
}

}  // namespace
}  // namespace compressopt

using namespace compressopt;

int32_t co_compress(const co_combination* z, const co_errors* error, uint8_t* messages, int64_t numel,
                    int64_t scale_block, int32_t world_size, const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_TRY(check_signs(messages, numel, scale_block, world_size));
    CO_TRY(check_sending(z, numel, error));
    if (numel == 0) return CO_OK;
    const Place place(*exec);
    const DeviceGuard guard(place.device);
    CO_TRY(guard.status());
    const Bucket bucket(messages, numel, chunk_numel(numel, world_size), scale_block);
    return with_errors(*error, numel, world_size, [&](const auto& errors) {
        return compress(*z, errors, bucket, scale_block == 0, place);
    });
}

int32_t co_average_compress(const uint8_t* messages, const co_errors* error, uint8_t* out, int64_t numel,
                            int64_t scale_block, int32_t world_size, const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_TRY(check_signs(messages, numel, scale_block, world_size));
    CO_TRY(check_signs(out, numel, scale_block, world_size));
    if (numel == 0) return CO_OK;
    CO_TRY(check_errors(error, "error"));
    const Place place(*exec);
    const DeviceGuard guard(place.device);
    CO_TRY(guard.status());
    const Bucket bucket(out, numel, chunk_numel(numel, 1), scale_block);
    const Mean<true> mean = {messages, message_nbytes(numel, scale_block), bucket.scale_block, bucket.blocks, world_size,
                             static_cast<float>(1.0 / world_size)};
    return with_errors(*error, numel, 1, [&](const auto& errors) {
        return compress(mean, errors, bucket, scale_block == 0, place);
    });
}

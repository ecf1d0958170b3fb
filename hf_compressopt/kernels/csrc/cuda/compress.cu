// Compression with error feedback: u = z + error; messages <- Q(u); error <- u - Q(u).
//
// A block of scale_block elements is the work of a group of threads, a warp or a block of them, which keeps u in registers
// between the sum that gives the scale and the signs: one pass over memory. With one scale for everything there are
// three passes: u and the sums of its tiles, the scale, the signs; the sums lie where the signs will be.
#include "tile.cuh"

namespace compressopt {
namespace {

constexpr int64_t kWarpBlock = kTileQuads * kQuad * kWarp;  // largest scale_block that a warp keeps in registers

constexpr int kMessageGroup = 4;  // messages that are summed by themselves

// The mean of the messages of one chunk.
struct Mean {
    const uint8_t* messages;
    int64_t stride, blocks;
    int32_t world_size;
    Real inverse;

    template <int kGroup>
    __device__ void get(Quad (&z)[kTileQuads], const Tile<kGroup>& tile) const {
        const uint8_t* message = messages;
        Quad sum[kTileQuads];  // of a group
#pragma unroll
        for (int q = 0; q < kTileQuads; ++q) z[q] = same(-0.0f);  // to which a sum is added without a change
        for (int rank = 0; rank < world_size; ++rank, message += stride) {
            const float scale = scale_at(message, tile.scale);
            const uint8_t* const bits = message + 4 * blocks + tile.inside / 8;
            const bool begins = rank % kMessageGroup == 0;
            const bool ends = rank % kMessageGroup == kMessageGroup - 1 || rank == world_size - 1;
#pragma unroll
            for (int q = 0; q < kTileQuads; ++q) {
                const unsigned signs = tile.has(q) ? signs_at(bits, tile.offset(q)) : 0;
                const Quad value = each([&](int k) { return with_sign(scale, signs >> k); });
                sum[q] = begins ? value : sum[q] + value;
            }
            if (!ends) continue;
#pragma unroll
            for (int q = 0; q < kTileQuads; ++q) z[q] = z[q] + sum[q];
        }
#pragma unroll
        for (int q = 0; q < kTileQuads; ++q) z[q] = z[q] * inverse;
    }
};

// The elements of one block, or some of a chunk.
struct Part {
    int64_t start, length;  // in the bucket
    uint8_t* message;       // of its chunk
    int64_t inside;         // start, in the chunk
    int64_t scale;          // which of the chunk's scales
    int64_t blocks, numel;  // of the chunk

    __device__ bool ends_chunk() const { return inside + length == numel; }

    template <int kGroup>
    __device__ Tile<kGroup> tile(int64_t begin, int thread) const {
        const int64_t left = length - begin;
        return {start + begin, inside + begin, scale, static_cast<int>(left < kTile ? left : kTile), kQuad * thread};
    }
};

// The bucket and its messages. scale_block: the chunk, where there is one scale.
struct Bucket {
    float* error;
    uint8_t* messages;
    int64_t numel, chunk, scale_block;
    int64_t blocks, nbytes;  // of a chunk that is full: only the last that is not empty may not be
    int64_t groups;          // all blocks
    int64_t chunks;          // that are not empty

    Bucket(float* error_, uint8_t* messages_, int64_t numel_, int64_t chunk_, int64_t scale_block_)
        : error(error_),
          messages(messages_),
          numel(numel_),
          chunk(chunk_),
          scale_block(scale_block_ == 0 ? chunk : scale_block_),
          blocks(ceil_div(chunk, scale_block)),
          nbytes(message_nbytes(chunk, scale_block_)),
          chunks(ceil_div(numel, chunk)) {
        groups = (chunks - 1) * blocks + ceil_div(numel - (chunks - 1) * chunk, scale_block);
    }

    // The n-th of the pieces of `length` elements, `count` to a full chunk.
    __device__ Part part(int64_t n, int64_t length, int64_t count) const {
        const int64_t j = quotient(n, count), begin = j * chunk;
        Part part;
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

// error <- u - Q(u), and the signs.
template <int kGroup>
__device__ inline void store_tile(const Bucket& bucket, const Part& part, const Tile<kGroup>& tile,
                                  const Quad (&u)[kTileQuads], float scale) {
    float* const error = bucket.error + tile.start;
    uint8_t* const bits = part.message + 4 * part.blocks + tile.inside / 8;
#pragma unroll
    for (int q = 0; q < kTileQuads; ++q) {
        const Span span = tile.span(q);
        unsigned signs = 0;
        const Quad rest = each([&](int k) {
            const bool negative = span.has(k) && u[q].of[k].value < 0.0f;
            signs |= static_cast<unsigned>(negative) << k;
            return u[q].of[k] - with_sign(scale, negative);
        });
        if (tile.has(q)) store(error + tile.offset(q), rest, span);
        store_signs(bits, tile.offset(q), tile.length, signs);
    }
}

// What follows the last sign of a chunk. thread: the caller's place among at least 16.
__device__ inline void store_padding(const Part& part, int thread) {
    if (!part.ends_chunk()) return;
    const int64_t used = 4 * part.blocks + (part.numel + 7) / 8;
    if (used + thread < (used + kAlignment - 1) / kAlignment * kAlignment) part.message[used + thread] = 0;
}

template <int kGroup>
__device__ inline void load_error(Quad (&u)[kTileQuads], const Bucket& bucket, const Tile<kGroup>& tile) {
    const float* const error = bucket.error + tile.start;
#pragma unroll
    for (int q = 0; q < kTileQuads; ++q) {
        u[q] = tile.has(q) ? load(error + tile.offset(q), tile.span(q)) : same(0.0f);
    }
}

template <int kGroup>
__device__ inline void store_error(const Quad (&u)[kTileQuads], const Bucket& bucket, const Tile<kGroup>& tile) {
    float* const error = bucket.error + tile.start;
#pragma unroll
    for (int q = 0; q < kTileQuads; ++q) {
        if (tile.has(q)) store(error + tile.offset(q), u[q], tile.span(q));
    }
}

// u = error + what is to be sent. Returns the sum of this thread's squares.
template <int kGroup, class Source>
__device__ inline double load_u(Quad (&u)[kTileQuads], const Bucket& bucket, const Source& source,
                                const Tile<kGroup>& tile) {
    Quad z[kTileQuads];
    source.get(z, tile);
    load_error(u, bucket, tile);
    double squares = 0;
#pragma unroll
    for (int q = 0; q < kTileQuads; ++q) {
        if (!tile.has(q)) continue;
        u[q] = z[q] + u[q];
        squares += square_sum(u[q], tile.span(q));
    }
    return squares;
}

template <int kGroup, class Source>
__global__ void __launch_bounds__(kThreads, 3)
    compress_blocks(const Source __grid_constant__ source, const Bucket __grid_constant__ bucket) {
    static_assert(sizeof(Source) + sizeof(Bucket) <= kMaxParameters);
    const int thread = threadIdx.x % kGroup;
    const int64_t group = int64_t{blockIdx.x} * (kThreads / kGroup) + threadIdx.x / kGroup;
    if (group >= bucket.groups) return;  // a whole warp; blocks of threads that are one group are all needed
    const Part part = bucket.part(group, bucket.scale_block, bucket.blocks);
    const Tile<kGroup> tile = part.tile<kGroup>(0, thread);
    Quad u[kTileQuads];
    const float scale = root_mean<kGroup>(load_u(u, bucket, source, tile), part.length);
    if (thread == 0) reinterpret_cast<float*>(part.message)[part.scale] = scale;
    store_tile(bucket, part, tile, u, scale);
    store_padding(part, thread);
}

// For blocks too large to be kept in registers: u waits in `error`, where each thread reads what it wrote itself.
template <class Source>
__global__ void __launch_bounds__(kThreads, 2)
    compress_large_blocks(const Source __grid_constant__ source, const Bucket __grid_constant__ bucket) {
    const Part part = bucket.part(blockIdx.x, bucket.scale_block, bucket.blocks);
    Quad u[kTileQuads];
    double squares = 0;
    for (int64_t begin = 0; begin < part.length; begin += kTile) {
        const Tile<kThreads> tile = part.tile<kThreads>(begin, threadIdx.x);
        squares += load_u(u, bucket, source, tile);
        store_error(u, bucket, tile);
    }
    const float scale = root_mean<kThreads>(squares, part.length);
    if (threadIdx.x == 0) reinterpret_cast<float*>(part.message)[part.scale] = scale;
    for (int64_t begin = 0; begin < part.length; begin += kTile) {
        const Tile<kThreads> tile = part.tile<kThreads>(begin, threadIdx.x);
        load_error(u, bucket, tile);
        store_tile(bucket, part, tile, u, scale);
    }
    store_padding(part, threadIdx.x);
}

// ---- one scale for the whole bucket ----------------------------------------------------------------------------------

// error <- u, and the sum of the squares of each tile of the bucket, which waits in the messages.
template <class Source>
__global__ void __launch_bounds__(kThreads, 3)
    sum_tiles(const Source __grid_constant__ source, const Bucket __grid_constant__ bucket) {
    static_assert(sizeof(Source) + sizeof(Bucket) <= kMaxParameters);
    const int64_t start = blockIdx.x * kTile, left = bucket.numel - start;
    const Tile<kThreads> tile = {start, start, 0, static_cast<int>(left < kTile ? left : kTile),
                                 static_cast<int>(kQuad * threadIdx.x)};
    Quad u[kTileQuads];
    const double squares = over_block(load_u(u, bucket, source, tile), Sum());
    if (threadIdx.x == 0) reinterpret_cast<double*>(bucket.messages)[blockIdx.x] = squares;
    store_error(u, bucket, tile);
}

// One block of threads: the scale, to the head of each message. All sums are read before anything is written.
__global__ void __launch_bounds__(kThreads) find_scale(const Bucket __grid_constant__ bucket) {
    const double* const sums = reinterpret_cast<const double*>(bucket.messages);
    double squares = 0;
    for (int64_t tile = threadIdx.x; tile * kTile < bucket.numel; tile += kThreads) squares += sums[tile];
    const float scale = root_mean<kThreads>(squares, bucket.numel);
    for (int64_t j = threadIdx.x; j < bucket.chunks; j += kThreads) {
        *reinterpret_cast<float*>(bucket.messages + j * bucket.nbytes) = scale;
    }
}

__global__ void __launch_bounds__(kThreads, 4)
    store_tiles(const Bucket __grid_constant__ bucket, const int64_t tiles_of_chunk) {
    const Part part = bucket.part(blockIdx.x, kTile, tiles_of_chunk);
    if (part.length <= 0) return;  // the last chunk is shorter
    const Tile<kThreads> tile = part.tile<kThreads>(0, threadIdx.x);
    Quad u[kTileQuads];
    load_error(u, bucket, tile);
    store_tile(bucket, part, tile, u, scale_at(part.message, 0));
    store_padding(part, threadIdx.x);
}

// ---- host ------------------------------------------------------------------------------------------------------------

template <class Source>
co_status compress(const Source& source, const Bucket& bucket, bool one_scale, const Place& place) {
    if (one_scale) {
        CO_TRY(launch(sum_tiles<Source>, ceil_div(bucket.numel, kTile), place, source, bucket));
        CO_TRY(launch(find_scale, 1, place, bucket));
        const int64_t tiles = ceil_div(bucket.chunk, kTile);
        return launch(store_tiles, bucket.chunks * tiles, place, bucket, tiles);
    }
    if (bucket.scale_block <= kWarpBlock) {
        return launch(compress_blocks<kWarp, Source>, ceil_div(bucket.groups, kThreads / kWarp), place, source, bucket);
    }
    if (bucket.scale_block <= kTile) return launch(compress_blocks<kThreads, Source>, bucket.groups, place, source, bucket);
    return launch(compress_large_blocks<Source>, bucket.groups, place, source, bucket);
}

co_status check_messages(const void* messages, int64_t numel, int64_t scale_block, int32_t world_size) {
    CO_REQUIRE(numel >= 0, "numel < 0");
    CO_REQUIRE(scale_block >= 0 && scale_block % 8 == 0, "scale_block is no multiple of 8 and not 0");
    CO_REQUIRE(world_size >= 1, "world_size < 1");
    CO_REQUIRE(numel == 0 || messages, "the messages are null");
    CO_REQUIRE(reinterpret_cast<uintptr_t>(messages) % kAlignment == 0, "messages are not aligned to 16 bytes");
    return CO_OK;
}

}  // namespace
}  // namespace compressopt

using namespace compressopt;

int32_t co_compress(const co_combination* z, float* error, uint8_t* messages, int64_t numel, int64_t scale_block,
                    int32_t world_size, const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_TRY(check_messages(messages, numel, scale_block, world_size));
    CO_TRY(check_combination(z, numel));
    if (numel == 0) return CO_OK;
    CO_REQUIRE(error, "error is null");
    const Place place(*exec);
    const DeviceGuard guard(place.device);
    CO_TRY(guard.status());
    const Bucket bucket(error, messages, numel, chunk_numel(numel, world_size), scale_block);
    // Blocks may cross the borders of tables: more runs than one table holds are added to the error first.
    const bool at_once = !z->grads || z->count <= ManyRuns::capacity;
    if (!at_once) CO_TRY(combine(*z, error, numel, true, place));
    const co_combination rest = at_once ? *z : co_combination{};
    const Real nothing = at_once ? 0.0f : -0.0f;  // what is added where there is no x; -0 leaves all bits as they are
    const RunsOf runs(nullptr, rest.grads, numel);
    return for_tables<FewRuns, ManyRuns>(runs.count(rest.count), kTileBits, runs, [&](const auto& table, int64_t) {
        using Runs = std::decay_t<decltype(table)>;
        return compress(Combination<Runs>{rest.x, rest.factors, rest.alpha, rest.beta, nothing, table}, bucket,
                        scale_block == 0, place);
    });
}

int32_t co_average_compress(const uint8_t* messages, float* error, uint8_t* out, int64_t numel, int64_t scale_block,
                            int32_t world_size, const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_TRY(check_messages(messages, numel, scale_block, world_size));
    CO_TRY(check_messages(out, numel, scale_block, world_size));
    if (numel == 0) return CO_OK;
    CO_REQUIRE(error, "error is null");
    const Place place(*exec);
    const DeviceGuard guard(place.device);
    CO_TRY(guard.status());
    const Bucket bucket(error, out, numel, numel, scale_block);
    const Mean mean = {messages, message_nbytes(numel, scale_block), bucket.blocks, world_size,
                       static_cast<float>(1.0 / world_size)};
    return compress(mean, bucket, scale_block == 0, place);
}

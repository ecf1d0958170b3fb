// Sums over the tensors of a bucket: a block of threads sums an item, a second kernel the items of each run, in an order
// that depends on the segments only.
#pragma once

#include <algorithm>
#include <vector>

#include "runs.cuh"

namespace compressopt {

constexpr int64_t kMaxItems = 8192;  // about; more elements make larger items, so that the scratch memory stays small

// Thread 0 of the block gets the fold over the items of run `run`; of each item, number `which` of `width`.
template <class Runs, class Fold>
__device__ inline double fold_items(const Runs& runs, int run, const double* of_item, int width, int which, Fold fold) {
    double result = 0;  // all that is folded is >= 0
    for (int item = runs.first_item[run] + threadIdx.x; item < runs.first_item[run + 1]; item += kThreads) {
        result = fold(result, of_item[item * width + which]);
    }
    return over_block(result, fold);
}

// Keep three numbers of this block's item: a sum, one of the fold Second, and a maximum. All threads of the block call.
template <class Second>
__device__ inline void keep_item(double sum, double second, double maximum, double* of_item) {
    sum = over_block(sum, Sum());
    second = over_block(second, Second());
    maximum = over_block(maximum, Maximum());
    if (threadIdx.x != 0) return;
    double* const mine = of_item + 3 * int64_t{blockIdx.x};
    mine[0] = sum;
    mine[1] = second;
    mine[2] = maximum;
}

// Fold the items of each run into the three numbers of its tensor.
template <class Runs, class Second>
__global__ void __launch_bounds__(kThreads)
    fold_runs(const Runs __grid_constant__ runs, const double* __restrict__ of_item, double* __restrict__ sums) {
    const int run = blockIdx.x;
    if (runs.entries[run].numel == 0) return;
    const double sum = fold_items(runs, run, of_item, 3, 0, Sum());
    const double second = fold_items(runs, run, of_item, 3, 1, Second());
    const double maximum = fold_items(runs, run, of_item, 3, 2, Maximum());
    if (threadIdx.x == 0) {
        double* const of_tensor = sums + 3 * int64_t{runs.entries[run].index};
        of_tensor[0] += sum;
        of_tensor[1] = Second()(of_tensor[1], second);
        of_tensor[2] = Maximum()(of_tensor[2], maximum);
    }
}

// ---- host ------------------------------------------------------------------------------------------------------------

inline int tile_bits_for(const co_segment* segments, int64_t count) {
    int64_t numel = 0;
    for (int64_t k = 0; k < count; ++k) numel += segments[k].numel;
    int bits = kTileBits;
    while ((numel >> bits) > kMaxItems) ++bits;
    return bits;
}

// The most bytes that the items of a table need.
constexpr size_t scratch_nbytes(int width) {
    return (kMaxItems + 2 * ManyRuns::capacity + 1) * width * sizeof(double);
}

// The tensors' entries in the sums are written by blocks of threads that know nothing of each other.
inline bool indices_differ(const co_segment* segments, int64_t count) {
    std::vector<int32_t> indices;
    for (int64_t k = 0; k < count; ++k) {
        if (segments[k].numel > 0) indices.push_back(segments[k].index);
    }
    std::sort(indices.begin(), indices.end());
    return std::adjacent_find(indices.begin(), indices.end()) == indices.end();
}

// Three numbers of each tensor of a bucket: launch_items(table, items, of_item) has each item's kept by keep_item<Second>.
template <class Second, class LaunchItems>
co_status sum_tensors(const co_segment* segments, int64_t count, int64_t numel, double* sums, const Place& place,
                      LaunchItems launch_items) {
    CO_REQUIRE(indices_differ(segments, count), "two segments of one call have the same index");
    const DeviceGuard guard(place.device);
    CO_TRY(guard.status());
    const Scratch scratch(place, scratch_nbytes(3));
    CO_TRY(scratch.status());
    double* const of_item = scratch.as<double>();
    return for_tables<FewRuns, ManyRuns>(
        count, tile_bits_for(segments, count), RunsOf(segments, nullptr, numel),
        [&](const auto& table, int64_t items) -> co_status {
            if (items == 0) return CO_OK;
            CO_TRY(launch_items(table, items, of_item));
            return launch(fold_runs<std::decay_t<decltype(table)>, Second>, table.count, place, table, of_item, sums);
        });
}

}  // namespace compressopt

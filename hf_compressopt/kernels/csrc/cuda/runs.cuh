// The user's tensors, as kernels see them: tables of runs, passed by value as parameters of a kernel, so that no memory
// is needed and a graph can capture the call; and the division of runs into items, one for each block of threads.
#pragma once

#include <algorithm>

#include "library.h"
#include "threads.cuh"

namespace compressopt {

// Consecutive elements of one tensor, or, where a kernel reads gradients beside parameters, of both.
struct Run {
    void* param;       // the first element, or null
    const void* grad;  // the first element, or null
    int64_t start;     // where the run begins in the bucket
    int64_t numel;
    int32_t index;
    int8_t param_dtype, grad_dtype;
    bool still, grad_still;  // the flags of the parameters' segment, or of the only one; of the gradients'

    __device__ int64_t stop() const { return start + numel; }
    // What load_... has loaded, ..._of makes numbers of.
    __device__ RawQuad load_param(int64_t i, Span span) const { return load(param, param_dtype, i - start, span); }
    __device__ RawQuad load_grad(int64_t i, Span span) const { return load(grad, grad_dtype, i - start, span); }
    __device__ Quad param_of(const RawQuad& raw) const { return widened(raw, param_dtype); }
    __device__ Quad grad_of(const RawQuad& raw) const { return widened(raw, grad_dtype); }
    __device__ void store_param(int64_t i, const Quad& quad, Span span) const {
        store(param, param_dtype, i - start, quad, span);
    }
};

// An item is the part of a run in one tile of 2^tile_bits elements of the bucket. first_item[r]: items before run r.
template <class Entry, int kCapacity>
struct Table {
    static constexpr int capacity = kCapacity;
    int32_t count;
    int32_t tile_bits;
    int32_t first_item[kCapacity + 1];
    Entry entries[kCapacity];
};

// A kernel has 32764 bytes of parameters; few runs get by with fewer bytes, which are quicker to launch.
constexpr int kMaxParameters = 32764;
using FewRuns = Table<Run, 80>;
using ManyRuns = Table<Run, 720>;

struct Item {
    int entry;
    int64_t low, high;  // elements of the bucket
};

__host__ __device__ inline int64_t items_of(int64_t start, int64_t numel, int tile_bits) {
    return numel == 0 ? 0 : ((start + numel - 1) >> tile_bits) - (start >> tile_bits) + 1;
}

template <class AnyTable>
__device__ inline Item find_item(const AnyTable& table) {
    const int item = blockIdx.x;
    int entry = 0, beyond = table.count;
    while (beyond - entry > 1) {
        const int middle = (entry + beyond) / 2;
        if (table.first_item[middle] <= item) {
            entry = middle;
        } else {
            beyond = middle;
        }
    }
    const int64_t start = table.entries[entry].start, stop = start + table.entries[entry].numel;
    const int64_t tile = (start >> table.tile_bits) + (item - table.first_item[entry]);
    const int64_t low = tile << table.tile_bits, high = (tile + 1) << table.tile_bits;
    return {entry, low > start ? low : start, high < stop ? high : stop};
}

// Call body(i, span) for the quads of this block's item that are this thread's.
template <class Body>
__device__ inline void for_quads(const Item& item, Body body) {
    for (int64_t i = item.low / kQuad * kQuad + kQuad * threadIdx.x; i < item.high; i += kQuad * kThreads) {
        body(i, span_of(i, item.low, item.high));
    }
}

// The same for bodies with little to load: ask(i, span) of kAhead quads, and then body(what was asked for, i, span).
template <int kAhead, class Ask, class Body>
__device__ inline void for_quads_ahead(const Item& item, Ask ask, Body body) {
    constexpr int kStep = kQuad * kThreads;
    for (int64_t i = item.low / kQuad * kQuad + kQuad * threadIdx.x; i < item.high; i += kAhead * kStep) {
        decltype(ask(i, Span{})) asked[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            const int64_t at = i + a * kStep < item.high ? i + a * kStep : i;  // no branch: a quad is asked for twice
            asked[a] = ask(at, span_of(at, item.low, item.high));
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            const int64_t at = i + a * kStep;
            if (at < item.high) body(asked[a], at, span_of(at, item.low, item.high));
        }
    }
}

// Outputs, the parameters of runs, <- outputs * decay + values * scale; for operations of one pass.
struct Addition {
    Real decay, scale;
    bool reads;  // the outputs
    Addition(float keep, float by) : decay(keep), scale(by), reads(keep != 0.0f) {}

    // ask() asks for the values.
    template <class Ask>
    __device__ void to(const Run& run, int64_t i, Span span, Ask ask) const {
        if (!run.param) return;
        RawQuad old = {};
        if (reads) old = run.load_param(i, span);
        Quad values = ask() * scale;
        if (reads) values = run.param_of(old) * decay + values;
        run.store_param(i, values, span);
    }
};

// ---- host ------------------------------------------------------------------------------------------------------------

inline co_status check_segments(const co_segment* segments, int64_t count, int64_t numel, const char* name) {
    int64_t sum = 0;
    for (int64_t k = 0; k < count; ++k) {
        const co_segment& segment = segments[k];
        if (segment.numel < 0) return fail(CO_BAD_ARGUMENT, "%s[%lld]: numel < 0", name, (long long)k);
        if (segment.dtype < CO_FLOAT32 || segment.dtype > CO_FLOAT16) {
            return fail(CO_BAD_ARGUMENT, "%s[%lld]: dtype %d is none of co_dtype", name, (long long)k, segment.dtype);
        }
        sum += segment.numel;
    }
    if (numel >= 0 && sum != numel) {
        return fail(CO_BAD_ARGUMENT, "%s cover %lld elements, the bucket has %lld", name, (long long)sum,
                    (long long)numel);
    }
    return CO_OK;
}

// A run, but for its place in the bucket. A segment that is null is not given.
inline Run run_of(const co_segment* param, const co_segment* grad) {
    const co_segment* const any = param ? param : grad;
    Run run = {};
    if (!any) return run;
    run.numel = any->numel;
    run.index = any->index;
    run.still = any->flags & CO_STILL;
    if (param) {
        run.param = param->data;
        run.param_dtype = static_cast<int8_t>(param->dtype);
    }
    if (grad) {
        run.grad = grad->data;
        run.grad_dtype = static_cast<int8_t>(grad->dtype);
        run.grad_still = grad->flags & CO_STILL;
    }
    return run;
}

// The runs of a bucket whose parameters, gradients or both are given; one run of neither where none are.
class RunsOf {
public:
    RunsOf(const co_segment* params, const co_segment* grads, int64_t numel)
        : params_(params), grads_(grads), numel_(numel) {}
    int64_t count(int64_t given) const { return params_ || grads_ ? given : 1; }

    Run operator()(int64_t k) {
        Run run = run_of(params_ ? params_ + k : nullptr, grads_ ? grads_ + k : nullptr);
        if (!params_ && !grads_) run.numel = numel_;
        run.start = start_;
        start_ += run.numel;
        return run;
    }

private:
    const co_segment *params_, *grads_;
    int64_t numel_, start_ = 0;
};

template <class Filled, class EntryAt, class Launch>
co_status fill_table(int64_t& done, int64_t count, int tile_bits, EntryAt& entry_at, Launch& run) {
    Filled table;
    table.count = static_cast<int32_t>(std::min<int64_t>(count - done, Filled::capacity));
    table.tile_bits = tile_bits;
    int64_t items = 0;
    for (int32_t k = 0; k < table.count; ++k) {
        table.entries[k] = entry_at(done + k);
        table.first_item[k] = static_cast<int32_t>(items);
        items += items_of(table.entries[k].start, table.entries[k].numel, tile_bits);
        if (items > INT32_MAX) return fail(CO_BAD_ARGUMENT, "more elements than the 2^43 that one call takes");
    }
    table.first_item[table.count] = static_cast<int32_t>(items);
    done += table.count;
    return run(table, items);
}

// Fill tables with entry_at(0) ... entry_at(count - 1), each called once and in order, and call run(table, items) for
// each of them.
template <class Few, class Many, class EntryAt, class Launch>
co_status for_tables(int64_t count, int tile_bits, EntryAt entry_at, Launch run) {
    for (int64_t done = 0; done < count;) {
        if (count - done <= Few::capacity) {
            CO_TRY((fill_table<Few>(done, count, tile_bits, entry_at, run)));
        } else {
            CO_TRY((fill_table<Many>(done, count, tile_bits, entry_at, run)));
        }
    }
    return CO_OK;
}

// ---- one pass over elements -------------------------------------------------------------------------------------------

// Quads that an operation asks for ahead: where there are several, by ask(run, i, span), and it is called with that too.
template <class Operation>
constexpr int kAheadOf = 1;

// An Operation is called with a run, the place i of a quad in the bucket, and which of its elements belong to the run.
template <class Runs, class Operation>
__global__ void __launch_bounds__(kThreads, kTakesMore && kAheadOf<Operation> > 1 ? 3 : 4)
    over_runs(const Runs __grid_constant__ runs, const Operation __grid_constant__ operation) {
    static_assert(sizeof(Runs) + sizeof(Operation) <= kMaxParameters);
    const Item item = find_item(runs);
    const Run& run = runs.entries[item.entry];
    if constexpr (kAheadOf<Operation> > 1) {
        for_quads_ahead<kAheadOf<Operation>>(
            item, [&](int64_t i, Span span) { return operation.ask(run, i, span); },
            [&](const auto& asked, int64_t i, Span span) { operation(run, i, span, asked); });
    } else {
        for_quads(item, [&](int64_t i, Span span) { operation(run, i, span); });
    }
}

template <class Operation>
co_status run(const Operation& operation, RunsOf runs, int64_t count, const Place& place) {
    const DeviceGuard guard(place.device);
    CO_TRY(guard.status());
    return for_tables<FewRuns, ManyRuns>(
        runs.count(count), kTileBits, runs, [&](const auto& table, int64_t items) -> co_status {
            if (items == 0) return CO_OK;
            using Runs = std::decay_t<decltype(table)>;
            return launch(over_runs<Runs, Operation>, items, place, table, operation);
        });
}

}  // namespace compressopt

// The sketch of a group's elements, and their sum of squares in the same pass. Four blocks of threads take a span: each
// thread keeps four numbers of the span's sketch in registers, and finds the elements that belong to them. A second
// kernel sums the spans.
#include "../sketch_hash.h"
#include "runs.cuh"

namespace compressopt {
namespace {

constexpr int kNumbers = 4;  // of a thread
constexpr int kParts = static_cast<int>(kSketch) / (kThreads * kNumbers);  // blocks of threads of a span
constexpr int kWords = static_cast<int>(kSketch / kSignWord);  // hashes of a run's signs
constexpr int kBatch = kThreads / kWords;  // runs whose signs are hashed together, a word by each thread

// An element as it lies in memory, of a run of this dtype.
__device__ inline float number_of(unsigned raw, unsigned dtype) {
    if (dtype == CO_FLOAT32) return __uint_as_float(raw);
    return dtype == CO_BFLOAT16 ? __uint_as_float(raw << 16) : __half2float(__ushort_as_half(static_cast<uint16_t>(raw)));
}

// Which element of a run belongs to a place of the sketch.
__device__ inline unsigned element_at(unsigned place, unsigned rotation) {
    const unsigned row = (place / kRowLanes - rotation) % kRows;
    return row * kRowLanes + (place - rotation / kRows) % kRowLanes;
}

// The elements of a table's runs in one span. The table may hold only a part of the span: sums of earlier parts are in
// `sketches` and `sums`.
template <class Runs>
__global__ void __launch_bounds__(kThreads, kTakesMore ? 2 : 4)
    sketch_spans(const Runs __grid_constant__ runs, const Spans spans, const SketchKeys keys, const int64_t first_span,
                 float* __restrict__ sketches, double* __restrict__ sums) {
    static_assert(sizeof(Runs) + sizeof(Spans) + sizeof(SketchKeys) + 3 * sizeof(void*) <= kMaxParameters);
    __shared__ uint64_t words[kBatch][kWords];
    const int64_t span = first_span + blockIdx.x / kParts;
    const int first = static_cast<int>(blockIdx.x % kParts) * kThreads * kNumbers + static_cast<int>(threadIdx.x);
    const int64_t low = runs.entries[0].start, high = runs.entries[runs.count - 1].stop();
    const bool begins = low <= spans.begin(span);
    const int64_t begin = begins ? spans.begin(span) : low, end = high < spans.end(span) ? high : spans.end(span);
    float* const mine = sketches + span * kSketch;
    Real y[kNumbers];
    double squares = 0;
    for (int j = 0; j < kNumbers; ++j) y[j] = begins ? 0.0f : mine[first + j * kThreads];
    int entry = 0;
    const int64_t last = (spans.offset + end - 1) / kSketch;
    for (int64_t batch = (spans.offset + begin) / kSketch; batch <= last; batch += kBatch) {
        words[threadIdx.x / kWords][threadIdx.x % kWords] =
            keys.sign_word((batch + threadIdx.x / kWords) * kWords + threadIdx.x % kWords);
        __syncthreads();
        unsigned raw[kBatch][kNumbers], rotation[kBatch], dtypes = 0;  // of two bits each
#pragma unroll
        for (int r = 0; r < kBatch; ++r) {  // all elements of the batch are asked for before the first is looked at
            const int64_t start = (batch + r) * kSketch - spans.offset;  // of the run, where the segments begin
            rotation[r] = keys.rotation(batch + r);
            while (entry + 1 < runs.count && runs.entries[entry].stop() <= start) ++entry;
            const bool whole = runs.entries[entry].start <= start && start + kSketch <= runs.entries[entry].stop();
#pragma unroll
            for (int j = 0; j < kNumbers; ++j) {
                const int64_t i = start + element_at(static_cast<unsigned>(first + j * kThreads), rotation[r]);
                const bool inside = begin <= i && i < end;
                int k = entry;
                while (!whole && inside && runs.entries[k].stop() <= i) ++k;
                const Run& run = runs.entries[k];
                raw[r][j] = inside && run.grad ? load_one(run.grad, run.grad_dtype, i - run.start) : 0;
                dtypes |= static_cast<unsigned>(run.grad_dtype) << 2 * (r * kNumbers + j);
            }
        }
#pragma unroll
        for (int r = 0; r < kBatch; ++r) {
#pragma unroll
            for (int j = 0; j < kNumbers; ++j) {
                const float number = number_of(raw[r][j], dtypes >> 2 * (r * kNumbers + j) & 3u);
                const unsigned inside = element_at(static_cast<unsigned>(first + j * kThreads), rotation[r]);
                const unsigned sign = static_cast<unsigned>(words[r][inside / kSignWord] >> inside % kSignWord) << 31;
                // The product is exact: the bits are those of a product and a sum.
                squares = __fma_rn(double{number}, double{number}, squares);
                y[j] = y[j] + Real(__uint_as_float(__float_as_uint(number) ^ sign));
            }
        }
        __syncthreads();  // the words may be written again
    }
    for (int j = 0; j < kNumbers; ++j) mine[first + j * kThreads] = y[j].value;
    squares = over_block(squares, Sum());
    double* const sum = sums + span * kParts + blockIdx.x % kParts;
    if (threadIdx.x == 0) *sum = begins ? squares : *sum + squares;
}

// y <- y + the sum of the spans' sketches, and squares[0] <- squares[0] + that of their squares.
__global__ void __launch_bounds__(kThreads)
    add_spans(const int64_t spans, const float* __restrict__ sketches, const double* __restrict__ sums,
              float* __restrict__ y, double* __restrict__ squares) {
    const int64_t place = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    double total = 0;
    for (int64_t span = 0; span < spans; ++span) total += double{sketches[span * kSketch + place]};
    y[place] = static_cast<float>(double{y[place]} + total);
    if (place != 0) return;
    for (int64_t k = 0; k < spans * kParts; ++k) *squares += sums[k];
}

}  // namespace
}  // namespace compressopt

using namespace compressopt;

int32_t co_sketch(const co_segment* segments, int64_t count, int64_t offset, uint64_t seed, float* y, double* squares,
                  const co_exec* exec) {
    CO_REQUIRE(exec, "exec is null");
    CO_REQUIRE(offset >= 0, "offset < 0");
    CO_REQUIRE(count >= 0 && (count == 0 || segments), "segments is null");
    CO_TRY(check_segments(segments, count, -1, "segments"));
    int64_t numel = 0;
    for (int64_t k = 0; k < count; ++k) numel += segments[k].numel;
    if (numel == 0) return CO_OK;
    CO_REQUIRE(y && squares, "y or squares is null");
    const Place place(*exec);
    const DeviceGuard guard(place.device);
    CO_TRY(guard.status());
    const Spans spans(offset, numel);
    const size_t nbytes = static_cast<size_t>(spans.count) * (kSketch * sizeof(float) + kParts * sizeof(double));
    const Scratch scratch(place, nbytes);
    CO_TRY(scratch.status());
    float* const sketches = scratch.as<float>();
    double* const sums = reinterpret_cast<double*>(sketches + spans.count * kSketch);
    const auto span_of = [&](int64_t i) { return ((offset + i) / kSketch - spans.first_run) / spans.per_span; };
    CO_TRY((for_tables<FewRuns, ManyRuns>(
        count, kTileBits, RunsOf(nullptr, segments, numel), [&](const auto& table, int64_t) -> co_status {
            using Runs = std::decay_t<decltype(table)>;
            const Run &first = table.entries[0], &last = table.entries[table.count - 1];
            const int64_t stop = last.start + last.numel;
            if (first.start == stop) return CO_OK;
            const int64_t first_span = span_of(first.start), spans_here = span_of(stop - 1) - first_span + 1;
            return launch(sketch_spans<Runs>, spans_here * kParts, place, table, spans, SketchKeys(seed), first_span,
                          sketches, sums);
        })));
    return launch(add_spans, kSketch / kThreads, place, spans.count, static_cast<const float*>(sketches),
                  static_cast<const double*>(sums), y, squares);
}

// Adam and AdamW over many tensors. A first kernel of one block counts the steps up and finds what depends on them, so
// that a graph can capture the call: nothing that changes from step to step is known to the host.
#include <type_traits>

#include "runs.cuh"

namespace compressopt {
namespace {

struct AdamTensor {
    static constexpr int64_t start = 0;
    void* param;
    void* grad;
    void *exp_avg, *exp_avg_sq;
    float* master;
    void* copy;
    float* step;
    int64_t numel;
    int8_t param_dtype, grad_dtype, moment_dtype, copy_dtype;
};

using FewTensors = Table<AdamTensor, 46>;
using ManyTensors = Table<AdamTensor, 425>;

// What a tensor's elements need of its step.
struct alignas(16) Rates {
    float step_size, root_correction, decay, unused;
};

__device__ inline bool skipped(const co_adam_options& options) {
    return options.found_inf && *options.found_inf != 0.0f;
}

template <class Tensors>
__global__ void __launch_bounds__(kThreads)
    count_steps(const Tensors __grid_constant__ tensors, const co_adam_options __grid_constant__ options,
                Rates* __restrict__ rates) {
    if (skipped(options)) return;
    const double lr = options.lr_pointer ? *options.lr_pointer : options.lr;
    for (int k = threadIdx.x; k < tensors.count; k += kThreads) {
        float* const step = tensors.entries[k].step;
        const float count = *step + 1.0f;
        *step = count;
        const double first = options.bias_correction ? 1.0 - pow(options.beta1, double{count}) : 1.0;
        const double second = options.bias_correction ? 1.0 - pow(options.beta2, double{count}) : 1.0;
        rates[k] = {static_cast<float>(lr / first), static_cast<float>(sqrt(second)),
                    static_cast<float>(1.0 - lr * options.weight_decay), 0.0f};
    }
}

template <class Tensors>
__global__ void __launch_bounds__(kThreads, 3)
    step_tensors(const Tensors __grid_constant__ tensors, const co_adam_options __grid_constant__ options,
                 const Rates* __restrict__ rates) {
    static_assert(sizeof(Tensors) + sizeof(co_adam_options) + sizeof(Rates*) <= kMaxParameters);
    if (skipped(options)) return;
    const Item item = find_item(tensors);
    const AdamTensor& tensor = tensors.entries[item.entry];
    const Rates rate = rates[item.entry];
    const Real grad_scale = options.grad_scale ? *options.grad_scale : 1.0f;
    const Real clip_factor = options.clip_factor ? *options.clip_factor : 1.0f;
    const Real eps = static_cast<float>(options.eps), weight_decay = static_cast<float>(options.weight_decay);
    const Real new_m = static_cast<float>(1.0 - options.beta1);
    const Real old_v = static_cast<float>(options.beta2), new_v = static_cast<float>(1.0 - options.beta2);
    void* const weights = tensor.master ? tensor.master : tensor.param;
    const int weights_dtype = tensor.master ? CO_FLOAT32 : tensor.param_dtype;
    for_quads(item, [&](int64_t i, Span span) {
        const RawQuad raw_g = load(tensor.grad, tensor.grad_dtype, i, span);
        const RawQuad raw_p = load(weights, weights_dtype, i, span);
        const RawQuad raw_m = load(tensor.exp_avg, tensor.moment_dtype, i, span);
        const RawQuad raw_v = load(tensor.exp_avg_sq, tensor.moment_dtype, i, span);
        Quad g = widened(raw_g, tensor.grad_dtype), p = widened(raw_p, weights_dtype);
        Quad m = widened(raw_m, tensor.moment_dtype), v = widened(raw_v, tensor.moment_dtype);
        if (options.grad_scale) g = g / grad_scale;
        if (options.clip_factor) g = g * clip_factor;
        if (options.write_grads) store(tensor.grad, tensor.grad_dtype, i, g, span);
        if (options.maximize) g = negated(g);
        if (options.adam_w_mode) {
            p = p * Real(rate.decay);
        } else if (weight_decay.value != 0.0f) {
            g = g + p * weight_decay;
        }
        m = m + (g - m) * new_m;
        v = v * old_v + g * new_v * g;
        p = p - m * Real(rate.step_size) / (square_root(v) / Real(rate.root_correction) + eps);
        store(tensor.exp_avg, tensor.moment_dtype, i, m, span);
        store(tensor.exp_avg_sq, tensor.moment_dtype, i, v, span);
        store(weights, weights_dtype, i, p, span);
        if (tensor.master) store(tensor.param, tensor.param_dtype, i, p, span);
        if (tensor.copy) store(tensor.copy, tensor.copy_dtype, i, p, span);
    });
}

bool is_dtype(int32_t dtype) { return dtype >= CO_FLOAT32 && dtype <= CO_FLOAT16; }

co_status check_tensor(const co_adam_tensor& tensor) {
    CO_REQUIRE(tensor.numel >= 0, "a tensor has numel < 0");
    CO_REQUIRE(tensor.step, "a tensor has no step");
    CO_REQUIRE(is_dtype(tensor.param_dtype) && is_dtype(tensor.grad_dtype) && is_dtype(tensor.moment_dtype) &&
                   (!tensor.copy || is_dtype(tensor.copy_dtype)),
               "a tensor's dtype is none of co_dtype");
    CO_REQUIRE(tensor.numel == 0 || (tensor.param && tensor.grad && tensor.exp_avg && tensor.exp_avg_sq),
               "param, grad, exp_avg or exp_avg_sq of a tensor is null");
    return CO_OK;
}

}  // namespace
}  // namespace compressopt

using namespace compressopt;

int32_t co_adam(const co_adam_tensor* tensors, int64_t count, const co_adam_options* options, const co_exec* exec) {
    CO_REQUIRE(exec && options, "exec or options is null");
    CO_REQUIRE(count >= 0, "count < 0");
    if (count == 0) return CO_OK;
    CO_REQUIRE(tensors, "tensors is null");
    for (int64_t k = 0; k < count; ++k) CO_TRY(check_tensor(tensors[k]));
    const Place place(*exec);
    const DeviceGuard guard(place.device);
    CO_TRY(guard.status());
    const Scratch scratch(place, ManyTensors::capacity * sizeof(Rates));
    CO_TRY(scratch.status());
    const auto tensor_at = [&](int64_t k) {
        const co_adam_tensor& tensor = tensors[k];
        return AdamTensor{tensor.param,
                          tensor.grad,
                          tensor.exp_avg,
                          tensor.exp_avg_sq,
                          tensor.master,
                          tensor.copy,
                          tensor.step,
                          tensor.numel,
                          static_cast<int8_t>(tensor.param_dtype),
                          static_cast<int8_t>(tensor.grad_dtype),
                          static_cast<int8_t>(tensor.moment_dtype),
                          static_cast<int8_t>(tensor.copy_dtype)};
    };
    Rates* const rates = scratch.as<Rates>();
    return for_tables<FewTensors, ManyTensors>(
        count, kTileBits, tensor_at, [&](const auto& table, int64_t items) -> co_status {
            using Tensors = std::decay_t<decltype(table)>;
            CO_TRY(launch(count_steps<Tensors>, 1, place, table, *options, rates));
            if (items == 0) return CO_OK;
            return launch(step_tensors<Tensors>, items, place, table, *options, rates);
        });
}

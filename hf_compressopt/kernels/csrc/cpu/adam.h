/* Adam and AdamW over many tensors, and norms. */
#pragma once
#include "common.h"

namespace compressopt {
namespace CO_VECTOR {
namespace {

constexpr int64_t kAdamTile = 512; /* elements converted at a time */
constexpr int64_t kNormPiece = 65536;
constexpr int64_t kAdamBytesPerThread = 4 << 20; /* so much may lie in a cache, where one thread is quick */

/* Elements to prefetch ahead, since the hardware's own prefetching ends with the page. */
constexpr int64_t kAdamAhead = 256, kNormAhead = 768;

/* What happens to a gradient before Adam sees it. */
struct GradChange {
    float divisor, factor, sign;
    bool inverted; /* divisor is the inverse of a power of two, and multiplied: the same bits, sooner */
    bool any;

    explicit GradChange(const co_adam_options &o) {
        float scale = o.grad_scale == nullptr ? 1.0f : *o.grad_scale;
        int exponent;
        inverted = __builtin_frexpf(scale, &exponent) == 0.5f && exponent > -100 && exponent < 100;
        divisor = inverted ? 1.0f / scale : scale;
        factor = o.clip_factor == nullptr ? 1.0f : *o.clip_factor;
        sign = o.maximize != 0 ? -1.0f : 1.0f;
        any = o.grad_scale != nullptr || o.clip_factor != nullptr || o.maximize != 0 || o.write_grads != 0;
    }
};

/* The numbers of one tensor's step. */
struct AdamNumbers {
    float rest1, beta2, rest2, eps, decay, shrink, step_size, correction2_sqrt;

    AdamNumbers() {}
    AdamNumbers(const co_adam_options &o, double lr, double step)
        : rest1(static_cast<float>(1 - o.beta1)),
          beta2(static_cast<float>(o.beta2)),
          rest2(static_cast<float>(1 - o.beta2)),
          eps(static_cast<float>(o.eps)),
          decay(static_cast<float>(o.weight_decay)),
          shrink(static_cast<float>(1 - lr * o.weight_decay)) {
        double first = 1, second = 1;
        if (o.bias_correction != 0) {
            first = 1 - power(o.beta1, step);
            second = 1 - power(o.beta2, step);
        }
        step_size = static_cast<float>(lr / first);
        correction2_sqrt = static_cast<float>(__builtin_sqrt(second));
    }

    static double power(double base, double exponent) {
        double result = 1;
        for (uint64_t n = static_cast<uint64_t>(exponent); n != 0; n >>= 1) {
            if (n & 1) result *= base;
            base *= base;
        }
        return result;
    }
};

enum Decay { kNone, kDecoupled, kL2 };

/* One step of n elements. written, copy: where the changed gradient and a copy of the parameter go, or NULL. */
template <bool kChange, Decay kDecay, class G>
inline void adam_elements(int64_t n, float *p, const G *g, float *m, float *v, G *written, bfloat16 *copy,
                          const AdamNumbers &a, const GradChange &change) {
    Vec rest1 = set1(a.rest1), beta2 = set1(a.beta2), rest2 = set1(a.rest2), eps = set1(a.eps);
    Vec decay = set1(kDecay == kL2 ? a.decay : a.shrink), size = set1(a.step_size), root2 = set1(a.correction2_sqrt);
    Vec divisor = set1(change.divisor), factor = set1(change.factor), sign = set1(change.sign);
    each_vector(n, [&](int64_t i, auto lanes) {
        prefetch(g + i + kAdamAhead);
        prefetch(p + i + kAdamAhead);
        prefetch(m + i + kAdamAhead);
        prefetch(v + i + kAdamAhead);
        Vec grad = lanes.get(g + i), param = lanes.get(p + i), old = lanes.get(m + i);
        if (kChange) {
            grad = (change.inverted ? grad * divisor : grad / divisor) * factor;
            if (written != nullptr) lanes.put(written + i, grad);
            grad = grad * sign;
        }
        if (kDecay == kL2) grad = grad + decay * param;
        if (kDecay == kDecoupled) param = param * decay;
        Vec first = old + rest1 * (grad - old);
        Vec second = beta2 * lanes.get(v + i) + rest2 * grad * grad;
        lanes.put(m + i, first);
        lanes.put(v + i, second);
        param = param - size * first / (square_root(second) / root2 + eps);
        lanes.put(p + i, param);
        if (copy != nullptr) lanes.put(copy + i, param);
    });
}

template <class T>
inline void convert_in(float *out, const T *in, int64_t n) {
    each_vector(n, [&](int64_t i, auto lanes) { lanes.put(out + i, lanes.get(in + i)); });
}
template <class T>
inline void convert_out(T *out, const float *in, int64_t n) {
    each_vector(n, [&](int64_t i, auto lanes) { lanes.put(out + i, lanes.get(in + i)); });
}
inline void convert_in(float *out, const void *in, int32_t dtype, int64_t n) {
    with_dtype(dtype, [&](auto type) { convert_in(out, static_cast<const typename decltype(type)::type *>(in), n); });
}
inline void convert_out(void *out, int32_t dtype, const float *in, int64_t n) {
    with_dtype(dtype, [&](auto type) { convert_out(static_cast<typename decltype(type)::type *>(out), in, n); });
}

struct AdamStep {
    const co_adam_options &options;
    GradChange change;
    Decay decay;
    explicit AdamStep(const co_adam_options &o)
        : options(o), change(o), decay(o.weight_decay == 0 ? kNone : o.adam_w_mode != 0 ? kDecoupled : kL2) {}

    /* Elements [begin, end) of a tensor. float32 is updated where it lies, the rest by way of the L1 cache. */
    void operator()(const co_adam_tensor &t, const AdamNumbers &numbers, int64_t begin, int64_t end) const {
        bool wide_param = t.master != nullptr || t.param_dtype == CO_FLOAT32;
        bool wide_moments = t.moment_dtype == CO_FLOAT32;
        auto *copy = t.copy_dtype == CO_BFLOAT16 ? static_cast<bfloat16 *>(t.copy) : nullptr; /* what most copies are */
        bool plain = wide_param && wide_moments && t.master == nullptr && t.copy == copy;
        int64_t tile = plain ? end - begin : kAdamTile;
        alignas(64) float narrow[3][kAdamTile];
        for (int64_t i = begin; i < end; i += tile) {
            int64_t n = least(tile, end - i);
            void *param = element(t.param, t.param_dtype, i);
            void *first = element(t.exp_avg, t.moment_dtype, i), *second = element(t.exp_avg_sq, t.moment_dtype, i);
            float *p = t.master != nullptr ? t.master + i : wide_param ? static_cast<float *>(param) : narrow[0];
            float *m = wide_moments ? static_cast<float *>(first) : narrow[1];
            float *v = wide_moments ? static_cast<float *>(second) : narrow[2];
            if (!wide_param) convert_in(p, param, t.param_dtype, n);
            if (!wide_moments) {
                convert_in(m, first, t.moment_dtype, n);
                convert_in(v, second, t.moment_dtype, n);
            }
            with_dtype(t.grad_dtype, [&](auto type) {
                using G = typename decltype(type)::type;
                elements(n, p, static_cast<G *>(t.grad) + i, m, v, copy == nullptr ? copy : copy + i, numbers);
            });
            if (p != param) convert_out(param, t.param_dtype, p, n);
            if (t.copy != copy) convert_out(element(t.copy, t.copy_dtype, i), t.copy_dtype, p, n);
            if (!wide_moments) {
                convert_out(first, t.moment_dtype, m, n);
                convert_out(second, t.moment_dtype, v, n);
            }
        }
    }

    template <class G>
    void elements(int64_t n, float *p, G *g, float *m, float *v, bfloat16 *copy, const AdamNumbers &a) const {
        G *written = options.write_grads != 0 ? g : nullptr;
        if (change.any) {
            if (decay == kNone) adam_elements<true, kNone>(n, p, g, m, v, written, copy, a, change);
            if (decay == kDecoupled) adam_elements<true, kDecoupled>(n, p, g, m, v, written, copy, a, change);
            if (decay == kL2) adam_elements<true, kL2>(n, p, g, m, v, written, copy, a, change);
        } else {
            if (decay == kNone) adam_elements<false, kNone>(n, p, g, m, v, written, copy, a, change);
            if (decay == kDecoupled) adam_elements<false, kDecoupled>(n, p, g, m, v, written, copy, a, change);
            if (decay == kL2) adam_elements<false, kL2>(n, p, g, m, v, written, copy, a, change);
        }
    }
};

int32_t adam(const co_adam_tensor *tensors, int64_t count, const co_adam_options *options, const co_exec *exec) {
    if (options->found_inf != nullptr && *options->found_inf != 0) return CO_OK;
    Starts starts(count);
    Array<AdamNumbers, 160> numbers(count);
    if (starts.missing() || numbers.data == nullptr) return out_of_memory();
    double lr = options->lr_pointer != nullptr ? static_cast<double>(*options->lr_pointer) : options->lr;
    starts.at[0] = 0;
    for (int64_t i = 0; i < count; ++i) {
        starts.at[i + 1] = starts.at[i] + tensors[i].numel;
        float step = *tensors[i].step + 1;
        bool known = i > 0 && step == *tensors[i - 1].step; /* which has been counted up */
        numbers[i] = known ? numbers[i - 1] : AdamNumbers(*options, lr, step);
        *tensors[i].step = step;
    }
    AdamStep step(*options);
    int64_t numel = starts.at[count];
    auto work = [&](int64_t piece) {
        int64_t begin = piece * kPiece, end = least(begin + kPiece, numel);
        for (int64_t i = starts.find(begin); begin < end; ++i) {
            int64_t stop = least(starts.at[i + 1], end);
            if (stop <= begin) continue;
            step(tensors[i], numbers[i], begin - starts.at[i], stop - starts.at[i]);
            begin = stop;
        }
    };
    parallel(exec, numel * 28, ceil_div(numel, kPiece), 1, work, kAdamBytesPerThread);
    return CO_OK;
}

int32_t square_sums(const co_segment *segments, int64_t count, double *sums, const co_exec *exec) {
    Starts pieces(count); /* of at most kNormPiece elements of one segment */
    if (pieces.missing()) return out_of_memory();
    int64_t bytes = 0;
    pieces.at[0] = 0;
    for (int64_t i = 0; i < count; ++i) {
        pieces.at[i + 1] = pieces.at[i] + ceil_div(segments[i].numel, kNormPiece);
        bytes += 4 * segments[i].numel;
    }
    Array<double, 256> parts(pieces.at[count]);
    if (parts.data == nullptr) return out_of_memory();
    /* From the last piece to the first: the first ones are read next, by other kernels, from a cache. */
    parallel(exec, bytes, pieces.at[count], 1, [&](int64_t from_last) {
        int64_t piece = pieces.at[count] - 1 - from_last;
        int64_t i = pieces.find(piece), begin = (piece - pieces.at[i]) * kNormPiece;
        const co_segment &segment = segments[i];
        int64_t n = least(kNormPiece, segment.numel - begin);
        with_dtype(segment.dtype, [&](auto type) {
            NormSum sum;
            const auto *x = static_cast<const typename decltype(type)::type *>(segment.data) + begin;
            sum.add(n, [&](int64_t at, auto lanes) {
                prefetch_far(x + at + kNormAhead);
                return lanes.get(x + at);
            });
            parts[piece] = sum.total();
        });
    });
    for (int64_t i = 0; i < count; ++i) {
        sums[i] = 0;
        for (int64_t piece = pieces.at[i]; piece < pieces.at[i + 1]; ++piece) sums[i] += parts[piece];
    }
    return CO_OK;
}

}  // namespace
}  // namespace CO_VECTOR
}  // namespace compressopt

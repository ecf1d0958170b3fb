/* The exported functions: arguments are checked here, and handed to the best instruction set of this machine. */
#include <atomic>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "dispatch.h"

namespace compressopt {
namespace {

thread_local char last_error[512] = "";

const Kernels *best_kernels() {
#if defined(CO_X86_64)
    __builtin_cpu_init(); /* what the CPU has and the operating system saves */
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
                __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    bool gfni = __builtin_cpu_supports("gfni") && __builtin_cpu_supports("avx512vbmi");
    if (avx512 && gfni) return &avx512_gfni_kernels;
    if (avx512) return &avx512_kernels;
    if (avx2) return &avx2_kernels;
#endif
    return &portable_kernels;
}

std::atomic<const Kernels *> chosen{nullptr};

const Kernels &kernels() {
    const Kernels *known = chosen.load(std::memory_order_acquire);
    if (known == nullptr) {
        known = best_kernels();
        chosen.store(known, std::memory_order_release);
    }
    return *known;
}

/* ---- checks ------------------------------------------------------------------------------------------------------ */

#define CO_CHECK(condition, ...)                                    \
    do {                                                            \
        if (!(condition)) return fail(CO_BAD_ARGUMENT, __VA_ARGS__); \
    } while (0)
#define CO_TRY(call)                    \
    do {                                \
        int32_t code = (call);          \
        if (code != CO_OK) return code; \
    } while (0)
#define CO_NOT_NULL(pointer) CO_CHECK((pointer) != nullptr, "%s: %s is null", __func__, #pointer)

bool known_dtype(int32_t dtype) { return dtype >= CO_FLOAT32 && dtype <= CO_FLOAT16; }

int32_t check_exec(const char *function, const co_exec *exec) {
    CO_CHECK(exec != nullptr, "%s: exec is null", function);
    CO_CHECK(exec->threads >= 1, "%s: threads must be >= 1, got %d", function, exec->threads);
    return CO_OK;
}

int32_t check_numel(const char *function, int64_t numel) {
    CO_CHECK(numel >= 0, "%s: numel must be >= 0, got %lld", function, static_cast<long long>(numel));
    return CO_OK;
}

int32_t check_blocks(const char *function, int64_t scale_block, int32_t world_size) {
    CO_CHECK(scale_block >= 0 && scale_block % 8 == 0, "%s: scale_block must be a multiple of 8, or 0, got %lld",
             function, static_cast<long long>(scale_block));
    CO_CHECK(world_size >= 1, "%s: world_size must be >= 1, got %d", function, world_size);
    return CO_OK;
}

/* numel < 0: the segments need not belong together. */
int32_t check_segments(const char *function, const co_segment *segments, int64_t count, int64_t numel, bool indexed) {
    CO_CHECK(count >= 0 && (count == 0 || segments != nullptr), "%s: %lld segments at %p", function,
             static_cast<long long>(count), static_cast<const void *>(segments));
    int64_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
        const co_segment &s = segments[i];
        long long number = static_cast<long long>(i);
        CO_CHECK(s.numel >= 0, "%s: segment %lld has numel %lld", function, number, static_cast<long long>(s.numel));
        CO_CHECK(known_dtype(s.dtype), "%s: segment %lld has dtype %d; known are 0 to 2", function, number, s.dtype);
        CO_CHECK(!indexed || s.index >= 0, "%s: segment %lld has index %d", function, number, s.index);
        CO_CHECK(numel >= 0 || s.data != nullptr || s.numel == 0, "%s: the data of segment %lld is null", function,
                 number);
        sum += s.numel;
    }
    CO_CHECK(numel < 0 || sum == numel, "%s: the segments have %lld elements, the bucket has %lld", function,
             static_cast<long long>(sum), static_cast<long long>(numel));
    return CO_OK;
}

int32_t check_average(const char *function, const co_average *y);

int32_t check_combination(const char *function, const co_combination *z, int64_t numel) {
    CO_CHECK(z != nullptr, "%s: z is null", function);
    if (z->x == nullptr && z->last != nullptr) {
        CO_CHECK(z->last->numel == numel, "%s: last has %lld elements, the bucket has %lld", function,
                 static_cast<long long>(z->last->numel), static_cast<long long>(numel));
        CO_CHECK(numel == 0 || z->last->messages != nullptr, "%s: the messages of last are null", function);
        CO_TRY(check_average(function, z->last));
    }
    if (z->grads != nullptr) return check_segments(function, z->grads, z->count, numel, z->factors != nullptr);
    CO_CHECK(z->factors == nullptr, "%s: factors need segments", function);
    return CO_OK;
}

int32_t check_average(const char *function, const co_average *y) {
    CO_CHECK(y != nullptr, "%s: y is null", function);
    CO_TRY(check_numel(function, y->numel));
    if (y->numel == 0) return CO_OK;
    CO_CHECK(y->messages != nullptr || y->values != nullptr, "%s: neither messages nor values", function);
    if (y->messages == nullptr) return CO_OK;
    CO_CHECK(y->stride >= 0 && y->stride % 16 == 0, "%s: stride must be a multiple of 16, got %lld", function,
             static_cast<long long>(y->stride));
    return check_blocks(function, y->scale_block, y->world_size);
}

int32_t check_errors(const char *function, const char *name, const co_errors *errors) {
    CO_CHECK(errors != nullptr, "%s: %s is null", function, name);
    CO_CHECK((errors->values == nullptr) != (errors->messages == nullptr),
             "%s: %s must have values or messages, and not both", function, name);
    return CO_OK;
}

int32_t check_variance(const char *function, const co_variance *variance) {
    CO_CHECK(variance != nullptr, "%s: exp_avg_sq is null", function);
    CO_CHECK((variance->values == nullptr) != (variance->codes == nullptr),
             "%s: exp_avg_sq must have values or codes, and not both", function);
    CO_CHECK((variance->codes == nullptr) == (variance->tops == nullptr),
             "%s: codes of exp_avg_sq need tops, and values none", function);
    return CO_OK;
}

/* Whether a bucket's segments need the indices of their tensors. */
bool indexed(const co_variance *variance) { return variance != nullptr && variance->codes != nullptr; }

/* A call that compresses, or corrects errors by what was sent: z, the errors, and the messages, whose name is given. */
int32_t check_sending(const char *function, const co_combination *z, int64_t numel, const co_errors *error,
                      const void *messages, const char *name) {
    CO_TRY(check_combination(function, z, numel));
    if (numel == 0) return CO_OK;
    CO_TRY(check_errors(function, "error", error));
    CO_CHECK(messages != nullptr, "%s: %s is null", function, name);
    return CO_OK;
}

int32_t check_signs(const char *function, const co_exec *exec, int64_t numel, int64_t scale_block,
                    int32_t world_size) {
    CO_TRY(check_exec(function, exec));
    CO_TRY(check_numel(function, numel));
    return check_blocks(function, scale_block, world_size);
}

int32_t check_both_errors(const char *function, const co_errors *error, const co_errors *new_error) {
    CO_TRY(check_errors(function, "error", error));
    CO_TRY(check_errors(function, "new_error", new_error));
    CO_CHECK((error->values == nullptr) == (new_error->values == nullptr), "%s: error and new_error have two forms",
             function);
    return CO_OK;
}

int32_t check_integers(const char *function, int64_t numel, int32_t bits, int32_t world_size) {
    CO_TRY(check_numel(function, numel));
    CO_CHECK(bits == 4 || bits == 8, "%s: bits must be 4 or 8, got %d", function, bits);
    CO_CHECK(world_size >= 1, "%s: world_size must be >= 1, got %d", function, world_size);
    return CO_OK;
}

int32_t check_integers(const char *function, const co_integers *y) {
    CO_CHECK(y != nullptr, "%s: y is null", function);
    CO_TRY(check_integers(function, y->numel, y->bits, y->world_size));
    CO_CHECK(y->numel == 0 || y->messages != nullptr, "%s: the messages of y are null", function);
    CO_CHECK(y->stride >= 0 && y->stride % 16 == 0, "%s: stride must be a multiple of 16, got %lld", function,
             static_cast<long long>(y->stride));
    return CO_OK;
}

int32_t check_refresh(const char *function, const co_refresh *refresh, const co_segment *segments, int64_t count) {
    CO_CHECK(refresh != nullptr, "%s: refresh is null", function);
    CO_TRY(check_numel(function, refresh->numel));
    CO_TRY(check_segments(function, segments, count, refresh->numel, true));
    if (refresh->y == nullptr) {
        CO_CHECK(refresh->numel == 0 || refresh->values != nullptr, "%s: neither messages nor values", function);
        return CO_OK;
    }
    CO_CHECK(refresh->y->numel == refresh->numel, "%s: y has %lld elements, the bucket has %lld", function,
             static_cast<long long>(refresh->y->numel), static_cast<long long>(refresh->numel));
    return check_integers(function, refresh->y);
}

}  // namespace

int32_t fail(int32_t code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return code;
}

int32_t out_of_memory() { return fail(CO_BAD_ARGUMENT, "no memory for a call's tables"); }

}  // namespace compressopt

using namespace compressopt;

int32_t co_abi_version(void) { return CO_ABI_VERSION; }

const char *co_instruction_set(void) { return kernels().name; }

int32_t co_use_instruction_set(const char *name) {
    CO_NOT_NULL(name);
    const Kernels *best = best_kernels(), *wanted = nullptr;
    if (strcmp(name, "portable") == 0) wanted = &portable_kernels;
#if defined(CO_X86_64)
    if (strcmp(name, "avx2") == 0 && best != &portable_kernels) wanted = &avx2_kernels;
    bool avx512 = best == &avx512_kernels || best == &avx512_gfni_kernels;
    if (strcmp(name, "avx512") == 0 && avx512) wanted = &avx512_kernels;
    if (strcmp(name, "avx512_gfni") == 0 && best == &avx512_gfni_kernels) wanted = best;
#endif
    CO_CHECK(wanted != nullptr, "this machine cannot run \"%s\"; the best that it can is \"%s\"", name, best->name);
    chosen.store(wanted, std::memory_order_release);
    return CO_OK;
}

int32_t co_check_device(int32_t) { return CO_OK; }

const char *co_last_error(void) { return last_error; }

int32_t co_compress(const co_combination *z, const co_errors *error, uint8_t *messages, int64_t numel, int64_t scale_block,
                    int32_t world_size, const co_exec *exec) {
    CO_TRY(check_signs(__func__, exec, numel, scale_block, world_size));
    CO_TRY(check_sending(__func__, z, numel, error, messages, "messages"));
    if (numel == 0) return CO_OK;
    return kernels().compress(z, error, messages, numel, scale_block, world_size, exec);
}

int32_t co_average_compress(const uint8_t *messages, const co_errors *error, uint8_t *out, int64_t numel, int64_t scale_block,
                            int32_t world_size, const co_exec *exec) {
    CO_TRY(check_signs(__func__, exec, numel, scale_block, world_size));
    if (numel == 0) return CO_OK;
    CO_NOT_NULL(messages);
    CO_TRY(check_errors(__func__, "error", error));
    CO_NOT_NULL(out);
    return kernels().average_compress(messages, error, out, numel, scale_block, world_size, exec);
}

int32_t co_decompress(const co_average *y, float *out, const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_average(__func__, y));
    if (y->numel == 0) return CO_OK;
    CO_NOT_NULL(out);
    return kernels().decompress(y, out, exec);
}

int32_t co_add_average(const co_average *y, const co_segment *outputs, int64_t count, float decay, float scale,
                       const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_average(__func__, y));
    CO_TRY(check_segments(__func__, outputs, count, y->numel, false));
    if (y->numel == 0) return CO_OK;
    return kernels().add_average(y, outputs, count, decay, scale, exec);
}

int32_t co_combine(const co_combination *z, float *out, int64_t numel, const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_numel(__func__, numel));
    CO_TRY(check_combination(__func__, z, numel));
    if (numel == 0) return CO_OK;
    CO_NOT_NULL(out);
    return kernels().combine(z, out, numel, exec);
}

int32_t co_sum_rows(const void *rows, int32_t dtype, int64_t count, float *out, int64_t numel, float factor,
                    const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_numel(__func__, numel));
    CO_CHECK(known_dtype(dtype), "%s: the rows have dtype %d; known are 0 to 2", __func__, dtype);
    CO_CHECK(count >= 1, "%s: count must be >= 1, got %lld", __func__, static_cast<long long>(count));
    if (numel == 0) return CO_OK;
    CO_NOT_NULL(rows);
    CO_NOT_NULL(out);
    return kernels().sum_rows(rows, dtype, count, out, numel, factor, exec);
}

int32_t co_compress_integers(const co_combination *z, const co_errors *error, const co_errors *new_error,
                             uint8_t *messages, int64_t numel, int32_t bits, int32_t world_size, const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_integers(__func__, numel, bits, world_size));
    CO_TRY(check_sending(__func__, z, numel, error, messages, "messages"));
    if (numel == 0) return CO_OK;
    if (new_error != nullptr) CO_TRY(check_both_errors(__func__, error, new_error));
    return kernels().compress_integers(z, error, new_error, messages, numel, bits, world_size, exec);
}

int32_t co_average_integers(const uint8_t *messages, const co_errors *error, const co_errors *new_error, uint8_t *out,
                            int64_t numel, int32_t bits, int32_t world_size, const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_integers(__func__, numel, bits, world_size));
    if (numel == 0) return CO_OK;
    CO_NOT_NULL(messages);
    CO_TRY(check_both_errors(__func__, error, new_error));
    CO_NOT_NULL(out);
    return kernels().average_integers(messages, error, new_error, out, numel, bits, world_size, exec);
}

int32_t co_mean_integers(const uint8_t *messages, float *out, int64_t numel, int32_t bits, int32_t world_size,
                         float factor, const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_integers(__func__, numel, bits, world_size));
    if (numel == 0) return CO_OK;
    CO_NOT_NULL(messages);
    CO_NOT_NULL(out);
    return kernels().mean_integers(messages, out, numel, bits, world_size, factor, exec);
}

int32_t co_add_integers(const co_integers *y, const co_segment *outputs, int64_t count, float decay, float scale,
                        const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_integers(__func__, y));
    CO_TRY(check_segments(__func__, outputs, count, y->numel, false));
    if (y->numel == 0) return CO_OK;
    return kernels().add_integers(y, outputs, count, decay, scale, exec);
}

int32_t co_decode_integers(const co_integers *y, float *out, const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_integers(__func__, y));
    if (y->numel == 0) return CO_OK;
    CO_NOT_NULL(out);
    return kernels().decode_integers(y, out, exec);
}

int32_t co_any_nan(const co_integers *y, uint8_t *found, const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_integers(__func__, y));
    CO_NOT_NULL(found);
    *found = 0;
    if (y->numel == 0) return CO_OK;
    return kernels().any_nan(y, found, exec);
}

int32_t co_apply_adam(const co_average *y, float *exp_avg, const co_variance *exp_avg_sq, const co_segment *params,
                      int64_t count, const float *corrections, float beta, const co_descent *descent,
                      const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_average(__func__, y));
    CO_TRY(check_segments(__func__, params, count, y->numel, corrections != nullptr || indexed(exp_avg_sq)));
    if (y->numel == 0) return CO_OK;
    CO_CHECK(exp_avg != nullptr || beta == 1.0f, "%s: beta must be 1 without exp_avg, got %g", __func__,
             static_cast<double>(beta));
    CO_TRY(check_variance(__func__, exp_avg_sq));
    CO_NOT_NULL(descent);
    return kernels().apply_adam(y, exp_avg, exp_avg_sq, params, count, corrections, beta, descent, exec);
}

int32_t co_local_step(float *exp_avg, const co_variance *exp_avg_sq, float *local_update, const co_segment *grads,
                      const co_segment *params, int64_t count, int64_t numel, float alpha, float beta,
                      const co_descent *descent, const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_numel(__func__, numel));
    CO_TRY(check_segments(__func__, params, count, numel, indexed(exp_avg_sq)));
    if (grads != nullptr) CO_TRY(check_segments(__func__, grads, count, numel, false));
    if (numel == 0) return CO_OK;
    CO_NOT_NULL(exp_avg);
    CO_TRY(check_variance(__func__, exp_avg_sq));
    CO_NOT_NULL(local_update);
    CO_NOT_NULL(descent);
    return kernels().local_step(exp_avg, exp_avg_sq, local_update, grads, params, count, numel, alpha, beta, descent,
                                exec);
}

int32_t co_sync_parameters(const co_average *y, float *exp_avg, float *anchor, const co_variance *exp_avg_sq,
                           float *local_update, const co_segment *params, int64_t count, float lr_sum,
                           const co_descent *descent, const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_average(__func__, y));
    CO_TRY(check_segments(__func__, params, count, y->numel, indexed(exp_avg_sq)));
    if (y->numel == 0) return CO_OK;
    CO_NOT_NULL(exp_avg);
    CO_NOT_NULL(anchor);
    CO_TRY(check_variance(__func__, exp_avg_sq));
    CO_NOT_NULL(local_update);
    CO_NOT_NULL(descent);
    return kernels().sync_parameters(y, exp_avg, anchor, exp_avg_sq, local_update, params, count, lr_sum, descent,
                                     exec);
}

int32_t co_lamb_moments(const co_average *y, float *exp_avg, float *fresh, const co_variance *exp_avg_sq,
                        const co_segment *params, int64_t count, const float *factors, double *sums,
                        const co_lamb_options *options, const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_average(__func__, y));
    CO_TRY(check_segments(__func__, params, count, y->numel, true));
    if (y->numel == 0) return CO_OK;
    CO_NOT_NULL(exp_avg);
    CO_NOT_NULL(fresh);
    CO_TRY(check_variance(__func__, exp_avg_sq));
    CO_NOT_NULL(factors);
    CO_NOT_NULL(sums);
    CO_NOT_NULL(options);
    return kernels().lamb_moments(y, exp_avg, fresh, exp_avg_sq, params, count, factors, sums, options, exec);
}

int32_t co_lamb_apply(const float *exp_avg, const co_variance *exp_avg_sq, const co_segment *params, int64_t count,
                      int64_t numel, const float *rates, const co_lamb_options *options, const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_numel(__func__, numel));
    CO_TRY(check_segments(__func__, params, count, numel, true));
    if (numel == 0) return CO_OK;
    CO_NOT_NULL(exp_avg);
    CO_TRY(check_variance(__func__, exp_avg_sq));
    CO_NOT_NULL(rates);
    CO_NOT_NULL(options);
    return kernels().lamb_apply(exp_avg, exp_avg_sq, params, count, numel, rates, options, exec);
}

int32_t co_variance_sums(const co_refresh *refresh, const co_variance *exp_avg_sq, const co_segment *segments,
                         int64_t count, double *sums, const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_refresh(__func__, refresh, segments, count));
    if (refresh->numel == 0) return CO_OK;
    CO_TRY(check_variance(__func__, exp_avg_sq));
    CO_NOT_NULL(sums);
    return kernels().variance_sums(refresh, exp_avg_sq, segments, count, sums, exec);
}

int32_t co_refresh_variance(const co_refresh *refresh, const co_variance *exp_avg_sq, const co_segment *segments,
                            int64_t count, const float *floors, const int32_t *tops, const float *factors, uint64_t key,
                            const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_refresh(__func__, refresh, segments, count));
    if (refresh->numel == 0) return CO_OK;
    CO_TRY(check_variance(__func__, exp_avg_sq));
    CO_NOT_NULL(floors);
    CO_CHECK(exp_avg_sq->codes == nullptr || (tops != nullptr && factors != nullptr), "%s: codes need tops and factors",
             __func__);
    return kernels().refresh_variance(refresh, exp_avg_sq, segments, count, floors, tops, factors, key, exec);
}

int32_t co_adam(const co_adam_tensor *tensors, int64_t count, const co_adam_options *options, const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_CHECK(count >= 0, "co_adam: count must be >= 0, got %lld", static_cast<long long>(count));
    if (count == 0) return CO_OK;
    CO_NOT_NULL(tensors);
    CO_NOT_NULL(options);
    for (int64_t i = 0; i < count; ++i) {
        const co_adam_tensor &t = tensors[i];
        long long number = static_cast<long long>(i);
        CO_TRY(check_numel(__func__, t.numel));
        CO_CHECK(t.step != nullptr, "co_adam: the step of tensor %lld is null", number);
        CO_CHECK(t.numel == 0 || (t.param != nullptr && t.grad != nullptr && t.exp_avg != nullptr &&
                                  t.exp_avg_sq != nullptr),
                 "co_adam: the parameter, gradient or a moment of tensor %lld is null", number);
        CO_CHECK(known_dtype(t.param_dtype) && known_dtype(t.grad_dtype) && known_dtype(t.moment_dtype) &&
                     (t.copy == nullptr || known_dtype(t.copy_dtype)),
                 "co_adam: tensor %lld has an unknown dtype; known are 0 to 2", number);
    }
    return kernels().adam(tensors, count, options, exec);
}

int32_t co_square_sums(const co_segment *segments, int64_t count, double *sums, const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_segments(__func__, segments, count, -1, false));
    if (count == 0) return CO_OK;
    CO_NOT_NULL(sums);
    return kernels().square_sums(segments, count, sums, exec);
}

int32_t co_sketch(const co_segment *segments, int64_t count, int64_t offset, uint64_t seed, float *y, double *squares,
                  const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_CHECK(offset >= 0, "co_sketch: offset must be >= 0, got %lld", static_cast<long long>(offset));
    int64_t numel = 0;
    for (int64_t i = 0; i < count; ++i) numel += segments == nullptr || segments[i].numel < 0 ? 0 : segments[i].numel;
    CO_TRY(check_segments(__func__, segments, count, numel, false));
    if (numel == 0) return CO_OK;
    CO_NOT_NULL(y);
    CO_NOT_NULL(squares);
    return kernels().sketch(segments, count, offset, seed, y, squares, exec);
}

int32_t co_change_sizes(const uint16_t *from, const uint16_t *to, int64_t numel, int16_t *sizes, const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_numel(__func__, numel));
    if (numel == 0) return CO_OK;
    CO_NOT_NULL(from);
    CO_NOT_NULL(to);
    CO_NOT_NULL(sizes);
    return kernels().change_sizes(from, to, numel, sizes, exec);
}

int32_t co_write_changes(const uint16_t *from, const uint16_t *to, int64_t numel, const int16_t *sizes,
                         const int64_t *offsets, uint8_t *payload, const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_numel(__func__, numel));
    if (numel == 0) return CO_OK;
    CO_NOT_NULL(from);
    CO_NOT_NULL(to);
    CO_NOT_NULL(sizes);
    CO_NOT_NULL(offsets);
    return kernels().write_changes(from, to, numel, sizes, offsets, payload, exec);
}

int32_t co_apply_changes(const uint8_t *payload, const int16_t *sizes, const int64_t *offsets, uint16_t *values,
                         int64_t numel, const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_numel(__func__, numel));
    if (numel == 0) return CO_OK;
    CO_NOT_NULL(sizes);
    CO_NOT_NULL(offsets);
    CO_NOT_NULL(values);
    return kernels().apply_changes(payload, sizes, offsets, values, numel, exec);
}

int32_t co_copy(const float *in, float *out, int64_t numel, const co_exec *exec) {
    CO_TRY(check_exec(__func__, exec));
    CO_TRY(check_numel(__func__, numel));
    if (numel == 0) return CO_OK;
    CO_NOT_NULL(in);
    CO_NOT_NULL(out);
    return kernels().copy(in, out, numel, exec);
}

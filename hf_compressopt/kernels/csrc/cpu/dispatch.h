/* What every instruction set implements: the functions of compressopt.h, called with arguments that were checked. */
#ifndef COMPRESSOPT_CPU_DISPATCH_H
#define COMPRESSOPT_CPU_DISPATCH_H

#include "../compressopt.h"

namespace compressopt {

struct Kernels {
    const char *name;
    decltype(&co_compress) compress;
    decltype(&co_average_compress) average_compress;
    decltype(&co_decompress) decompress;
    decltype(&co_add_average) add_average;
    decltype(&co_combine) combine;
    decltype(&co_sum_rows) sum_rows;
    decltype(&co_apply_adam) apply_adam;
    decltype(&co_local_step) local_step;
    decltype(&co_sync_parameters) sync_parameters;
    decltype(&co_lamb_moments) lamb_moments;
    decltype(&co_lamb_apply) lamb_apply;
    decltype(&co_variance_sums) variance_sums;
    decltype(&co_refresh_variance) refresh_variance;
    decltype(&co_adam) adam;
    decltype(&co_square_sums) square_sums;
    decltype(&co_copy) copy;
    decltype(&co_compress_integers) compress_integers;
    decltype(&co_average_integers) average_integers;
    decltype(&co_mean_integers) mean_integers;
    decltype(&co_add_integers) add_integers;
    decltype(&co_decode_integers) decode_integers;
    decltype(&co_any_nan) any_nan;
    decltype(&co_sketch) sketch;
    decltype(&co_change_sizes) change_sizes;
    decltype(&co_write_changes) write_changes;
    decltype(&co_apply_changes) apply_changes;
};

extern const Kernels portable_kernels;
#if defined(__x86_64__) && !defined(COMPRESSOPT_PORTABLE_ONLY)
#define CO_X86_64 1
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
extern const Kernels avx512_gfni_kernels;
#endif

/* Keeps the message for co_last_error, and returns the code. */
int32_t fail(int32_t code, const char *format, ...) __attribute__((format(printf, 2, 3)));
int32_t out_of_memory();

}  // namespace compressopt

#endif

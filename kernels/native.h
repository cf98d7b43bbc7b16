/* What the C sources of kvd_kernels._native share. The contract of all functions is at the top of native.c. */
#ifndef KVD_KERNELS_NATIVE_H
#define KVD_KERNELS_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_AVX2 1
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,popcnt"))) /* every processor with the one has the other */
#else
#define HAVE_AVX2 0
#endif

#define LOAD(pointer) __atomic_load_n((pointer), __ATOMIC_RELAXED)

/* Whoever gives the GIL back may wait a whole switch interval (5 ms) for it when another thread computes. Work that takes a
 * few microseconds is therefore done with the GIL held; these are about 10 microseconds' worth. */
#define RELEASE_BYTES ((size_t)64 << 10)
#define RELEASE_ENTRIES ((size_t)16 << 10)

/* Streaming past the caches pays only when the result would not stay in them anyway: the next reader, a send say, wants a
 * small result hot. Measured as gather plus one read of the result: 1.1x slower at 2 MiB, even at 4 to 8, 0.9x at 16. */
#define STREAM_BYTES ((size_t)8 << 20)

#define BEGIN_WORK(large)                       \
    PyThreadState *thread_state = NULL;         \
    if (large) thread_state = PyEval_SaveThread()
#define END_WORK() \
    if (thread_state != NULL) PyEval_RestoreThread(thread_state)

/* ---------------------------------------------------------------- buffers */

static inline int buffers_overlap(const Py_buffer *a, const Py_buffer *b)
{
    uintptr_t p = (uintptr_t)a->buf, q = (uintptr_t)b->buf;
    return p < q + (uintptr_t)b->len && q < p + (uintptr_t)a->len && a->len > 0 && b->len > 0;
}

/* ---------------------------------------------------------------- streaming */

#if HAVE_AVX2
/* target is 32-byte aligned and bytes a multiple of 32 */
AVX2 static inline void stream_row(char *target, const char *source, size_t bytes)
{
    size_t i = 0;
    for (; i + 128 <= bytes; i += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(source + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(source + i + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(source + i + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(source + i + 96));
        _mm256_stream_si256((__m256i *)(target + i), a);
        _mm256_stream_si256((__m256i *)(target + i + 32), b);
        _mm256_stream_si256((__m256i *)(target + i + 64), c);
        _mm256_stream_si256((__m256i *)(target + i + 96), d);
    }
    for (; i < bytes; i += 32)
        _mm256_stream_si256((__m256i *)(target + i), _mm256_loadu_si256((const __m256i *)(source + i)));
}
#endif

/* ---------------------------------------------------------------- what native.c makes a module of */

#define KERNEL(name)                   \
    extern const char name##_doc[];    \
    PyObject *name(PyObject *self, PyObject *args)

/* copies.c */
KERNEL(kvd_move);
KERNEL(kvd_copy_runs);

/* indices.c */
KERNEL(kvd_partition);
KERNEL(kvd_token_entries);
KERNEL(kvd_accumulate);
#if HAVE_AVX2
extern uint8_t kvd_compress[256][8]; /* of each set of lanes the lanes, ascending */
void kvd_fill_compress(void);        /* once, before the first use */
#endif

/* hamming.c */
KERNEL(kvd_sign_codes);
KERNEL(kvd_hamming);

/* topk.c */
KERNEL(kvd_top_k);

/* regroup.c */
KERNEL(kvd_regroup);
KERNEL(kvd_zero);

/* blocks.c */
KERNEL(kvd_encode_bfp);
KERNEL(kvd_decode_bfp);

#endif

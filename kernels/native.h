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
#define AVX2 __attribute__((target("avx2")))
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

/* ---------------------------------------------------------------- compressing */

#if HAVE_AVX2
/* Of each set of lanes the lanes, ascending: native.c fills it when the module is imported. */
extern uint8_t kvd_compress[256][8];
#endif

/* ---------------------------------------------------------------- topk.c */

extern const char kvd_top_k_doc[];
PyObject *kvd_top_k(PyObject *self, PyObject *args);

/* ---------------------------------------------------------------- regroup.c */

extern const char kvd_regroup_doc[], kvd_zero_doc[];
PyObject *kvd_regroup(PyObject *self, PyObject *args);
PyObject *kvd_zero(PyObject *self, PyObject *args);

/* ---------------------------------------------------------------- blocks.c */

extern const char kvd_encode_bfp_doc[], kvd_decode_bfp_doc[];
PyObject *kvd_encode_bfp(PyObject *self, PyObject *args);
PyObject *kvd_decode_bfp(PyObject *self, PyObject *args);

#endif

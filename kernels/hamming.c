/* Hash codes in C: making them of keys, and comparing them; a part of kvd_kernels._native, whose contract is in native.c.
 *
 * A code must not depend on the machine or on how many keys are hashed at a time: two ends compare them, and a bit that
 * rounding tips makes another selection. So each sum is taken in the order of the dimensions, with every product and sum
 * rounded to a float by itself. Lanes are bits of the code, so vectors change nothing about that; fused multiply-add would,
 * and setup passes -ffp-contract=off against compilers that fuse by themselves.
 */
#include "native.h"

#define RELEASE_WORK ((size_t)64 << 10) /* steps of a few to the nanosecond: see RELEASE_BYTES */
#define WORD_BITS 64

/* ---------------------------------------------------------------- making codes */

typedef struct {
    const float *x, *w;
    unsigned char *out;
    size_t n, dim, bits;
} Hash;

static void hash_baseline(const Hash *h)
{
    for (size_t i = 0; i < h->n; i++) {
        const float *x = h->x + i * h->dim;
        unsigned char *out = h->out + i * (h->bits / 8);
        for (size_t first = 0; first < h->bits; first += WORD_BITS) {
            float sum[WORD_BITS] = {0};
            for (size_t d = 0; d < h->dim; d++) {
                const float *w = h->w + d * h->bits + first;
                for (size_t b = 0; b < WORD_BITS; b++) sum[b] += x[d] * w[b];
            }
            for (size_t byte = 0; byte < WORD_BITS / 8; byte++) {
                unsigned code = 0;
                for (size_t b = 0; b < 8; b++) code |= (unsigned)(sum[byte * 8 + b] > 0) << b;
                out[first / 8 + byte] = (unsigned char)code;
            }
        }
    }
}

#if HAVE_AVX2
AVX2 static void hash_avx2(const Hash *h)
{
    const __m256 zero = _mm256_setzero_ps();
    for (size_t i = 0; i < h->n; i++) {
        const float *x = h->x + i * h->dim;
        unsigned char *out = h->out + i * (h->bits / 8);
        for (size_t first = 0; first < h->bits; first += WORD_BITS) {
            __m256 sum[8] = {zero, zero, zero, zero, zero, zero, zero, zero};
            const float *w = h->w + first;
            for (size_t d = 0; d < h->dim; d++, w += h->bits) {
                __m256 value = _mm256_set1_ps(x[d]);
                for (size_t lane = 0; lane < 8; lane++)
                    sum[lane] = _mm256_add_ps(sum[lane], _mm256_mul_ps(value, _mm256_loadu_ps(w + 8 * lane)));
            }
            for (size_t lane = 0; lane < 8; lane++)
                out[first / 8 + lane] = (unsigned char)_mm256_movemask_ps(_mm256_cmp_ps(sum[lane], zero, _CMP_GT_OQ));
        }
    }
}
#endif

const char kvd_sign_codes_doc[] = "sign_codes(avx2, x, w, n, dim, bits, out)\n\n"
                                  "Bit b of out[i] is set where the sum over d of x[i, d] * w[d, b] is above 0.";

PyObject *kvd_sign_codes(PyObject *self, PyObject *args)
{
    int avx2;
    Py_ssize_t n, dim, bits;
    Py_buffer x, w, out;
    if (!PyArg_ParseTuple(args, "py*y*nnnw*", &avx2, &x, &w, &n, &dim, &bits, &out)) return NULL;
    int sound = n >= 0 && dim > 0 && bits > 0 && bits % WORD_BITS == 0 && n <= PY_SSIZE_T_MAX / 4 / dim &&
                dim <= PY_SSIZE_T_MAX / 4 / bits && x.len == 4 * n * dim && w.len == 4 * dim * bits &&
                out.len % (bits / 8) == 0 && out.len / (bits / 8) == n;
    if (sound) {
        Hash h = {.x = x.buf, .w = w.buf, .out = out.buf, .n = (size_t)n, .dim = (size_t)dim, .bits = (size_t)bits};
        PyThreadState *thread_state = (size_t)n * h.dim >= RELEASE_WORK / h.bits ? PyEval_SaveThread() : NULL;
#if HAVE_AVX2
        if (avx2) hash_avx2(&h);
        else
#endif
            hash_baseline(&h);
        if (thread_state != NULL) PyEval_RestoreThread(thread_state);
    }
    PyBuffer_Release(&x);
    PyBuffer_Release(&w);
    PyBuffer_Release(&out);
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "sign_codes: the buffers' sizes do not fit each other; call kvd_kernels.sign_codes");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------- comparing codes */

typedef struct {
    const unsigned char *q, *k;
    int32_t *out;
    size_t rows, group, tokens, bytes;
} Compare;

static inline uint64_t word_at(const unsigned char *p)
{
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

/* For processors whose population count is not known to be there. */
static inline int32_t bits_of(uint64_t v)
{
    v -= v >> 1 & UINT64_C(0x5555555555555555);
    v = (v & UINT64_C(0x3333333333333333)) + (v >> 2 & UINT64_C(0x3333333333333333));
    v = (v + (v >> 4)) & UINT64_C(0x0f0f0f0f0f0f0f0f);
    return (int32_t)(v * UINT64_C(0x0101010101010101) >> 56);
}

#define COMPARE_BODY(COUNT)                                                               \
    for (size_t r = 0; r < c->rows; r++) {                                                \
        const unsigned char *q = c->q + r * c->group * c->bytes;                          \
        const unsigned char *k = c->k + r * c->tokens * c->bytes;                         \
        for (size_t t = 0; t < c->tokens; t++, k += c->bytes) {                           \
            int32_t sum = 0;                                                              \
            for (size_t g = 0; g < c->group; g++)                                         \
                for (size_t i = 0; i < c->bytes; i += 8)                                  \
                    sum += (int32_t)COUNT(word_at(q + g * c->bytes + i) ^ word_at(k + i)); \
            c->out[r * c->tokens + t] = sum;                                              \
        }                                                                                 \
    }

static void compare_baseline(const Compare *c) { COMPARE_BODY(bits_of) }

#if HAVE_AVX2
AVX2 static void compare_popcnt(const Compare *c) { COMPARE_BODY(_mm_popcnt_u64) }

/* Codes of whole vectors: counts of nibbles from a table, added up by bytes while they can't overflow. */
AVX2 static void compare_avx2(const Compare *c)
{
    const __m256i table = _mm256_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4, 0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3,
                                           2, 3, 3, 4);
    const __m256i low = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
    for (size_t r = 0; r < c->rows; r++) {
        const unsigned char *q = c->q + r * c->group * c->bytes, *k = c->k + r * c->tokens * c->bytes;
        for (size_t t = 0; t < c->tokens; t++, k += c->bytes) {
            __m256i sum = zero, bytes = zero;
            unsigned added = 0;
            for (size_t g = 0; g < c->group; g++)
                for (size_t i = 0; i < c->bytes; i += 32) {
                    __m256i differ = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)(q + g * c->bytes + i)),
                                                      _mm256_loadu_si256((const __m256i *)(k + i)));
                    __m256i a = _mm256_shuffle_epi8(table, _mm256_and_si256(differ, low));
                    __m256i b = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(differ, 4), low));
                    bytes = _mm256_add_epi8(bytes, _mm256_add_epi8(a, b));
                    if (++added == 31) { /* 31 * 8 is the most that a byte holds */
                        sum = _mm256_add_epi64(sum, _mm256_sad_epu8(bytes, zero));
                        bytes = zero;
                        added = 0;
                    }
                }
            sum = _mm256_add_epi64(sum, _mm256_sad_epu8(bytes, zero));
            __m128i half = _mm_add_epi64(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
            c->out[r * c->tokens + t] = (int32_t)(_mm_cvtsi128_si64(half) + _mm_extract_epi64(half, 1));
        }
    }
}
#endif

const char kvd_hamming_doc[] = "hamming(avx2, q, k, rows, group, tokens, bytes, out)\n\n"
                               "out[r, t] = the sum over g of the bits in which q[r, g] and k[r, t] differ.";

PyObject *kvd_hamming(PyObject *self, PyObject *args)
{
    int avx2;
    Py_ssize_t rows, group, tokens, bytes;
    Py_buffer q, k, out;
    if (!PyArg_ParseTuple(args, "py*y*nnnnw*", &avx2, &q, &k, &rows, &group, &tokens, &bytes, &out)) return NULL;
    int sound = rows >= 0 && group > 0 && tokens >= 0 && bytes > 0 && bytes % 8 == 0 && bytes <= INT32_MAX / 8 / group &&
                (rows == 0 || (group * bytes <= PY_SSIZE_T_MAX / rows && tokens <= PY_SSIZE_T_MAX / bytes / rows &&
                               tokens <= PY_SSIZE_T_MAX / 4 / rows)) &&
                q.len == rows * group * bytes && k.len == rows * tokens * bytes && out.len == rows * tokens * 4;
    if (sound) {
        Compare c = {.q = q.buf, .k = k.buf, .out = out.buf, .rows = (size_t)rows, .group = (size_t)group,
                     .tokens = (size_t)tokens, .bytes = (size_t)bytes};
        PyThreadState *thread_state = (size_t)k.len * c.group >= RELEASE_WORK * 4 ? PyEval_SaveThread() : NULL;
#if HAVE_AVX2
        if (avx2 && bytes % 32 == 0) compare_avx2(&c);
        else if (avx2) compare_popcnt(&c);
        else
#endif
            compare_baseline(&c);
        if (thread_state != NULL) PyEval_RestoreThread(thread_state);
    }
    PyBuffer_Release(&q);
    PyBuffer_Release(&k);
    PyBuffer_Release(&out);
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "hamming: the buffers' sizes do not fit each other; call kvd_kernels.hamming");
        return NULL;
    }
    Py_RETURN_NONE;
}

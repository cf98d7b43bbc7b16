/* The highest scores of each row in C; a part of kvd_kernels._native, whose contract is in native.c.
 *
 * Scores become integers of the same order, and the k-th highest is found bit by bit: how many are at least that? Each
 * question is one pass of comparisons over the row, which vectors do eight at a time, from the first bit in which the row's
 * scores differ to the last, or until the answer is k: a dozen passes, whatever k is and however the scores are spread.
 * Digits counted in a table take fewer passes, but many scores share a digit, and then each waits for the one before it:
 * three times slower here.
 */
#include "native.h"

#define RELEASE_SCORES ((size_t)32 << 10) /* of about a nanosecond each: see RELEASE_BYTES in native.c */
#define LANES 8
#define LOWEST INT32_C(-2139095041) /* minus infinity's key */

/* Keys of one row; `n` is a multiple of LANES, those behind the row's end are INT32_MIN, which no score has. */
typedef struct {
    int32_t *keys, least, greatest;
    size_t n;
} Row;

/* Minus zero and zero alike; not a number as minus infinity. */
static inline int32_t key_of(float score)
{
    int32_t bits;
    score += 0.0f;
    memcpy(&bits, &score, 4);
    int32_t key = bits < 0 ? bits ^ INT32_MAX : bits;
    return score == score ? key : LOWEST;
}

static void read_baseline(Row *row, const float *scores, size_t n)
{
    row->least = INT32_MAX;
    row->greatest = INT32_MIN;
    for (size_t i = 0; i < n; i++) {
        int32_t key = row->keys[i] = key_of(scores[i]);
        if (key < row->least) row->least = key;
        if (key > row->greatest) row->greatest = key;
    }
}

static size_t count_baseline(const Row *row, int32_t from)
{
    uint32_t counts[LANES] = {0};
    for (size_t i = 0; i < row->n; i += LANES)
        for (size_t lane = 0; lane < LANES; lane++) counts[lane] += row->keys[i + lane] >= from;
    size_t sum = 0;
    for (size_t lane = 0; lane < LANES; lane++) sum += counts[lane];
    return sum;
}

#if HAVE_AVX2
AVX2 static void read_avx2(Row *row, const float *scores, size_t n)
{
    const __m256i sign = _mm256_set1_epi32(INT32_MAX);
    __m256i least = sign, greatest = _mm256_set1_epi32(INT32_MIN);
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m256 score = _mm256_add_ps(_mm256_loadu_ps(scores + i), _mm256_setzero_ps());
        __m256i bits = _mm256_castps_si256(score);
        __m256i key = _mm256_xor_si256(bits, _mm256_and_si256(_mm256_srai_epi32(bits, 31), sign));
        __m256i none = _mm256_castps_si256(_mm256_cmp_ps(score, score, _CMP_UNORD_Q));
        key = _mm256_blendv_epi8(key, _mm256_set1_epi32(LOWEST), none);
        _mm256_storeu_si256((__m256i *)(row->keys + i), key);
        least = _mm256_min_epi32(least, key);
        greatest = _mm256_max_epi32(greatest, key);
    }
    int32_t ends[2 * LANES];
    _mm256_storeu_si256((__m256i *)ends, least);
    _mm256_storeu_si256((__m256i *)(ends + LANES), greatest);
    Row rest = {.keys = row->keys + i};
    read_baseline(&rest, scores + i, n - i);
    for (size_t lane = 0; lane < LANES; lane++) {
        if (ends[lane] < rest.least) rest.least = ends[lane];
        if (ends[LANES + lane] > rest.greatest) rest.greatest = ends[LANES + lane];
    }
    row->least = rest.least;
    row->greatest = rest.greatest;
}

AVX2 static size_t count_avx2(const Row *row, int32_t from)
{
    const __m256i below = _mm256_set1_epi32(from - 1); /* from is above INT32_MIN */
    __m256i sum = _mm256_setzero_si256();
    for (size_t i = 0; i < row->n; i += LANES)
        sum = _mm256_sub_epi32(sum, _mm256_cmpgt_epi32(_mm256_loadu_si256((const __m256i *)(row->keys + i)), below));
    uint32_t counts[LANES];
    _mm256_storeu_si256((__m256i *)counts, sum);
    size_t all = 0;
    for (size_t lane = 0; lane < LANES; lane++) all += counts[lane];
    return all;
}
#endif

static inline size_t count(int avx2, const Row *row, int32_t from)
{
#if HAVE_AVX2
    if (avx2) return count_avx2(row, from);
#endif
    (void)avx2;
    return count_baseline(row, from);
}

/* The least key of the k highest; `*level` becomes how many of that very key are among them. */
static int32_t threshold(int avx2, const Row *row, size_t k, size_t *level)
{
    const uint32_t offset = UINT32_C(1) << 31; /* keys as unsigned numbers of the same order */
    uint32_t low = (uint32_t)row->least ^ offset, differ = low ^ ((uint32_t)row->greatest ^ offset);
    int bits = 0;
    while (bits < 32 && differ >> bits) bits++;
    uint32_t found = bits == 32 ? 0 : low >> bits << bits;
    *level = SIZE_MAX;
    for (int bit = bits - 1; bit >= 0; bit--) {
        uint32_t asked = found | UINT32_C(1) << bit;
        size_t n = count(avx2, row, (int32_t)(asked ^ offset));
        if (n < k) continue;
        found = asked;
        if (n == k) return (int32_t)(found ^ offset);
    }
    int32_t least = (int32_t)(found ^ offset);
    *level = k - (least == INT32_MAX ? 0 : count(avx2, row, least + 1));
    return least;
}

#if HAVE_AVX2
/* As `take` does from token t on, in whole vectors, as long as `out` has room for one and, where equal keys count, each of
 * a vector's may be one. */
AVX2 static size_t take_avx2(const Row *row, int32_t least, size_t want, size_t *made, size_t *level, size_t t, int32_t *out)
{
    const __m256i limit = _mm256_set1_epi32(least), lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (; t < row->n && *made + LANES <= want && (*level == 0 || *level >= LANES); t += LANES) {
        __m256i keys = _mm256_loadu_si256((const __m256i *)(row->keys + t));
        unsigned above = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(keys, limit)));
        if (*level) {
            unsigned equal = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(keys, limit)));
            *level -= (size_t)__builtin_popcount(equal);
            above |= equal;
        }
        __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)kvd_compress[above]));
        __m256i tokens = _mm256_permutevar8x32_epi32(_mm256_add_epi32(lanes, _mm256_set1_epi32((int32_t)t)), order);
        _mm256_storeu_si256((__m256i *)(out + *made), tokens);
        *made += (size_t)__builtin_popcount(above);
    }
    return t;
}
#endif

/* The first `want` tokens above `least`, of those at it the first `level`. */
static void take(int avx2, const Row *row, int32_t least, size_t want, size_t level, int32_t *out)
{
    size_t made = 0, t = 0;
    while (made < want) {
#if HAVE_AVX2
        if (avx2) t = take_avx2(row, least, want, &made, &level, t, out);
#endif
        for (size_t end = t + LANES; made < want && t < end; t++) {
            size_t equal = (row->keys[t] == least) & (level > 0);
            out[made] = (int32_t)t;
            made += (row->keys[t] > least) | equal;
            level -= equal;
        }
    }
    (void)avx2;
}

/* Of the first n scores the last and the k - 1 best of those before it, ascending. `keys` has room for n + LANES. */
static void choose(int avx2, const float *scores, size_t n, size_t k, int32_t *keys, int32_t *out)
{
    size_t before = n - 1, level;
    if (k > 1) {
        Row row = {.keys = keys, .n = (before + LANES - 1) / LANES * LANES};
#if HAVE_AVX2
        if (avx2) read_avx2(&row, scores, before);
        else
#endif
            read_baseline(&row, scores, before);
        for (size_t i = before; i < row.n; i++) keys[i] = INT32_MIN;
        int32_t least = threshold(avx2, &row, k - 1, &level);
        take(avx2, &row, least, k - 1, level, out);
    }
    out[k - 1] = (int32_t)before;
}

const char kvd_top_k_doc[] = "top_k(avx2, scores, lengths, k, rows, tokens, width, out) -> int\n\n"
                             "out[r] = of the first lengths[r] scores of row r the last and the k[r] - 1 best others, "
                             "ascending, -1 behind them; the first row whose length or k makes no sense, or -1.";

PyObject *kvd_top_k(PyObject *self, PyObject *args)
{
    int avx2;
    Py_ssize_t rows, tokens, width, bad = -1;
    Py_buffer scores, lengths, k, out;
    if (!PyArg_ParseTuple(args, "py*y*y*nnnw*", &avx2, &scores, &lengths, &k, &rows, &tokens, &width, &out)) return NULL;
    int sound = rows >= 0 && tokens >= 0 && width >= 0 && tokens <= INT32_MAX && width <= tokens &&
                (rows == 0 || tokens <= PY_SSIZE_T_MAX / 8 / rows) && scores.len == 4 * rows * tokens &&
                lengths.len == 8 * rows && k.len == 8 * rows && out.len == 4 * rows * width;
    int32_t *keys = sound ? PyMem_RawMalloc(4 * ((size_t)tokens + LANES)) : NULL;
    if (keys != NULL) {
        PyThreadState *thread_state = (size_t)rows * (size_t)tokens >= RELEASE_SCORES ? PyEval_SaveThread() : NULL;
        for (Py_ssize_t r = 0; r < rows && bad < 0; r++) {
            int64_t n = ((const int64_t *)lengths.buf)[r], most = ((const int64_t *)k.buf)[r];
            int32_t *row = (int32_t *)out.buf + r * width;
            if (most < 1 || most > width || n < most || n > tokens) {
                bad = r;
                break;
            }
            choose(avx2, (const float *)scores.buf + r * tokens, (size_t)n, (size_t)most, keys, row);
            for (Py_ssize_t i = (Py_ssize_t)most; i < width; i++) row[i] = -1;
        }
        if (thread_state != NULL) PyEval_RestoreThread(thread_state);
        PyMem_RawFree(keys);
    }
    PyBuffer_Release(&scores);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&k);
    PyBuffer_Release(&out);
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "top_k: the buffers' sizes do not fit each other; call kvd_kernels.top_k");
        return NULL;
    }
    if (keys == NULL) return PyErr_NoMemory();
    return PyLong_FromSsize_t(bad);
}

/* What is made of KV indices: their split by mask, the entries that they name, and how often each part is named. */
#include "index.h"

/* ---------------------------------------------------------------- partition */

/* The position of the first entry of a row that is refused. */
static Py_ssize_t row_refused(const int32_t *index, const int8_t *mask, size_t k, size_t tokens)
{
    for (size_t j = 0; j < k; j++) {
        size_t t = (size_t)(int64_t)LOAD(index + j);
        if (t >= tokens || (uint8_t)(LOAD(mask + t) - 1) > 1) return (Py_ssize_t)j;
    }
    return (Py_ssize_t)k; /* changed meanwhile: it was refused, and it is no more */
}

/* One row: entries with mask 2 to the front of `out`, the others to `local`, which is appended. Both have 8 entries more than
 * the row, since the AVX2 version stores whole vectors. Returns whether an entry is refused.
 *
 * The padding byte is tested as (mask - 1) > 1, unsigned: only 1 and 2 pass. An index out of range reads mask[0] instead. */
static int partition_row_baseline(const int32_t *index, const int8_t *mask, size_t k, size_t tokens, int32_t *out,
                                  int32_t *local, int32_t *count)
{
    size_t remote = 0, near = 0;
    unsigned bad = 0;
    for (size_t j = 0; j < k; j++) {
        int32_t v = LOAD(index + j);
        unsigned outside = (uint32_t)v >= tokens;
        uint8_t m = (uint8_t)LOAD(mask + (outside ? 0 : (uint32_t)v));
        bad |= outside | ((uint8_t)(m - 1) > 1);
        /* Both stores always, one of them to be overwritten: which lane an entry takes is not predictable. */
        out[remote] = v;
        local[near] = v;
        remote += m == 2;
        near += m != 2;
    }
    memcpy(out + remote, local, near * sizeof(int32_t));
    *count = (int32_t)remote;
    return bad != 0;
}

#if HAVE_AVX2
/* For each of 256 sets of lanes: the lanes of the set in order, then anything. Filled when the module is loaded. */
uint8_t kvd_compress[256][8];

void kvd_fill_compress(void)
{
    for (int set = 0; set < 256; set++)
        for (int lane = 0, n = 0; lane < 8; lane++)
            if (set >> lane & 1) kvd_compress[set][n++] = (uint8_t)lane;
}

AVX2 static inline void store_lanes(int32_t *at, __m256i v, unsigned set)
{
    __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)kvd_compress[set]));
    _mm256_storeu_si256((__m256i *)at, _mm256_permutevar8x32_epi32(v, lanes));
}

AVX2 static int partition_row_avx2(const int32_t *index, const int8_t *mask, size_t k, size_t tokens, int32_t *out,
                                   int32_t *local, int32_t *count)
{
    size_t remote = 0, near = 0, j = 0;
    __m256i bad = _mm256_setzero_si256();
    const __m256i last = _mm256_set1_epi32((int32_t)tokens - 1), last_word = _mm256_set1_epi32((int32_t)tokens - 4);
    const __m256i one = _mm256_set1_epi32(1), two = _mm256_set1_epi32(2), byte = _mm256_set1_epi32(0xff);
    if (tokens >= 4) { /* a lane reads four mask bytes at once: never beyond the row's last */
        for (; j + 8 <= k; j += 8) {
            __m256i v = _mm256_loadu_si256((const __m256i *)(index + j));
            __m256i t = _mm256_min_epu32(v, last); /* unsigned: negative ones become the last token, and differ from v */
            __m256i word = _mm256_min_epu32(t, last_word);
            __m256i shift = _mm256_slli_epi32(_mm256_sub_epi32(t, word), 3);
            __m256i m = _mm256_i32gather_epi32((const int *)mask, word, 1);
            m = _mm256_and_si256(_mm256_srlv_epi32(m, shift), byte);
            __m256i is_remote = _mm256_cmpeq_epi32(m, two);
            __m256i good = _mm256_and_si256(_mm256_or_si256(is_remote, _mm256_cmpeq_epi32(m, one)), _mm256_cmpeq_epi32(v, t));
            bad = _mm256_or_si256(bad, _mm256_xor_si256(good, _mm256_set1_epi32(-1)));
            unsigned set = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(is_remote));
            store_lanes(out + remote, v, set);
            store_lanes(local + near, v, ~set & 0xff);
            unsigned n = (unsigned)__builtin_popcount(set);
            remote += n;
            near += 8 - n;
        }
    }
    unsigned tail_bad = 0;
    for (; j < k; j++) {
        int32_t v = LOAD(index + j);
        unsigned outside = (uint32_t)v >= tokens;
        uint8_t m = (uint8_t)LOAD(mask + (outside ? 0 : (uint32_t)v));
        tail_bad |= outside | ((uint8_t)(m - 1) > 1);
        out[remote] = v;
        local[near] = v;
        remote += m == 2;
        near += m != 2;
    }
    memcpy(out + remote, local, near * sizeof(int32_t));
    *count = (int32_t)remote;
    return tail_bad || !_mm256_testz_si256(bad, bad);
}
#endif

const char kvd_partition_doc[] = "partition(avx2, index, mask, batch, heads, out, counts) -> int";

PyObject *kvd_partition(PyObject *self, PyObject *args)
{
    int avx2;
    Py_ssize_t batch, heads, bad = -1;
    Py_buffer index, mask, out, counts;
    int32_t *scratch = NULL;
    if (!PyArg_ParseTuple(args, "py*y*nnw*w*", &avx2, &index, &mask, &batch, &heads, &out, &counts)) return NULL;
    /* Shapes come from the buffers, so that nothing can be multiplied into an overflow. */
    Py_ssize_t rows = counts.len / 4, n = index.len / 4;
    int sound = batch > 0 && heads > 0 && rows > 0 && counts.len % 4 == 0 && rows % batch == 0 && rows / batch == heads &&
                index.len % 4 == 0 && n % rows == 0 && out.len == index.len && mask.len % batch == 0 &&
                mask.len / batch <= INT32_MAX && (mask.len > 0 || n == 0);
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "partition: the buffers' sizes do not fit each other; call kvd_kernels.partition");
    } else if (n > 0) {
        size_t k = (size_t)(n / rows), tokens = (size_t)(mask.len / batch);
        /* The result is made aside: it is handed over only when every row is sound, and `out` may be `index` itself. */
        scratch = PyMem_RawMalloc(((size_t)n + 8 + k + 8 + (size_t)rows) * sizeof(int32_t));
        if (scratch == NULL) {
            sound = 0;
            PyErr_NoMemory();
        } else {
            int32_t *result = scratch, *local = result + n + 8, *remote = local + k + 8;
            BEGIN_WORK((size_t)n >= RELEASE_ENTRIES);
            for (size_t r = 0; r < (size_t)rows; r++) {
                const int32_t *row = (const int32_t *)index.buf + r * k;
                const int8_t *row_mask = (const int8_t *)mask.buf + r / (size_t)heads * tokens;
                int refused;
#if HAVE_AVX2
                if (avx2) refused = partition_row_avx2(row, row_mask, k, tokens, result + r * k, local, remote + r);
                else
#endif
                refused = partition_row_baseline(row, row_mask, k, tokens, result + r * k, local, remote + r);
                if (refused) {
                    size_t at = (size_t)row_refused(row, row_mask, k, tokens);
                    bad = (Py_ssize_t)(r * k + (at < k ? at : 0));
                    break;
                }
            }
            if (bad < 0) {
                memcpy(out.buf, result, (size_t)n * sizeof(int32_t));
                memcpy(counts.buf, remote, (size_t)rows * sizeof(int32_t));
            }
            END_WORK();
        }
    } else {
        memset(counts.buf, 0, (size_t)counts.len);
    }
    PyMem_RawFree(scratch);
    PyBuffer_Release(&index);
    PyBuffer_Release(&mask);
    PyBuffer_Release(&out);
    PyBuffer_Release(&counts);
    return sound ? PyLong_FromSsize_t(bad) : NULL;
}

/* ---------------------------------------------------------------- token_entries */

const char kvd_token_entries_doc[] = "token_entries(avx2, index, rows, tokens, heads, out) -> int";

PyObject *kvd_token_entries(PyObject *self, PyObject *args)
{
    int avx2;
    Py_ssize_t rows, tokens, heads, bad = -1;
    Py_buffer index, out;
    if (!PyArg_ParseTuple(args, "py*nnnw*", &avx2, &index, &rows, &tokens, &heads, &out)) return NULL;
    (void)avx2; /* the compiler does as well */
    Py_ssize_t n = index.len / 4;
    int sound = rows > 0 && heads > 0 && tokens >= 0 && tokens <= INT32_MAX && index.len % 4 == 0 && n % rows == 0 &&
                out.len % 8 == 0 && out.len / 8 == n && rows % heads == 0;
    if (sound) {
        size_t k = (size_t)(n / rows);
        const int32_t *values = index.buf;
        int64_t *result = out.buf;
        Index all = {.values = values, .width = 4, .limit = (size_t)tokens};
        BEGIN_WORK((size_t)n >= 2 * RELEASE_ENTRIES);
        bad = first_refused(&all, (size_t)n);
        if (bad < 0)
            for (size_t r = 0; r < (size_t)rows; r++) {
                uint64_t h = (uint64_t)heads, base = (uint64_t)r / h * (uint64_t)tokens * h + (uint64_t)r % h;
                unsigned changed = 0; /* checked again, or a value changed meanwhile could name another sequence's entry */
                for (size_t j = 0; j < k; j++) {
                    uint32_t t = (uint32_t)LOAD(values + r * k + j);
                    changed |= t >= (uint64_t)tokens;
                    result[r * k + j] = (int64_t)(base + t * h);
                }
                if (changed) {
                    bad = (Py_ssize_t)(r * k);
                    break;
                }
            }
        END_WORK();
    }
    PyBuffer_Release(&index);
    PyBuffer_Release(&out);
    if (!sound) {
        PyErr_SetString(PyExc_ValueError,
                        "token_entries: the buffers' sizes do not fit each other; call kvd_kernels.token_entries");
        return NULL;
    }
    return PyLong_FromSsize_t(bad);
}

/* ---------------------------------------------------------------- accumulate */

/* Dividing by the same length again and again: a multiplication instead, exact while a * length < 2^64 for every a. */
typedef struct {
    uint64_t length, magic;
} Divisor;

static inline uint64_t divide(uint64_t a, const Divisor *d)
{
#ifdef __SIZEOF_INT128__
    if (d->magic) return (uint64_t)(((unsigned __int128)a * d->magic) >> 64);
#endif
    return a / d->length;
}

typedef struct {
    const int32_t *index;
    size_t rows, k, sequences, cells, stride;
    const int64_t *starts, *lengths;
    void *counts;
    int is_float, skip_beyond;
} Count;

static Divisor divisor_for(const Count *c, uint64_t length)
{
    Divisor d = {.length = length, .magic = 0};
    /* a < length * cells */
    if (length > 1 && length < ((uint64_t)1 << 31) && c->cells < UINT64_MAX / length / length)
        d.magic = UINT64_MAX / length + 1; /* = floor((2^64 - 1) / length) + 1, above 2^64 / length by less than 1 */
    return d;
}

/* 0: count it in *cell; 1: skip it; 2: refuse it */
static inline int cell_of(const Count *c, int32_t value, int64_t start, const Divisor *d, uint64_t *cell)
{
    uint64_t t = (uint64_t)((int64_t)value - start);
    if (value < 0 || (int64_t)t < 0) return 2;
    if (t >= d->length) return c->skip_beyond ? 1 : 2;
    *cell = d->length == c->cells ? t : divide(t * c->cells, d);
    return 0;
}

static Py_ssize_t count_refused(const Count *c)
{
    for (size_t r = 0; r < c->rows; r++) {
        size_t s = r / (c->rows / c->sequences);
        int64_t start = c->starts[s], end = start + c->lengths[s];
        const int32_t *row = c->index + r * c->k;
        int bad = 0;
        for (size_t j = 0; j < c->k; j++) {
            bad |= row[j] < start;
            bad |= (row[j] >= end) & !c->skip_beyond;
        }
        if (bad)
            for (size_t j = 0; j < c->k; j++)
                if (row[j] < start || (row[j] >= end && !c->skip_beyond)) return (Py_ssize_t)(r * c->k + j);
    }
    return -1;
}

static Py_ssize_t count_all(const Count *c)
{
    for (size_t r = 0; r < c->rows; r++) {
        size_t s = r / (c->rows / c->sequences);
        Divisor d = divisor_for(c, (uint64_t)c->lengths[s]);
        double *as_float = (double *)c->counts + s * c->stride;
        uint64_t *as_int = (uint64_t *)c->counts + s * c->stride;
        for (size_t j = 0; j < c->k; j++) {
            uint64_t cell;
            int what = cell_of(c, LOAD(c->index + r * c->k + j), c->starts[s], &d, &cell);
            if (what == 2 || (what == 0 && cell >= c->cells)) return (Py_ssize_t)(r * c->k + j);
            if (what == 1) continue;
            if (c->is_float) as_float[cell] += 1.0;
            else as_int[cell] += 1;
        }
    }
    return -1;
}

const char kvd_accumulate_doc[] =
    "accumulate(avx2, index, rows, starts, lengths, cells, shared, is_float, skip_beyond, counts) -> int\n\n"
    "counts[sequence, (t - start) * cells // length] += 1 for every t of the index.";

PyObject *kvd_accumulate(PyObject *self, PyObject *args)
{
    int avx2, shared, is_float, skip_beyond;
    Py_ssize_t rows, cells, bad = -1;
    Py_buffer index, starts, lengths, counts;
    if (!PyArg_ParseTuple(args, "py*ny*y*npppw*", &avx2, &index, &rows, &starts, &lengths, &cells, &shared, &is_float,
                          &skip_beyond, &counts))
        return NULL;
    (void)avx2; /* a histogram does not vectorise */
    Py_ssize_t n = index.len / 4, sequences = starts.len / 8, arrays = shared ? 1 : sequences;
    int sound = rows > 0 && sequences > 0 && cells > 0 && cells <= INT32_MAX && starts.len == lengths.len &&
                starts.len % 8 == 0 && rows % sequences == 0 && index.len % 4 == 0 && n % rows == 0 &&
                counts.len % 8 == 0 && counts.len / 8 % arrays == 0 && counts.len / 8 / arrays == cells;
    for (Py_ssize_t s = 0; sound && s < sequences; s++) {
        int64_t start = ((const int64_t *)starts.buf)[s], length = ((const int64_t *)lengths.buf)[s];
        sound = start >= 0 && start <= INT32_MAX && length > 0 && length <= INT32_MAX;
    }
    if (sound) {
        Count c = {.index = index.buf, .rows = (size_t)rows, .k = (size_t)(n / rows), .sequences = (size_t)sequences,
                   .cells = (size_t)cells, .stride = shared ? 0 : (size_t)cells, .starts = starts.buf,
                   .lengths = lengths.buf, .counts = counts.buf, .is_float = is_float, .skip_beyond = skip_beyond};
        BEGIN_WORK((size_t)n >= RELEASE_ENTRIES);
        bad = count_refused(&c);
        if (bad < 0) bad = count_all(&c);
        END_WORK();
    }
    PyBuffer_Release(&index);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&lengths);
    PyBuffer_Release(&counts);
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "accumulate: the buffers' sizes do not fit each other; call kvd_kernels.accumulate");
        return NULL;
    }
    return PyLong_FromSsize_t(bad);
}

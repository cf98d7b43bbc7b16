/* The kernels of kvd in C: kvd_kernels._native.
 *
 * The contract, the same for every function here and for kernels/reference.py, which defines the results:
 *
 *   - arguments are contiguous buffers, checked for type and shape by kernels/ops.py; sizes are checked here again, since a
 *     wrong one would reach outside of memory;
 *   - the first argument says whether AVX2 may be used (the caller asks has_avx2() once);
 *   - the result is -1 when the work is done, or the flat position of the first entry that is refused, and then nothing has
 *     been written.
 *
 * Indices, descriptors and masks often live in memory that another process, or a NIC, writes at the same time. So checking
 * first and trusting later is not enough: every such value is read exactly once where it is used (atomic loads), and it is
 * checked there again. A caller who changes an index under our feet gets a refusal with some rows already written, but never
 * an access outside of the buffers.
 *
 * AVX2 code is compiled through target attributes, so that plain `cc` builds this file for every x86-64 and for aarch64.
 */
#include "native.h"

/* How far ahead of the copy rows are prefetched, and the most of one row that is. */
#define PREFETCH_BYTES ((size_t)8 << 10)
#define PREFETCH_ROWS_MAX ((size_t)32)
#define PREFETCH_ROW_BYTES ((size_t)1 << 10)

/* ---------------------------------------------------------------- indices */

/* An index array, or none: then entry i is i itself. */
typedef struct {
    const void *values;
    int width; /* bytes of one value: 4, 8, or 0 for none */
    size_t limit;
} Index;

/* Negative values come out as huge ones, so that one comparison with the limit refuses both. */
static inline size_t index_at(const Index *index, size_t i)
{
    if (index->width == 4) return (size_t)(int64_t)LOAD((const int32_t *)index->values + i);
    if (index->width == 8) return (size_t)LOAD((const int64_t *)index->values + i);
    return i;
}

/* The position of the first value that is out of range, or -1. */
static Py_ssize_t first_refused(const Index *index, size_t n)
{
    for (size_t start = 0; start < n; start += 256) {
        size_t end = n - start < 256 ? n : start + 256;
        int bad = 0;
        if (index->width == 4 && index->limit <= INT32_MAX) {
            const uint32_t *v = (const uint32_t *)index->values;
            uint32_t limit = (uint32_t)index->limit;
            for (size_t i = start; i < end; i++) bad |= v[i] >= limit;
        } else {
            for (size_t i = start; i < end; i++) bad |= index_at(index, i) >= index->limit;
        }
        if (bad)
            for (size_t i = start; i < end; i++)
                if (index_at(index, i) >= index->limit) return (Py_ssize_t)i;
    }
    return -1;
}

/* ---------------------------------------------------------------- copying rows */

static inline void prefetch_row(const char *base, size_t offset, size_t bytes)
{
    uintptr_t p = (uintptr_t)base + offset; /* may be outside: then it is a hint about nothing */
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const void *)(p + i), 0, 3);
}

typedef struct {
    char *target;
    const char *source;
    size_t row_bytes, n;
    Index to, from;
} Move;

/* target[to[i]] = source[from[i]], in order. */
#define MOVE_BODY(COPY)                                                                                          \
    const size_t bytes = m->row_bytes, near = bytes < PREFETCH_ROW_BYTES ? bytes : PREFETCH_ROW_BYTES;           \
    size_t ahead = PREFETCH_BYTES / (bytes ? bytes : 1) + 1;                                                     \
    if (ahead > PREFETCH_ROWS_MAX) ahead = PREFETCH_ROWS_MAX;                                                    \
    for (size_t i = 0; i < m->n; i++) {                                                                          \
        if (m->n - i > ahead) prefetch_row(m->source, index_at(&m->from, i + ahead) * bytes, near);              \
        size_t from = index_at(&m->from, i), to = index_at(&m->to, i);                                           \
        if (from >= m->from.limit || to >= m->to.limit) return (Py_ssize_t)i;                                    \
        COPY(m->target + to * bytes, m->source + from * bytes, bytes);                                           \
    }                                                                                                            \
    return -1

static Py_ssize_t move_baseline(const Move *m) { MOVE_BODY(memcpy); }

#if HAVE_AVX2
AVX2 static Py_ssize_t move_stream_rows(const Move *m) { MOVE_BODY(stream_row); }

static Py_ssize_t move_stream(const Move *m)
{
    Py_ssize_t bad = move_stream_rows(m);
    _mm_sfence(); /* whoever is told that the rows are there must see them */
    return bad;
}
#endif

static Py_ssize_t move_rows(const Move *m, int avx2)
{
#if HAVE_AVX2
    /* Scattered rows must fill whole cache lines: a partly written line that is streamed costs more than it saves. */
    size_t unit = m->to.width ? 64 : 32;
    if (avx2 && m->row_bytes * m->n >= STREAM_BYTES && (uintptr_t)m->target % unit == 0 && m->row_bytes % unit == 0)
        return move_stream(m);
#endif
    (void)avx2;
    return move_baseline(m);
}

static int index_from(Index *index, const Py_buffer *buffer, int width, Py_ssize_t limit, size_t n)
{
    index->values = buffer->buf;
    index->width = width;
    index->limit = (size_t)limit;
    if (width == 0) return n <= index->limit;
    return (width == 4 || width == 8) && buffer->len % width == 0 && (size_t)(buffer->len / width) == n;
}

PyDoc_STRVAR(move_doc, "move(avx2, source, entry_bytes, from, from_width, target, to, to_width) -> int\n\n"
                       "target[to[i]] = source[from[i]]; a width of 0 means no index there.\n"
                       "Refusals of `to` are reported as n + position.");

static PyObject *py_move(PyObject *self, PyObject *args)
{
    int avx2, from_width, to_width;
    Py_ssize_t entry_bytes, bad = -1;
    Py_buffer source, from, target, to;
    if (!PyArg_ParseTuple(args, "py*ny*iw*y*i", &avx2, &source, &entry_bytes, &from, &from_width, &target, &to, &to_width))
        return NULL;
    int sound = entry_bytes > 0 && source.len % entry_bytes == 0 && target.len % entry_bytes == 0;
    if (sound) {
        Py_ssize_t rows_in = source.len / entry_bytes, rows_out = target.len / entry_bytes;
        size_t n = from_width ? (size_t)(from.len / (from_width == 4 ? 4 : 8))
                              : to_width ? (size_t)(to.len / (to_width == 4 ? 4 : 8)) : (size_t)rows_in;
        Move m = {.target = target.buf, .source = source.buf, .row_bytes = (size_t)entry_bytes, .n = n};
        sound = index_from(&m.from, &from, from_width, rows_in, n) && index_from(&m.to, &to, to_width, rows_out, n);
        if (sound) {
            BEGIN_WORK(n * m.row_bytes >= RELEASE_BYTES);
            if (from_width) bad = first_refused(&m.from, n);
            if (bad < 0 && to_width) {
                bad = first_refused(&m.to, n);
                if (bad >= 0) bad += (Py_ssize_t)n;
            }
            if (bad < 0) bad = move_rows(&m, avx2);
            END_WORK();
        }
    }
    PyBuffer_Release(&source);
    PyBuffer_Release(&from);
    PyBuffer_Release(&target);
    PyBuffer_Release(&to);
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "move: the buffers' sizes do not fit each other; call kvd_kernels.gather or scatter");
        return NULL;
    }
    return PyLong_FromSsize_t(bad);
}

/* ---------------------------------------------------------------- copying runs */

typedef struct {
    char *target;
    const char *source;
    uint64_t target_bytes, source_bytes;
    const int64_t *descriptors;
    size_t n;
    int overlap;
} Runs;

/* Lengths first: then neither subtraction can wrap, where offset + length could. */
static inline int run_fits(const Runs *r, uint64_t from, uint64_t to, uint64_t bytes)
{
    return bytes <= r->source_bytes && bytes <= r->target_bytes && from <= r->source_bytes - bytes &&
           to <= r->target_bytes - bytes;
}

static Py_ssize_t runs_refused(const Runs *r, uint64_t *total)
{
    *total = 0;
    for (size_t i = 0; i < r->n; i++) {
        const int64_t *d = r->descriptors + 3 * i;
        uint64_t bytes = (uint64_t)LOAD(d + 2);
        if (!run_fits(r, (uint64_t)LOAD(d), (uint64_t)LOAD(d + 1), bytes)) return (Py_ssize_t)i;
        *total += bytes; /* may wrap for absurd lists; only chooses between two right ways */
    }
    return -1;
}

#define RUNS_BODY(COPY)                                                              \
    for (size_t i = 0; i < r->n; i++) {                                              \
        const int64_t *d = r->descriptors + 3 * i;                                   \
        uint64_t from = (uint64_t)LOAD(d), to = (uint64_t)LOAD(d + 1);               \
        uint64_t bytes = (uint64_t)LOAD(d + 2);                                      \
        if (r->n - i > 2) prefetch_row(r->source, (uint64_t)LOAD(d + 6), 256);       \
        if (!run_fits(r, from, to, bytes)) return (Py_ssize_t)i;                     \
        COPY(r->target + to, r->source + from, bytes);                               \
    }                                                                                \
    return -1

static Py_ssize_t runs_move(const Runs *r) { RUNS_BODY(memmove); }
static Py_ssize_t runs_copy(const Runs *r) { RUNS_BODY(memcpy); }

#if HAVE_AVX2
AVX2 static inline void stream_run(char *target, const char *source, size_t bytes)
{
    size_t head = (size_t)(-(intptr_t)target & 63);
    if (bytes < 1024) {
        memcpy(target, source, bytes);
        return;
    }
    memcpy(target, source, head);
    size_t body = (bytes - head) & ~(size_t)63;
    stream_row(target + head, source + head, body);
    memcpy(target + head + body, source + head + body, bytes - head - body);
}

AVX2 static Py_ssize_t runs_stream_each(const Runs *r) { RUNS_BODY(stream_run); }

static Py_ssize_t runs_stream(const Runs *r)
{
    Py_ssize_t bad = runs_stream_each(r);
    _mm_sfence();
    return bad;
}
#endif

PyDoc_STRVAR(copy_runs_doc, "copy_runs(avx2, source, target, descriptors) -> int");

static PyObject *py_copy_runs(PyObject *self, PyObject *args)
{
    int avx2;
    Py_ssize_t bad = -1;
    Py_buffer source, target, descriptors;
    if (!PyArg_ParseTuple(args, "py*w*y*", &avx2, &source, &target, &descriptors)) return NULL;
    int sound = descriptors.len % 24 == 0;
    if (sound) {
        Runs r = {.target = target.buf, .source = source.buf, .descriptors = descriptors.buf,
                  .target_bytes = (uint64_t)target.len, .source_bytes = (uint64_t)source.len,
                  .n = (size_t)descriptors.len / 24};
        r.overlap = buffers_overlap(&source, &target);
        uint64_t total;
        BEGIN_WORK(r.n >= RELEASE_ENTRIES / 4); /* checking alone is work then */
        bad = runs_refused(&r, &total);
        if (bad < 0) {
            if (thread_state == NULL && total >= RELEASE_BYTES) thread_state = PyEval_SaveThread();
            if (r.overlap) bad = runs_move(&r);
#if HAVE_AVX2
            else if (avx2 && total >= STREAM_BYTES) bad = runs_stream(&r);
#endif
            else bad = runs_copy(&r);
        }
        END_WORK();
    }
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    PyBuffer_Release(&descriptors);
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "copy_runs: descriptors are not triples of int64; call kvd_kernels.copy_runs");
        return NULL;
    }
    return PyLong_FromSsize_t(bad);
}

/* ---------------------------------------------------------------- partition */

/* One row: entries with mask 2 to the front of `out`, the others to `local`, which is appended. Both have 8 entries more than
 * the row, since the AVX2 version stores whole vectors. Returns the position of the first refused entry, or -1.
 *
 * The padding byte is tested as (mask - 1) > 1, unsigned: only 1 and 2 pass. An index out of range reads mask[0] instead. */
static Py_ssize_t row_refused(const int32_t *index, const int8_t *mask, size_t k, size_t tokens)
{
    for (size_t j = 0; j < k; j++) {
        size_t t = (size_t)(int64_t)LOAD(index + j);
        if (t >= tokens || (uint8_t)(LOAD(mask + t) - 1) > 1) return (Py_ssize_t)j;
    }
    return (Py_ssize_t)k; /* changed meanwhile: it was refused, and it is no more */
}

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

static void fill_compress(void)
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

PyDoc_STRVAR(partition_doc, "partition(avx2, index, mask, batch, heads, out, counts) -> int");

static PyObject *py_partition(PyObject *self, PyObject *args)
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

PyDoc_STRVAR(token_entries_doc, "token_entries(avx2, index, rows, tokens, heads, out) -> int");

static PyObject *py_token_entries(PyObject *self, PyObject *args)
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

PyDoc_STRVAR(accumulate_doc,
             "accumulate(avx2, index, rows, starts, lengths, cells, shared, is_float, skip_beyond, counts) -> int\n\n"
             "counts[sequence, (t - start) * cells // length] += 1 for every t of the index.");

static PyObject *py_accumulate(PyObject *self, PyObject *args)
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

/* ---------------------------------------------------------------- overlaps */

PyDoc_STRVAR(overlap_doc, "overlap(a, b) -> bool: two contiguous buffers share memory.");

static PyObject *py_overlap(PyObject *self, PyObject *args)
{
    Py_buffer a, b;
    if (!PyArg_ParseTuple(args, "y*y*", &a, &b)) return NULL;
    int shared = buffers_overlap(&a, &b);
    PyBuffer_Release(&a);
    PyBuffer_Release(&b);
    return PyBool_FromLong(shared);
}

/* ---------------------------------------------------------------- the module */

static PyObject *py_has_avx2(PyObject *self, PyObject *ignored)
{
#if HAVE_AVX2
    return PyBool_FromLong(__builtin_cpu_supports("avx2"));
#else
    Py_RETURN_FALSE;
#endif
}

/* in hamming.c */
PyObject *kvd_sign_codes(PyObject *self, PyObject *args);
PyObject *kvd_hamming(PyObject *self, PyObject *args);
extern const char kvd_sign_codes_doc[], kvd_hamming_doc[];

static PyMethodDef methods[] = {
    {"has_avx2", py_has_avx2, METH_NOARGS, "has_avx2() -> bool: this build and this CPU have AVX2."},
    {"overlap", py_overlap, METH_VARARGS, overlap_doc},
    {"move", py_move, METH_VARARGS, move_doc},
    {"copy_runs", py_copy_runs, METH_VARARGS, copy_runs_doc},
    {"partition", py_partition, METH_VARARGS, partition_doc},
    {"token_entries", py_token_entries, METH_VARARGS, token_entries_doc},
    {"accumulate", py_accumulate, METH_VARARGS, accumulate_doc},
    {"sign_codes", kvd_sign_codes, METH_VARARGS, kvd_sign_codes_doc},
    {"hamming", kvd_hamming, METH_VARARGS, kvd_hamming_doc},
    {"top_k", kvd_top_k, METH_VARARGS, kvd_top_k_doc},
    {"regroup", kvd_regroup, METH_VARARGS, kvd_regroup_doc},
    {"zero", kvd_zero, METH_VARARGS, kvd_zero_doc},
    {"encode_bfp", kvd_encode_bfp, METH_VARARGS, kvd_encode_bfp_doc},
    {"decode_bfp", kvd_decode_bfp, METH_VARARGS, kvd_decode_bfp_doc},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module)
{
#if HAVE_AVX2
    __builtin_cpu_init();
    fill_compress();
#endif
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* no state of its own but a constant table */
#endif
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "kvd_kernels._native", .m_doc = "The C kernels of kvd; call them through kvd_kernels.",
    .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }

/* Bytes from here to there: rows that index arrays name, and runs that descriptors name. */
#include "index.h"

/* How far ahead of the copy rows are prefetched, and the most of one row that is. */
#define PREFETCH_BYTES ((size_t)8 << 10)
#define PREFETCH_ROWS_MAX ((size_t)32)
#define PREFETCH_ROW_BYTES ((size_t)1 << 10)

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

const char kvd_move_doc[] = "move(avx2, source, entry_bytes, from, from_width, target, to, to_width) -> int\n\n"
                            "target[to[i]] = source[from[i]]; a width of 0 means no index there.\n"
                            "Refusals of `to` are reported as n + position.";

PyObject *kvd_move(PyObject *self, PyObject *args)
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

const char kvd_copy_runs_doc[] = "copy_runs(avx2, source, target, descriptors) -> int";

PyObject *kvd_copy_runs(PyObject *self, PyObject *args)
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

/* Tenstorrent's block formats: sixteen elements share an exponent. A page of n elements is n / 16 exponents, zeros up to a
 * multiple of 16 bytes, and then n elements of sign and magnitude, 8 bits each or 4 (the first in the low nibble);
 * kernels/reference.py defines the rounding.
 */
#include "native.h"

#define ROW 16

typedef struct {
    const char *source;
    char *target;
    size_t pages, rows;   /* rows of sixteen in a page */
    size_t lead;          /* bytes of a block page before its elements */
    size_t page, stride;  /* bytes of a block page, and from one to the next where they are written */
    const int64_t *places; /* of block pages that are read; each read once where it is used */
    uint64_t last;
    int magnitude, wide; /* bits of a magnitude: 7 or 3; plain elements are f32, not bf16 */
} Pages;

#define EACH for (int i = 0; i < ROW; i++)
#define INLINE static inline __attribute__((always_inline))

/* ---------------------------------------------------------------- one row of sixteen elements */

INLINE void encode_row_baseline(char *exponent_at, char *body, const char *from, int magnitude, int wide)
{
    const uint32_t shift = 24 - (uint32_t)magnitude, most = (1u << magnitude) - 1;
    uint32_t bits[ROW], shared = 0;
    uint8_t small[ROW];
    if (wide) {
        memcpy(bits, from, sizeof bits);
    } else {
        uint16_t halves[ROW];
        memcpy(halves, from, sizeof halves);
        EACH bits[i] = (uint32_t)halves[i] << 16;
    }
    EACH {
        uint32_t exponent = bits[i] >> 23 & 0xff;
        shared = exponent > shared ? exponent : shared;
    }
    EACH {
        uint32_t exponent = bits[i] >> 23 & 0xff;
        uint32_t mantissa = exponent ? (bits[i] & 0x7fffff) | 0x800000 : 0; /* denormals count as zero */
        uint32_t down = shared - exponent;
        mantissa >>= down < 24 ? down : 24;
        uint32_t kept = (mantissa + (1u << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift; /* half to even */
        kept = kept < most ? kept : most;
        small[i] = (uint8_t)(kept | (kept ? bits[i] >> 31 << magnitude : 0)); /* zero has no sign */
    }
    *exponent_at = (char)shared;
    if (magnitude == 7) memcpy(body, small, ROW);
    else
        for (int i = 0; i < ROW / 2; i++) body[i] = (char)(small[2 * i] | small[2 * i + 1] << 4);
}

INLINE void decode_row_baseline(char *to, const char *exponent_at, const char *body, int magnitude, int wide)
{
    const uint32_t most = (1u << magnitude) - 1;
    uint32_t number[ROW], bits[ROW];
    uint8_t small[ROW];
    float kept[ROW];
    if (magnitude == 7) memcpy(small, body, ROW);
    else EACH small[i] = (uint8_t)((uint8_t)body[i / 2] >> 4 * (i % 2) & 15);
    EACH kept[i] = (float)(int32_t)(small[i] & most); /* exact: its exponent and fraction are the normalised ones */
    memcpy(number, kept, sizeof number);
    EACH {
        uint32_t sign = (uint32_t)(small[i] >> magnitude) << 31;
        int32_t exponent = (int32_t)(number[i] >> 23) - 127 + (uint8_t)*exponent_at - (magnitude - 1);
        uint32_t value = sign | (uint32_t)exponent << 23 | (number[i] & 0x7fffff);
        value = exponent < 0 ? 0 : value;
        bits[i] = small[i] & most ? value : sign;
    }
    if (wide) {
        memcpy(to, bits, sizeof bits);
    } else {
        uint16_t halves[ROW];
        EACH halves[i] = (uint16_t)(bits[i] >> 16);
        memcpy(to, halves, sizeof halves);
    }
}

#if HAVE_AVX2
/* The same, eight elements in a vector. */
AVX2 INLINE __m256i encode_half(__m256i bits, __m256i exponent, __m256i shared, int magnitude)
{
    const int shift = 24 - magnitude;
    __m256i mantissa = _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffff)), _mm256_set1_epi32(0x800000));
    mantissa = _mm256_andnot_si256(_mm256_cmpeq_epi32(exponent, _mm256_setzero_si256()), mantissa);
    mantissa = _mm256_srlv_epi32(mantissa, _mm256_sub_epi32(shared, exponent)); /* from 32 on it is 0 */
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(mantissa, shift), _mm256_set1_epi32(1));
    __m256i kept = _mm256_add_epi32(_mm256_add_epi32(mantissa, _mm256_set1_epi32((1 << (shift - 1)) - 1)), odd);
    kept = _mm256_min_epi32(_mm256_srli_epi32(kept, shift), _mm256_set1_epi32((1 << magnitude) - 1));
    __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(bits, 31), magnitude);
    return _mm256_or_si256(kept, _mm256_and_si256(sign, _mm256_cmpgt_epi32(kept, _mm256_setzero_si256())));
}

AVX2 INLINE void encode_row_avx2(char *exponent_at, char *body, const char *from, int magnitude, int wide)
{
    __m256i a, b;
    if (wide) {
        a = _mm256_loadu_si256((const __m256i *)from);
        b = _mm256_loadu_si256((const __m256i *)(from + 32));
    } else {
        a = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)), 16);
        b = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from + 16))), 16);
    }
    const __m256i byte = _mm256_set1_epi32(0xff);
    __m256i ea = _mm256_and_si256(_mm256_srli_epi32(a, 23), byte), eb = _mm256_and_si256(_mm256_srli_epi32(b, 23), byte);
    __m256i shared = _mm256_max_epi32(ea, eb);
    shared = _mm256_max_epi32(shared, _mm256_permute2x128_si256(shared, shared, 1));
    shared = _mm256_max_epi32(shared, _mm256_shuffle_epi32(shared, 0x4e));
    shared = _mm256_max_epi32(shared, _mm256_shuffle_epi32(shared, 0xb1));
    *exponent_at = (char)_mm_cvtsi128_si32(_mm256_castsi256_si128(shared));
    a = encode_half(a, ea, shared, magnitude);
    b = encode_half(b, eb, shared, magnitude);
    /* packing works within halves of a vector: the permutation brings the sixteen back into order */
    __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
    if (magnitude == 7) {
        __m256i small = _mm256_permute4x64_epi64(_mm256_packus_epi16(both, both), 0x08);
        _mm_storeu_si128((__m128i *)body, _mm256_castsi256_si128(small));
    } else { /* pairs of 16 bits: the second one's four bits above the first one's */
        __m256i pairs = _mm256_and_si256(_mm256_or_si256(both, _mm256_srli_epi32(both, 12)), byte);
        __m256i words = _mm256_packus_epi32(pairs, pairs);
        __m256i small = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words, words), _mm256_setr_epi32(0, 4, 0, 0, 0, 0, 0, 0));
        _mm_storel_epi64((__m128i *)body, _mm256_castsi256_si128(small));
    }
}

AVX2 INLINE __m256i decode_half(__m256i small, __m256i lift, int magnitude)
{
    const __m256i zero = _mm256_setzero_si256();
    __m256i kept = _mm256_and_si256(small, _mm256_set1_epi32((1 << magnitude) - 1));
    __m256i number = _mm256_castps_si256(_mm256_cvtepi32_ps(kept));
    __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(small, magnitude), 31);
    __m256i exponent = _mm256_add_epi32(_mm256_srli_epi32(number, 23), lift);
    __m256i value = _mm256_or_si256(sign, _mm256_and_si256(number, _mm256_set1_epi32(0x7fffff)));
    value = _mm256_or_si256(value, _mm256_slli_epi32(exponent, 23));
    value = _mm256_andnot_si256(_mm256_cmpgt_epi32(zero, exponent), value);
    return _mm256_blendv_epi8(value, sign, _mm256_cmpeq_epi32(kept, zero));
}

AVX2 INLINE void decode_row_avx2(char *to, const char *exponent_at, const char *body, int magnitude, int wide)
{
    __m128i small;
    if (magnitude == 7) {
        small = _mm_loadu_si128((const __m128i *)body);
    } else {
        const __m128i nibble = _mm_set1_epi8(15);
        __m128i pairs = _mm_loadl_epi64((const __m128i *)body);
        small = _mm_unpacklo_epi8(_mm_and_si128(pairs, nibble), _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble));
    }
    __m256i lift = _mm256_set1_epi32((uint8_t)*exponent_at - 127 - (magnitude - 1));
    __m256i a = decode_half(_mm256_cvtepu8_epi32(small), lift, magnitude);
    __m256i b = decode_half(_mm256_cvtepu8_epi32(_mm_srli_si128(small, 8)), lift, magnitude);
    if (wide) {
        _mm256_storeu_si256((__m256i *)to, a);
        _mm256_storeu_si256((__m256i *)(to + 32), b);
    } else {
        __m256i both = _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
        _mm256_storeu_si256((__m256i *)to, _mm256_permute4x64_epi64(both, 0xd8));
    }
}
#endif

/* ---------------------------------------------------------------- pages */

/* One function for each form, so that the rows' loops see constants. */
#define PAGES(SUFFIX, ATTRIBUTE)                                                                                  \
    ATTRIBUTE INLINE void encode_form_##SUFFIX(const Pages *p, int magnitude, int wide)                           \
    {                                                                                                             \
        const size_t plain = ROW * (wide ? 4 : 2), small = ROW * ((size_t)magnitude + 1) / 8;                     \
        for (size_t page = 0; page < p->pages; page++) {                                                          \
            const char *from = p->source + page * p->rows * plain;                                                \
            char *to = p->target + page * p->stride;                                                              \
            for (size_t row = 0; row < p->rows; row++)                                                            \
                encode_row_##SUFFIX(to + row, to + p->lead + row * small, from + row * plain, magnitude, wide);   \
            memset(to + p->rows, 0, p->lead - p->rows);                                                           \
            memset(to + p->page, 0, p->stride - p->page);                                                         \
        }                                                                                                         \
    }                                                                                                             \
    ATTRIBUTE INLINE Py_ssize_t decode_form_##SUFFIX(const Pages *p, int magnitude, int wide)                     \
    {                                                                                                             \
        const size_t plain = ROW * (wide ? 4 : 2), small = ROW * ((size_t)magnitude + 1) / 8;                     \
        for (size_t page = 0; page < p->pages; page++) {                                                          \
            uint64_t place = (uint64_t)LOAD(p->places + page);                                                    \
            if (place > p->last) return (Py_ssize_t)page;                                                         \
            const char *from = p->source + place;                                                                 \
            char *to = p->target + page * p->rows * plain;                                                        \
            for (size_t row = 0; row < p->rows; row++)                                                            \
                decode_row_##SUFFIX(to + row * plain, from + row, from + p->lead + row * small, magnitude, wide); \
        }                                                                                                         \
        return -1;                                                                                                \
    }                                                                                                             \
    ATTRIBUTE static void encode_##SUFFIX(const Pages *p)                                                         \
    {                                                                                                             \
        if (p->magnitude == 7 && p->wide) encode_form_##SUFFIX(p, 7, 1);                                          \
        else if (p->magnitude == 7) encode_form_##SUFFIX(p, 7, 0);                                                \
        else if (p->wide) encode_form_##SUFFIX(p, 3, 1);                                                          \
        else encode_form_##SUFFIX(p, 3, 0);                                                                       \
    }                                                                                                             \
    ATTRIBUTE static Py_ssize_t decode_##SUFFIX(const Pages *p)                                                   \
    {                                                                                                             \
        if (p->magnitude == 7) return p->wide ? decode_form_##SUFFIX(p, 7, 1) : decode_form_##SUFFIX(p, 7, 0);    \
        return p->wide ? decode_form_##SUFFIX(p, 3, 1) : decode_form_##SUFFIX(p, 3, 0);                           \
    }

PAGES(baseline, )
#if HAVE_AVX2
PAGES(avx2, AVX2)
#endif

/* Bytes of plain elements in `pages` pages, and of a block page; 0 where the form is none or too large. */
static int read_form(Pages *p, Py_ssize_t elements, Py_ssize_t plain, uint64_t *plain_bytes)
{
    if (elements <= 0 || elements % ROW || (p->magnitude != 7 && p->magnitude != 3) || (plain != 2 && plain != 4)) return 0;
    p->rows = (size_t)elements / ROW;
    p->lead = (p->rows + ROW - 1) / ROW * ROW;
    p->page = p->lead + (size_t)elements * ((size_t)p->magnitude + 1) / 8;
    p->wide = plain == 4;
    return !__builtin_mul_overflow((uint64_t)elements * (uint64_t)plain, (uint64_t)p->pages, plain_bytes);
}

const char kvd_encode_bfp_doc[] = "encode_bfp(avx2, source, plain_bytes, magnitude, elements, target, stride) -> int";

PyObject *kvd_encode_bfp(PyObject *self, PyObject *args)
{
    int avx2;
    Py_ssize_t plain, elements, stride;
    Py_buffer source, target;
    Pages p = {0};
    if (!PyArg_ParseTuple(args, "py*ninw*n", &avx2, &source, &plain, &p.magnitude, &elements, &target, &stride)) return NULL;
    uint64_t bytes = 0;
    int sound = stride > 0 && target.len % stride == 0;
    if (sound) {
        p.source = source.buf;
        p.target = target.buf;
        p.stride = (size_t)stride;
        p.pages = (size_t)(target.len / stride);
        sound = read_form(&p, elements, plain, &bytes) && bytes == (uint64_t)source.len && p.page <= p.stride;
    }
    if (sound) {
        BEGIN_WORK(bytes >= RELEASE_BYTES / 4);
#if HAVE_AVX2
        if (avx2) encode_avx2(&p);
        else
#endif
        encode_baseline(&p);
        END_WORK();
    }
    (void)avx2;
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "encode_bfp: the buffers' sizes do not fit each other; call kvd_kernels.encode_bfp");
        return NULL;
    }
    return PyLong_FromSsize_t(-1);
}

const char kvd_decode_bfp_doc[] = "decode_bfp(avx2, source, offsets, magnitude, elements, target, plain_bytes) -> int";

PyObject *kvd_decode_bfp(PyObject *self, PyObject *args)
{
    int avx2;
    Py_ssize_t plain, elements, bad = -1;
    Py_buffer source, offsets, target;
    Pages p = {0};
    if (!PyArg_ParseTuple(args, "py*y*inw*n", &avx2, &source, &offsets, &p.magnitude, &elements, &target, &plain))
        return NULL;
    uint64_t bytes = 0;
    p.source = source.buf;
    p.target = target.buf;
    p.places = offsets.buf;
    p.pages = (size_t)offsets.len / 8;
    int sound = offsets.len % 8 == 0 && read_form(&p, elements, plain, &bytes) && bytes == (uint64_t)target.len &&
                (p.pages == 0 || p.page <= (size_t)source.len);
    if (sound && p.pages > 0) {
        p.last = (uint64_t)source.len - p.page;
        BEGIN_WORK(bytes >= RELEASE_BYTES / 4);
        for (size_t i = 0; i < p.pages && bad < 0; i++)
            if ((uint64_t)LOAD(p.places + i) > p.last) bad = (Py_ssize_t)i;
        if (bad < 0) {
#if HAVE_AVX2
            if (avx2) bad = decode_avx2(&p);
            else
#endif
            bad = decode_baseline(&p);
        }
        END_WORK();
    }
    (void)avx2;
    PyBuffer_Release(&source);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&target);
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "decode_bfp: the buffers' sizes do not fit each other; call kvd_kernels.decode_bfp");
        return NULL;
    }
    return PyLong_FromSsize_t(bad);
}

/* The kernels of kvd in C: kvd_kernels._native. Here is the module; the work is done in copies.c (rows and runs of bytes),
 * indices.c (KV indices), regroup.c (tiles), blocks.c (block floats) and hamming.c (hash codes).
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
 * AVX2 code is compiled through target attributes, so that plain `cc` builds every file for every x86-64 and for aarch64.
 */
#include "native.h"

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

static PyObject *py_has_avx2(PyObject *self, PyObject *ignored)
{
#if HAVE_AVX2
    return PyBool_FromLong(__builtin_cpu_supports("avx2"));
#else
    Py_RETURN_FALSE;
#endif
}

static PyMethodDef methods[] = {
    {"has_avx2", py_has_avx2, METH_NOARGS, "has_avx2() -> bool: this build and this CPU have AVX2."},
    {"overlap", py_overlap, METH_VARARGS, overlap_doc},
    {"move", kvd_move, METH_VARARGS, kvd_move_doc},
    {"copy_runs", kvd_copy_runs, METH_VARARGS, kvd_copy_runs_doc},
    {"partition", kvd_partition, METH_VARARGS, kvd_partition_doc},
    {"token_entries", kvd_token_entries, METH_VARARGS, kvd_token_entries_doc},
    {"accumulate", kvd_accumulate, METH_VARARGS, kvd_accumulate_doc},
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
    kvd_fill_compress();
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

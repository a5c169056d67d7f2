// sagc_fast.controller._fill: lists of lists of plain numbers into a vector of doubles, the form in which most callers hold
// lengths. NumPy's fromiter walks an iterator and needs three times as long, more than the controller's whole step.
//
// Limited API of Python 3.11, so that one file serves every interpreter. Optional: _lengths.py falls back to fromiter.
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

// Item i of a list or tuple, borrowed; null (and no error set) behind its end, which a list may reach early when another
// thread shortens it.
static PyObject* item_of(PyObject* sequence, int is_list, Py_ssize_t i) {
  PyObject* item = is_list ? PyList_GetItem(sequence, i) : PyTuple_GetItem(sequence, i);
  if (item == NULL) PyErr_Clear();
  return item;
}

// The value of an int or float, subclasses included; 0 when the object is neither or the int fits no 64 bits.
static int number_of(PyObject* item, double* value) {
  if (PyLong_Check(item)) {
    int overflow = 0;
    *value = (double)PyLong_AsLongLongAndOverflow(item, &overflow);
    return !overflow;
  }
  if (PyFloat_Check(item)) {
    *value = PyFloat_AsDouble(item);
    return 1;
  }
  return 0;
}

// group_size: of every group, or -1 when they may differ.
static int fill_values(PyObject* groups, double* values, Py_ssize_t room, Py_ssize_t group_size) {
  const int is_list = PyList_Check(groups);
  if (!is_list && !PyTuple_Check(groups)) return 0;
  const Py_ssize_t num_groups = is_list ? PyList_Size(groups) : PyTuple_Size(groups);
  Py_ssize_t at = 0;
  for (Py_ssize_t g = 0; g < num_groups; g++) {
    PyObject* group = item_of(groups, is_list, g);
    if (group == NULL) return 0;
    const int is_inner_list = PyList_Check(group);
    if (!is_inner_list && !PyTuple_Check(group)) return 0;
    const Py_ssize_t size = is_inner_list ? PyList_Size(group) : PyTuple_Size(group);
    if (size > room - at || (group_size >= 0 && size != group_size)) return 0;
    for (Py_ssize_t i = 0; i < size; i++) {
      PyObject* item = item_of(group, is_inner_list, i);
      if (item == NULL || !number_of(item, values + at + i)) return 0;
    }
    at += size;
  }
  return at == room;
}

static PyObject* fill(PyObject* module, PyObject* args) {
  (void)module;
  PyObject *groups, *target;
  Py_ssize_t group_size;
  Py_buffer buffer;
  if (!PyArg_ParseTuple(args, "OOn", &groups, &target, &group_size)) return NULL;
  if (PyObject_GetBuffer(target, &buffer, PyBUF_WRITABLE) != 0) return NULL;
  const int is_filled = fill_values(groups, (double*)buffer.buf, buffer.len / (Py_ssize_t)sizeof(double), group_size);
  PyBuffer_Release(&buffer);
  return PyBool_FromLong(is_filled);
}

static PyMethodDef methods[] = {
    {"fill", fill, METH_VARARGS,
     "fill(groups, values, group_size) -> bool: the numbers of all groups into the float64 vector ``values``, which they "
     "must fill exactly, each group with ``group_size`` of them (-1: any number). False when they do not, or are not lists "
     "or tuples of lists or tuples of int or float; ``values`` is undefined then."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "sagc_fast.controller._fill", .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit__fill(void) { return PyModuleDef_Init(&definition); }

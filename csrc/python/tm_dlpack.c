/* The two DLPack doors: a tensor type's C exchange table, which makes no object a tensor, and the capsules of
 * `__dlpack__`. Only memory that the host can address passes. */
#include "tm_dlpack.h"

#include "../core/tm_dtype.h"
#include "tm_views.h"

#include <string.h>

static const char *device_name(int32_t type) {
    switch (type) {
    case 2:
        return "CUDA";
    case 4:
        return "OpenCL";
    case 7:
        return "Vulkan";
    case 8:
        return "Metal";
    case 10:
        return "ROCm";
    case 12:
        return "extension (such as Ascend NPU)";
    case 13:
        return "CUDA managed";
    case 14:
        return "oneAPI";
    case 15:
        return "WebGPU";
    default:
        return "unknown";
    }
}

static tm_door check_device(tm_views *views, Py_ssize_t position, PyObject *object, long type, long id) {
    if (type == TM_DL_CPU || type == TM_DL_CUDA_HOST || type == TM_DL_ROCM_HOST)
        return TM_DOOR_OPEN;
    PyObject *device = PyObject_GetAttr(object, views->state->str_device);
    PyErr_Clear(); /* not every tensor has one; the numbers below name it as well */
    if (device != NULL)
        tm_views_refuse(
            views, position, PyExc_TypeError,
            "is in the memory of device '%S' (DLPack type %ld, %s), which the host can't address: "
            "copy it to the host first, or use the device backend",
            device, type, device_name((int32_t)type));
    else
        tm_views_refuse(
            views, position, PyExc_TypeError,
            "is in the memory of a device (DLPack type %ld, %s, number %ld), which the host can't "
            "address: copy it to the host first, or use the device backend",
            type, device_name((int32_t)type), id);
    Py_XDECREF(device);
    return TM_DOOR_ERROR;
}

static tm_dtype by_bits(unsigned bits, tm_dtype one, tm_dtype two, tm_dtype four, tm_dtype eight) {
    return bits == 8 ? one : bits == 16 ? two : bits == 32 ? four : bits == 64 ? eight : TM_DTYPE_COUNT;
}

static tm_dtype dtype_of(tm_dl_dtype type) {
    static const tm_dtype float8[] = {TM_F8E3M4,     TM_F8E4M3, TM_F8E4M3B11FNUZ, TM_F8E4M3FN,
                                      TM_F8E4M3FNUZ, TM_F8E5M2, TM_F8E5M2FNUZ,    TM_F8E8M0FNU};
    if (type.lanes != 1)
        return TM_DTYPE_COUNT;
    switch (type.code) {
    case TM_DL_INT:
        return by_bits(type.bits, TM_I8, TM_I16, TM_I32, TM_I64);
    case TM_DL_UINT:
        return by_bits(type.bits, TM_U8, TM_U16, TM_U32, TM_U64);
    case TM_DL_FLOAT:
        return by_bits(type.bits, TM_DTYPE_COUNT, TM_F16, TM_F32, TM_F64);
    case TM_DL_BFLOAT:
        return type.bits == 16 ? TM_BF16 : TM_DTYPE_COUNT;
    case TM_DL_BOOL:
        return type.bits == 8 ? TM_BOOL : TM_DTYPE_COUNT;
    default:
        if (type.code >= TM_DL_F8_E3M4 && type.code <= TM_DL_F8_E8M0FNU && type.bits == 8)
            return float8[type.code - TM_DL_F8_E3M4];
        return TM_DTYPE_COUNT;
    }
}

static tm_door refuse_dtype(tm_views *views, Py_ssize_t position, tm_dl_dtype type) {
    static const char *const kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
    if (type.code < sizeof kinds / sizeof kinds[0] && type.lanes == 1)
        return tm_views_refuse(views, position, PyExc_TypeError,
                               "dtype %s%u can't be read: it must be a real float, an integer or bool",
                               kinds[type.code], (unsigned)type.bits);
    return tm_views_refuse(
        views, position, PyExc_TypeError,
        "dtype (DLPack code %u, %u bits, %u lanes) can't be read: it must be a real float, an "
        "integer or bool",
        (unsigned)type.code, (unsigned)type.bits, (unsigned)type.lanes);
}

static tm_door open_tensor(tm_views *views, Py_ssize_t position, PyObject *object, const tm_dl_tensor *tensor,
                           tm_view *view) {
    if (check_device(views, position, object, tensor->device.type, tensor->device.id) != TM_DOOR_OPEN)
        return TM_DOOR_ERROR;
    view->dtype = dtype_of(tensor->dtype);
    if (view->dtype == TM_DTYPE_COUNT)
        return refuse_dtype(views, position, tensor->dtype);
    if (tensor->ndim < 0 || tensor->ndim > TM_MAX_NDIM)
        return tm_views_refuse(views, position, PyExc_TypeError, "%d axes are outside 0 to %d",
                               (int)tensor->ndim, TM_MAX_NDIM);
    view->data = tensor->data != NULL ? (const char *)tensor->data + tensor->byte_offset : NULL;
    view->ndim = tensor->ndim;
    return tm_views_place(views, position, view, tensor->shape, tensor->strides,
                          (int64_t)tm_dtype_size(view->dtype));
}

/* ---- the exchange table ---- */

static const tm_dl_exchange_api *table_of_capsule(PyObject *capsule) {
    if (!PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
        return NULL;
    const tm_dl_exchange_header *header = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    while (header != NULL && header->version.major != TM_DL_MAJOR)
        header = header->previous;
    const tm_dl_exchange_api *api = (const tm_dl_exchange_api *)header; /* the header is its first member */
    return api != NULL && api->tensor_from_object != NULL ? api : NULL;
}

static int slot_is_of(const tm_exchange_slot *slot, PyTypeObject *type) {
    if (slot->type_ref == NULL)
        return 0;
#if PY_VERSION_HEX >= 0x030d0000
    PyObject *alive = NULL;
    if (PyWeakref_GetRef(slot->type_ref, &alive) < 0)
        PyErr_Clear(); /* can't be: the slot holds a weak reference */
    const int same = alive == (PyObject *)type;
    Py_XDECREF(alive);
    return same;
#else
    return PyWeakref_GET_OBJECT(slot->type_ref) == (PyObject *)type;
#endif
}

/* The table of this type, found in the module's slots or looked up; NULL without a Python error when it has
 * none that we can use. */
static const tm_dl_exchange_api *table_of(tm_state *state, PyTypeObject *type) {
    for (size_t i = 0; i < TM_EXCHANGE_SLOTS; i++)
        if (slot_is_of(&state->exchange[i], type))
            return state->exchange[i].api;
    PyObject *capsule = PyObject_GetAttr((PyObject *)type, state->str_exchange_api);
    if (capsule == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError))
            PyErr_Clear();
        return NULL;
    }
    const tm_dl_exchange_api *api = table_of_capsule(capsule);
    Py_DECREF(capsule);
    if (api == NULL)
        return NULL;
    PyObject *type_ref = PyWeakref_NewRef((PyObject *)type, NULL);
    if (type_ref == NULL)
        return NULL;
    tm_exchange_slot *slot = &state->exchange[state->exchange_next];
    state->exchange_next = (state->exchange_next + 1) % TM_EXCHANGE_SLOTS;
    PyObject *old = slot->type_ref;
    slot->type_ref = type_ref; /* owned by the state */
    slot->api = api;
    Py_XDECREF(old);
    return api;
}

int tm_exchange_knows(tm_state *state, PyObject *object) {
    if (table_of(state, Py_TYPE(object)) != NULL)
        return 1;
    return PyErr_Occurred() != NULL ? -1 : 0;
}

/* torch keeps the sign of some views (the imaginary part of a conjugate) in a bit beside the memory, and its
 * exchange table doesn't tell. Such views come from complex memory: their elements don't lie in C order, or
 * there is one. So only those are asked, and a plain gradient costs nothing. */
static tm_door check_sign(tm_views *views, Py_ssize_t position, PyObject *object, const tm_dl_tensor *tensor,
                          const tm_view *view) {
    if (tensor->dtype.code != TM_DL_FLOAT || (view->strides == NULL && view->n != 1))
        return TM_DOOR_OPEN;
    PyObject *answer = PyObject_CallMethodNoArgs(object, views->state->str_is_neg);
    if (answer == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return tm_views_refuse_from(views, position, object);
        PyErr_Clear(); /* another framework: no such bit */
        return TM_DOOR_OPEN;
    }
    const int negative = answer == Py_True;
    Py_DECREF(answer);
    if (negative)
        return tm_views_refuse(views, position, PyExc_TypeError,
                               "has its negative bit set, so that memory holds the opposite sign: pass "
                               ".resolve_neg()");
    return TM_DOOR_OPEN;
}

tm_door tm_exchange_open(tm_views *views, Py_ssize_t position, PyObject *object, tm_view *view) {
    const tm_dl_exchange_api *api = table_of(views->state, Py_TYPE(object));
    if (api == NULL)
        return PyErr_Occurred() != NULL ? TM_DOOR_ERROR : TM_DOOR_OTHER;
    tm_dl_tensor tensor; /* borrows the tensor's own shape and strides until tm_views_place has copied them */
    if (api->tensor_from_object(object, &tensor) != 0)
        return tm_views_refuse_from(views, position, object);
    const tm_door door = open_tensor(views, position, object, &tensor, view);
    return door == TM_DOOR_OPEN ? check_sign(views, position, object, &tensor, view) : door;
}

/* ---- __dlpack__ ---- */

/* (type, number) of `__dlpack_device__` checked before any export, so that no device has to be synchronised
 * for an error. An object without it is judged by its capsule. */
static tm_door check_declared_device(tm_views *views, Py_ssize_t position, PyObject *object) {
    PyObject *pair = PyObject_CallMethodNoArgs(object, views->state->str_dlpack_device);
    if (pair == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return tm_views_refuse_from(views, position, object);
        PyErr_Clear();
        return TM_DOOR_OPEN;
    }
    long type = 0, id = 0;
    tm_door door = TM_DOOR_ERROR;
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        tm_views_refuse(views, position, PyExc_TypeError, "__dlpack_device__ of %s must return a pair of int",
                        Py_TYPE(object)->tp_name);
        goto done;
    }
    type = PyLong_AsLong(PyTuple_GET_ITEM(pair, 0)); /* an enum is an int */
    if (type == -1 && PyErr_Occurred()) {
        tm_views_refuse_from(views, position, object);
        goto done;
    }
    id = PyLong_AsLong(PyTuple_GET_ITEM(pair, 1));
    if (id == -1 && PyErr_Occurred()) {
        tm_views_refuse_from(views, position, object);
        goto done;
    }
    door = check_device(views, position, object, type, id);
done:
    Py_DECREF(pair);
    return door;
}

/* A tensor that asks for gradients refuses __dlpack__; its detached self shares the memory. New reference. */
static PyObject *without_gradient(tm_state *state, PyObject *object) {
    PyObject *flag = PyObject_GetAttr(object, state->str_requires_grad);
    const int attached = flag == Py_True;
    Py_XDECREF(flag);
    PyErr_Clear(); /* no such attribute: no such refusal */
    if (attached)
        return PyObject_CallMethodNoArgs(object, state->str_detach);
    return Py_NewRef(object);
}

static PyObject *export_capsule(tm_state *state, PyObject *object) {
    PyObject *tensor = without_gradient(state, object);
    if (tensor == NULL)
        return NULL;
    PyObject *arguments[2] = {tensor, state->dlpack_version};
    PyObject *capsule = PyObject_VectorcallMethod(state->str_dlpack, arguments, 1, state->dlpack_kwnames);
    if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear(); /* a producer from before DLPack 1.0 takes no max_version */
        capsule = PyObject_CallMethodNoArgs(tensor, state->str_dlpack);
    }
    Py_DECREF(tensor); /* the capsule keeps the memory */
    return capsule;
}

/* Takes the managed tensor out of the capsule; from then on the views own it. */
static tm_door take_capsule(tm_views *views, Py_ssize_t position, PyObject *object, PyObject *capsule,
                            tm_view *view) {
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        tm_dl_managed_versioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (PyCapsule_SetName(capsule, "used_dltensor_versioned") < 0)
            return TM_DOOR_ERROR;
        if (tm_views_hold_versioned(views, managed) < 0)
            return TM_DOOR_ERROR;
        if (managed->version.major != TM_DL_MAJOR)
            return tm_views_refuse(views, position, PyExc_TypeError, "DLPack version %u.%u is not 1.x",
                                   (unsigned)managed->version.major, (unsigned)managed->version.minor);
        if (tm_views_check_writable(views, position, (managed->flags & TM_DL_READ_ONLY) != 0) != TM_DOOR_OPEN)
            return TM_DOOR_ERROR;
        return open_tensor(views, position, object, &managed->tensor, view);
    }
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        tm_dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
        if (PyCapsule_SetName(capsule, "used_dltensor") < 0)
            return TM_DOOR_ERROR;
        if (tm_views_hold_managed(views, managed) < 0)
            return TM_DOOR_ERROR;
        return open_tensor(views, position, object, &managed->tensor, view);
    }
    return tm_views_refuse(views, position, PyExc_TypeError,
                           "__dlpack__ of %s returned no unused DLPack capsule", Py_TYPE(object)->tp_name);
}

tm_door tm_capsule_open(tm_views *views, Py_ssize_t position, PyObject *object, tm_view *view) {
    if (!PyObject_HasAttr(object, views->state->str_dlpack))
        return TM_DOOR_OTHER;
    if (check_declared_device(views, position, object) != TM_DOOR_OPEN)
        return TM_DOOR_ERROR;
    PyObject *capsule = export_capsule(views->state, object);
    if (capsule == NULL)
        return tm_views_refuse_from(views, position, object);
    const tm_door door = take_capsule(views, position, object, capsule, view);
    Py_DECREF(capsule);
    return door;
}

// The CUDA driver of a device that is not there: kernels are loaded by name, and their launches
// logged.
#define _GNU_SOURCE
#include "pretended.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#undef cudaGetDriverEntryPoint
#undef cuGetProcAddress

CUresult cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int i) { return *device = i, CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* name, int n, CUdevice device) {
    return snprintf(name, n, "pretended"), CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                              CUdevice device) {  // the runtime's numbers are the same
    return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    return *flags = 0, *active = 1, CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
    return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** name) {
    return *name = "pretended", CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
    return *text = "pretended", CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange(CUdeviceptr* begin, size_t* n, CUdeviceptr p) {
    if (begin) *begin = p;
    if (n) *n = 1 << 30;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned n, CUjit_option* options,
                            void** values) {
    return *module = malloc(1), CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    return cuModuleLoadDataEx(module, image, 0, NULL, NULL);
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    return *function = (CUfunction)strdup(name), CUDA_SUCCESS;  // what a launch then says
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction function) {
    switch (attribute) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
            *value = 1024;
            break;
        case CU_FUNC_ATTRIBUTE_NUM_REGS:
            *value = 64;
            break;
        case CU_FUNC_ATTRIBUTE_PTX_VERSION:
        case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
            *value = capability(0) * 10 + capability(1);
            break;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            *value = SHARED_OPTIN;
            break;
        default:
            *value = 0;
    }
    return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, CUfunction function, int threads,
                                                     size_t shared) {
    return *n = 1, CUDA_SUCCESS;
}
CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t* n, CUfunction function, int blocks,
                                                 int threads) {
    return *n = SHARED_OPTIN, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveClusters(int* n, CUfunction function, const CUlaunchConfig* how) {
    return *n = 8, CUDA_SUCCESS;
}
CUresult cuOccupancyMaxPotentialClusterSize(int* n, CUfunction function,
                                            const CUlaunchConfig* how) {
    return *n = 8, CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, CUstream s, void** arguments,
                        void** extra) {
    return say("kernel %s", (const char*)f), CUDA_SUCCESS;
}
CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                   unsigned by, unsigned bz, unsigned shared, CUstream s,
                                   void** arguments) {
    return say("kernel %s", (const char*)f), CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* how, CUfunction f, void** arguments, void** extra) {
    return say("kernel %s", (const char*)f), CUDA_SUCCESS;
}

// Who asks for a function of the driver gets the one above, else one that succeeds and does
// nothing.
static int nothing() { return 0; }
static void* function_of(const char* name) {
    char newer[256];
    snprintf(newer, sizeof newer, "%s_v2", name);
    Dl_info self;
    dladdr((void*)nothing, &self);
    void* library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    void* found = dlsym(library, name);
    if (!found) found = dlsym(library, newer);
    return found ? found : (void*)nothing;
}

cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult* result) {
    *function = function_of(name);
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult* result) {
    return cudaGetDriverEntryPoint(name, function, flags, result);
}
CUresult cuGetProcAddress(const char* name, void** function, int version, cuuint64_t flags) {
    return *function = function_of(name), CUDA_SUCCESS;
}
CUresult cuGetProcAddress_v2(const char* name, void** function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* result) {
    if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
    return cuGetProcAddress(name, function, version, flags);
}
CUresult cuGetExportTable(const void** table, const CUuuid* id) {
    return *table = NULL, CUDA_ERROR_INVALID_VALUE;
}

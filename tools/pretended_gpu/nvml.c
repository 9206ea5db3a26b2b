// NVML of the same device, which vLLM asks before it makes a context. pynvml says of functions that
// are not here that the library lacks them.
#include "pretended.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#undef cudaGetDeviceProperties

typedef struct nvmlDevice* Device;
enum { SUCCESS, INVALID_ARGUMENT = 2 };

int nvmlInit() { return SUCCESS; }
int nvmlInit_v2() { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown() { return SUCCESS; }
const char* nvmlErrorString(int error) { return "pretended"; }

int nvmlDeviceGetCount_v2(unsigned* n) { return cudaGetDeviceCount((int*)n); }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, Device* device) {
    return *device = (Device)1, i == 0 ? SUCCESS : INVALID_ARGUMENT;
}
int nvmlDeviceGetIndex(Device device, unsigned* i) { return *i = 0, SUCCESS; }
int nvmlDeviceGetCudaComputeCapability(Device device, int* major, int* minor) {
    return *major = capability(0), *minor = capability(1), SUCCESS;
}
int nvmlDeviceGetMemoryInfo(Device device, unsigned long long* info) {  // all, available, used
    size_t available, all;
    cudaMemGetInfo(&available, &all);
    return info[0] = all, info[1] = available, info[2] = all - available, SUCCESS;
}
int nvmlDeviceGetName(Device device, char* name, unsigned n) {
    struct cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, 0);
    return snprintf(name, n, "%s", properties.name), SUCCESS;
}
int nvmlDeviceGetUUID(Device device, char* uuid, unsigned n) {
    return snprintf(uuid, n, "GPU-00000000-0000-0000-0000-000000000000"), SUCCESS;
}

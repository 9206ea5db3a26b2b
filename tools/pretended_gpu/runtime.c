// The CUDA runtime of a device that is not there: memory is the host's, zeroed; launches do nothing
// and are logged.
#include "pretended.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#undef cudaGetDeviceProperties
#undef cudaGetDriverEntryPoint

int capability(int part) {
    const char* text = getenv("PRETENDED_CAPABILITY");
    const char* point = strchr(text, '.');
    return atoi(part == 0 ? text : point + 1);
}

void say(const char* format, ...) {
    const char* path = getenv("PRETENDED_LOG");
    FILE* log = path ? fopen(path, "a") : NULL;
    if (!log) return;
    char line[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(log, "%s\n", line);  // one write: several threads compile
    fclose(log);
}

// Facts of the device
// -------------------------------------------------------------------------------------------------

static cudaError_t describe(struct cudaDeviceProp* p) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "pretended");
    p->major = capability(0), p->minor = capability(1);
    p->totalGlobalMem = 64ull << 30, p->totalConstMem = 65536, p->l2CacheSize = L2;
    p->multiProcessorCount = PROCESSORS, p->warpSize = 32, p->memoryBusWidth = 6144;
#if CUDART_VERSION < 13000
    p->clockRate = 1980000, p->memoryClockRate = 2619000;
#endif
    p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048,
    p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->regsPerBlock = p->regsPerMultiprocessor = REGISTERS;
    p->sharedMemPerBlock = SHARED_PLAIN, p->sharedMemPerBlockOptin = SHARED_OPTIN,
    p->sharedMemPerMultiprocessor = SHARED_ALL;
    p->reservedSharedMemPerBlock = 1024, p->textureAlignment = 512;
    p->cooperativeLaunch = p->clusterLaunch = p->unifiedAddressing = p->managedMemory =
        p->concurrentKernels = p->memoryPoolsSupported = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* p, int device) { return describe(p); }
cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp* p, int device) { return describe(p); }

cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp p;
    describe(&p);
    switch (attribute) {
        case cudaDevAttrMaxThreadsPerBlock:
            *value = p.maxThreadsPerBlock;
            break;
        case cudaDevAttrMaxBlockDimX:
            *value = p.maxThreadsDim[0];
            break;
        case cudaDevAttrMaxBlockDimY:
            *value = p.maxThreadsDim[1];
            break;
        case cudaDevAttrMaxBlockDimZ:
            *value = p.maxThreadsDim[2];
            break;
        case cudaDevAttrMaxGridDimX:
            *value = p.maxGridSize[0];
            break;
        case cudaDevAttrMaxGridDimY:
            *value = p.maxGridSize[1];
            break;
        case cudaDevAttrMaxGridDimZ:
            *value = p.maxGridSize[2];
            break;
        case cudaDevAttrMaxSharedMemoryPerBlock:
            *value = SHARED_PLAIN;
            break;
        case cudaDevAttrWarpSize:
            *value = p.warpSize;
            break;
        case cudaDevAttrMaxRegistersPerBlock:
            *value = REGISTERS;
            break;
        case cudaDevAttrMultiProcessorCount:
            *value = PROCESSORS;
            break;
        case cudaDevAttrL2CacheSize:
            *value = L2;
            break;
        case cudaDevAttrMaxThreadsPerMultiProcessor:
            *value = p.maxThreadsPerMultiProcessor;
            break;
        case cudaDevAttrComputeCapabilityMajor:
            *value = p.major;
            break;
        case cudaDevAttrComputeCapabilityMinor:
            *value = p.minor;
            break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            *value = SHARED_ALL;
            break;
        case cudaDevAttrMaxRegistersPerMultiprocessor:
            *value = REGISTERS;
            break;
        case cudaDevAttrCooperativeLaunch:
            *value = 1;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = SHARED_OPTIN;
            break;
        case cudaDevAttrMaxBlocksPerMultiprocessor:
            *value = p.maxBlocksPerMultiProcessor;
            break;
        case cudaDevAttrReservedSharedMemoryPerBlock:
            *value = 1024;
            break;
        case cudaDevAttrMemoryPoolsSupported:
            *value = 1;
            break;
        default:
            *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* n) { return *n = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
    return *can = 0, cudaSuccess;
}
cudaError_t cudaDeviceGetLimit(size_t* value, enum cudaLimit limit) {
    return *value = 8 << 20, cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int n, int device) {
    return snprintf(id, n, "0000:00:00.0"), cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* available, size_t* all) {
    return *available = 60ull << 30, *all = 64ull << 30, cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = 0;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* found, const void* p) {
    memset(found, 0, sizeof *found);
    found->type = cudaMemoryTypeDevice, found->devicePointer = (void*)p;
    return cudaSuccess;
}

// Memory and streams
// -------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** p, size_t n) {
    if (posix_memalign(p, 512, n ? n : 1)) return cudaErrorMemoryAllocation;
    memset(*p, 0, n);
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t s) { return cudaMalloc(p, n); }
cudaError_t cudaMallocHost(void** p, size_t n) { return cudaMalloc(p, n); }
cudaError_t cudaHostAlloc(void** p, size_t n, unsigned flags) { return cudaMalloc(p, n); }
cudaError_t cudaHostGetDevicePointer(void** p, void* host, unsigned flags) {
    return *p = host, cudaSuccess;
}
cudaError_t cudaFree(void* p) { return free(p), cudaSuccess; }
cudaError_t cudaFreeAsync(void* p, cudaStream_t s) { return free(p), cudaSuccess; }
cudaError_t cudaFreeHost(void* p) { return free(p), cudaSuccess; }
cudaError_t cudaMemset(void* p, int value, size_t n) { return memset(p, value, n), cudaSuccess; }
cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t s) {
    return memset(p, value, n), cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t n, enum cudaMemcpyKind k) {
    return memmove(to, from, n), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, enum cudaMemcpyKind k,
                            cudaStream_t s) {
    return cudaMemcpy(to, from, n, k);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind k, cudaStream_t s) {
    for (size_t row = 0; row < height; row++)
        memmove((char*)to + row * to_pitch, (const char*)from + row * from_pitch, width);
    return cudaSuccess;
}

static cudaError_t handle(void** made) { return *made = malloc(1), cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t* s) { return handle((void**)s); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned flags) { return handle((void**)s); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned flags, int priority) {
    return handle((void**)s);
}
cudaError_t cudaStreamGetPriority(cudaStream_t s, int* priority) {
    return *priority = 0, cudaSuccess;
}
// Graphs: what is captured runs at once, and a replay does nothing.
static unsigned long long captures;
static int capturing;
static void* const GRAPH = &captures;
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus* status) {
    *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
static cudaError_t capture_info(cudaStream_t s, enum cudaStreamCaptureStatus* status,
                                unsigned long long* id, cudaGraph_t* graph, size_t* n) {
    if (id) *id = captures;
    if (graph) *graph = GRAPH;
    if (n) *n = 0;
    return cudaStreamIsCapturing(s, status);
}
#undef cudaStreamGetCaptureInfo
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t s, enum cudaStreamCaptureStatus* status,
                                        unsigned long long* id, cudaGraph_t* graph,
                                        const cudaGraphNode_t** nodes, size_t* n) {
    return capture_info(s, status, id, graph, n);
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* n) {
    return capture_info(s, status, id, graph, n);
}
#endif
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode mode) {
    return capturing = 1, captures++, cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* graph) {
    return capturing = 0, *graph = GRAPH, cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph,
                                          unsigned long long flags) {
    return *made = GRAPH, cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph,
                                 unsigned long long flags) {
    return *made = GRAPH, cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* n) {
    return *n = 1, cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) { return handle((void**)e); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned flags) { return handle((void**)e); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
    return *ms = 1, cudaSuccess;
}

// Kernels of libraries
// -------------------------------------------------------------------------------------------------

static struct {
    const void* host;
    const char* name;
}* registered;
static size_t count, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void __cudaRegisterFunction(void** binary, const char* host, char* device, const char* name,
                            int limit, void* t, void* b, void* bd, void* gd, int* size) {
    pthread_mutex_lock(&lock);
    if (count == room)
        registered = realloc(registered, (room = room ? 2 * room : 1024) * sizeof *registered);
    registered[count].host = host, registered[count++].name = name;
    pthread_mutex_unlock(&lock);
}

const char* kernel_name(const void* host) {
    for (size_t i = 0; i < count; i++)
        if (registered[i].host == host) return registered[i].name;
    return "?";
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* found, const void* kernel) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024, found->numRegs = 32,
    found->maxDynamicSharedSizeBytes = SHARED_OPTIN;
    found->binaryVersion = found->ptxVersion = capability(0) * 10 + capability(1);
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void* kernel, int threads,
                                                          size_t shared) {
    return *n = 1, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void* kernel,
                                                                   int threads, size_t shared,
                                                                   unsigned flags) {
    return *n = 1, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* n, const void* kernel,
                                           const cudaLaunchConfig_t* how) {
    return *n = 8, cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t s) {
    return say("library %s", kernel_name(kernel)), cudaSuccess;
}
cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                                        size_t shared, cudaStream_t s) {
    return say("library %s", kernel_name(kernel)), cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* kernel,
                                void** arguments) {
    return say("library %s", kernel_name(kernel)), cudaSuccess;
}

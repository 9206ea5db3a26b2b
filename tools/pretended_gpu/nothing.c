// Functions of CUDA that succeed and do nothing. No header of CUDA says otherwise here: what they
// take is left unread.
#define NOTHING(name) \
    int name() { return 0; }

NOTHING(cudaSetDevice)
NOTHING(cudaSetValidDevices)
NOTHING(cudaDeviceSynchronize)
NOTHING(cudaDeviceSetLimit)
NOTHING(cudaGetLastError)
NOTHING(cudaPeekAtLastError)
NOTHING(cudaHostRegister)
NOTHING(cudaHostUnregister)
NOTHING(cudaStreamDestroy)
NOTHING(cudaStreamSynchronize)
NOTHING(cudaStreamQuery)
NOTHING(cudaStreamWaitEvent)
NOTHING(cudaThreadExchangeStreamCaptureMode)
NOTHING(cudaEventDestroy)
NOTHING(cudaEventRecord)
NOTHING(cudaEventRecordWithFlags)
NOTHING(cudaEventQuery)
NOTHING(cudaEventSynchronize)
NOTHING(cudaFuncSetAttribute)
NOTHING(cudaFuncSetCacheConfig)
NOTHING(cudaGraphLaunch)
NOTHING(cudaGraphDestroy)
NOTHING(cudaGraphExecDestroy)
NOTHING(cudaGraphNodeGetDependencies)

NOTHING(cuInit)
NOTHING(cuCtxSetCurrent)
NOTHING(cuCtxGetLimit)
NOTHING(cuCtxSetLimit)
NOTHING(cuDevicePrimaryCtxRetain)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOTHING(cuLinkAddData_v2)
NOTHING(cuLinkComplete)
NOTHING(cuLinkCreate_v2)
NOTHING(cuModuleLoad)
NOTHING(cuModuleUnload)
NOTHING(cuPointerGetAttribute)
NOTHING(cuTensorMapEncodeTiled)

// cuBLAS, which would look for the rest of a driver. What it makes is all zeros.
static char made[1 << 16];
#define MAKING(name) \
    int name(void** handle) { return *handle = made, 0; }
MAKING(cublasCreate_v2)
MAKING(cublasLtMatmulDescCreate)
MAKING(cublasLtMatmulPreferenceCreate)
MAKING(cublasLtMatrixLayoutCreate)
NOTHING(cublasGetMathMode)
NOTHING(cublasGetPointerMode_v2)
unsigned long cublasLtGetVersion() { return 130000; }
int cublasLtMatmulAlgoGetHeuristic(void* handle, void* of, void* a, void* b, void* c, void* d,
                                   void* preference, int asked, void* found, int* n) {
    return *n = 1, 0;
}
NOTHING(cublasDestroy_v2)
NOTHING(cublasDotEx)
NOTHING(cublasGemmEx)
NOTHING(cublasGemmStridedBatchedEx)
NOTHING(cublasLtMatmul)
NOTHING(cublasLtMatmulDescDestroy)
NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatmulPreferenceDestroy)
NOTHING(cublasLtMatmulPreferenceSetAttribute)
NOTHING(cublasLtMatrixLayoutDestroy)
NOTHING(cublasLtMatrixLayoutSetAttribute)
NOTHING(cublasSdot_v2)
NOTHING(cublasSetMathMode)
NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasSetStream_v2)
NOTHING(cublasSetWorkspace_v2)
NOTHING(cublasSgemmEx)
NOTHING(cublasSgemmStridedBatched)
NOTHING(cublasSgemm_v2)
NOTHING(cublasSgemv_v2)

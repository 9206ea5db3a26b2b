// The products that a warpgroup makes at once: 64 rows of one matrix, which are fragments in
// registers or a tile in shared memory, times a tile of another matrix in shared memory.
#pragma once

#include "swizzle.cuh"

namespace {

// Returns the descriptor of a tile at a multiple of 1024 bytes of shared memory. That of the next
// 16 columns of K is 2 more.
__device__ __forceinline__ u64 tile_descriptor(u32 address) {
    constexpr u64 SWIZZLE_128 = 1;
    return SWIZZLE_128 << 62 | u64(CORE_MATRIX_BYTES >> 4) << 32 | 1ull << 16 |
           (address & 0x3FFFF) >> 4;
}

// A tile whose rows run along what is contracted (K-major) is the one above. One whose rows run
// along M or N (MN-major) is in pieces of 64 columns: each has a row of 128 bytes for each k,
// swizzled alike, and lies PIECE_BYTES after the one before; 16 k further on are 2048 bytes.
template <u32 PIECE_BYTES>
__device__ __forceinline__ u64 tile_descriptor_mn(u32 address) {
    constexpr u64 SWIZZLE_128 = 1;
    return SWIZZLE_128 << 62 | u64(CORE_MATRIX_BYTES >> 4) << 32 | u64(PIECE_BYTES >> 4) << 16 |
           (address & 0x3FFFF) >> 4;
}

// Makes writes to registers visible to the products that read them or add to them. It stands before
// the first product after such a write.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Makes one group of the products since the last commit, which can be waited for.
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `Pending` groups are not done.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// d [64, N] += a [64, 16] b [N, 16]^T: numbers of type T, bf16 or f16, accumulators in float32.
// A warp has 16 rows, with the fragments of mma.m16n8k16.
template <class T, int N>
__device__ __forceinline__ void wgmma(float* d, const u32 (&a)[4], u64 b);

#define REGISTERS_8 "%0,%1,%2,%3"
#define SUMS_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define REGISTERS_16 REGISTERS_8 ",%4,%5,%6,%7"
#define SUMS_16 SUMS_8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define REGISTERS_24 REGISTERS_16 ",%8,%9,%10,%11"
#define SUMS_24 SUMS_16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define REGISTERS_32 REGISTERS_24 ",%12,%13,%14,%15"
#define SUMS_32 SUMS_24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define REGISTERS_40 REGISTERS_32 ",%16,%17,%18,%19"
#define SUMS_40 SUMS_32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define REGISTERS_48 REGISTERS_40 ",%20,%21,%22,%23"
#define SUMS_48 SUMS_40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define REGISTERS_56 REGISTERS_48 ",%24,%25,%26,%27"
#define SUMS_56 SUMS_48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define REGISTERS_64 REGISTERS_56 ",%28,%29,%30,%31"
#define SUMS_64 SUMS_56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define REGISTERS_72 REGISTERS_64 ",%32,%33,%34,%35"
#define SUMS_72 SUMS_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define REGISTERS_80 REGISTERS_72 ",%36,%37,%38,%39"
#define SUMS_80 SUMS_72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define REGISTERS_88 REGISTERS_80 ",%40,%41,%42,%43"
#define SUMS_88 SUMS_80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define REGISTERS_96 REGISTERS_88 ",%44,%45,%46,%47"
#define SUMS_96 SUMS_88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define REGISTERS_104 REGISTERS_96 ",%48,%49,%50,%51"
#define SUMS_104 SUMS_96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define REGISTERS_112 REGISTERS_104 ",%52,%53,%54,%55"
#define SUMS_112 SUMS_104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define REGISTERS_120 REGISTERS_112 ",%56,%57,%58,%59"
#define SUMS_120 SUMS_112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define REGISTERS_128 REGISTERS_120 ",%60,%61,%62,%63"
#define SUMS_128 SUMS_120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define REGISTERS_136 REGISTERS_128 ",%64,%65,%66,%67"
#define SUMS_136 SUMS_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define REGISTERS_144 REGISTERS_136 ",%68,%69,%70,%71"
#define SUMS_144 SUMS_136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define REGISTERS_152 REGISTERS_144 ",%72,%73,%74,%75"
#define SUMS_152 SUMS_144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define REGISTERS_160 REGISTERS_152 ",%76,%77,%78,%79"
#define SUMS_160 SUMS_152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define REGISTERS_168 REGISTERS_160 ",%80,%81,%82,%83"
#define SUMS_168 SUMS_160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define REGISTERS_176 REGISTERS_168 ",%84,%85,%86,%87"
#define SUMS_176 SUMS_168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define REGISTERS_184 REGISTERS_176 ",%88,%89,%90,%91"
#define SUMS_184 SUMS_176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define REGISTERS_192 REGISTERS_184 ",%92,%93,%94,%95"
#define SUMS_192 SUMS_184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define REGISTERS_200 REGISTERS_192 ",%96,%97,%98,%99"
#define SUMS_200 SUMS_192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define REGISTERS_208 REGISTERS_200 ",%100,%101,%102,%103"
#define SUMS_208 SUMS_200, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define REGISTERS_216 REGISTERS_208 ",%104,%105,%106,%107"
#define SUMS_216 SUMS_208, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define REGISTERS_224 REGISTERS_216 ",%108,%109,%110,%111"
#define SUMS_224 SUMS_216, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define REGISTERS_232 REGISTERS_224 ",%112,%113,%114,%115"
#define SUMS_232 SUMS_224, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define REGISTERS_240 REGISTERS_232 ",%116,%117,%118,%119"
#define SUMS_240 SUMS_232, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define REGISTERS_248 REGISTERS_240 ",%120,%121,%122,%123"
#define SUMS_248 SUMS_240, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define REGISTERS_256 REGISTERS_248 ",%124,%125,%126,%127"
#define SUMS_256 SUMS_248, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

// The operands that follow the accumulators have the numbers A0 .. B.
#define WGMMA_OF(T, N, A0, A1, A2, A3, B)                                                \
    template <>                                                                          \
    __device__ __forceinline__ void wgmma<T, N>(float* d, const u32(&a)[4], u64 b) {     \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #T "." #T         \
                     " {" REGISTERS_##N "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B \
                                        ", 1, 1, 1, 0;"                                  \
                     : SUMS_##N                                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));              \
    }
#define WGMMA(N, A0, A1, A2, A3, B)      \
    WGMMA_OF(bf16, N, A0, A1, A2, A3, B) \
    WGMMA_OF(f16, N, A0, A1, A2, A3, B)
WGMMA(8, 4, 5, 6, 7, 8)
WGMMA(16, 8, 9, 10, 11, 12)
WGMMA(24, 12, 13, 14, 15, 16)
WGMMA(32, 16, 17, 18, 19, 20)
WGMMA(40, 20, 21, 22, 23, 24)
WGMMA(48, 24, 25, 26, 27, 28)
WGMMA(56, 28, 29, 30, 31, 32)
WGMMA(64, 32, 33, 34, 35, 36)
WGMMA(72, 36, 37, 38, 39, 40)
WGMMA(80, 40, 41, 42, 43, 44)
WGMMA(88, 44, 45, 46, 47, 48)
WGMMA(96, 48, 49, 50, 51, 52)
WGMMA(104, 52, 53, 54, 55, 56)
WGMMA(112, 56, 57, 58, 59, 60)
WGMMA(120, 60, 61, 62, 63, 64)
WGMMA(128, 64, 65, 66, 67, 68)
WGMMA(136, 68, 69, 70, 71, 72)
WGMMA(144, 72, 73, 74, 75, 76)
WGMMA(152, 76, 77, 78, 79, 80)
WGMMA(160, 80, 81, 82, 83, 84)
WGMMA(168, 84, 85, 86, 87, 88)
WGMMA(176, 88, 89, 90, 91, 92)
WGMMA(184, 92, 93, 94, 95, 96)
WGMMA(192, 96, 97, 98, 99, 100)
WGMMA(200, 100, 101, 102, 103, 104)
WGMMA(208, 104, 105, 106, 107, 108)
WGMMA(216, 108, 109, 110, 111, 112)
WGMMA(224, 112, 113, 114, 115, 116)
WGMMA(232, 116, 117, 118, 119, 120)
WGMMA(240, 120, 121, 122, 123, 124)
WGMMA(248, 124, 125, 126, 127, 128)
WGMMA(256, 128, 129, 130, 131, 132)
#undef WGMMA
#undef WGMMA_OF

// d [64, N] += a [64, 16] b [N, 16]^T: both from tiles in shared memory. A_MN, B_MN: whether they
// are MN-major.
template <class T, int N, bool A_MN, bool B_MN>
__device__ __forceinline__ void wgmma_shared(float* d, u64 a, u64 b);

// The operands that follow the accumulators have the numbers A and B.
#define WGMMA_SHARED_OF(T, N, A, B, A_MAJOR, B_MAJOR, A_MN, B_MN)                               \
    template <>                                                                                 \
    __device__ __forceinline__ void wgmma_shared<T, N, A_MN, B_MN>(float* d, u64 a, u64 b) {    \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #T "." #T                \
                     " {" REGISTERS_##N "}, %" #A ", %" #B ", 1, 1, 1, " #A_MAJOR ", " #B_MAJOR \
                                        ";"                                                     \
                     : SUMS_##N                                                                 \
                     : "l"(a), "l"(b));                                                         \
    }
#define WGMMA_SHARED(T, N, A, B)                    \
    WGMMA_SHARED_OF(T, N, A, B, 0, 0, false, false) \
    WGMMA_SHARED_OF(T, N, A, B, 0, 1, false, true)  \
    WGMMA_SHARED_OF(T, N, A, B, 1, 1, true, true)
WGMMA_SHARED(bf16, 64, 32, 33)
WGMMA_SHARED(bf16, 128, 64, 65)
WGMMA_SHARED(bf16, 256, 128, 129)
WGMMA_SHARED(f16, 64, 32, 33)
WGMMA_SHARED(f16, 128, 64, 65)
WGMMA_SHARED(f16, 256, 128, 129)
#undef WGMMA_SHARED
#undef WGMMA_SHARED_OF

// d [64, 128] = a [64, 32] b [128, 32]^T, plus d if ADDS: e4m3 codes from K-major tiles in shared
// memory. Sums have some 14 bits.
template <bool ADDS>
__device__ __forceinline__ void wgmma_e4m3(float* d, u64 a, u64 b) {
    asm volatile(
        "{.reg .pred adds; setp.ne.b32 adds, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" REGISTERS_128
        "}, %64, %65, adds, 1, 1;}"
        : SUMS_128
        : "l"(a), "l"(b), "n"(int(ADDS)));
}

}  // namespace

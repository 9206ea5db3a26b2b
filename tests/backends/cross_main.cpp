// A kernel of a segment, run where nothing else of the library does:   program IN OUT
// IN: the number of sizes and the sizes, the number of arrays, and each array's bytes and content.
// OUT: all arrays afterwards.
#include <cstdio>
#include <vector>

using i64 = long long;

extern "C" void product();
extern "C" int run_0(void* const* p, const i64* n, void* const* products, int threads);

namespace {

i64 number(std::FILE* file) {
    i64 n = 0;
    return std::fread(&n, sizeof n, 1, file) == 1 ? n : -1;
}

}  // namespace

int main(int, char** argv) {
    std::FILE* in = std::fopen(argv[1], "rb");
    std::vector<i64> sizes(number(in));
    for (i64& size : sizes) size = number(in);
    std::vector<std::vector<char>> arrays(number(in));
    std::vector<void*> pointers;
    for (auto& array : arrays) {
        array.resize(number(in));
        if (std::fread(array.data(), 1, array.size(), in) != array.size()) return 2;
        pointers.push_back(array.data());
    }
    void* const products[] = {reinterpret_cast<void*>(product)};
    if (const int bad = run_0(pointers.data(), sizes.data(), products, 2)) return bad;
    std::FILE* out = std::fopen(argv[2], "wb");
    for (auto& array : arrays) std::fwrite(array.data(), 1, array.size(), out);
    return std::fclose(out);
}

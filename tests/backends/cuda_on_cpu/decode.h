// Decodes a matrix [N, K] by a Segment's reader, as lanes do: `out` gets what fragments hold.
// Included in a namespace for each Segment.
namespace {

using T = Segment::Activation;
using Reader = Segment::Weights;

void put(float* out, i32 row, i32 column, u32 pair) {
    if (row >= Segment::N) return;
    float* to = out + i64(row) * Segment::K + column;
    if (column >= Segment::K) {  // multiplied by zeros
        if (!std::isfinite(widen(T{u16(pair)})) || !std::isfinite(widen(T{u16(pair >> 16)})))
            to[-column] = NAN;
        return;
    }
    const float factor = Reader::RESCALE * Reader::outer(Segment(), 0, row);
    to[0] = widen(T{u16(pair)}) * factor, to[1] = widen(T{u16(pair >> 16)}) * factor;
}

void from_memory(float* out) {
    for (i32 first = 0; first < Segment::N; first += 16)
        for (i32 lane = 0; lane < 32; ++lane) {
            Reader reader;
            reader.open(Segment(), 0, first, 0, lane);
            for (i32 block = 0; 64 * block < Segment::K; ++block) {
                // one block further by each of the two ways
                if (block % 2 == 0 && block > 0) reader.advance(2);
                const auto packed = reader.load(block % 2);
                const auto scales = Reader::scales(packed);
                for (int step = 0; step < 8; ++step) {
                    u32 a[2];
                    Reader::dequantize(packed, scales, step % 4, step / 4, a);
                    const i32 column = 64 * block + 16 * (lane % 4) + step / 4 * 8 + step % 4 * 2;
                    put(out, first + lane / 4, column, a[0]);
                    put(out, first + lane / 4 + 8, column, a[1]);
                }
            }
        }
}

#ifdef TILED
// Tiles as producers copy them.
template <class Shared, class R = Reader>
void copy(u8* elements, u8* scales, i32 tile) {
    const Segment s;
    for (i32 run = 0; run < R::ELEMENTS / RUN; ++run)
        for (i32 lane = 0; lane < 32; ++lane)
            std::memcpy(elements + RUN * run + Shared::swizzled_lane(lane, run),
                        R::elements(s) + i64(tile) * R::ELEMENTS + RUN * run + 16 * lane, 16);
    for (i32 piece = 0; piece < R::SCALES / 16; ++piece) {
        if constexpr (R::SCALES_FOLLOW)
            std::memcpy(scales + 16 * piece, R::scales(s) + i64(tile) * R::SCALES + 16 * piece, 16);
        else
            std::memcpy(
                scales + 16 * piece,
                R::first_piece(s, piece) +
                    i64(R::piece_of_tile(piece, Segment::K / 64, tile)) * R::pieces_apart(piece),
                16);
    }
}

alignas(16) u8 elements[4 * 1024], scales[4 * 1024];

template <bool FRAGMENT_ORDER>
void from_shared(float* out) {
    using Shared = typename Reader::template Shared<FRAGMENT_ORDER>;
    constexpr i32 TILES = Segment::K / 64;
    for (i32 tile = 0; tile < Segment::N / 16 * TILES; ++tile) {
        copy<Shared>(elements, scales, tile);
        for (i32 lane = 0; lane < 32; ++lane) {
            const auto packed = Shared(0, 0, lane).load(elements, scales);
            for (int v = 0; v < 4; ++v) {
                u32 a[4];
                Shared::dequantize(packed, v, a);
                const i32 run = FRAGMENT_ORDER ? lane % 4 : v, pair = FRAGMENT_ORDER ? v : lane % 4;
                for (int i = 0; i < 4; ++i)
                    put(out, tile / TILES * 16 + lane / 4 + 8 * (i % 2),
                        tile % TILES * 64 + 16 * run + 8 * (i / 2) + 2 * pair, a[i]);
            }
        }
    }
}

// For dgrad, to a matrix [N, K] too: pairs are of a column.
void transposed(float* out) {
    using Shared = typename Reader::template Transposed<1>;
    constexpr i32 TILES = Segment::K / 64;
    for (i32 first = 0; first < Segment::N / 16; first += 4)
        for (i32 across = 0; across < TILES; ++across) {
            for (i32 t = 0; t < 4; ++t)
                copy<Shared>(elements + t * Reader::ELEMENTS, scales + t * Reader::SCALES,
                             (first + t) * TILES + across);
            for (i32 thread = 0; thread < 128; ++thread) {
                const i32 warp = thread / 32, lane = thread % 32;
                const auto packed = Shared(0, 0, warp, lane).load(elements, scales);
                for (int v = 0; v < 4; ++v) {
                    u32 a[4];
                    Shared::dequantize(packed, v, a);
                    for (int i = 0; i < 8; ++i) {
                        const i32 row = 16 * (first + v) + 2 * (lane % 4) + i / 4 + i % 4 / 2 * 8,
                                  column = 64 * across + 16 * warp + lane / 4 + i % 2 * 8;
                        const u16 bits = u16(a[i % 4] >> 16 * (i / 4));
                        out[i64(row) * Segment::K + column] =
                            widen(T{bits}) * Reader::RESCALE * Reader::outer(Segment(), 0, row);
                    }
                }
            }
        }
}
#endif

}  // namespace

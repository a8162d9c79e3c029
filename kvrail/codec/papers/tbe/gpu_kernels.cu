// Weights as TCA-TBE: their tiles for products (../fused/product.cuh), and `unpack`, which gives them back as bfloat16. The
// bits: README.md beside this.
//
// A warp restores a strip of a BlockTile: 16 rows and 64 columns, four TensorCoreTiles, 16 FragTiles, 1,024 weights. First
// each lane has half a FragTile, the 32 bits of it in each bitmap: it finds how many values of PackedSignMantissa lie
// before it, and makes of its bits four rows of eight codes. Then each lane takes a row of each TensorCoreTile, so that
// lanes beside each other read values beside each other, and restores four weights at a time in words of 32 bits. What has
// no code gets whatever lies there, and then its full value from the lane that has its bits.

#define CODES 0x0f0f0f0fu
#define SIGNS 0x80808080u

// Bytes of a warp's scratch: values of PackedSignMantissa, some of FullValue, codes of each row, where each row begins.
#define HELD_FULL 64
#define FULL_AT 1056
#define CODES_AT (FULL_AT + 2 * HELD_FULL)
#define ROWS_AT (CODES_AT + 512)
#define SCRATCH_BYTES (ROWS_AT + 512)

#define PARAMETERS \
  const u32 *base, const u8 *bitmaps, const u8 *sign_mantissas, const u16 *full_values, const uint4 *offsets
#define PARTS base, bitmaps, sign_mantissas, full_values, offsets

struct Weight {
  const u8 *bitmaps, *sign_mantissas;
  const u16* full_values;
  const uint4* offsets;
  u32 bases;  // the base in each byte
  __device__ __forceinline__ Weight(PARAMETERS)
      : bitmaps(bitmaps), sign_mantissas(sign_mantissas), full_values(full_values), offsets(offsets),
        bases(read4(base) * 0x01010101u) {}
  __device__ __forceinline__ float scale(int) const { return 1.0f; }
};

// Where a strip begins: its number, the byte of PackedSignMantissa and how many of them there are, the value of FullValue.
struct Place {
  u32 strip, from = 0, full = 0, count = 0;
  __device__ __forceinline__ void nowhere() { strip = ~0u; }
  __device__ __forceinline__ void look_up(const Weight& weight, int row_of_strips, int tile, int across) {
    const u32 block = (u32)(row_of_strips >> 2) * across + tile, part = row_of_strips & 3;
    const uint4 entry = read16(weight.offsets + block);
    const u32 begin = part == 0 ? 0 : part == 1 ? entry.z & 0xffffu : part == 2 ? entry.z >> 16 : entry.w & 0xffffu;
    const u32 end = part == 0 ? entry.z & 0xffffu : part == 1 ? entry.z >> 16 : part == 2 ? entry.w & 0xffffu : entry.w >> 16;
    strip = block * 4 + part;
    from = entry.x * 16 + begin;
    full = entry.y * 8 + part * 1024 - begin;
    count = end - begin;
  }
};

// A strip on its way: its lane's words of the bitmaps and pieces of the values.
struct Tile {
  static constexpr int SCRATCH = SCRATCH_BYTES;
  u32 strip, from, full, count;
  u32 plane0, plane1, plane2;  // after `begin`: which weights have a code, values before the lane's, unused
  uint4 values0, values1, values2;
  u32 full0, full1;
  u32 scratch, bases;
  u32 chosen, corner;  // of the lane, for every tile: the choices of its mask, and its first place in a tile

  __device__ __forceinline__ Tile() {
    const u32 lane = threadIdx.x % 32;
    chosen = kept(choices(lane & 15));
    corner = kept((lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) * 16));
  }

  __device__ __forceinline__ bool any() const { return strip != ~0u; }

  __device__ __forceinline__ void fetch(const Weight& weight, const Place& place, int source, int lane) {
    strip = __shfl_sync(~0u, place.strip, source);
    from = __shfl_sync(~0u, place.from, source);
    full = __shfl_sync(~0u, place.full, source);
    count = __shfl_sync(~0u, place.count, source);
    if (!any()) return;
    bases = weight.bases;
    const u8* const bits = weight.bitmaps + (u64)strip * 384 + lane * 4;
    plane0 = read4(bits);
    plane1 = read4(bits + 128);
    plane2 = read4(bits + 256);
    const int left = (int)((from & 15) + count) - lane * 16, others = (int)(1024 - count) - lane;
    const u8* const at = weight.sign_mantissas + ((from & ~15u) + lane * 16);
    if (left > 0) values0 = read16(at);
    if (left > 512) values1 = read16(at + 512);
    if (left > 1024) values2 = read16(at + 1024);  // of the first lane alone
    const u16* const there = weight.full_values + (full + lane);
    if (others > 0) full0 = read2(there);
    if (others > 32) full1 = read2(there + 32);
  }

  __device__ __forceinline__ void begin(u32 given, int lane) {
    scratch = given;
    store16(scratch + lane * 16, values0.x, values0.y, values0.z, values0.w);
    store16(scratch + lane * 16 + 512, values1.x, values1.y, values1.z, values1.w);
    if (lane == 0) store16(scratch + 1024, values2.x, values2.y, values2.z, values2.w);
    store2(scratch + FULL_AT + lane * 2, full0);
    store2(scratch + FULL_AT + lane * 2 + 64, full1);
    const u32 coded = plane0 | plane1 | plane2;
    u32 before = __popc(coded);  // its sum over the lanes up to this one
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const u32 other = __shfl_up_sync(~0u, before, distance);
      if (lane >= distance) before += other;
    }
    before -= __popc(coded);
    // Of four columns each, codes of four bits of one column in all rows; then, byte by byte, of one row in all columns.
    const u32 c0 = (plane0 & 0x11111111u) | ((plane1 << 1) & 0x22222222u) | ((plane2 << 2) & 0x44444444u);
    const u32 c1 = ((plane0 >> 1) & 0x11111111u) | (plane1 & 0x22222222u) | ((plane2 << 1) & 0x44444444u);
    const u32 c2 = ((plane0 >> 2) & 0x11111111u) | ((plane1 >> 1) & 0x22222222u) | (plane2 & 0x44444444u);
    const u32 c3 = ((plane0 >> 3) & 0x11111111u) | ((plane1 >> 2) & 0x22222222u) | ((plane2 >> 1) & 0x44444444u);
    const u32 upper01 = bytes_of(c0, c1, 0x5140), lower01 = bytes_of(c0, c1, 0x7362);
    const u32 upper23 = bytes_of(c2, c3, 0x5140), lower23 = bytes_of(c2, c3, 0x7362);
    store16(scratch + CODES_AT + lane * 16, bytes_of(upper01, upper23, 0x5410), bytes_of(upper01, upper23, 0x7632),
            bytes_of(lower01, lower23, 0x5410), bytes_of(lower01, lower23, 0x7632));
    // Where a row's values begin in shared memory, and above it which of its weights have a code.
    const u32 at = scratch + (from & 15) + before;
    store16(scratch + ROWS_AT + lane * 16, bytes_of(at, coded, 0x4210),
            bytes_of(at + __popc(coded & 0xffu), coded, 0x5210), bytes_of(at + __popc(coded & 0xffffu), coded, 0x6210),
            bytes_of(at + __popc(coded & 0xffffffu), coded, 0x7210));
    plane0 = coded;
    plane1 = before;
    __syncwarp();
  }

  // For four weights, by the mask of those that have a code: which of the values ahead each takes, in four bits each;
  // above, the number of values, four times.
  static __device__ __forceinline__ u32 choices(u32 mask) {
    const u32 second = mask & 1, third = second + ((mask >> 1) & 1), fourth = third + ((mask >> 2) & 1);
    return (fourth + ((mask >> 3) & 1)) * 0x11110000u | fourth << 12 | third << 8 | second << 4;
  }

  // Four weights, as two words of two, of their values and codes.
  __device__ __forceinline__ void join(u32 values, u32 codes, u32& first, u32& second) const {
    const u32 exponents = codes + bases;
    const u32 low = bits_of(exponents << 7, values, SIGNS), high = bits_of(values, exponents >> 1, SIGNS);
    first = first_pair(low, high);
    second = second_pair(low, high);
  }

  __device__ __forceinline__ void store(u32 to, int lane) const {
    const u32 place = to + corner, own = scratch + lane * 4;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const u32 codes = load4(own + CODES_AT + 128 * k), row = load4(own + ROWS_AT + 128 * k);
      const u32 one = __shfl_sync(~0u, chosen, row >> 24), other = __shfl_sync(~0u, chosen, row >> 28);
      const u32 at = row & 0xfffffcu, middle = load4(at + 4);
      const u32 ahead = __funnelshift_r(load4(at), middle, row * 8), behind = __funnelshift_r(middle, load4(at + 8), row * 8);
      const u32 left = bytes_of(ahead, behind, one), right = bytes_of(ahead, behind, other + (one >> 16));
      u32 x, y, z, w;
      join(left, codes & CODES, x, y);
      join(right, (codes >> 4) & CODES, z, w);
      store16(place ^ (32 * k), x, y, z, w);
    }
  }

  __device__ __forceinline__ void patch(const Weight& weight, u32 to, int lane) const {
    const u32 row = 4 * (lane & 1), group = 2 * (lane >> 3) + ((lane >> 2) & 1);
    const u32 first = to + (row + 8 * ((lane >> 1) & 1)) * 128 + (group ^ row) * 16;
    u32 rest = ~plane0, index = 32 * (lane + 1) - plane1;  // of the values behind the lane's
    index -= __popc(plane0);
    auto put = [&](u32 value) {  // the last of the rest; a row further is 128 bytes further, and its groups are swapped
      const u32 bit = 31 - __clz(rest);
      store2(first ^ ((bit * 16) & 0x180) ^ (bit * 2), value);
      rest ^= 1u << bit;
    };
    while (rest != 0 && index > HELD_FULL) put(read2(weight.full_values + (full + --index)));
    for (u32 at = scratch + FULL_AT + 2 * index; rest != 0;) put(load2(at -= 2));
  }
};

#ifndef STRIPS
// The weight, [rows, columns], bit for bit; columns a multiple of 64. A warp unpacks one strip after another.
extern "C" __global__ void __launch_bounds__(256) unpack(PARAMETERS, u16* out, int rows, int columns) {
  extern __shared__ __align__(1024) u8 room[];
  const Weight weight{PARTS};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, across = columns / 64;
  const u32 tiles = (u32)((rows + 15) / 16) * across, stride = gridDim.x * 8;
  u8* const held = room + warp * 2048;
  const u32 to = shared(held), scratch = shared(room) + 8 * 2048 + warp * Tile::SCRATCH;
  Place place;
  Tile tile;
  auto fetch = [&](u32 number) {
    place.nowhere();
    if (number < tiles) place.look_up(weight, number / across, number % across, across);
    tile.fetch(weight, place, 0, lane);
  };
  u32 number = blockIdx.x * 8 + warp;
  fetch(number);
  while (tile.any()) {
    tile.begin(scratch, lane);
    const Tile ready = tile;
    fetch(number + stride);
    ready.store(to, lane);
    __syncwarp();
    ready.patch(weight, to, lane);
    __syncwarp();
    const u32 row0 = number / across * 16, column = number % across * 64;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 i = lane + 32 * j, row = i >> 3, group = i & 7;
      if (row0 + row < rows)
        *(uint4*)(out + (u64)(row0 + row) * columns + column + group * 8) = *(uint4*)(held + row * 128 + ((group ^ (row & 7)) * 16));
    }
    __syncwarp();
    number += stride;
  }
}
#endif

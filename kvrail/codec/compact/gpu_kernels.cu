// Compact weights: their tiles for products (../fused/product.cuh), and `unpack`, which gives them back as bfloat16. The bits:
// README.md beside this.

#define FIXED 1408  // bytes of a tile before its records
#define NONE 0xffffffffu
#define FIELDS 0x83838383u  // sign and code of four weights, as the high bytes of bfloat16 have them
#define WINDOW 0x3c3c3c3cu  // what the high bytes of exponents 120 to 127 share

// A lane's 32 weights of a tile, as they are stored.
struct Piece { uint4 low0, low1; u32 q0, q1, q2; };

__device__ __forceinline__ u32 rotated(u32 v, int by) { return __funnelshift_r(v, v, by); }

// High bytes of a lane's weights, four to a word, of the eight words of low bytes.
__device__ __forceinline__ void high_bytes(const Piece& p, u32* high) {
  high[0] = (p.q0 & FIELDS) | WINDOW;
  high[1] = (rotated(p.q0, 3) & FIELDS) | WINDOW;
  high[2] = (p.q1 & FIELDS) | WINDOW;
  high[3] = (rotated(p.q1, 3) & FIELDS) | WINDOW;
  high[4] = (p.q2 & FIELDS) | WINDOW;
  high[5] = (rotated(p.q2, 3) & FIELDS) | WINDOW;
  high[6] = ((p.q0 >> 5) & 0x03030303u) | ((p.q2 << 2) & 0x80808080u) | WINDOW;
  high[7] = ((p.q1 >> 5) & 0x03030303u) | ((p.q2 << 1) & 0x80808080u) | WINDOW;
}

__device__ __forceinline__ Piece read_piece(const u8* at, int lane) {
  Piece p;
  p.low0 = read16(at + lane * 16);
  p.low1 = read16(at + 512 + lane * 16);
  const u8* codes = at + 1024 + lane * 4;
  p.q0 = read4(codes);
  p.q1 = read4(codes + 128);
  p.q2 = read4(codes + 256);
  return p;
}

// Write a lane's weights into a tile of shared memory, [16][128 bytes], whose 16-byte groups are swizzled by the row.
// added: to each word; shifts the exponents of two weights at once.
__device__ __forceinline__ void store_piece(u32 tile, const Piece& p, int lane, u32 added) {
  u32 high[8];
  high_bytes(p, high);
  const int row = lane & 15, group = (lane >> 4) * 4, turn = row & 7;
  const u32 at = tile + row * 128;
  const u32 low[8] = {p.low0.x, p.low0.y, p.low0.z, p.low0.w, p.low1.x, p.low1.y, p.low1.z, p.low1.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 l0 = low[2 * i], l1 = low[2 * i + 1], h0 = high[2 * i], h1 = high[2 * i + 1];
    store16(at + (((group + i) ^ turn) * 16), first_pair(l0, h0) + added, second_pair(l0, h0) + added,
            first_pair(l1, h1) + added, second_pair(l1, h1) + added);
  }
}

// Byte offset of the weight that a record names. second: whether it lies in the tile's second half of columns.
__device__ __forceinline__ u32 place_of(u32 record, bool second) {
  const u32 row = (record & 511) >> 5, column = (second ? 32 : 0) + (record & 31);
  return row * 128 + (((column >> 3) ^ (row & 7)) * 16) + (column & 7) * 2;
}

#define PARAMETERS const u8 *blocks, const u32 *index, const u32 *counts, const float *scales
#define PARTS blocks, index, counts, scales

struct Weight {
  const u8* blocks;
  const u32 *index, *counts;
  const float* scales;
  __device__ __forceinline__ float scale(int row) const { return scales[row]; }
};

// Where a tile begins, and its counts.
struct Place {
  u32 at = 0, of;
  __device__ __forceinline__ void nowhere() { of = NONE; }
  __device__ __forceinline__ void look_up(const Weight& weight, int strip, int tile, int across) {
    at = read4(weight.index + (u32)strip * across + tile);
    of = read4(weight.counts + (u32)strip * across + tile);
  }
};

// A tile on its way: its lane's piece and first record, its counts, and where it lies.
struct Tile {
  static constexpr int SCRATCH = 0;
  Piece piece;
  u32 record, counts;
  const u8* at;

  __device__ __forceinline__ bool any() const { return counts != NONE; }

  __device__ __forceinline__ void fetch(const Weight& weight, const Place& place, int from, int lane) {
    const u32 begin = __shfl_sync(~0u, place.at, from);
    counts = __shfl_sync(~0u, place.of, from);
    if (!any()) return;
    at = weight.blocks + (u64)begin * 16;
    piece = read_piece(at, lane);
    record = 0;
    if (lane < (counts & 0xffffu)) record = ((const u16*)(at + FIXED))[lane];
  }

  __device__ __forceinline__ void begin(u32, int) {}

  __device__ __forceinline__ void store(u32 to, int lane) const { store_piece(to, piece, lane, 0); }

  __device__ __forceinline__ void patch(const Weight&, u32 to, int lane) {
    const u32 n = counts & 0xffffu, first = counts >> 16;
    const u16* const records = (const u16*)(at + FIXED);
    for (u32 i = lane; i < n; i += 32) {
      if (i >= 32) record = records[i];
      const u32 high = to + place_of(record, i >= first) + 1;
      store1(high, (load1(high) & 0x80) | (record >> 9));
    }
  }
};

#ifndef STRIPS
// The weight, [rows, columns], bit for bit. A warp unpacks one tile after another. shifts: exponents' distances, by row.
extern "C" __global__ void __launch_bounds__(256) unpack(const u8* blocks, const u32* index, const u32* counts,
                                                         const int* shifts, u16* out, int rows, int columns) {
  __shared__ __align__(1024) u8 room[8 * 2048];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, across = columns / 64;
  const u32 tiles = (u32)(rows / 16) * across, stride = gridDim.x * 8;
  u8* const held = room + warp * 2048;
  u32 tile = blockIdx.x * 8 + warp;
  if (tile >= tiles) return;
  const u8* at = blocks + (u64)read4(index + tile) * 16;
  Piece piece = read_piece(at, lane);
  u32 count = read4(counts + tile);
  while (true) {
    const u32 strip = tile / across, column = (tile % across) * 64, n = count & 0xffffu, first = count >> 16;
    const bool more = tile + stride < tiles;
    const u8* next_at = at;
    Piece next = piece;
    u32 next_count = 0;
    if (more) {
      next_at = blocks + (u64)read4(index + tile + stride) * 16;
      next = read_piece(next_at, lane);
      next_count = read4(counts + tile + stride);
    }
    const u16* const records = (const u16*)(at + FIXED);
    u32 record = lane < n ? records[lane] : 0;
    store_piece(shared(held), piece, lane, (u32)shifts[strip * 16 + (lane & 15)] * 0x00800080u);
    __syncwarp();
    for (u32 i = lane; i < n; i += 32) {
      if (i >= 32) record = records[i];
      u16* const place = (u16*)(held + place_of(record, i >= first));
      const u32 value = *place;
      const int shift = shifts[strip * 16 + ((record & 511) >> 5)];
      int exponent = (record >> 9) * 2 + (((value >> 7) ^ shift) & 1);  // as it is stored
      if (exponent != 0 && exponent != 255) exponent += shift;
      *place = (u16)((value & 0x807f) | (exponent << 7));
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int i = lane + 32 * j, row = i >> 3, group = i & 7;
      *(uint4*)(out + (u64)(strip * 16 + row) * columns + column + group * 8) = *(uint4*)(held + row * 128 + ((group ^ (row & 7)) * 16));
    }
    __syncwarp();
    if (!more) return;
    tile += stride;
    at = next_at;
    piece = next;
    count = next_count;
  }
}
#endif

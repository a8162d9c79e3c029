// Products with packed weights, and packed weights back to bfloat16. The bits: README.md beside this.
//
// `product` multiplies up to 8 * TOKEN_TILES tokens by a weight that it unpacks on the way. A block has PRODUCERS warps
// that read tiles from global memory, unpack them into shared memory and put the escapes in place; one warp whose first
// lane has the copy engine bring the tokens' columns; and STRIPS warps that multiply, each 16 rows of the weight. Stages
// of shared memory lie between them. A block works on STRIPS strips at a time and goes on to its next ones without a
// pause. Each output is one chain of m16n8k16 products in order of the columns: the order of cuBLASLt's kernels that do
// not split the sum, so the bits are theirs, whatever the constants here.
//
// Constants of a build: TOKEN_TILES 1, 2 or 4; PRODUCERS, a multiple of STRIPS; STRIPS; STAGES.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define TILES (PRODUCERS / STRIPS)  // of a strip, in one stage
#define TOKENS (8 * TOKEN_TILES)
#define FIXED 1408                    // bytes of a tile before its records
#define WEIGHTS_OF_STAGE (PRODUCERS * 2048)
#define TOKENS_OF_STAGE (TILES * TOKENS * 128)
#define STEPS (2 * TILES)             // of 32 columns, in one stage
#define NONE 0xffffffffu
#define FIELDS 0x83838383u            // sign and code of four weights, as the high bytes of bfloat16 have them
#define WINDOW 0x3c3c3c3cu            // what the high bytes of exponents 120 to 127 share

struct __align__(64) TensorMap { u64 words[16]; };

// A lane's 32 weights of a tile, packed.
struct Piece { uint4 low0, low1; u32 q0, q1, q2; };

// A tile on its way: its lane's piece and first record, its counts, and where it lies.
struct Tile { Piece piece; u32 record, counts; const u8* at; };

__device__ __forceinline__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ uint4 read16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ u32 read4(const void* p) {
  u32 v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0,[%1];" : "=r"(v) : "l"(p));
  return v;
}

__device__ __forceinline__ void store16(u32 at, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.shared.v4.b32 [%0],{%1,%2,%3,%4};" ::"r"(at), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

__device__ __forceinline__ u32 load1(u32 at) {
  u32 v;
  asm volatile("ld.shared.u8 %0,[%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ void store1(u32 at, u32 v) { asm volatile("st.shared.u8 [%0],%1;" ::"r"(at), "r"(v) : "memory"); }

__device__ __forceinline__ void barrier_init(u32 b, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0],%1;" ::"r"(b), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(u32 b) {
  asm volatile("{.reg .b64 t; mbarrier.arrive.shared.b64 t,[%0];}" ::"r"(b) : "memory");
}

__device__ __forceinline__ void arrive_expecting(u32 b, u32 bytes) {
  asm volatile("{.reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t,[%0],%1;}" ::"r"(b), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(u32 b, u32 parity) {
  asm volatile("{.reg .pred p; L: mbarrier.try_wait.parity.shared.b64 p,[%0],%1; @p bra D; bra L; D:}" ::"r"(b), "r"(parity) : "memory");
}

// 64 columns of all tokens, [TOKENS][128 bytes], swizzled by the copy engine; tokens that are not there come as zeros.
__device__ __forceinline__ void copy_tokens(u32 to, const TensorMap* map, int column, u32 b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0],[%1,{%2,%3}],[%4];"
               ::"r"(to), "l"(map), "r"(column), "r"(0), "r"(b) : "memory");
}

__device__ __forceinline__ void load_matrices(u32* r, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ void multiply(float* sums, const u32* weights, const u32* tokens) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "r"(tokens[0]), "r"(tokens[1]));
}

__device__ __forceinline__ u16 to_bfloat16(float f) {
  u16 r;
  asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(r) : "f"(f));
  return r;
}

__device__ __forceinline__ float from_bfloat16(u16 v) { return __uint_as_float((u32)v << 16); }

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

__device__ __forceinline__ u32 first_pair(u32 low, u32 high) { return __byte_perm(low, high, 0x5140); }
__device__ __forceinline__ u32 second_pair(u32 low, u32 high) { return __byte_perm(low, high, 0x7362); }

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

#ifdef STRIPS
extern "C" __global__ void __launch_bounds__((PRODUCERS + STRIPS + 1) * 32, 1) product(
    const u8* blocks, const u32* index, const u32* counts, const float* scales, const __grid_constant__ TensorMap map,
    const u16* bias, u16* out, int rows, int columns, int tokens) {
  extern __shared__ __align__(1024) u8 room[];
  u8* const held_tokens = room + STAGES * WEIGHTS_OF_STAGE;
  const u32 full = shared(held_tokens + STAGES * TOKENS_OF_STAGE), empty = full + 8 * STAGES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      barrier_init(full + 8 * s, PRODUCERS + 1);
      barrier_init(empty + 8 * s, STRIPS);
    }
  }
  __syncthreads();
  const int across = columns / 64, stages = (across + TILES - 1) / TILES, strips = rows / 16;
  const int turns = (strips + STRIPS - 1) / STRIPS;
  const int rounds = (turns - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x, steps = rounds * stages;

  if (warp < PRODUCERS) {
    const int own_strip = warp / TILES, own_tile = warp % TILES;
    // Where the tile of a step begins, and its counts: NONE where there is none. A lane looks up one step of 32.
    auto look_up = [&](int step, u32& at, u32& of) {
      of = NONE;
      if (step >= steps) return;
      const int round = step / stages, tile = (step - round * stages) * TILES + own_tile;
      const int strip = ((int)blockIdx.x + round * (int)gridDim.x) * STRIPS + own_strip;
      if (strip >= strips || tile >= across) return;
      at = read4(index + (u32)strip * across + tile);
      of = read4(counts + (u32)strip * across + tile);
    };
    u32 at = 0, of = NONE, next_at = 0, next_of = NONE;
    look_up(lane, at, of);
    look_up(32 + lane, next_at, next_of);
    Tile tile;
    auto fetch = [&](int step) {
      if ((step & 31) == 0 && step > 0) {
        at = next_at;
        of = next_of;
        look_up(step + 32 + lane, next_at, next_of);
      }
      const u32 begin = __shfl_sync(~0u, at, step & 31);
      tile.counts = __shfl_sync(~0u, of, step & 31);
      if (tile.counts == NONE) return;
      tile.at = blocks + (u64)begin * 16;
      tile.piece = read_piece(tile.at, lane);
      tile.record = 0;
      if (lane < (tile.counts & 0xffffu)) tile.record = ((const u16*)(tile.at + FIXED))[lane];
    };
    if (steps > 0) fetch(0);
    int s = 0;
    u32 parity = 1;
    for (int step = 0; step < steps; step++) {
      wait(empty + 8 * s, parity);
      const u32 n = tile.counts & 0xffffu, first = tile.counts >> 16;
      const bool any = tile.counts != NONE;
      const u32 to = shared(room + s * WEIGHTS_OF_STAGE + warp * 2048);
      const u16* const records = (const u16*)(tile.at + FIXED);
      u32 record = tile.record;
      if (any) store_piece(to, tile.piece, lane, 0);
      if (step + 1 < steps) fetch(step + 1);
      if (any) {
        __syncwarp();
        for (u32 i = lane; i < n; i += 32) {
          if (i >= 32) record = records[i];
          const u32 high = to + place_of(record, i >= first) + 1;
          store1(high, (load1(high) & 0x80) | (record >> 9));
        }
        __syncwarp();
      }
      if (lane == 0) arrive(full + 8 * s);
      if (++s == STAGES) {
        s = 0;
        parity ^= 1;
      }
    }
  } else if (warp == PRODUCERS + STRIPS) {
    if (lane != 0) return;
    int s = 0, stage = 0;
    u32 parity = 1;
    for (int step = 0; step < steps; step++) {
      const int here = min(TILES, across - stage * TILES);
      wait(empty + 8 * s, parity);
      arrive_expecting(full + 8 * s, here * TOKENS * 128);
      for (int t = 0; t < here; t++)
        copy_tokens(shared(held_tokens + s * TOKENS_OF_STAGE) + t * TOKENS * 128, &map, (stage * TILES + t) * 64, full + 8 * s);
      if (++s == STAGES) {
        s = 0;
        parity ^= 1;
      }
      if (++stage == stages) stage = 0;
    }
  } else {
    const int own = warp - PRODUCERS, row = lane & 15, upper = lane >> 4, token = lane & 7, part = lane >> 3;
    int s = 0;
    u32 parity = 0;
    for (int round = 0; round < rounds; round++) {
      float sums[TOKEN_TILES][4];
#pragma unroll
      for (int j = 0; j < TOKEN_TILES; j++)
        for (int i = 0; i < 4; i++) sums[j][i] = 0.0f;
      for (int stage = 0; stage < stages; stage++) {
        wait(full + 8 * s, parity);
        const u32 weights = shared(room + s * WEIGHTS_OF_STAGE + own * TILES * 2048) + row * 128;
        const u32 given = shared(held_tokens + s * TOKENS_OF_STAGE) + token * 128;
        const int here = min(TILES, across - stage * TILES);
        u32 a[2][8], b[2][TOKEN_TILES][4];
        auto load = [&](int i, int slot) {
          const int t = i / 2, half = i % 2;
          load_matrices(a[slot], weights + t * 2048 + (((4 * half + upper) ^ (row & 7)) * 16));
          load_matrices(a[slot] + 4, weights + t * 2048 + (((4 * half + 2 + upper) ^ (row & 7)) * 16));
#pragma unroll
          for (int j = 0; j < TOKEN_TILES; j++)
            load_matrices(b[slot][j], given + (t * TOKENS + j * 8) * 128 + (((4 * half + part) ^ token) * 16));
        };
        auto use = [&](int slot) {
#pragma unroll
          for (int j = 0; j < TOKEN_TILES; j++) multiply(sums[j], a[slot], b[slot][j]);
#pragma unroll
          for (int j = 0; j < TOKEN_TILES; j++) multiply(sums[j], a[slot] + 4, b[slot][j] + 2);
        };
        if (here == TILES) {
          load(0, 0);
#pragma unroll
          for (int i = 0; i < STEPS; i++) {  // a step's matrices are loaded while the one before it multiplies
            if (i + 1 < STEPS) load(i + 1, (i + 1) % 2);
            use(i % 2);
          }
        } else {
          for (int i = 0; i < 2 * here; i++) {
            load(i, 0);
            use(0);
          }
        }
        __syncwarp();
        if (lane == 0) arrive(empty + 8 * s);
        if (++s == STAGES) {
          s = 0;
          parity ^= 1;
        }
      }
      const int strip = ((int)blockIdx.x + round * (int)gridDim.x) * STRIPS + own;
      if (strip >= strips) continue;
      const int n = strip * 16 + lane / 4;
      const float scale = scales[n], scale8 = scales[n + 8];
      const float more = bias ? from_bfloat16(bias[n]) : 0.0f, more8 = bias ? from_bfloat16(bias[n + 8]) : 0.0f;
#pragma unroll
      for (int j = 0; j < TOKEN_TILES; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int t = j * 8 + 2 * (lane % 4) + i;
          if (t >= tokens) continue;
          out[(u64)t * rows + n] = to_bfloat16(fmaf(sums[j][i], scale, more));
          out[(u64)t * rows + n + 8] = to_bfloat16(fmaf(sums[j][i + 2], scale8, more8));
        }
      }
    }
  }
}
#else
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
      int exponent = (record >> 9) * 2 + (((value >> 7) ^ shift) & 1);  // as it was packed
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

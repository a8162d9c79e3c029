// Products with weights in fewer bytes: `product` multiplies up to 8 * TOKEN_TILES tokens by a weight that it unpacks on
// the way. A block has PRODUCERS warps that read tiles from global memory, unpack them into shared memory and put what
// has no code in place; one warp whose first lane has the copy engine bring the tokens' columns; and STRIPS warps that
// multiply, each 16 rows of the weight. Stages of shared memory lie between them. A block works on STRIPS strips at a time
// and goes on to its next ones without a pause. Each output is one chain of m16n8k16 products in order of the columns: the
// order of cuBLASLt's kernels that do not split the sum, so the bits are theirs, whatever the constants here.
//
// Constants of a build: TOKEN_TILES 1, 2, 4, 6 or 8; PRODUCERS, a multiple of STRIPS; STRIPS; STAGES.
//
// The form of the weight, whose source comes before this one, says how tiles of 16 rows and 64 columns are unpacked:
//   PARAMETERS, PARTS   the kernel's parameters that say where the weight lies, and their names
//   Weight              made of PARTS; scale(row) is what a row's sums are multiplied by
//   Place               where a tile begins; look_up finds it, nowhere() is that of no tile
//   Tile                fetch reads a tile, whose place another lane may hold, into registers; any() says whether there
//                       is one. With SCRATCH bytes of shared memory of the warp's own, begin lays there what store needs.
//                       store writes values into the stage, patch those that have no code.

#define TILES (PRODUCERS / STRIPS)  // of a strip, in one stage
#define TOKENS (8 * TOKEN_TILES)
#define WEIGHTS_OF_STAGE (PRODUCERS * 2048)
#define TOKENS_OF_STAGE (TILES * TOKENS * 128)
#define STEPS (2 * TILES)  // of 32 columns, in one stage

extern "C" __global__ void __launch_bounds__((PRODUCERS + STRIPS + 1) * 32, 1) product(
    PARAMETERS, const __grid_constant__ TensorMap map,
    const u16* bias, u16* out, int rows, int columns, int tokens) {
  extern __shared__ __align__(1024) u8 room[];
  u8* const held_tokens = room + STAGES * WEIGHTS_OF_STAGE;
  const u32 full = shared(held_tokens + STAGES * TOKENS_OF_STAGE), empty = full + 8 * STAGES;
  const Weight weight{PARTS};
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
    const u32 scratch = empty + 8 * STAGES + warp * Tile::SCRATCH;
    // Where the tile of a step begins. A lane looks up one step of 32.
    auto look_up = [&](int step, Place& place) {
      place.nowhere();
      if (step >= steps) return;
      const int round = step / stages, tile = (step - round * stages) * TILES + own_tile;
      const int strip = ((int)blockIdx.x + round * (int)gridDim.x) * STRIPS + own_strip;
      if (strip < strips && tile < across) place.look_up(weight, strip, tile, across);
    };
    Place place, next;
    look_up(lane, place);
    look_up(32 + lane, next);
    Tile tile;
    auto fetch = [&](int step) {
      if ((step & 31) == 0 && step > 0) {
        place = next;
        look_up(step + 32 + lane, next);
      }
      tile.fetch(weight, place, step & 31, lane);
    };
    if (steps > 0) fetch(0);
    int s = 0;
    u32 parity = 1;
    for (int step = 0; step < steps; step++) {
      if constexpr (Tile::SCRATCH > 0) {
        if (tile.any()) tile.begin(scratch, lane);
      }
      Tile held = tile;
      if constexpr (Tile::SCRATCH > 0) {
        fetch(step + 1);  // what it overwrites lies in the scratch by now
      }
      wait(empty + 8 * s, parity);
      const u32 to = shared(room + s * WEIGHTS_OF_STAGE + warp * 2048);
      if (held.any()) held.store(to, lane);
      if constexpr (Tile::SCRATCH == 0) {
        if (step + 1 < steps) fetch(step + 1);
      }
      if (held.any()) {
        __syncwarp();
        held.patch(weight, to, lane);
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
        auto load_weights = [&](u32* to, int i) {
          const u32 from = weights + i / 2 * 2048;
          load_matrices(to, from + (((4 * (i % 2) + upper) ^ (row & 7)) * 16));
          load_matrices(to + 4, from + (((4 * (i % 2) + 2 + upper) ^ (row & 7)) * 16));
        };
        auto load_tokens = [&](u32* to, int i, int j) {
          load_matrices(to, given + (i / 2 * TOKENS + j * 8) * 128 + (((4 * (i % 2) + part) ^ token) * 16));
        };
#if TOKEN_TILES > 4  // registers hold one step's weights and two tiles' tokens
        u32 a[8], b[2][4];
#pragma unroll 2
        for (int i = 0; i < 2 * here; i++) {
          load_weights(a, i);
          load_tokens(b[0], i, 0);
#pragma unroll
          for (int j = 0; j < TOKEN_TILES; j++) {
            if (j + 1 < TOKEN_TILES) load_tokens(b[(j + 1) % 2], i, j + 1);
            multiply(sums[j], a, b[j % 2]);
            multiply(sums[j], a + 4, b[j % 2] + 2);
          }
        }
#else
        u32 a[2][8], b[2][TOKEN_TILES][4];
        auto load = [&](int i, int slot) {
          load_weights(a[slot], i);
#pragma unroll
          for (int j = 0; j < TOKEN_TILES; j++) load_tokens(b[slot][j], i, j);
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
#endif
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
      const float scale = weight.scale(n), scale8 = weight.scale(n + 8);
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

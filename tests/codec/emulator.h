// The functions of kvrail/codec/fused/ptx.cuh, and what CUDA C++ has beside them, for a CPU: threads of a block take turns,
// one of them at a time, and wait for each other where the GPU's would. A block after another. Slow, and strict: shared
// memory begins as rubbish, addresses are checked, and a block in which all threads wait is an error.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <utility>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct uint4 { u32 x, y, z, w; };
struct Index { int x; };
struct TensorMap { const u16* from; int columns, rows, tokens; };

alignas(1024) u8 room[232448];  // what a block of an H100 may have
static Index threadIdx, blockIdx, gridDim;
static u32 shared_bytes;
using std::min;

struct Fiber { ucontext_t context; std::vector<char> stack; bool done = false; u64 operations = 0; };
struct Warp { u32 slots[2][32][8]; int arrived[2] = {0, 0}; u64 completed = 0; };
struct Barrier { int count, pending, bytes; u32 phase; };

static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static std::map<u32, Barrier> barriers;
static std::vector<std::pair<const u8*, u64>> readable;
static std::function<void()> body;
static ucontext_t scheduler;
static u64 events;
static int at_block_barrier;
static u64 block_barriers;

static void fail(const char* what, u64 value) {
  fprintf(stderr, "thread %d of block %d: %s (%llu)\n", threadIdx.x, blockIdx.x, what, value);
  abort();
}

template <typename Condition>
static void wait_until(Condition holds) {
  while (!holds()) swapcontext(&fibers[threadIdx.x].context, &scheduler);
  events++;
}

static void run_fiber() {
  body();
  fibers[threadIdx.x].done = true;
  events++;
  swapcontext(&fibers[threadIdx.x].context, &scheduler);
}

static void launch(int blocks, int threads, u32 shared, std::function<void()> given) {
  body = given;
  gridDim.x = blocks;
  shared_bytes = shared;
  for (int block = 0; block < blocks; block++) {
    blockIdx.x = block;
    memset(room, 0xcd, sizeof room);
    barriers.clear();
    warps.assign(threads / 32, Warp());
    fibers = std::vector<Fiber>(threads);
    at_block_barrier = 0;
    block_barriers = 0;
    for (Fiber& fiber : fibers) {
      fiber.stack.resize(64 << 10);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      makecontext(&fiber.context, run_fiber, 0);
    }
    for (bool left = true; left;) {
      const u64 before = events;
      left = false;
      for (int thread = 0; thread < threads; thread++) {
        if (fibers[thread].done) continue;
        threadIdx.x = thread;
        swapcontext(&scheduler, &fibers[thread].context);
        left |= !fibers[thread].done;
      }
      if (left && events == before) fail("all threads wait", 0);
    }
  }
}

// All lanes of a warp give some words; then each may look at all of them.
static u32 (*exchange(std::initializer_list<u32> words))[8] {
  Warp& warp = warps[threadIdx.x / 32];
  const u64 number = fibers[threadIdx.x].operations++;
  const int half = number & 1;
  std::copy(words.begin(), words.end(), warp.slots[half][threadIdx.x % 32]);
  if (++warp.arrived[half] == 32) {
    warp.arrived[half] = 0;
    warp.completed = number + 1;
  }
  wait_until([&] { return warp.completed > number; });
  return warp.slots[half];
}

static void whole(u32 mask) { if (mask != ~0u) fail("lanes are left out", mask); }
static inline void __syncwarp() { exchange({}); }
static inline u32 __shfl_sync(u32 mask, u32 value, int from) { whole(mask); return exchange({value})[from & 31][0]; }
static inline u32 __shfl_up_sync(u32 mask, u32 value, int by) {
  whole(mask);
  const int lane = threadIdx.x % 32;
  return exchange({value})[lane >= by ? lane - by : lane][0];
}
static inline void __syncthreads() {
  const u64 number = block_barriers;
  if (++at_block_barrier == (int)fibers.size()) {
    at_block_barrier = 0;
    block_barriers++;
  }
  wait_until([&] { return block_barriers > number; });
}

static inline int __popc(u32 v) { return __builtin_popcount(v); }
static inline int __clz(u32 v) { return v ? __builtin_clz(v) : 32; }
static inline u32 __funnelshift_r(u32 low, u32 high, u32 by) { return ((u64)high << 32 | low) >> (by & 31); }
static inline float __uint_as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
static inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
  const u64 both = (u64)high << 32 | low;
  u32 v = 0;
  for (int i = 0; i < 4; i++) v |= (u32)(both >> (8 * (selector >> 4 * i & 7)) & 255) << 8 * i;
  return v;
}

static u8* place(u32 at, u32 bytes) {
  if (at % bytes || at + bytes > shared_bytes) fail("a wrong address in shared memory", at);
  return room + at;
}
static const u8* readable_at(const void* p, u32 bytes) {
  const u8* at = (const u8*)p;
  for (auto& range : readable)
    if (at >= range.first && at + bytes <= range.first + range.second && (u64)at % bytes == 0) return at;
  fail("a wrong address in global memory", (u64)at);
  return nullptr;
}
template <typename T>
static T loaded(const u8* at) { T v; memcpy(&v, at, sizeof v); return v; }

static inline u32 shared(const void* p) { return (u32)((const u8*)p - room); }
static inline uint4 read16(const void* p) { return loaded<uint4>(readable_at(p, 16)); }
static inline u32 read4(const void* p) { return loaded<u32>(readable_at(p, 4)); }
static inline u32 read2(const void* p) { return loaded<u16>(readable_at(p, 2)); }
static inline u32 load4(u32 at) { return loaded<u32>(place(at, 4)); }
static inline u32 load2(u32 at) { return loaded<u16>(place(at, 2)); }
static inline u32 load1(u32 at) { return *place(at, 1); }
static inline void store16(u32 at, u32 x, u32 y, u32 z, u32 w) { const uint4 v = {x, y, z, w}; memcpy(place(at, 16), &v, 16); }
static inline void store2(u32 at, u32 v) { const u16 low = v; memcpy(place(at, 2), &low, 2); }
static inline void store1(u32 at, u32 v) { *place(at, 1) = v; }
static inline u32 bytes_of(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }
static inline u32 kept(u32 v) { return v; }
static inline u32 bits_of(u32 set, u32 unset, u32 mask) { return (set & mask) | (unset & ~mask); }
static inline u32 first_pair(u32 low, u32 high) { return __byte_perm(low, high, 0x5140); }
static inline u32 second_pair(u32 low, u32 high) { return __byte_perm(low, high, 0x7362); }
static inline float from_bfloat16(u16 v) { return __uint_as_float((u32)v << 16); }
static inline u16 to_bfloat16(float f) {
  u32 v;
  memcpy(&v, &f, 4);
  return std::isnan(f) ? 0x7fff : (v + 0x7fff + (v >> 16 & 1)) >> 16;
}

static void end_of_phase(Barrier& b) {
  if (b.pending || b.bytes) return;
  b.phase ^= 1;
  b.pending = b.count;
  events++;
}
static inline void barrier_init(u32 at, u32 count) { place(at, 8); barriers[at] = {(int)count, (int)count, 0, 0}; }
static inline void arrive(u32 at) {
  Barrier& b = barriers.at(at);
  b.pending--;
  end_of_phase(b);
}
static inline void arrive_expecting(u32 at, u32 bytes) {
  barriers.at(at).bytes += bytes;
  arrive(at);
}
static inline void wait(u32 at, u32 parity) { wait_until([=] { return barriers.at(at).phase != parity; }); }

static inline void copy_tokens(u32 to, const TensorMap* map, int column, u32 b) {
  for (int token = 0; token < map->tokens; token++)
    for (int i = 0; i < 64; i++) {
      const bool there = token < map->rows && column + i < map->columns;
      const u16 value = there ? map->from[(u64)token * map->columns + column + i] : 0;
      memcpy(place(to + token * 128 + ((i / 8) ^ (token & 7)) * 16 + i % 8 * 2, 2), &value, 2);
    }
  Barrier& barrier = barriers.at(b);
  barrier.bytes -= map->tokens * 128;
  end_of_phase(barrier);
}
static inline void load_matrices(u32* r, u32 at) {
  u32(*given)[8] = exchange({at});
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; i++) {
    place(given[8 * i + lane / 4][0], 16);
    r[i] = load4(given[8 * i + lane / 4][0] + lane % 4 * 4);
  }
}
// Sums of sixteen are exact here, then rounded; a GPU's differ in their last bits, but not where all sums are integers.
static inline void multiply(float* sums, const u32* weights, const u32* tokens) {
  u32(*given)[8] = exchange({weights[0], weights[1], weights[2], weights[3], tokens[0], tokens[1]});
  const int lane = threadIdx.x % 32;
  auto half = [](u32 word, int upper) { return (double)from_bfloat16(upper ? word >> 16 : word & 0xffff); };
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + 8 * (i / 2), token = 2 * (lane % 4) + i % 2;
    double sum = sums[i];
    for (int k = 0; k < 16; k++)
      sum += half(given[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)], k % 2) * half(given[token * 4 + k % 8 / 2][4 + k / 8], k % 2);
    sums[i] = (float)sum;
  }
}

extern "C" void allow(const void* at, u64 bytes) { readable.push_back({(const u8*)at, bytes}); }
extern "C" void forget() { readable.clear(); }

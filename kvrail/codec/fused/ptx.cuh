// The instructions that kernels over weights in fewer bytes are made of, each as a function. tests/codec/emulator.h has
// the same functions for a CPU, so that the kernels can be tried without a GPU.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(64) TensorMap { u64 words[16]; };

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

__device__ __forceinline__ u32 read2(const void* p) {
  u16 v;
  asm volatile("ld.global.nc.L1::no_allocate.u16 %0,[%1];" : "=h"(v) : "l"(p));
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

// The same value, which the compiler keeps: what it knows how to compute it computes again and again, to save registers.
__device__ __forceinline__ u32 kept(u32 v) {
  u32 r;
  asm volatile("shfl.sync.idx.b32 %0,%1,%2,0x1f,0xffffffff;" : "=r"(r) : "r"(v), "r"(threadIdx.x % 32));
  return r;
}

__device__ __forceinline__ u16 to_bfloat16(float f) {
  u16 r;
  asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(r) : "f"(f));
  return r;
}

__device__ __forceinline__ float from_bfloat16(u16 v) { return __uint_as_float((u32)v << 16); }

__device__ __forceinline__ u32 load4(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ u32 load2(u32 at) {
  u16 v;
  asm volatile("ld.shared.u16 %0,[%1];" : "=h"(v) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ void store2(u32 at, u32 v) {
  asm volatile("st.shared.u16 [%0],%1;" ::"r"(at), "h"((u16)v) : "memory");
}

// Bytes of `low` (0 to 3) and `high` (4 to 7), by the selector's four lower nibbles.
__device__ __forceinline__ u32 bytes_of(u32 low, u32 high, u32 selector) {
  u32 v;
  asm("prmt.b32 %0,%1,%2,%3;" : "=r"(v) : "r"(low), "r"(high), "r"(selector));
  return v;
}

// The bits of `set` where the mask has ones, of `unset` where it has zeros.
__device__ __forceinline__ u32 bits_of(u32 set, u32 unset, u32 mask) {
  u32 v;
  asm("lop3.b32 %0,%1,%2,%3,0xe4;" : "=r"(v) : "r"(set), "r"(unset), "r"(mask));
  return v;
}

__device__ __forceinline__ u32 first_pair(u32 low, u32 high) { return __byte_perm(low, high, 0x5140); }
__device__ __forceinline__ u32 second_pair(u32 low, u32 high) { return __byte_perm(low, high, 0x7362); }

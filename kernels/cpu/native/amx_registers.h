// A thread's eight matrix registers, by the instructions of Intel's AMX.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "simd.h"

namespace amx {

// Whether the system lets this process use them, asked once.
INLINE bool are_allowed() {
    static const bool allowed = [] {
        constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
        return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    }();
    return allowed;
}

struct Shapes {  // of all registers, as `ldtilecfg` reads them
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_a_row[16] = {};
    uint8_t rows[16] = {};

    void set(int number, int num_rows, int num_bytes) {
        rows[number] = (uint8_t)num_rows;
        bytes_a_row[number] = (uint16_t)num_bytes;
    }
};

INLINE void take_shape(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
INLINE void give_up() { asm volatile("tilerelease"); }

template <int N>
INLINE void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(N)); }
template <int N>
INLINE void load(const void* at, int64_t stride) {  // bytes from row to row
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(stride), "i"(N) : "memory");
}
template <int N>
INLINE void load_once(const void* at, int64_t stride) {  // leaves the first cache to others
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(stride), "i"(N) : "memory");
}
template <int N>
INLINE void store(void* at, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(at), "r"(stride), "i"(N) : "memory");
}
// Sums [rows][16] float32 += inputs [rows][steps][2] bfloat16 * weights [steps][16][2] bfloat16.
template <int SUMS, int INPUTS, int WEIGHTS>
INLINE void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(INPUTS), "i"(WEIGHTS));
}

}  // namespace amx

// What this machine can do: bytes read a second, and products a second, on some threads at once.
#include <chrono>
#include <thread>
#include <vector>

#include "../../kernels/cpu/native/kernels.h"

namespace {

template <class F>
double seconds(int threads, F function) {
    std::vector<std::thread> others;
    const auto started = std::chrono::steady_clock::now();
    for (int i = 1; i < threads; i++) others.emplace_back(function, i);
    function(0);
    for (auto& thread : others) thread.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

template <class E>
float products(int rounds) {  // 16 sums that never leave their registers
    Floats sums[16] = {}, x = fill(1.f), y = fill(1e-9f);  // in int8 they are some numbers too
    for (int i = 0; i < rounds; i++) {
        UNROLL for (int j = 0; j < 16; j++) {
            sums[j] = dot<E>(sums[j], x, y);
            asm volatile("" : "+v"(sums[j]));  // or equal sums would be made once
        }
    }
    float all = 0;
    UNROLL for (int j = 0; j < 16; j++) all += sums[j][0];
    return all;
}

// The same by matrix registers, four sums at a time; in int8 what they hold does not matter either.
double matrix_ops_per_s([[maybe_unused]] bool is_int8, [[maybe_unused]] int threads) {
#if defined(SPLITFLAP_HAS_REGISTERS)
    constexpr int ROUNDS = 500000;
    const double s = seconds(threads, [=](int) {
        alignas(64) char memory[1024] = {};
        amx::shape(amx::MOST_ROWS, amx::STEPS);
        amx::load<4>(memory, 64);
        amx::load<5>(memory, 64);
        amx::load<6>(memory, 64);
        amx::load<7>(memory, 64);
        for (int i = 0; i < ROUNDS; i++) {
            if (is_int8) {
                asm volatile("tdpbssd %tmm6, %tmm4, %tmm0\n tdpbssd %tmm7, %tmm4, %tmm1");
                asm volatile("tdpbssd %tmm6, %tmm5, %tmm2\n tdpbssd %tmm7, %tmm5, %tmm3");
                continue;
            }
            amx::dot<0, 4, 6>();
            amx::dot<1, 4, 7>();
            amx::dot<2, 5, 6>();
            amx::dot<3, 5, 7>();
        }
        amx::release();
    });
    return 2.0 * 4 * 16 * 16 * (is_int8 ? 64 : 32) * ROUNDS * threads / s;
#else
    return 0;
#endif
}

volatile float kept;

}  // namespace

extern "C" {

double bytes_per_s(const char* memory, int64_t bytes, int threads) {
    const double s = seconds(threads, [=](int member) {
        const int64_t share = bytes / threads / 1024 * 1024;
        const char* at = memory + member * share;
        Words all[4] = {};
        for (int64_t i = 0; i < share; i += 4 * sizeof(Words))
            for (int j = 0; j < 4; j++) all[j] ^= load_as<Words>(at + i + j * sizeof(Words));
        kept = (float)(all[0] ^ all[1] ^ all[2] ^ all[3])[0];
    });
    return bytes / s;
}

double flops_per_s(int is_bf16, int threads) {
    if (is_bf16 && amx::are_allowed()) return matrix_ops_per_s(false, threads);
    const int rounds = 1000000;
    const double s = seconds(threads, [=](int) {
        kept = is_bf16 ? products<bf16>(rounds) : products<float>(rounds);
    });
    return 2.0 * 16 * rounds * LANES * (is_bf16 ? 2 : 1) * threads / s;
}

double int8_ops_per_s(int threads) {
    if (amx::are_allowed()) return matrix_ops_per_s(true, threads);
    const int rounds = 1000000;
    const double s = seconds(threads, [=](int) { kept = products<q8>(rounds); });
    return 2.0 * 16 * rounds * LANES * PAIR<q8> * threads / s;
}
}

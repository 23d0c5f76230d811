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
    const int rounds = 1000000;
    const double s = seconds(threads, [=](int) {
        kept = is_bf16 ? products<bf16>(rounds) : products<float>(rounds);
    });
    return 2.0 * 16 * rounds * LANES * (is_bf16 ? 2 : 1) * threads / s;
}

double int8_ops_per_s(int threads) {
    const int rounds = 1000000;
    const double s = seconds(threads, [=](int) { kept = products<q8>(rounds); });
    return 2.0 * 16 * rounds * LANES * PAIR<q8> * threads / s;
}
}

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cuda_runtime.h"

namespace emulator {

int driver_version = CUDART_VERSION;
bool out_of_memory = false;

dim3 thread_index, block_index;

namespace {

constexpr unsigned kLanes = 32;
constexpr size_t kStack = 256 * 1024;

enum class State { kReady, kAtShuffle, kAtBarrier, kDone };

// A context is where a fiber begins; from then on jumps change fibers, which take no system call.
struct Fiber {
    ucontext_t context;
    jmp_buf jump;
    std::unique_ptr<char[]> stack;
    State state = State::kDone;
    bool begun = false;
};

struct Warp {
    uint64_t values[2][kLanes];  // of this shuffle and of the last one, which slower lanes may still read
    unsigned shuffles[kLanes];
};

int order = 0;  // 0: upwards, 1: downwards, others: at random, with this seed
std::vector<Fiber> fibers;
std::vector<Warp> warps;
jmp_buf scheduler;
const std::function<void()>* thread_body;
unsigned current;

void give_way(State state) {
    Fiber& fiber = fibers[current];
    fiber.state = state;
    if (_setjmp(fiber.jump) == 0) _longjmp(scheduler, 1);
}

void fiber_main() {
    for (;;) {
        (*thread_body)();
        give_way(State::kDone);
    }
}

void resume(unsigned thread) {
    Fiber& fiber = fibers[thread];
    current = thread;
    thread_index = dim3(thread, 0, 0);
    if (_setjmp(scheduler) != 0) return;
    if (fiber.begun) _longjmp(fiber.jump, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}

void create(Fiber& fiber) {
    if (!fiber.stack) fiber.stack.reset(new char[kStack]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
    fiber.begun = false;
}

std::vector<unsigned> ordered(unsigned count, std::mt19937& random) {
    std::vector<unsigned> indices(count);
    std::iota(indices.begin(), indices.end(), 0u);
    if (order == 1) std::reverse(indices.begin(), indices.end());
    if (order > 1) std::shuffle(indices.begin(), indices.end(), random);
    return indices;
}

// Wake the threads of [first, last) if all of them wait for the same.
bool wake(unsigned first, unsigned last, State state) {
    for (unsigned k = first; k < last; ++k) {
        if (fibers[k].state != state) return false;
    }
    for (unsigned k = first; k < last; ++k) fibers[k].state = State::kReady;
    return true;
}

bool run_block(unsigned threads, std::mt19937& random) {
    for (unsigned k = 0; k < threads; ++k) fibers[k].state = State::kReady;
    for (Warp& warp : warps) std::fill(std::begin(warp.shuffles), std::end(warp.shuffles), 0u);
    for (;;) {
        for (unsigned k : ordered(threads, random)) {
            if (fibers[k].state == State::kReady) resume(k);
        }
        const auto done = [](const Fiber& fiber) { return fiber.state == State::kDone; };
        if (std::all_of(fibers.begin(), fibers.begin() + threads, done)) return true;
        bool woken = wake(0, threads, State::kAtBarrier);
        for (unsigned k = 0; k < threads; k += kLanes) woken |= wake(k, k + kLanes, State::kAtShuffle);
        if (!woken) {  // give up; threads begin anew next time
            for (Fiber& fiber : fibers) create(fiber);
            return false;
        }
    }
}

}  // namespace

void wait_for_block() { give_way(State::kAtBarrier); }

uint64_t exchange(uint64_t value, unsigned from_lane) {
    Warp& warp = warps[current / kLanes];
    const unsigned lane = current % kLanes, turn = warp.shuffles[lane]++ % 2;
    warp.values[turn][lane] = value;
    give_way(State::kAtShuffle);
    return warp.values[turn][from_lane];
}

bool run(unsigned blocks, unsigned threads, const std::function<void()>& body) {
    if (fibers.size() < threads) {
        fibers.resize(threads);
        for (Fiber& fiber : fibers) create(fiber);
    }
    warps.resize((threads + kLanes - 1) / kLanes);
    thread_body = &body;
    std::mt19937 random(static_cast<unsigned>(order));
    for (unsigned block : ordered(blocks, random)) {
        block_index = dim3(block, 0, 0);
        if (!run_block(threads, random)) return false;
    }
    return true;
}

}  // namespace emulator

#define EMULATOR_API extern "C" __attribute__((visibility("default")))
EMULATOR_API void emulator_set_order(int order) { emulator::order = order; }
EMULATOR_API void emulator_set_driver(int version) { emulator::driver_version = version; }
EMULATOR_API void emulator_set_out_of_memory(int out_of_memory) { emulator::out_of_memory = out_of_memory != 0; }

#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cuda_runtime.h"

// With EMULATOR_TSAN the kernels are compiled with -fsanitize=thread, which then takes fibers for threads that only
// barriers, shuffles, and the begin and end of a launch bring in order.
#ifdef EMULATOR_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* token);
void __tsan_release(void* token);
}
#else
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
#endif

namespace emulator {

dim3 thread_index, block_index;

namespace {

constexpr unsigned kLanes = 32;
#ifdef EMULATOR_TSAN
constexpr size_t kStack = 64 * 1024;
constexpr bool kTsan = true;
#else
constexpr size_t kStack = 256 * 1024;
constexpr bool kTsan = false;
#endif
constexpr size_t kSharedMemory = 48 * 1024;  // of a block, as on a GPU

enum class State { kReady, kAtShuffle, kAtBarrier, kDone };

// A context is where a fiber begins; from then on jumps change fibers, which take no system call.
struct Fiber {
    ucontext_t context;
    jmp_buf jump;
    char* stack = nullptr;
    State state = State::kDone;
    bool begun = false;
    Site site;
    unsigned mask, from_lane, barriers, shuffles;
    uint64_t value;
    char shuffle_tokens[2];
#ifdef EMULATOR_TSAN
    void* tsan = nullptr;
#endif
};

// What threads of a block share. Each launch has its own for each block, so that nothing orders threads of two blocks.
struct Block {
    char barrier_tokens[2];
    std::map<const void*, void*> variables;
    size_t used = 0;
    alignas(16) char memory[kSharedMemory];
};

struct Random {
    uint64_t state = 1;
    unsigned operator()() {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return static_cast<unsigned>(state >> 32);
    }
} lots;

std::vector<Fiber> fibers;
Block* block;
#ifdef EMULATOR_TSAN
ucontext_t scheduler;
void* main_fiber;
#else
jmp_buf scheduler;
#endif
const std::function<void()>* thread_body;
Fiber* current;
bool running = false, interleaving = false;
char begin_token, end_token;

cudaError_t fault_error = cudaSuccess;
char fault_text[512] = "";

void to_scheduler(Fiber& fiber) {
#ifdef EMULATOR_TSAN
    __tsan_switch_to_fiber(main_fiber, 1);
    swapcontext(&fiber.context, &scheduler);
#else
    if (_setjmp(fiber.jump) == 0) _longjmp(scheduler, 1);
#endif
}

void give_way(State state) {
    Fiber& fiber = *current;
    fiber.state = state;
    to_scheduler(fiber);
}

// Ends the launch.
void fault(cudaError_t error, const char* what, const void* address = nullptr) {
    fault_error = error;
    char where[64] = "";
    if (address) snprintf(where, sizeof(where), " at %p", address);
    snprintf(fault_text, sizeof(fault_text), "%s%s, block %u, thread %u", what, where, block_index.x, thread_index.x);
}
[[noreturn]] void stop(cudaError_t error, const char* what, const void* address = nullptr) {
    fault(error, what, address);
    for (;;) give_way(State::kDone);
}

void fiber_main() {
    for (;;) {
        __tsan_acquire(&begin_token);
        (*thread_body)();
        __tsan_release(&end_token);
        give_way(State::kDone);
    }
}

void create(Fiber& fiber) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
    fiber.begun = false;
}

void resume(unsigned thread) {
    Fiber& fiber = fibers[thread];
    current = &fiber;
    thread_index = dim3(thread, 0, 0);
#ifdef EMULATOR_TSAN
    __tsan_switch_to_fiber(fiber.tsan, 1);
    swapcontext(&scheduler, &fiber.context);
#else
    if (_setjmp(scheduler) != 0) return;
    if (fiber.begun) _longjmp(fiber.jump, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
#endif
}

std::vector<unsigned> shuffled(unsigned count) {
    std::vector<unsigned> indices(count);
    std::iota(indices.begin(), indices.end(), 0u);
    for (unsigned k = count; k > 1; --k) std::swap(indices[k - 1], indices[lots() % k]);
    return indices;
}

// Wake the lanes of a warp that stand at one shuffle with all that its mask names.
bool wake_warp(unsigned first) {
    bool woken = false;
    for (unsigned lane = 0; lane < kLanes; ++lane) {
        Fiber& fiber = fibers[first + lane];
        if (fiber.state != State::kAtShuffle) continue;
        const auto takes_part = [&](unsigned k) {
            const Fiber& other = fibers[first + k];
            return other.state == State::kAtShuffle && other.mask == fiber.mask && other.site == fiber.site;
        };
        bool all = true;
        for (unsigned k = 0; k < kLanes; ++k) all &= !(fiber.mask >> k & 1) || takes_part(k);
        if (!all) continue;
        uint64_t values[kLanes];
        for (unsigned k = 0; k < kLanes; ++k) values[k] = fibers[first + k].value;
        const unsigned mask = fiber.mask;
        for (unsigned k = 0; k < kLanes; ++k) {
            if (!(mask >> k & 1)) continue;
            Fiber& other = fibers[first + k];
            const unsigned from = other.from_lane % kLanes;
            other.value = mask >> from & 1 ? values[from] : uint64_t{kPoison} << 32 | kPoison;
            other.state = State::kReady;
        }
        woken = true;
    }
    return woken;
}

bool wake_block(unsigned threads) {
    for (unsigned k = 0; k < threads; ++k) {
        if (fibers[k].state != State::kAtBarrier || !(fibers[k].site == fibers[0].site)) return false;
    }
    for (unsigned k = 0; k < threads; ++k) fibers[k].state = State::kReady;
    return true;
}

// Let each lane that can go on do so. Returns whether one could.
bool step_warp(unsigned first, Random& random) {
    bool ran = false;
    const unsigned turn = random() % kLanes, flip = random() % 2 * (kLanes - 1), twist = random() % kLanes | 1;
    for (unsigned k = 0; k < kLanes; ++k) {
        const unsigned lane = first + ((k ^ flip) * twist + turn) % kLanes;
        if (fibers[lane].state != State::kReady) continue;
        ran = true;
        resume(lane);
        if (fault_error != cudaSuccess) return false;
    }
    return wake_warp(first) || ran;
}

void run_block(unsigned threads) {
    for (unsigned k = 0; k < threads; ++k) {
        fibers[k].state = State::kReady;
        fibers[k].barriers = fibers[k].shuffles = 0;
    }
    interleaving = lots() % 4 == 0;
    for (;;) {
        // One warp as far as it can go, and then the next, or all of them side by side.
        const bool ahead = lots() % 2;
        bool ran = false;
        for (unsigned warp : shuffled(threads / kLanes)) {
            while (step_warp(warp * kLanes, lots)) {
                ran = true;
                if (!ahead) break;
            }
            if (fault_error != cudaSuccess) return;
        }
        if (ran) continue;
        const auto done = [](const Fiber& fiber) { return fiber.state == State::kDone; };
        if (std::all_of(fibers.begin(), fibers.begin() + threads, done)) return;
        if (!wake_block(threads)) return fault(cudaErrorLaunchTimeout, "threads wait for others that do not come");
    }
}

// ---- buffers between pages that nobody may touch ----------------------------------------------------------------------

struct Guarded {
    uintptr_t begin, end;  // of the buffer
    void* mapping;
    size_t nbytes;
};
std::map<uintptr_t, Guarded> guarded;  // by the mapping's begin

struct sigaction previous_action;

void on_bad_address(int signal, siginfo_t* info, void*) {
    if (!running || !current) {
        sigaction(signal, &previous_action, nullptr);
        return;
    }
    fault(cudaErrorIllegalAddress, "an access beside a buffer", info->si_addr);
    give_way(State::kDone);
}

void* map(size_t nbytes) {
    void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) abort();
    return memory;
}

std::map<std::string, std::pair<int, cudaError_t>> scripted;  // after so many calls, an error
std::map<std::string, int> calls;

}  // namespace

void wait_for_block(Site site) {
    Fiber& fiber = *current;
    fiber.site = site;
    char* const token = &block->barrier_tokens[fiber.barriers++ % 2];
    __tsan_release(token);
    give_way(State::kAtBarrier);
    __tsan_acquire(token);
}

uint64_t exchange(unsigned mask, uint64_t value, unsigned from_lane, Site site) {
    Fiber& fiber = *current;
    const unsigned lane = thread_index.x % kLanes, first = thread_index.x - lane;
    if (!(mask >> lane & 1)) stop(cudaErrorLaunchFailure, "a lane that its shuffle's mask does not name");
    fiber.mask = mask, fiber.value = value, fiber.from_lane = from_lane, fiber.site = site;
    const unsigned turn = fiber.shuffles++ % 2;
    __tsan_release(&fiber.shuffle_tokens[turn]);
    give_way(State::kAtShuffle);
    for (unsigned k = 0; kTsan && k < kLanes; ++k) {
        if (mask >> k & 1) __tsan_acquire(&fibers[first + k].shuffle_tokens[turn]);
    }
    return fiber.value;
}

void poison(void* memory, size_t nbytes) {
    for (size_t k = 0; k + sizeof(kPoison) <= nbytes; k += sizeof(kPoison)) {
        memcpy(static_cast<char*>(memory) + k, &kPoison, sizeof(kPoison));
    }
}

void* shared_memory(const void* key, size_t nbytes) {
    void*& variable = block->variables[key];
    if (!variable) {
        if (block->used + nbytes > kSharedMemory) stop(cudaErrorLaunchFailure, "more shared memory than a block has");
        variable = block->memory + block->used;
        block->used += (nbytes + 15) / 16 * 16;
    }
    return variable;
}

void check_access(const void* first, size_t nbytes) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(first);
    if (address % nbytes != 0) stop(cudaErrorMisalignedAddress, "a vector off its alignment", first);
    auto next = guarded.upper_bound(address);
    if (next != guarded.begin()) {
        const Guarded& buffer = std::prev(next)->second;
        const bool near = address < reinterpret_cast<uintptr_t>(buffer.mapping) + buffer.nbytes;
        if (near && (address < buffer.begin || address + nbytes > buffer.end)) {
            stop(cudaErrorIllegalAddress, "a vector that leaves its buffer", first);
        }
    }
    if (interleaving && lots() % 8 == 0) give_way(State::kReady);
}

cudaError_t run(unsigned blocks, unsigned threads, const std::function<void()>& body) {
    if (threads % kLanes != 0) abort();
    fault_error = cudaSuccess;
    thread_body = &body;
    running = true;
    struct sigaction action = {};
    action.sa_sigaction = on_bad_address;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &previous_action);
    fibers.resize(std::max<size_t>(fibers.size(), threads));
    std::vector<std::unique_ptr<Block>> of_launch(kTsan ? blocks : 1);
    for (auto& one : of_launch) one.reset(new Block);
#ifdef EMULATOR_TSAN  // threads of their own, with stacks that no other has used, for each block
    const size_t stacks_nbytes = kStack * blocks * threads;
    char* const stacks = static_cast<char*>(map(stacks_nbytes));
    std::vector<void*> created;
    main_fiber = __tsan_get_current_fiber();
#else
    for (Fiber& fiber : fibers) {
        if (fiber.stack) continue;
        fiber.stack = static_cast<char*>(map(kStack));
        create(fiber);
    }
#endif
    __tsan_release(&begin_token);
    for (unsigned number : shuffled(blocks)) {
        block_index = dim3(number, 0, 0);
        block = of_launch[kTsan ? number : 0].get();
        block->variables.clear();
        block->used = 0;
        poison(block->memory, kSharedMemory);
#ifdef EMULATOR_TSAN
        for (unsigned k = 0; k < threads; ++k) {
            fibers[k].stack = stacks + kStack * (size_t{number} * threads + k);
            created.push_back(fibers[k].tsan = __tsan_create_fiber(0));
            create(fibers[k]);
        }
#endif
        run_block(threads);
        if (fault_error != cudaSuccess) break;
    }
    __tsan_acquire(&end_token);
    running = false;
    current = nullptr;
#ifdef EMULATOR_TSAN
    for (void* fiber : created) __tsan_destroy_fiber(fiber);
    munmap(stacks, stacks_nbytes);
#else
    if (fault_error != cudaSuccess) {
        for (Fiber& fiber : fibers) create(fiber);  // threads begin anew next time
    }
#endif
    sigaction(SIGSEGV, &previous_action, nullptr);
    return fault_error;
}

cudaError_t call(const char* function) {
    ++calls[function];
    const auto found = scripted.find(function);
    if (found == scripted.end() || found->second.first-- > 0) return cudaSuccess;
    const cudaError_t error = found->second.second;
    scripted.erase(found);
    return error;
}

int& setting(const char* name) {
    static std::map<std::string, int> values = {{"device", 0},      {"devices", 1}, {"driver", 13000}, {"runtime", 13000},
                                                {"capture", 0}, {"major", 9},   {"minor", 0}};
    return values.at(name);
}

}  // namespace emulator

using namespace emulator;

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        default: return error == fault_error ? fault_text : "an error";
    }
}

cudaError_t cudaMalloc(void** memory, size_t nbytes) {
    const cudaError_t error = call("cudaMalloc");
    if (error != cudaSuccess) return error;
    *memory = aligned_alloc(256, (nbytes + 255) / 256 * 256);
    poison(*memory, nbytes);
    return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void emulator_set_seed(int seed) { lots.state = 0x9e3779b97f4a7c15u * (2 * static_cast<uint64_t>(seed) + 1); }
EXPORT void emulator_set(const char* name, int value) { setting(name) = value; }
EXPORT int emulator_get(const char* name) { return setting(name); }
EXPORT int emulator_calls(const char* function) { return calls[function]; }
// The call after the next `calls` ones returns the error.
EXPORT void emulator_fail(const char* function, int calls, int error) {
    scripted[function] = {calls, static_cast<cudaError_t>(error)};
}

// A buffer between two pages that nobody may touch: at its begin, or with `at_end` so that it ends with a multiple of
// `alignment` bytes at the page that follows. What is beside it holds `filler`.
EXPORT void* emulator_allocate(size_t nbytes, size_t shift, int at_end, size_t alignment, int filler) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t inside = (nbytes + shift + page - 1) / page * page + (nbytes + shift == 0 ? page : 0);
    char* const mapping = static_cast<char*>(map(inside + 2 * page));
    mprotect(mapping, page, PROT_NONE);
    mprotect(mapping + page + inside, page, PROT_NONE);
    memset(mapping + page, filler, inside);
    const size_t offset = at_end ? (inside - nbytes) / alignment * alignment : shift;
    char* const begin = mapping + page + offset;
    const uintptr_t address = reinterpret_cast<uintptr_t>(begin);
    guarded[reinterpret_cast<uintptr_t>(mapping)] = {address, address + nbytes, mapping, inside + 2 * page};
    return begin;
}
EXPORT void emulator_free_all() {
    for (const auto& entry : guarded) munmap(entry.second.mapping, entry.second.nbytes);
    guarded.clear();
}
// Whether something was written beside a buffer.
EXPORT int emulator_beside(int filler) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    for (const auto& entry : guarded) {
        const Guarded& buffer = entry.second;
        const uintptr_t first = reinterpret_cast<uintptr_t>(buffer.mapping) + page;
        const uintptr_t last = reinterpret_cast<uintptr_t>(buffer.mapping) + buffer.nbytes - page;
        for (uintptr_t k = first; k < last; ++k) {
            if (k == buffer.begin) k = buffer.end;
            if (k < last && *reinterpret_cast<const unsigned char*>(k) != static_cast<unsigned char>(filler)) return 1;
        }
    }
    return 0;
}

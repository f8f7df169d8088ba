// SPDX-License-Identifier: Apache-2.0
#include <faultline/gpt_device/gather.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <faultline/base/error.hpp>
#include <faultline/ranks/sums.hpp>

namespace faultline::gpt::on_device {
namespace {

using Word = std::uint32_t;
using BatchMemOp = CUresult(CUDAAPI*)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);

void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw WorkError(fmt::format("device cuda: {}: {}", what, cudaGetErrorString(error)));
}

/// The driver's, by way of the runtime: so nothing is linked but that.
BatchMemOp batch_mem_op() {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult state{};
    check(cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &found, 12000, cudaEnableDefault, &state),
          "looking for stream memory operations");
    if (state != cudaDriverEntryPointSuccess || found == nullptr)
        throw WorkError("device cuda: the driver has no stream memory operations of CUDA 12");
    return reinterpret_cast<BatchMemOp>(found);
}

/// Memory of less may stand in a block with other memory, all of which a handle would open.
constexpr std::size_t own_block = std::size_t{2} << 20;
std::size_t whole_blocks(std::size_t bytes) { return (bytes + own_block - 1) / own_block * own_block; }

/// The ranks' answers to the same question, "+" with what it is or "-" with why not. Whether all are good; else `why` is the
/// first that is not.
bool all_good(const std::vector<std::string>& answers, std::string& why) {
    const auto bad = std::ranges::find_if(answers, [](const std::string& a) { return !a.starts_with('+'); });
    if (bad == answers.end()) return true;
    why = fmt::format("rank {}: {}", bad - answers.begin(), bad->substr(std::min<std::size_t>(1, bad->size())));
    return false;
}

template <class F>
std::string answer(F&& work) {
    try {
        return fmt::format("+{}", work());
    } catch (const WorkError& error) {
        (void)cudaGetLastError();  // it is not to be found by whoever asks next
        return fmt::format("-{}", error.what());
    }
}

}  // namespace

struct Gather::State {
    Ranks& ranks;
    std::size_t bytes;  // of a part
    BatchMemOp operate = nullptr;
    std::optional<Memory> memory;  // the others' parts, then words: full, empty, of each rank
    std::vector<char*> opened;     // [rank] its memory; null: one's own
    int exceptions = std::uncaught_exceptions();

    State(Ranks& of, std::size_t part) : ranks(of), bytes(part), opened(static_cast<std::size_t>(of.size())) {}
    State(const State&) = delete;
    State& operator=(const State&) = delete;
    ~State() { close(); }
    void close() noexcept {
        const auto alone = no_other_recording();
        for (char*& other : opened)
            if (other != nullptr) (void)cudaIpcCloseMemHandle(std::exchange(other, nullptr));
    }

    [[nodiscard]] std::size_t others() const { return opened.size() - 1; }
    /// Behind the parts. `base`: this rank's memory or another's.
    [[nodiscard]] Word* full(char* base, int of) const { return reinterpret_cast<Word*>(base + others() * bytes) + of; }
    [[nodiscard]] Word* empty(char* base, int of) const { return full(base, of) + ranks.size(); }
    template <class F>
    void for_others(F&& f) const {
        for (int i = 1; i < ranks.size(); ++i) {
            const int other = (ranks.rank() + i) % ranks.size();
            f(other, opened[static_cast<std::size_t>(other)]);
        }
    }

    void run(std::vector<CUstreamBatchMemOpParams>& operations, Stream stream, const char* what) const {
        if (operations.empty()) return;
        if (operate(stream, static_cast<unsigned>(operations.size()), operations.data(), 0) != CUDA_SUCCESS)
            throw WorkError(fmt::format("device cuda: {}: the driver refuses a stream memory operation", what));
    }
    static CUstreamBatchMemOpParams writing(Word* to, Word value) {
        CUstreamBatchMemOpParams p{};
        p.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        p.writeValue.address = reinterpret_cast<CUdeviceptr>(to);
        p.writeValue.value = value;
        p.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // behind a barrier: what was copied is seen first
        return p;
    }
    /// Until it is set; and it is taken back.
    static void take(Word* word, std::vector<CUstreamBatchMemOpParams>& operations) {
        CUstreamBatchMemOpParams p{};
        p.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
        p.waitValue.address = reinterpret_cast<CUdeviceptr>(word);
        p.waitValue.value = 1;
        p.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
        operations.push_back(p);
        operations.push_back(writing(word, 0));
    }

    /// This rank's memory, and whether stream memory operations work on it. What others need to open it.
    std::string prepare() {
        const std::size_t words = 2 * opened.size();
        operate = batch_mem_op();
        memory.emplace(
            whole_blocks(others() * bytes + words * sizeof(Word)),
            fmt::format("{:.2f} GiB: the other ranks' gradients", static_cast<double>(others() * bytes) * 0x1p-30));
        std::vector<Word> values(words, 0);
        std::fill(values.begin() + ranks.size(), values.end(), Word{1});  // all empty
        const OwnedStream stream;
        upload(full(memory->data(), 0), values.data(), words * sizeof(Word), stream);
        std::vector<CUstreamBatchMemOpParams> trial{writing(full(memory->data(), 0), 1)};
        take(full(memory->data(), 0), trial);
        run(trial, stream, "trying them");
        on_device::wait(stream);
        cudaIpcMemHandle_t handle{};
        check(cudaIpcGetMemHandle(&handle, memory->data()), "showing memory to other processes");
        return {reinterpret_cast<const char*>(&handle), sizeof handle};
    }
    void open(const std::vector<std::string>& answers) {
        const auto alone = no_other_recording();
        for (std::size_t other = 0; other < answers.size(); ++other) {
            if (other == static_cast<std::size_t>(ranks.rank())) continue;
            cudaIpcMemHandle_t handle{};
            if (answers[other].size() != 1 + sizeof handle) throw WorkError("a handle of another size");
            std::memcpy(&handle, answers[other].data() + 1, sizeof handle);
            void* at = nullptr;
            check(cudaIpcOpenMemHandle(&at, handle, cudaIpcMemLazyEnablePeerAccess), "opening another card's memory");
            opened[other] = static_cast<char*>(at);
        }
    }
};

std::unique_ptr<Gather> Gather::among(Ranks& ranks, std::size_t bytes, std::string& why) {
    if (ranks.local_size() != ranks.size()) {
        why = "the ranks are on several machines";
        return nullptr;
    }
    auto state = std::make_unique<State>(ranks, bytes);
    const std::vector<std::string> handles = all_texts(&ranks, answer([&] { return state->prepare(); }));
    if (!all_good(handles, why)) return nullptr;
    const std::string opened = answer([&] {
        state->open(handles);
        return std::string();
    });
    if (!all_good(all_texts(&ranks, opened), why)) {  // on all ranks alike
        state->close();
        (void)all_texts(&ranks, "");  // memory that another one has open may not be freed (cudaFree)
        return nullptr;
    }
    return std::unique_ptr<Gather>(new Gather(std::move(state)));
}

Gather::Gather(std::unique_ptr<State> state) : state_(std::move(state)) {}

Gather::~Gather() {
    state_->close();
    // A rank that fails does not wait for the others, which learn of it when its process ends.
    if (std::uncaught_exceptions() > state_->exceptions) return;
    try {
        (void)all_texts(&state_->ranks, "");
    } catch (const std::exception&) {
        return;  // another one is gone, and its memory with it
    }
}

void Gather::begin(Stream stream) const {
    std::vector<CUstreamBatchMemOpParams> operations;
    state_->for_others(
        [&](int other, char*) { State::take(state_->empty(state_->memory->data(), other), operations); });
    state_->run(operations, stream, "waiting for the other ranks");
}

void Gather::copy(std::size_t offset, const void* from, std::size_t bytes, Stream stream) const {
    state_->for_others([&](int other, char* to) {
        const int self = state_->ranks.rank();
        const auto place = static_cast<std::size_t>(self < other ? self : self - 1);
        check(cudaMemcpyAsync(to + place * state_->bytes + offset, from, bytes, cudaMemcpyDeviceToDevice, stream),
              "copying to another card");
    });
}

void Gather::done(Stream stream) const {
    std::vector<CUstreamBatchMemOpParams> operations;
    state_->for_others(
        [&](int, char* base) { operations.push_back(State::writing(state_->full(base, state_->ranks.rank()), 1)); });
    state_->run(operations, stream, "telling the other ranks");
}

void Gather::wait(Stream stream) const {
    std::vector<CUstreamBatchMemOpParams> operations;
    state_->for_others([&](int other, char*) { State::take(state_->full(state_->memory->data(), other), operations); });
    state_->run(operations, stream, "waiting for the other ranks");
}

void Gather::release(Stream stream) const {
    std::vector<CUstreamBatchMemOpParams> operations;
    state_->for_others(
        [&](int, char* base) { operations.push_back(State::writing(state_->empty(base, state_->ranks.rank()), 1)); });
    state_->run(operations, stream, "telling the other ranks");
}

GatheredParts Gather::parts() const {
    return {state_->memory->data(), state_->bytes, state_->ranks.rank(), state_->ranks.size()};
}
std::size_t Gather::room() const { return state_->others() * state_->bytes; }

void Gather::call_off() noexcept {
    try {
        const std::vector<Word> set(2 * state_->opened.size(), 1);
        const OwnedStream stream;
        upload(state_->full(state_->memory->data(), 0), set.data(), set.size() * sizeof(Word), stream);
        on_device::wait(stream);
    } catch (const WorkError&) {
        return;  // the card has failed: nothing waits on it
    }
}

}  // namespace faultline::gpt::on_device
